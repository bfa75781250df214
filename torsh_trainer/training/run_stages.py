"""The stages of a run on one process: fit, evaluate, test, predict, and those that look for a knob.

Each drives the program, and hands on what it gives.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial

from torsh_trainer.strategies.base import Job, Strategy
from torsh_trainer.training.predictions import write_predictions
from torsh_trainer.training.program import Position, StageFinding
from torsh_trainer.training.run_parts import RunParts

log = logging.getLogger(__name__)

StageRunner = Callable[[RunParts], None]


def find_stages(parts: RunParts) -> dict[str, StageRunner]:
    """What runs each stage that this run's program knows, by the stage's name."""
    finders = parts.further_stages.items()
    return {
        "fit": _fit,
        "evaluate": partial(_evaluate, split="eval"),
        "test": partial(_evaluate, split="test"),
        "predict": _predict,
        **{name: partial(_find, find=find) for name, find in finders},
    }


def explain_end(parts: RunParts, position: Position) -> str:
    """Why nothing is left to train at ``position``, and the knob to raise; empty: some is."""
    spec, ends = parts.spec, parts.factory.last_step_by_epochs
    reached = {}
    if spec.max_steps is not None and position.step >= spec.max_steps:
        reached["trainer.max_steps"] = spec.max_steps
    by_epochs = ends is not None and position.step >= ends
    if spec.max_epochs is not None and (by_epochs or position.epoch >= spec.max_epochs):
        reached["trainer.max_epochs"] = spec.max_epochs
    if not reached:
        return ""
    limits = " and ".join(f"{name}={limit}" for name, limit in reached.items())
    return (
        f"nothing is left to train: step {position.step:,} has reached {limits}; "
        f"raise {' and '.join(reached)} to go on"
    )


def _fit(parts: RunParts) -> None:
    over = explain_end(parts, parts.program.position)
    if over:
        log.warning("%s", over)
    parts.program.fit()


def _evaluate(parts: RunParts, *, split: str) -> None:
    report = parts.program.evaluate(split)
    for callback in parts.callbacks:
        callback.on_evaluate(report)


def _predict(parts: RunParts) -> None:
    outputs, path = parts.program.predict(), parts.run_dir / "predictions.pt"
    if parts.groups.model.rank:  # another process makes the same ones, and writes them
        deque(outputs, maxlen=0)
    else:
        write_predictions(outputs, parts.groups.data, path)


def _find(parts: RunParts, *, find: Callable[[Strategy, Job], StageFinding]) -> None:
    found = find(parts.strategy, parts.job)
    parts.findings[found.name] = found.as_dict()
    if parts.world.is_rank_zero:
        print(found, flush=True)  # what the stage is for, however little is logged
