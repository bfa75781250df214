"""The modules that a script gets, on two processes, held to plain PyTorch on one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from torsh_trainer.comm.base import CommOptions
from torsh_trainer.dropin.negotiation.connection import StallCheck
from torsh_trainer.dropin.session import Seat, session
from torsh_trainer.testing.compare import FP32
from torsh_trainer.testing.ranks import shared_pool

BOUND = FP32.parameters


@contextlib.contextmanager
def horovod(comm: Any, **init: Any) -> Iterator[Any]:
    """What a script gets by ``import horovod.torch``, initialised."""
    import torsh_trainer.dropin.horovod.torch as hvd

    session.set_place(Seat(comm.world, CommOptions(), StallCheck()))
    hvd.init(**init)
    try:
        yield hvd
    finally:
        hvd.shutdown()


def data(rank: int, rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 3, 4, 4, generator=torch.Generator().manual_seed(rank))


# -- batch normalisation ---------------------------------------------------------------------------


def normalise(comm: Any, rows: tuple[int, int]) -> dict[str, Any]:
    with horovod(comm) as hvd:
        norm = hvd.SyncBatchNorm(3)
        mine = data(comm.rank, rows[comm.rank]).requires_grad_()
        weight = torch.arange(mine.numel()).view_as(mine) / 100
        out = norm(mine)
        (out * weight).sum().backward()
        return {
            "out": out.detach(),
            "grad": mine.grad,
            "weight": norm.weight.grad,
            "mean": norm.running_mean,
            "var": norm.running_var,
            "seen": norm.num_batches_tracked,
        }


@pytest.mark.parametrize("rows", [(6, 6), (2, 5)])
def test_sync_batch_norm_is_batch_norm_of_all_samples(rows):
    ranks = shared_pool(2).run(normalise, rows)
    norm = nn.BatchNorm2d(3)
    parts = [data(rank, rows[rank]) for rank in range(2)]
    whole = torch.cat(parts).requires_grad_()
    weights = torch.cat([torch.arange(p.numel()).view_as(p) / 100 for p in parts])
    out = norm(whole)
    (out * weights).sum().backward()
    for name, expected in (("out", out.detach()), ("grad", whole.grad)):
        found = torch.cat([rank[name] for rank in ranks])
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4), name
    for rank in ranks:
        assert torch.allclose(rank["mean"], norm.running_mean, rtol=BOUND, atol=BOUND)
        assert torch.allclose(rank["var"], norm.running_var, rtol=BOUND, atol=BOUND)
        assert rank["seen"] == 1
    summed = ranks[0]["weight"] + ranks[1]["weight"]
    assert torch.allclose(summed, norm.weight.grad, rtol=1e-4, atol=1e-4)


# -- the optimizer ---------------------------------------------------------------------------------


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 5), nn.Tanh(), nn.Linear(5, 2))


def loss_of(net: nn.Module, rank: int) -> torch.Tensor:
    return net(data(rank)).square().mean()


def close(comm: Any) -> list[torch.Tensor]:
    with horovod(comm) as hvd:
        net = model()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.LBFGS(net.parameters(), max_iter=3), net.named_parameters()
        )

        def compute() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(net, comm.rank)
            loss.backward()
            return hvd.allreduce(loss.detach())

        for _ in range(2):
            optimizer.step(compute)
        return [p.detach() for p in net.parameters()]


def test_what_a_closure_computes_is_reduced_before_the_step():
    net = model()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)

    def compute() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (loss_of(net, 0) + loss_of(net, 1)) / 2
        loss.backward()
        return loss.detach()

    for _ in range(2):
        optimizer.step(compute)
    for found in shared_pool(2).run(close):
        for mine, expected in zip(found, net.parameters(), strict=True):
            assert torch.allclose(mine, expected, rtol=1e-3, atol=1e-4)


def combine(comm: Any) -> list[torch.Tensor]:
    with horovod(comm) as hvd:
        net = model()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), op=hvd.Adasum
        )
        for _ in range(2):
            loss_of(net, comm.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in net.parameters()]


def test_adasum_combines_what_each_rank_has_changed_layer_by_layer():
    net = model()
    for _ in range(2):
        deltas = []
        for rank in range(2):
            grads = torch.autograd.grad(loss_of(net, rank), list(net.parameters()))
            deltas.append([-0.1 * grad for grad in grads])
        with torch.no_grad():
            for p, a, b in zip(net.parameters(), *deltas, strict=True):
                dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
                p += a * (1 - dot / (2 * aa)) + b * (1 - dot / (2 * bb))
    for found in shared_pool(2).run(combine):
        for mine, expected in zip(found, net.parameters(), strict=True):
            assert torch.allclose(mine, expected, rtol=1e-4, atol=1e-5)


def misuse(comm: Any) -> dict[str, str]:
    """What a wrong use of the optimizer is answered with."""
    told: dict[str, str] = {}

    def keep(name: str, call: Any) -> None:
        try:
            call()
        except (ValueError, AssertionError, RuntimeError, NotImplementedError) as error:
            told[name] = f"{type(error).__name__}: {error}"

    with horovod(comm) as hvd:
        net = model()
        named = list(net.named_parameters())
        plain = torch.optim.SGD(net.parameters(), lr=0.1)
        wrap = hvd.DistributedOptimizer
        keep("no pairs", lambda: wrap(plain, net.parameters()))
        keep("twice", lambda: wrap(plain, [("a", p) for _, p in named]))
        keep("left out", lambda: wrap(plain, named[1:]))
        keep("passes", lambda: wrap(plain, named, backward_passes_per_step=0))
        keep("divide", lambda: wrap(plain, named, gradient_predivide_factor=2.0, op=hvd.Sum))
        keep("groups", lambda: wrap(plain, named, groups=0))
        keep("lbfgs", lambda: hvd.broadcast_optimizer_state(torch.optim.LBFGS(net.parameters()), 0))
        keep("params", lambda: hvd.broadcast_parameters(3, 0))
        width = 3 + comm.rank
        other = nn.Linear(width, 1)
        keep("shapes", lambda: wrap(torch.optim.SGD(other.parameters()), other.named_parameters()))
        optimizer = wrap(plain, named)
        loss_of(net, comm.rank).backward()
        keep("race", optimizer.zero_grad)
        keep("too often", lambda: loss_of(net, comm.rank).backward())
        keep("set", lambda: hvd.allreduce(torch.ones(1), process_set=hvd.ProcessSet([0])))
        told["class"] = f"{type(optimizer).__name__} {isinstance(optimizer, torch.optim.SGD)}"
    return told


def test_a_wrong_use_of_the_optimizer_is_told_in_horovods_words():
    expected = {
        "no pairs": "ValueError: named_parameters should be a sequence of tuples",
        "twice": "ValueError: Parameter names in named_parameters must be unique",
        "left out": "ValueError: named_parameters was specified, but one or more",
        "passes": "ValueError: backward_passes_per_step must be > 0",
        "divide": "ValueError: gradient_predivide_factor not supported with op != Average",
        "groups": "ValueError: groups should be a non-negative integer",
        "lbfgs": "ValueError: cannot broadcast torch.optim.LBFGS state",
        "params": "ValueError: invalid params of type",
        "race": "AssertionError: optimizer.zero_grad() was called after loss.backward()",
        "too often": "AssertionError: Gradients were computed more than",
        "set": "ValueError: ProcessSet(process_set_id=None, ranks=[0], mpi_comm=None) is not known",
        "class": "SGD True",
    }
    for rank, told in enumerate(shared_pool(2).run(misuse)):
        for name, words in expected.items():
            assert told[name].startswith(words), name
        if rank == 1:
            assert "Mismatched ALLREDUCE tensor shapes" in told["shapes"]
            assert "Parameter: weight" in told["shapes"]


# -- sets of processes -----------------------------------------------------------------------------


def divide(comm: Any) -> list[Any]:
    import torsh_trainer.dropin.horovod.torch as hvd

    one, both = hvd.ProcessSet([1]), hvd.ProcessSet([0, 1])
    with horovod(comm, process_sets=[one]):
        answers: list[Any] = [one.size(), one.included(), one.process_set_id]
        mine = torch.full((2,), float(comm.rank + 1))
        if one.included():
            answers += [one.rank(), hvd.allreduce(mine, process_set=one, op=hvd.Sum).tolist()]
            answers.append(hvd.broadcast(mine, 1, process_set=one).tolist())
        try:
            hvd.add_process_set(both)
        except ValueError as error:
            answers.append(str(error))
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
        try:
            hvd.add_process_set(both)
        except ValueError as error:
            answers.append(str(error))
        first = hvd.add_process_set([0])
        if comm.rank == 0:
            answers.append(hvd.allgather(mine, process_set=first).tolist())
        answers += [hvd.remove_process_set(first), hvd.remove_process_set(hvd.global_process_set)]
        del os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"]
        answers.append(hvd.allreduce(mine, op=hvd.Max).tolist())
        return answers


def test_sets_of_processes_communicate_among_themselves():
    first, second = shared_pool(2).run(divide)
    duplicate = "Attempted to add a duplicate process set: ProcessSet(process_set_id=None"
    for answers in (first, second):
        assert answers[0] == 1
        assert any("HOROVOD_DYNAMIC_PROCESS_SETS=1" in str(answer) for answer in answers)
        assert any(str(answer).startswith(duplicate) for answer in answers)
        assert answers[-3:] == [True, False, [2.0, 2.0]]
    assert first[-4] == [1.0, 1.0]
    assert second[3:6] == [0, [2.0, 2.0], [2.0, 2.0]]


# -- names -----------------------------------------------------------------------------------------


def meet(comm: Any) -> dict[str, Any]:
    """Ranks that come in another order, with one name at once, and that leave."""
    found: dict[str, Any] = {}
    with horovod(comm) as hvd:
        names = ["a", "b", "c", "d"][:: 1 - 2 * comm.rank]
        handles = {
            name: hvd.allreduce_async(
                torch.full((3,), float(ord(name) * (comm.rank + 1))), name=name
            )
            for name in names
        }
        found["sums"] = {name: hvd.synchronize(handles[name])[0].item() for name in "abcd"}
        first = hvd.broadcast_async(torch.ones(1), 0, name="one")
        try:
            hvd.allreduce_async(torch.ones(1), name="one")
        except ValueError as error:
            found["twice"] = str(error)
        hvd.synchronize(first)
        try:
            (hvd.allgather if comm.rank else hvd.allreduce)(torch.ones(2), name="differ")
        except hvd.HorovodInternalError as error:
            found["differ"] = str(error)
        many = [hvd.allreduce_async_(torch.full((5,), float(n)), op=hvd.Sum) for n in range(40)]
        found["many"] = [hvd.synchronize(handle)[0].item() for handle in many]
        hvd.barrier()
        if comm.rank == 0:
            handle = hvd.allreduce_async(torch.ones(2), name="alone")
            try:
                hvd.synchronize(handle)
            except hvd.HorovodInternalError as error:
                found["left"] = str(error)
    return found


def test_ranks_meet_by_name_and_hear_of_one_that_left():
    first, second = shared_pool(2).run(meet)
    for found in (first, second):
        assert found["sums"] == {name: ord(name) * 1.5 for name in "abcd"}
        assert "the same name as another tensor" in found["twice"]
        assert "Mismatched collective operations" in found["differ"]
        assert found["many"] == [2.0 * n for n in range(40)]
    assert "Horovod has been shut down" in first["left"]


def ask_before(comm: Any) -> list[str]:
    import torsh_trainer.dropin.horovod.torch as hvd

    told = []
    for call in (hvd.rank, hvd.size, lambda: hvd.allreduce(torch.ones(1)), hvd.join, hvd.barrier):
        try:
            call()
        except ValueError as error:
            told.append(str(error))
    return told


def test_before_init_every_call_says_so():
    for told in shared_pool(2).run(ask_before):
        assert told == ["Horovod has not been initialized; use hvd.init()."] * 5
