"""A verb: ``python -m torsh_trainer hello``."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Greets whoever is named; returns the exit code."""
    print("hello", *argv)
    return 0
