"""A script under its own engine, and what ``translate --task`` makes of it, step by step."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torsh_trainer.dropin.recorded import recording

_QUIET = (
    "trainer.log_every=1",
    "trainer.eval_every_epochs=null",
    "callbacks.console.enabled=false",
)
_LONGEST_S = 600


@dataclass(frozen=True)
class TrainedStep:
    """The loss of a step, the mean over its micro-batches and processes; the norm of its gradient
    before clipping, None where the engine does not tell it; its learning rate, None in a report of
    ours, which tells that of the next step."""

    loss: float
    grad_norm: float | None
    lr: float | None = None


def record_script(
    words: Sequence[str], *, folder: Path, env: Mapping[str, str]
) -> list[TrainedStep]:
    """Runs a line under its engine, as it stands, and gives what a recorder saw of every step.

    A step without a loss is none of the script's: Horovod makes one to create an optimizer's state.
    """
    records = folder / "records"
    records.mkdir()
    paths = [str(Path(recording.__file__).parent), *filter(None, [env.get("PYTHONPATH")])]
    own = {recording.FOLDER: str(records), recording.STEPS: "0", recording.SEED: "0"}
    _run(words, folder=folder, env={**env, **own, "PYTHONPATH": os.pathsep.join(paths)})
    files = sorted(records.glob("rank-*.jsonl"))
    ranks = [[json.loads(line) for line in path.open()] for path in files]
    ranks = [[row for row in rows if row.get("losses")] for rows in ranks]
    steps = []
    for rows in zip(*ranks, strict=True):
        losses = [loss for row in rows for loss in row["losses"]]
        first = rows[0]
        steps.append(TrainedStep(sum(losses) / len(losses), first["grad_norm"], first["lr"][0]))
    return steps


def train_translation(
    told: str, *overrides: str, folder: Path, env: Mapping[str, str]
) -> list[TrainedStep]:
    """Runs the command that ``translate`` ``told``, and gives the steps that the run reports."""
    [typed] = re.findall(r"start it with: (.*)", told)
    first, *words = shlex.split(typed)
    if first.startswith("PYTHONPATH="):
        paths = [*first.partition("=")[2].split(":"), *filter(None, [env.get("PYTHONPATH")])]
        env = {**env, "PYTHONPATH": os.pathsep.join(paths)}
        words = words[1:]
    earlier = set(folder.glob("runs/*/*/metrics.jsonl"))
    _run([sys.executable, *words, *_QUIET, *overrides], folder=folder, env=env)
    [metrics] = set(folder.glob("runs/*/*/metrics.jsonl")) - earlier
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows = [row for row in rows if row["split"] == "train"]
    return [TrainedStep(row["loss"], row.get("grad_norm")) for row in rows]


def measure_difference(steps: Sequence[TrainedStep], others: Sequence[TrainedStep]) -> float:
    """The largest relative difference of a quantity that both tell, over all steps."""
    assert len(steps) == len(others) > 1
    largest = 0.0
    for step, other in zip(steps, others, strict=True):
        pairs = [(step.loss, other.loss)]
        if step.grad_norm is not None and other.grad_norm is not None:
            pairs.append((step.grad_norm, other.grad_norm))
        largest = max(largest, *(abs(one - two) / max(abs(two), 1e-30) for one, two in pairs))
    return largest


def _run(words: Sequence[str], *, folder: Path, env: Mapping[str, str]) -> None:
    done = subprocess.run(
        list(words),
        cwd=folder,
        env=dict(env),
        capture_output=True,
        text=True,
        timeout=_LONGEST_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
