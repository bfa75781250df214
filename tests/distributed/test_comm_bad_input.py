"""What ranks may get wrong between them: named in words of ours, and nothing waits for ever."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from torsh_trainer import DataSource, Loading, OptimizerSpec, Task, Trainer
from torsh_trainer import distributed as tc
from torsh_trainer.comm import create, watchdog
from torsh_trainer.comm.base import CommOptions
from torsh_trainer.errors import TorshError
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.builtin import Gloo
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.testing.plugins import install_plugin
from torsh_trainer.testing.ranks import RankPool, shared_pool
from torsh_trainer.training.trainer import run_in

CPU = torch.device("cpu")
BRIEF = CommOptions(timeout_s=2.0, startup_timeout_s=60.0)


def told(call: Any) -> tuple[str, str, dict[str, Any]]:
    """The kind of error, its words and its facts."""
    try:
        call()
    except TorshError as error:
        return type(error).__name__, str(error), error.facts
    return "", "", {}


# -- meeting --------------------------------------------------------------------------------------


PATIENT = """
import torch


def waits_for_all(world, store):
    '''A plugin that does what MPI's library does when it is initialised.'''
    store.set(f"initialised {world.rank}", "")
    store.wait([f"initialised {rank}" for rank in range(world.size)])

    def make(store, rank, size, timeout):
        return torch.distributed.ProcessGroupGloo(store, rank, size, timeout)

    torch.distributed.Backend.register_backend("patient", make, devices=["cpu"])
"""


def installed(folder: Path):
    return install_plugin(
        folder,
        entry_points={"torsh_trainer.backends": {"patient": "patient_backend:waits_for_all"}},
        modules={"patient_backend": PATIENT},
    )


def meeting(world, *, on_missing: str = "error", startup_timeout_s: float = 20.0):
    options = CommOptions("patient", startup_timeout_s=startup_timeout_s, on_missing=on_missing)
    return create(world, options, CPU)


def test_a_plugin_that_waits_for_all_is_loaded_only_where_all_have_it(tmp_path):
    def case(world):
        folder = tmp_path / f"rank-{world.rank}"
        with installed(folder) if world.rank == 0 else contextlib.nullcontext():
            kind, words, _ = told(lambda: meeting(world))
            comm = meeting(world, on_missing="fallback")
            backend = comm.backend
            comm.close()
        with installed(folder):
            comm = meeting(world)
            total = torch.ones(1)
            comm.all_reduce(total)
        return kind, words, backend, comm.backend, total.item()

    with RankPool(2, join=False) as pool:
        for kind, words, fallback, backend, total in pool.run(case):
            assert kind == "ResourceError"
            assert words.startswith("rank 1 cannot use patient: torch.distributed knows no backend")
            assert (fallback, backend, total) == ("gloo", "patient", 2.0)


def test_a_plugin_that_waits_for_all_does_not_hide_who_never_arrived(away, tmp_path):
    def case(world):
        if world.rank == 1:
            away.until_noticed_by(1)
            return "", "", {}
        with installed(tmp_path):
            answer = told(lambda: meeting(world, startup_timeout_s=1.0))
        away.noticed(world.rank)
        return answer

    with RankPool(2, join=False) as pool:
        kind, words, facts = pool.run(case)[0]
    assert kind == "ResourceError"
    assert words.startswith("rank 1 of 2 did not arrive within 1 s")
    assert facts["ranks"] == [1]


# -- a rank that does not come --------------------------------------------------------------------


def test_a_communicator_names_the_rank_that_does_not_come(away):
    def reduce(comm):
        work = comm.all_reduce(torch.ones(1), async_op=comm.world.rank == 2)
        if work is not None:
            work.wait()

    def case(comm):
        watchdog.GRACE_S = 1.0
        comm.barrier()  # nobody else is late, however busy the machine is
        if comm.world.rank == 1:
            away.until_noticed_by(2)
            return "", "", {}
        answer = told(lambda: reduce(comm))
        away.noticed(comm.world.rank)
        return answer

    with RankPool(3, options=BRIEF) as pool:
        answers = pool.run(case)
    for rank, operation in ((0, "all_reduce"), (2, "an asynchronous collective")):
        kind, words, facts = answers[rank]
        assert kind == "CommunicationError"
        assert words.startswith(f"{operation} failed on rank {rank} (gloo): rank 1 of 3 did not")
        assert "more than comm.timeout_s=2 waits longer" in words
        assert facts["missing"] == [1]


def test_a_part_of_the_job_waits_no_longer_than_the_whole(away):
    def case(comm):
        watchdog.GRACE_S = 1.0
        part = comm.split([0, 1])
        comm.barrier()
        if comm.world.rank != 0:
            away.until_noticed_by(1)
            return "", "", {}
        answer = told(lambda: part.all_reduce(torch.ones(1)))
        away.noticed(0)
        return answer

    with RankPool(3, options=BRIEF) as pool:
        kind, words, facts = pool.run(case, timeout_s=120.0)[0]
    assert kind == "CommunicationError"
    assert "rank 1 of 2 did not take part" in words
    assert facts["missing"] == [1]


def in_the_barrier_alone():
    torch.distributed.barrier()


@pytest.mark.matrix(1)
@pytest.mark.parametrize("apart", [False, True], ids=["one group", "groups of their own"])
def test_where_each_rank_waits_is_told_when_one_alone_enters_a_barrier(apart):
    def case(comm):
        part = comm.split([0, 1]) if apart else comm
        comm.barrier()

        def alone():
            with watchdog.explain_failures(comm.process_group, longer="more time"):
                in_the_barrier_alone()

        def together():
            part.all_reduce(torch.ones(1))

        # Each names the other's place, so the one that gives up first has to wait for the other.
        watchdog.GRACE_S = 10.0 if not apart else 3.0
        return told(alone if comm.world.rank == 0 else together)

    with RankPool(2, options=BRIEF) as pool:
        answers = pool.run(case, timeout_s=240.0)
    line = in_the_barrier_alone.__code__.co_firstlineno + 1
    for kind, words, _ in answers:
        assert kind == "CommunicationError"
        assert f"rank 0 waited in barrier at {__file__}:{line}" in words
        assert f"rank 1 waited in all_reduce at {__file__}" in words


# -- training -------------------------------------------------------------------------------------


class Numbers(DataSource):
    train = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))


class Odd(Task):
    """A model that is another on rank 1, or a rank 1 that hangs in its third forward."""

    data = Numbers()
    optimizer = OptimizerSpec("SGD", lr=0.1)

    def __init__(self, kind: str, rank: int) -> None:
        self.kind = kind if rank == 1 else ""
        self.calls = 0

    def build_model(self) -> nn.Module:
        out = 3 if self.kind == "shape" else 2
        layers = [nn.Linear(4, out), nn.Linear(out, 1)]
        if self.kind == "number":
            layers.append(nn.Linear(1, 1))
        model = nn.Sequential(*layers)
        return model.double() if self.kind == "dtype" else model

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        self.calls += 1
        if self.kind == "hangs" and self.calls == 3:
            time.sleep(4.5)
        return F.mse_loss(outputs, batch[1])


def trained(world, strategy: Strategy, kind: str, folder, options: CommOptions = CommOptions()):
    watchdog.GRACE_S = 1.0
    trainer = Trainer(
        task=Odd(kind, world.rank),
        strategy=strategy,
        comm=options,
        loading=Loading(batch_size=8),
        callbacks=(),
        run_dir=folder,
        max_steps=4,
        eval_every=None,
        eval_every_epochs=None,
        device="cpu",
    )
    return told(lambda: run_in(world, trainer))


DIFFERENT = {
    "shape": "rank 0: 0.weight float32 [2, 4]; rank 1: 0.weight float32 [3, 4]",
    "dtype": "rank 0: 0.weight float32 [2, 4]; rank 1: 0.weight float64 [2, 4]",
    "number": "rank 0: no further tensor; rank 1: 2.weight float32 [1, 1]",
}


@pytest.mark.matrix(4)
@pytest.mark.parametrize("strategy", [DDP(), Gloo(), FSDP()], ids=["ddp", "gloo", "fsdp"])
@pytest.mark.parametrize("kind", DIFFERENT)
def test_processes_that_build_different_models_are_told_the_first_difference(
    strategy, kind, tmp_path
):
    with RankPool(2, join=False) as pool:
        answers = pool.run(trained, strategy, kind, tmp_path, timeout_s=160.0)
    for name, words, _ in answers:
        assert name == "MismatchError"
        assert f"the processes have different models: {DIFFERENT[kind]}" in words


def test_so_are_those_that_wrap_different_models():
    def case(comm):
        return told(lambda: tc.DistributedDataParallel(nn.Linear(2, 2 + comm.world.rank)))

    for name, words, _ in shared_pool(2).run(case):
        assert name == "MismatchError"
        assert "rank 0: weight float32 [2, 2]; rank 1: weight float32 [3, 2]" in words


@pytest.mark.matrix(1)
@pytest.mark.parametrize("strategy", [DDP(), Gloo(), FSDP()], ids=["ddp", "gloo", "fsdp"])
def test_a_rank_that_hangs_while_training_is_named_by_the_others(strategy, tmp_path):
    with RankPool(2, join=False) as pool:
        options = replace(BRIEF, timeout_s=2.0)
        answers = pool.run(trained, strategy, "hangs", tmp_path, options, timeout_s=240.0)
    name, words, facts = answers[0]
    assert name == "CommunicationError"
    assert "rank 1 of 2 did not take part" in words
    assert facts["missing"] == [1]
