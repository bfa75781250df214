"""A callback that notes the first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.scripts import marks
from torsh_trainer.callbacks.base import Callback, StepReport


class Mark(Callback):
    """Notes when the first step ended, and at the end the peak memory."""

    def on_step(self, report: StepReport) -> None:
        marks.first_step()

    def on_end(self, result: Mapping[str, Any]) -> None:
        marks.finish()
