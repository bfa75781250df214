"""How the doctor prints: no secrets, and nothing that moves a terminal's cursor."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from torsh_trainer.utils.foreign import readable
from torsh_trainer.utils.masking import mask_text, mask_tree

_WIDTH = 100

FOUND = 1
"""The exit code where something was found."""


def show(text: str) -> None:
    """Prints text that holds what others have written: no secrets, nothing that moves a cursor."""
    print(readable(mask_text(text)))


def print_json(told: dict[str, Any]) -> None:
    """Prints plain values as JSON, without secrets."""
    print(json.dumps(mask_tree(told, text=mask_text), indent=2))


def write_field(name: str, text: str, *, indent: int = 2, column: int = 7) -> list[str]:
    """``text`` behind its ``name``, on lines of 100 columns."""
    start = f"{'':{indent}}{name:<{column}}"
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )
