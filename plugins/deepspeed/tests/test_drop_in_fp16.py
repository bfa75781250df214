"""Scripts in fp16 train by drop-in as they do under the real DeepSpeed.

It refuses fp16 on a CPU, where torch computes in it: the script lets its accelerator say that it is
supported.
"""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from dropping_in import read, run, same

from torsh_trainer.testing.compare import FP32

pytestmark = pytest.mark.exhaustive  # of which test_drop_in.py has one

STAGES = (1, 2, 3)
KINDS = ("dynamic", "infinite", "fixed", "fixed_infinite", "adamw", "low_loss")
NAMES = tuple(f"{kind}_{stage}" for kind in KINDS for stage in STAGES)
WRONG = "wrong_window"


@cache
def everything(real: bool) -> Path:
    """Where all idioms have left what they found."""
    names = (*NAMES, "dynamic_0", "meant_0", WRONG)
    return run(tuple(f"scaled_{name}" for name in names), real=real)


def both(name: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    real, mine = (read(everything(which), f"scaled_{name}") for which in (True, False))
    return list(zip(real, mine, strict=True))


def column(found: dict[str, Any], key: str) -> list[Any]:
    return [row[key] for row in found["rows"]]


@pytest.mark.parametrize("name", NAMES)
def test_in_fp16_losses_and_scales_are_deepspeeds_bit_for_bit(name):
    for real, mine in both(name):
        for key in ("loss", "returned", "scale", "overflow", "applied", "counts"):
            assert column(real, key) == column(mine, key), key
        same(real, mine, FP32.parameters)


@pytest.mark.parametrize("kind", ["dynamic", "infinite", "fixed_infinite"])
def test_steps_were_skipped_and_scales_went_both_ways(kind):
    """Else the test above would say little."""
    for name in (f"{kind}_{stage}" for stage in STAGES):
        real, _ = both(name)[0]
        scales, skipped = column(real, "scale"), real["rows"][-1]["counts"][1]
        assert 0 < skipped < len(scales)
        assert "inf" in column(real, "norm")
        moves = [after - before for before, after in itertools.pairwise(scales)]
        if kind != "fixed_infinite":
            assert min(moves) < 0 < max(moves)


def test_at_stage_0_it_does_what_deepspeeds_stage_1_does():
    """DeepSpeed's own divides there by a scale by which it has not multiplied: that is told."""
    for (meant, _), (wrong, mine) in zip(both("meant_0"), both("dynamic_0"), strict=True):
        same(meant, mine, FP32.parameters)
        with pytest.raises(AssertionError):
            same(wrong, mine, FP32.parameters)


def test_and_another_window_would_show():
    for (real, _), (_, mine) in zip(both("dynamic_1"), both(WRONG), strict=True):
        with pytest.raises(AssertionError, match=r"of step [78]"):
            same(real, mine, FP32.parameters)


WORDS = ("words_1", "words_2")
"""Run by themselves: after other idioms one loss of the last step was a unit of fp16 apart, on a
processor that computes in fp16 itself; why is not known."""


@cache
def masked_words(real: bool) -> Path:
    return run(WORDS, real=real)


@pytest.mark.parametrize("name", WORDS)
def test_masked_words_with_states_on_the_host_train_alike(name):
    for real, mine in zip(
        read(masked_words(True), name), read(masked_words(False), name), strict=True
    ):
        same(real, mine, FP32.parameters)
