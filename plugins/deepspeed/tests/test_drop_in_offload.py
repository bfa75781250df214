"""Scripts that keep states on the host train by drop-in as they do under the real DeepSpeed."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from dropping_in import read, run, same

from torsh_trainer.testing.compare import FP32

pytestmark = pytest.mark.exhaustive  # of which test_drop_in.py has one

STAGES = (1, 2, 3)
KERNEL = tuple(f"{kind}_{stage}" for kind in ("kernel", "script") for stage in STAGES)
"""DeepSpeed's own Adam for the host, which rounds an update differently."""
TORCHS = (
    *(f"{kind}_{stage}" for kind in ("torch", "accumulated") for stage in STAGES),
    "parameters",
)
HALF = tuple(f"{dtype}_{stage}" for dtype in ("bf16", "fp16") for stage in STAGES)
WRONG = "wrong_rate"


@cache
def everything(real: bool) -> Path:
    """Where all idioms have left what they found."""
    names = (*KERNEL, *TORCHS, *HALF, WRONG)
    return run(tuple(f"offload_{name}" for name in names), real=real)


def both(name):
    real, mine = (read(everything(which), f"offload_{name}") for which in (True, False))
    return zip(real, mine, strict=True)


@pytest.mark.parametrize("name", [*KERNEL, *TORCHS])
def test_what_is_offloaded_trains_as_under_deepspeed(name):
    for real, mine in both(name):
        same(real, mine, FP32.parameters)


@pytest.mark.parametrize("name", HALF)
def test_in_half_precision_losses_are_deepspeeds_bit_for_bit(name):
    for real, mine in both(name):
        assert [row["loss"] for row in real["rows"]] == [row["loss"] for row in mine["rows"]]
        assert real["state"] == mine["state"]
        same(real, mine, FP32.parameters)


def test_and_a_rate_of_one_percent_more_would_show():
    for (real, _), (_, mine) in zip(both("accumulated_2"), both(WRONG), strict=True):
        del mine["rows"][6:], real["rows"][6:]
        with pytest.raises(AssertionError):
            same(real, mine, FP32.parameters)
