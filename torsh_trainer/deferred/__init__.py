"""Deferred initialisation: what a model's tensors were computed by is kept, and not the tensors.

``recording`` watches the construction of a model and gives memory back while it goes on; ``tape``
is what was seen, and computes it again. Nothing here knows a strategy.
"""
