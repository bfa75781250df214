"""Layers cut over processes that have the same samples: plans, styles, and what they refuse."""
