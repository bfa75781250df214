"""A stage: ``trainer.stages=[count_tensors, fit]``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torsh_trainer.training.stages import StageContext


@dataclass(frozen=True)
class Tensors:
    """How many tensors the model of a run has, parameters and buffers."""

    name: ClassVar[str] = "tensors"

    parameters: int
    buffers: int

    def __str__(self) -> str:
        return f"the model has {self.parameters} parameters and {self.buffers} buffers"

    def as_dict(self) -> dict[str, Any]:
        return {"parameters": self.parameters, "buffers": self.buffers}


def count_tensors(context: StageContext) -> Tensors:
    """Builds the engine of the run, looks at its model, and throws it away."""
    engine = context.strategy.prepare(context.job, context.groups.data)
    try:
        return Tensors(len(list(engine.model.parameters())), len(list(engine.model.buffers())))
    finally:
        engine.close()
