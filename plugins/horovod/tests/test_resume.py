"""A Horovod run goes on under other strategies and back, on as many processes or on others.

What each journey must equal is one process of plain PyTorch that was never interrupted: the same
global batches, cut into the same micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torsh_trainer_horovod.strategy import Horovod

from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.data.loading import Loading
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.single import Single
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.resuming import SentenceTask, live, saving
from torsh_trainer.training.trainer import Trainer

STEPS = 7
# Sums of at most 4 micro-batches in another order, carried through 7 steps; Adam divides a gradient
# by its own size, where its terms may cancel. The bounds of the native strategies' own matrix.
BOUNDS = {"sgd": 64 * 2.0**-24, "adamw": 256 * 2.0**-24}

STRATEGIES: dict[str, Strategy] = {
    "horovod": Horovod(),
    "groups": Horovod(groups=2, cache_capacity=0),
    "ddp": DDP(),
    "fsdp": FSDP(),
    "single": Single(),
}
JOURNEYS = [
    [("horovod", 2, 2), ("ddp", 2, 4), ("horovod", 2, None)],
    [("horovod", 2, 4), ("groups", 2, None)],
    [("horovod", 2, 4), ("fsdp", 2, None)],
    [("fsdp", 2, 4), ("horovod", 2, None)],
    [("horovod", 4, 4), ("ddp", 2, None)],
    [("ddp", 2, 3), ("horovod", 4, None)],
    [("single", 1, 3), ("horovod", 2, None)],
]


def trainer(strategy: Strategy, optimizer: str, options: CheckpointOptions) -> Trainer:
    return Trainer(
        task=SentenceTask(optimizers=optimizer),
        strategy=strategy,
        loading=Loading(batch_size=8, micro_batch_size=2),
        checkpoint=options,
        max_steps=STEPS,
        seed=3,
        log_every=1,
        eval_every_epochs=None,
        deterministic=True,
        device="cpu",
        log_level="error",
    )


def leg(comm: Any, made: Trainer, folder: Path, until: int | None, change: Any) -> dict[str, Any]:
    done = live(comm, made, folder, until=until, change=change)
    losses = {
        (step, tuple(ids)): loss
        for step, micros in done.consumed.items()
        for ids, loss in zip(micros, done.losses[step], strict=True)
    }
    return {"losses": losses, "norms": done.norms, "state": done.state}


def travel(
    legs: list[tuple[str, int, int | None]],
    optimizer: str,
    folder: Path,
    change: Callable[[Any], None] | None = None,
) -> dict[str, Any]:
    """All losses by (step, samples) and norms by step of a run, and rank 0's state at its end."""
    whole: dict[str, Any] = {"losses": {}, "norms": {}}
    for number, (name, size, until) in enumerate(legs):
        # The check after a load would end a run whose state is spoilt before that shows.
        made = trainer(STRATEGIES[name], optimizer, saving(folder, check_loaded=change is None))
        ranks = shared_pool(size).run(leg, made, folder, until, change if number else None)
        for rank in ranks:
            whole["losses"].update(rank["losses"])
            whole["norms"].update(rank["norms"])
        whole["state"] = ranks[0]["state"]
    return whole


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return cache(lambda optimizer: travel([("single", 1, None)], optimizer, folder / optimizer))


def furthest(ours: dict[str, Any], plain: dict[str, Any]) -> float:
    """The largest difference of a loss or a norm, relative."""
    assert sorted(ours["losses"]) == sorted(plain["losses"]), "other samples were seen"
    assert sorted(ours["norms"]) == list(range(1, STEPS + 1))
    pairs = [
        (value, plain[kind][at]) for kind in ("losses", "norms") for at, value in ours[kind].items()
    ]
    return max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)


def words(legs: list[tuple[str, int, int | None]]) -> str:
    return "-".join(f"{name}{size}" for name, size, _ in legs)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("legs", JOURNEYS, ids=words)
def test_a_run_goes_on_as_if_nothing_had_happened(legs, optimizer, plain, tmp_path):
    done, expected = travel(legs, optimizer, tmp_path), plain(optimizer)
    assert furthest(done, expected) <= BOUNDS[optimizer]
    if legs[-1][0] != "fsdp":  # whose state is a shard
        for name, tensor in expected["state"]["model"].items():
            apart = (done["state"]["model"][name] - tensor).abs().max() / tensor.abs().max()
            assert float(apart) <= BOUNDS[optimizer], name


def without_optimizer_state(parts: Any) -> None:
    load = parts.engine.load_state_dict

    def meddled(state: Any) -> None:
        main = state["optimizer"]["main"]
        load({**state, "optimizer": {"main": {**main, "state": {}}}})

    parts.engine.load_state_dict = meddled


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_and_it_would_show_if_the_optimizers_state_were_lost(optimizer, plain, tmp_path):
    done = travel(JOURNEYS[0], optimizer, tmp_path, without_optimizer_state)
    assert furthest(done, plain(optimizer)) > 1000 * BOUNDS[optimizer]


def test_horovods_state_has_the_names_and_the_form_of_the_native_one(plain, tmp_path):
    ours = travel([("horovod", 2, None)], "adamw", tmp_path)["state"]["optimizer"]["main"]
    theirs = plain("adamw")["state"]["optimizer"]["main"]
    assert list(ours) == list(theirs)
    assert sorted(ours["state"]) == sorted(theirs["state"])
    for name, slots in theirs["state"].items():
        assert list(ours["state"][name]) == list(slots)
    for mine, plain_group in zip(ours["groups"], theirs["groups"], strict=True):
        settings = {key: value for key, value in plain_group.items() if key != "lr"}
        assert {key: value for key, value in mine.items() if key != "lr"} == settings
        torch.testing.assert_close(mine["lr"], plain_group["lr"])
