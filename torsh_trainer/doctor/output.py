"""How the doctor prints: no secrets, and nothing that moves a terminal's cursor."""

from __future__ import annotations

import json
from typing import Any

from torsh_trainer.utils.foreign import readable
from torsh_trainer.utils.masking import mask_text

FOUND = 1
"""The exit code where something was found."""


def show(text: str) -> None:
    """Prints text that holds what others have written: no secrets, nothing that moves a cursor."""
    print(readable(mask_text(text)))


def print_json(told: dict[str, Any]) -> None:
    """Prints plain values as JSON, without secrets."""
    print(mask_text(json.dumps(told, indent=2, ensure_ascii=True)))
