"""Layers cut over processes, beside parameters sharded over others: the name for a whole mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torsh_trainer.strategies.fsdp import FSDP


@dataclass(frozen=True)
class Parallel(FSDP):
    """``fsdp``, which also cuts layers over ``mesh.tp``: the knobs are the same.

    The axes of a model that are still to come (``pp``, ``cp``, ``ep``) will be its own.
    """

    name: ClassVar[str] = "parallel"
