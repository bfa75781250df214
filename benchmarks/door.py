"""(j) What a command costs before and after training, in seconds of a processor."""

from __future__ import annotations

import os
import resource
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.comparing import in_new_process, in_turns
from benchmarks.work import table

TITLE = "what a command costs around training"
OVERRIDES = 200
CONFIGURATION = ["-m", "torsh_trainer", "+recipe=digits", "--cfg", "job"]
COMMANDS: dict[str, list[str]] = {
    "`import torch`": ["-c", "import torch"],
    "`import torch`, and an optimizer is made": [
        "-c",
        "import torch; torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)",
    ],
    "one step of digits": ["-m", "torsh_trainer", "+recipe=digits", "trainer.max_steps=1"],
    "`--cfg job`": CONFIGURATION,
    f"`--cfg job`, {OVERRIDES} overrides": [
        *CONFIGURATION,
        *(f"+vars.knob{number}={number}" for number in range(OVERRIDES)),
    ],
}


def measure(*, quick: bool, device: str) -> list[dict[str, Any]]:
    """One row for each command: medians over interleaved runs, on the CPU."""
    seen = in_turns(COMMANDS, _cpu_s, rounds=1 if quick else 3)
    torchs = statistics.median(next(iter(seen.values())))
    rows = []
    for name, values in seen.items():
        cpu_s = statistics.median(values)
        rows.append({"command": name, "cpu_s": cpu_s, "ratio": cpu_s / torchs, "runs": len(values)})
        print(f"  {name}: {cpu_s:.2f} s ({cpu_s / torchs:.2f}x)", file=sys.stderr, flush=True)
    return rows


def text(rows: list[dict[str, Any]]) -> str:
    """The table, in Markdown."""
    cells = [(r["command"], f"{r['cpu_s']:.2f}", f"{r['ratio']:.2f}", r["runs"]) for r in rows]
    head = ("command", "processor time (s)", "of `import torch`", "runs")
    return f"### (j) What a command costs around training\n\n{table(head, cells)}"


def _cpu_s(name: str) -> float:
    before = _children_s()
    with tempfile.TemporaryDirectory() as folder:
        in_new_process(name, COMMANDS[name], folder=Path(folder), env=os.environ)
    return _children_s() - before


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
