"""What a run holds after a load is what was saved, under every strategy; else it does not train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torsh_trainer import DDP, FSDP, Single
from torsh_trainer.checkpoint.shards import FlatShard
from torsh_trainer.comm.base import Communicator
from torsh_trainer.data.loading import Loading
from torsh_trainer.errors import ConfigError
from torsh_trainer.optim.precision import Precision
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.builtin import Gloo
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.resuming import SentenceTask, live, saving
from torsh_trainer.testing.tiny import TinyModelOptions
from torsh_trainer.training.run_parts import RunParts
from torsh_trainer.training.trainer import Trainer

STRATEGIES = {
    "single": Single(),
    "ddp": DDP(),
    "zero1": DDP(zero1=True),
    "fsdp": FSDP(),
    "hybrid": FSDP(shard_size=1),
    "gloo": Gloo(),
}


def trainer_of(strategy: Strategy, folder: Path, **knobs: Any) -> Trainer:
    given: dict[str, Any] = {
        "task": SentenceTask(TinyModelOptions(batch_norm=True), optimizers="adamw"),
        "strategy": strategy,
        "loading": Loading(batch_size=8, micro_batch_size=2),
        "checkpoint": saving(folder),
        "ema_decay": 0.5,
        "eval_every_epochs": None,
        "max_steps": 4,
        "device": "cpu",
        "log_every": 1,
        "log_level": "error",
        **knobs,
    }
    return Trainer(**given)


def save(comm: Communicator, strategy: Strategy, folder: Path, **knobs: Any) -> None:
    live(comm, trainer_of(strategy, folder, **knobs), folder, until=2)


def resume(
    comm: Communicator,
    strategy: Strategy,
    folder: Path,
    meddle: Callable[[Any], None] | None = None,
    rank: int = 0,
    **knobs: Any,
) -> str:
    """What the run that goes on says; empty when it trains on. ``meddle`` spoils that rank."""

    def begin(running: RunParts) -> None:
        engine: Any = running.engine
        load = engine.load_state_dict

        def loaded(state: Mapping[str, Any]) -> None:
            load(state)
            if meddle is not None and comm.world.rank == rank:
                meddle(engine.state_dict())

        engine.load_state_dict = loaded

    try:
        leg = live(comm, trainer_of(strategy, folder, **knobs), folder, change=begin)
    except ConfigError as error:
        return str(error)
    assert leg.losses, "it has not trained"
    return ""


def local(entry: Any) -> Tensor:
    entry = entry.tensor if isinstance(entry, FlatShard) else entry
    entry = entry.to_local() if isinstance(entry, DTensor) else entry
    tensor: Tensor = entry.detach()
    return tensor


def turn_rows(state: Any) -> None:
    weight = local(state["model"]["embedding.weight"])
    weight.copy_(weight.flip(0))


def swap_two(state: Any) -> None:
    first, second = (local(state["model"][f"blocks.{i}.linear.weight"]) for i in (0, 1))
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)


def leave_a_moment(state: Any) -> None:
    for slots in state["optimizer"]["main"]["state"].values():
        local(slots["exp_avg"]).zero_()


def leave_the_average(state: Any) -> None:
    local(state["ema"]["averages"]["head.weight"]).zero_()


def change_a_bit(state: Any) -> None:
    bits = local(state["model"]["head.weight"]).view(torch.int32)
    bits[-1:, -1:] ^= 1


SPOILT = {
    turn_rows: "model.embedding.weight is not what was saved",
    swap_two: "model.blocks.0.linear.weight, model.blocks.1.linear.weight are not what was saved",
    leave_a_moment: "exp_avg",
    leave_the_average: "ema.averages.head.weight is not what was saved",
    change_a_bit: "model.head.weight is not what was saved",
}


PATHS = [
    *((name, name) for name in STRATEGIES),
    ("single", "fsdp"),
    ("fsdp", "zero1"),
    ("zero1", "hybrid"),
    ("hybrid", "single"),
    ("gloo", "ddp"),
]


@pytest.mark.matrix(5)
@pytest.mark.parametrize(("before", "after"), PATHS)
def test_what_was_saved_under_any_strategy_is_what_any_other_holds(
    before: str, after: str, tmp_path: Path
) -> None:
    shared_pool(1 if before == "single" else 2).run(save, STRATEGIES[before], tmp_path)
    answers = shared_pool(1 if after == "single" else 2).run(resume, STRATEGIES[after], tmp_path)
    assert set(answers) == {""}


@pytest.mark.matrix(4)
@pytest.mark.parametrize("meddle", SPOILT, ids=lambda one: one.__name__)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_load_that_goes_wrong_ends_the_run_before_its_first_step(
    name: str, meddle: Callable[[Any], None], tmp_path: Path
) -> None:
    ranks = shared_pool(1 if name == "single" else 2)
    ranks.run(save, STRATEGIES[name], tmp_path)
    for answer in ranks.run(resume, STRATEGIES[name], tmp_path, meddle):
        assert SPOILT[meddle] in answer
        assert "checkpoint.check_loaded=false goes on all the same" in answer
    unchecked = replace(saving(tmp_path), check_loaded=False)
    answers = ranks.run(_unchecked, STRATEGIES[name], tmp_path, meddle, unchecked)
    assert set(answers) == {""}


def _unchecked(
    comm: Communicator, strategy: Strategy, folder: Path, meddle: Any, options: Any
) -> str:
    return resume(comm, strategy, folder, meddle, checkpoint=options)


@pytest.mark.parametrize("name", ["ddp", "gloo"])
def test_a_replica_that_differs_is_found_too(name: str, tmp_path: Path) -> None:
    shared_pool(2).run(save, STRATEGIES[name], tmp_path)
    answers = shared_pool(2).run(resume, STRATEGIES[name], tmp_path, change_a_bit, 1)
    assert all("model.head.weight is not what was saved" in answer for answer in answers)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_another_precision_is_no_difference(name: str, tmp_path: Path) -> None:
    strategy = STRATEGIES[name]
    shared_pool(2).run(_saved_at, strategy, tmp_path)
    true_bf16 = Precision(params="bf16", compute="bf16", reduce="bf16")
    assert set(shared_pool(2).run(_at, strategy, tmp_path, true_bf16, 3)) == {""}
    assert set(shared_pool(2).run(_at, strategy, tmp_path, Precision(compute="bf16"), 4)) == {""}


PLAIN = {"task": SentenceTask(optimizers="adamw")}  # torch's BatchNorm takes no bf16 beside fp32


def _saved_at(comm: Communicator, strategy: Strategy, folder: Path) -> None:
    save(comm, strategy, folder, **PLAIN)


def _at(
    comm: Communicator, strategy: Strategy, folder: Path, precision: Precision, steps: int
) -> str:
    return resume(comm, strategy, folder, precision=precision, max_steps=steps, **PLAIN)


def test_asynchronous_saves_have_hashes_too(tmp_path: Path) -> None:
    def case(comm: Communicator, strategy: Strategy, folder: Path) -> str:
        options = saving(folder, mode="async", every_steps=1)
        live(comm, trainer_of(strategy, folder, checkpoint=options), folder, until=2)
        return resume(comm, strategy, folder, change_a_bit) + resume(comm, strategy, folder)

    for name in ("ddp", "fsdp"):
        for answer in shared_pool(2).run(case, STRATEGIES[name], tmp_path / name):
            assert "model.head.weight is not what was saved" in answer
