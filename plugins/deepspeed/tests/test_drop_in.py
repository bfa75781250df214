"""Scripts run by drop-in train as they do under the real DeepSpeed, idiom by idiom."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from dropping_in import read, run, same

from torsh_trainer.testing.compare import FP32

pytestmark = pytest.mark.usefixtures("warm_interpreters")

EXACT = (
    "sgd",
    "accumulated",
    "clipped",
    "stage_2",
    "stage_3",
    "adamw_2",
    "adamw_3",
    "by_arguments",
    "warmup",
    "decay",
    "client",
    "client_2",
    "grouped",
    "with_init",
    "loader",
    "resumed_0",
    "resumed_3",
    "by_hand",
    "plain_2",
    "plain_3",
    "words_3",
    "adversaries",
    "pretrain_0",
    "pretrain_2",
    "pretrain_3",
)
"""Idioms in fp32."""
HALF = ("bf16_0", "bf16_2", "bf16_3", "bf16_loss_0", "bf16_loss_3")
MORE = ("scaled_dynamic_2", "offload_kernel_2")
"""In fp16, and with states on the host; the rest of them are in files of their own."""
WRONG = "wrong_rate"
OF_STAGE_1 = ("stage_1", "adamw_1", "client_1", "resumed_1", "plain_1", "pretrain_1")
"""What stage 2 has too, run by itself."""
HALF_OF_STAGE_1 = ("bf16_1", "bf16_loss_1")


def list_rows(names: tuple[str, ...], more: tuple[str, ...]) -> list[Any]:
    return [*names, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in more)]


@cache
def everything(real: bool) -> Path:
    """Where all idioms but those of stage 1 have left what they found."""
    return run((*EXACT, *HALF, *MORE, "collectives", WRONG), real=real)


@cache
def all_of_stage_1(real: bool) -> Path:
    """Where those of stage 1 have."""
    return run((*OF_STAGE_1, *HALF_OF_STAGE_1), real=real)


def read_both(name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """What DeepSpeed and drop-in found on each rank."""
    where = all_of_stage_1 if name in (*OF_STAGE_1, *HALF_OF_STAGE_1) else everything
    return zip(read(where(True), name), read(where(False), name), strict=True)


@pytest.mark.parametrize("name", list_rows((*EXACT, *MORE), OF_STAGE_1))
def test_an_idiom_trains_as_under_deepspeed(name):
    for real, mine in read_both(name):
        same(real, mine, FP32.parameters)


@pytest.mark.parametrize("name", list_rows(HALF, HALF_OF_STAGE_1))
def test_in_bf16_losses_are_deepspeeds_bit_for_bit(name):
    for real, mine in read_both(name):
        assert [row["loss"] for row in real["rows"]] == [row["loss"] for row in mine["rows"]]
        assert real["state"] == mine["state"]
        same(real, mine, FP32.parameters)


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
