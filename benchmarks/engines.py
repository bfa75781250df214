"""(h) Step time and peak memory of every engine on one recipe, each run as a user starts it."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.comparing import in_new_process, in_turns
from benchmarks.work import table

TITLE = "step time and peak memory of every engine on one recipe"
EVERY = 5
"""Steps whose mean time is one sample; the first two of these are warm-up."""
RECIPE = (
    "+recipe=stdlib_lm",
    "model.width=512",
    "model.layers=6",
    "model.heads=8",
    "data.batch_size=8",
    "data.context=64",
    "trainer.stages=[fit]",
    "trainer.eval_every=null",
    "checkpoint.at_end=false",
    "logger.tensorboard.enabled=false",
    f"trainer.log_every={EVERY}",
)


@dataclass(frozen=True)
class Engine:
    """Overrides of a run, and on how many processes."""

    words: str
    processes: int = 2


ENGINES = (
    Engine("strategy=single", 1),
    Engine("strategy=ddp"),
    Engine("strategy=ddp strategy.zero1=true"),
    Engine("strategy=fsdp"),
    Engine("strategy=gloo"),
    Engine("strategy=mpi"),
    Engine("strategy=deepspeed strategy.stage=0"),
    Engine("strategy=deepspeed strategy.stage=1"),
    Engine("strategy=deepspeed strategy.stage=2"),
    Engine("strategy=deepspeed strategy.stage=3"),
    Engine("strategy=horovod"),
)


def measure(*, quick: bool, device: str) -> list[dict[str, Any]]:
    """A row for each engine: medians over rounds in turn, on the CPU, whatever ``device`` is."""
    rounds, samples = (1, 2) if quick else (2, 4)
    seen = in_turns(
        ENGINES,
        lambda engine: _run(engine, steps=EVERY * (samples + 2)),
        rounds=rounds,
        said=lambda run: f"{run['words']}: {run['step_s']:.3f} s, {run['peak_mib']:.0f} MiB",
    )
    ddp = seen[ENGINES[1]]
    return [
        {
            "words": engine.words,
            "processes": engine.processes,
            "step_s": statistics.median(run["step_s"] for run in runs),
            "of_ddp": [
                one["step_s"] / beside["step_s"] for one, beside in zip(runs, ddp, strict=True)
            ],
            "peak_mib": statistics.median(run["peak_mib"] for run in runs),
            "loss": [run["loss"] for run in runs],
        }
        for engine, runs in seen.items()
    ]


def text(rows: list[dict[str, Any]]) -> str:
    """The table, in Markdown."""
    head = (
        "engine",
        "processes",
        "step (s)",
        "of ddp's",
        "its rounds",
        "peak memory (MiB)",
        "loss",
    )
    cells = [
        (
            f"`{row['words']}`",
            row["processes"],
            f"{row['step_s']:.3f}",
            f"{statistics.median(row['of_ddp']):.2f}",
            f"{min(row['of_ddp']):.2f} to {max(row['of_ddp']):.2f}",
            f"{row['peak_mib']:.0f}",
            f"{statistics.median(row['loss']):.5f}",
        )
        for row in rows
    ]
    return f"### (h) Every engine on one recipe\n\n{table(head, cells)}\n\n{_about()}"


def _about() -> str:
    return (
        "Peak memory is that of the process that has most, program included; `single` takes the "
        "whole batch alone. The loss is that of the last report: the engine does not change it."
    )


def _run(engine: Engine, *, steps: int) -> dict[str, Any]:
    words = [*RECIPE, *engine.words.split(), f"trainer.max_steps={steps}"]
    words += ["trainer.device=cpu", f"launcher.num_processes={engine.processes}"]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = ["-m", "torsh_trainer", *words, f"hydra.run.dir={run}"]
        in_new_process(engine.words, command, folder=Path(folder), env=env)
        result = json.loads((run / "result.json").read_text(encoding="utf-8"))
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    reports = [row for row in map(json.loads, lines) if row["split"] == "train"]
    return {
        "words": engine.words,
        "step_s": statistics.median(row["step_s"] for row in reports[2:]),
        "peak_mib": result["peak_memory_bytes"] / 2**20,
        "loss": reports[-1]["loss"],
    }
