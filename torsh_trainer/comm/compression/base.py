"""The contract of gradient compression; the methods themselves come with the built-in backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


class Compression:
    """What is done to gradients before they cross processes; frozen knobs."""

    name: ClassVar[str]


@dataclass(frozen=True)
class NoCompression(Compression):
    """Gradients travel as they are."""

    name: ClassVar[str] = "none"
