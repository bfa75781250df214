"""What equals what, to which bound, by which test: read from the tests, written as a page.

``python -m torsh_trainer.testing.guarantees [--check]`` writes docs/guarantees.md of the repository
in the current directory, or says whether it is up to date.
"""
