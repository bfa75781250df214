"""Scripts run by drop-in train as they do under the real DeepSpeed, idiom by idiom."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torsh_trainer_deepspeed.operators import extensions_dir

from torsh_trainer.testing.compare import FP32

IDIOMS = Path(__file__).with_name("scripts") / "deepspeed_idioms.py"

EXACT = (
    "sgd",
    "accumulated",
    "clipped",
    "stage_1",
    "stage_2",
    "stage_3",
    "adamw_1",
    "adamw_2",
    "adamw_3",
    "by_arguments",
    "warmup",
    "decay",
    "client",
    "client_1",
    "client_2",
    "grouped",
    "with_init",
    "loader",
    "resumed_0",
    "resumed_1",
    "resumed_3",
    "by_hand",
)
"""Idioms in fp32."""
HALF = ("bf16_0", "bf16_1", "bf16_2", "bf16_3", "bf16_loss_0", "bf16_loss_1", "bf16_loss_3")
LOW = 2.0**-7
"""Of bf16: a sum of two micro-batches rounds in another order at stage 2."""
WRONG = "wrong_rate"


def run(names: tuple[str, ...], *, real: bool) -> Path:
    """Runs the idioms under either engine; the place at which they leave their files."""
    out = Path(mkdtemp(prefix="dropin-test-")) / "out"
    given = [str(IDIOMS), str(out), *names]
    starts = (
        ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        if real
        else ["torsh_trainer", "drop-in", "-np", "2"]
    )
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR", str(extensions_dir()))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    own = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": extensions, "PATH": path}
    done = subprocess.run(
        [sys.executable, "-m", *starts, *given],
        env={**os.environ, **(own if real else {}), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@cache
def everything(real: bool) -> Path:
    """Where all idioms have left what they found."""
    return run((*EXACT, *HALF, "collectives", WRONG), real=real)


def read(out: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(Path(f"{out}.{name}.{rank}").read_text()) for rank in range(2)]


def same(real: dict[str, Any], mine: dict[str, Any], bound: float) -> None:
    assert real.keys() == mine.keys()
    for name in real.keys() - {"rows", "state"}:
        close(real[name], mine[name], bound, name)
    assert len(real["rows"]) == len(mine["rows"]) > 1
    for step, (theirs, ours) in enumerate(zip(real["rows"], mine["rows"], strict=True)):
        assert theirs.keys() == ours.keys()
        for key, value in theirs.items():
            close(value, ours[key], bound, f"{key} of step {step}")
    assert real["state"].keys() == mine["state"].keys()
    for name, values in real["state"].items():
        theirs, ours = torch.tensor(values), torch.tensor(mine["state"][name])
        assert torch.allclose(ours, theirs, rtol=bound, atol=bound), name


def close(theirs: Any, ours: Any, bound: float, what: str) -> None:
    """Numbers within ``bound``, everything else equal."""
    if isinstance(theirs, float):
        assert ours == pytest.approx(theirs, rel=bound, abs=bound), what
    elif isinstance(theirs, list):
        assert len(theirs) == len(ours), what
        for one, other in zip(theirs, ours, strict=True):
            close(one, other, bound, what)
    else:
        assert ours == theirs, what


@pytest.mark.parametrize("name", EXACT)
def test_an_idiom_trains_as_under_deepspeed(name):
    for real, mine in zip(read(everything(True), name), read(everything(False), name), strict=True):
        same(real, mine, FP32.parameters)


@pytest.mark.parametrize("name", HALF)
def test_so_it_does_in_bf16(name):
    for real, mine in zip(read(everything(True), name), read(everything(False), name), strict=True):
        same(real, mine, LOW)


def test_collectives_give_what_deepspeeds_give():
    assert read(everything(True), "collectives") == read(everything(False), "collectives")


def test_and_a_wrong_rate_would_show():
    theirs, ours = read(everything(True), "sgd")[0], read(everything(False), WRONG)[0]
    with pytest.raises(AssertionError, match="lr of step 0"):
        same(theirs, ours, FP32.parameters)
    for row in [*theirs["rows"], *ours["rows"]]:
        del row["lr"]
    with pytest.raises(AssertionError, match=r"loss of step [1-9]"):
        same(theirs, ours, FP32.parameters)
    same(read(everything(True), WRONG)[0], read(everything(False), WRONG)[0], FP32.parameters)
