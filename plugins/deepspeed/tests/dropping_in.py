"""Idioms of scripts, run under the real DeepSpeed and by drop-in, and what they find compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torsh_trainer_deepspeed.operators import extensions_dir

IDIOMS = Path(__file__).with_name("scripts") / "deepspeed_idioms.py"


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
