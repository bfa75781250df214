"""When ranks do not do the same, or do not come: who is named, and in what kind of error."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from torsh_trainer import distributed as tc
from torsh_trainer.comm import watchdog
from torsh_trainer.comm.base import CommOptions
from torsh_trainer.comm.start import create
from torsh_trainer.distributed import process_group
from torsh_trainer.errors import TrainingError
from torsh_trainer.testing.ranks import RankPool, shared_pool

BRIEF = CommOptions(timeout_s=2.0, startup_timeout_s=60.0)


def told(call):
    """The kind of error, its words and its facts."""
    try:
        call()
    except tc.CommunicationError as error:
        kinds = (dist.DistBackendError, dist.DistNetworkError, RuntimeError, TrainingError)
        if all(isinstance(error, kind) for kind in kinds):
            return type(error).__name__, str(error), dict(error.facts)
    return "", "", {}


MISMATCHES = {
    "shape": (
        lambda rank: tc.all_reduce(torch.ones(2 + rank)),
        "rank 0: all_reduce of float32 [2], SUM; rank 1: all_reduce of float32 [3], SUM",
    ),
    "dtype": (
        lambda rank: tc.broadcast(torch.ones(2, dtype=[torch.float32, torch.int64][rank]), 0),
        "rank 0: broadcast of float32 [2], root 0; rank 1: broadcast of int64 [2], root 0",
    ),
    "operation": (
        lambda rank: [tc.all_reduce, tc.all_gather][rank](torch.ones(1)),
        "rank 0: all_reduce of float32 [1], SUM; rank 1: all_gather of float32 [1]",
    ),
    "reduction": (
        lambda rank: tc.all_reduce(torch.ones(1), ["sum", "max"][rank]),
        "rank 0: all_reduce of float32 [1], SUM; rank 1: all_reduce of float32 [1], MAX",
    ),
    "root": (
        lambda rank: tc.reduce(torch.ones(1), rank),
        "rank 0: reduce of float32 [1], SUM, root 0; rank 1: reduce of float32 [1], SUM, root 1",
    ),
    "parts": (
        lambda rank: tc.all_to_all(
            [torch.empty(1), torch.empty(2)], [torch.ones(1), torch.ones(2)]
        ),
        "rank 0 sends 2 elements to rank 1, which expects 1",
    ),
}


def differing(communicator, call, check):
    """What a rank is told of a call that fits to no other, and what the group can do afterwards."""
    tc.set_check(check)
    try:
        answer = told(lambda: call(communicator.world.rank))
        total = torch.ones(1)
        tc.all_reduce(total)  # the group is as good as before
    finally:
        tc.set_check(None)
    return *answer[:2], total.item()


@pytest.mark.parametrize("what", MISMATCHES)
def test_calls_that_differ_are_named_on_every_rank_before_anything_hangs(what):
    call, words = MISMATCHES[what]
    for kind, said, total in shared_pool(2).run(differing, call, True):
        assert kind == "MismatchError"
        assert words in said
        assert total == 2.0


@pytest.mark.parametrize("what", [what for what in MISMATCHES if what != "parts"])
def test_so_are_the_first_calls_of_a_group_though_nobody_asked(what):
    call, words = MISMATCHES[what]
    with RankPool(2) as pool:
        for kind, said, total in pool.run(differing, call, None):
            assert kind == "MismatchError"
            assert words in said
            assert total == 2.0


def test_a_first_call_that_is_not_waited_for_holds_nobody_up():
    """A program that is right for gloo: one rank's all-reduce waits for what it sends next."""

    def case(communicator):
        total, box = torch.ones(1), torch.zeros(1)
        if communicator.world.rank == 0:
            work = tc.all_reduce(total, async_op=True)
            tc.send(torch.ones(1), 1)
            work.wait()
        else:
            tc.recv(box, 0)
            tc.all_reduce(total.view(1, 1))  # another shape of as many elements will do
        return total.item()

    with RankPool(2) as pool:
        assert pool.run(case) == [2.0, 2.0]


def test_a_rank_that_is_late_for_a_first_call_is_waited_for_by_the_backend():
    def case(communicator):
        process_group.resolve().timeout_s = (
            1.0  # a quarter of it is what the others wait for its word
        )
        if communicator.world.rank == 1:
            time.sleep(1.0)
        totals = []
        for _ in range(3):
            total = torch.ones(1)
            tc.all_reduce(total)
            totals.append(total.item())
        return totals

    with RankPool(2) as pool:
        assert pool.run(case) == [[2.0] * 3] * 2


def test_checks_let_calls_that_fit_through():
    def case(communicator):
        rank, size = communicator.world.rank, communicator.world.size
        tc.set_check(True)
        try:
            total = torch.tensor([float(rank)])
            tc.all_reduce(total)
            pieces = tc.scatter(torch.arange(5) if rank == 0 else None, 0)
            outputs = [torch.empty(rank + 1) for _ in range(size)]
            tc.all_to_all(outputs, [torch.ones(i + 1) for i in range(size)])
            tc.ring_all_reduce(total)
            tc.barrier()
        finally:
            tc.set_check(None)
        return total.item(), len(pieces)

    assert shared_pool(2).run(case) == [(2.0, 3), (2.0, 2)]


def missing_one(answers):
    """Both ranks that came name the one that did not."""
    assert answers[1] is None
    for rank in (0, 2):
        kind, words, facts = answers[rank]
        assert kind == "CommunicationError"
        assert "rank 1 of 3 did not take part" in words
        assert (facts["rank"], facts["missing"]) == (rank, [1])


def test_a_rank_that_does_not_come_is_named_when_the_time_is_over(away):
    def case(communicator):
        communicator.barrier()  # nobody else is late, however busy the machine is
        if communicator.world.rank == 1:
            away.until_noticed_by(2)
            return None
        answer = told(lambda: tc.all_reduce(torch.ones(1)))
        away.noticed(communicator.world.rank)
        return answer

    with RankPool(3, options=BRIEF) as pool:
        missing_one(pool.run(case))


def test_with_checks_it_is_named_before_the_backend_gives_up(away):
    def case(communicator):
        communicator.barrier()
        if communicator.world.rank == 1:
            away.until_noticed_by(2)
            return None
        process_group.resolve().timeout_s = 2.0  # the group's own is a minute
        tc.set_check(True)
        answer = told(lambda: tc.all_reduce(torch.ones(1)))
        away.noticed(communicator.world.rank)
        return answer

    with RankPool(3) as pool:
        missing_one(pool.run(case))


def test_a_rank_that_has_ended_is_named():
    def case(communicator):
        if communicator.world.rank == 1:
            dist.destroy_process_group()
            return None
        return told(lambda: tc.all_reduce(torch.ones(1)))

    with RankPool(2, options=BRIEF) as pool:
        kind, words, facts = pool.run(case)[0]
    assert kind == "CommunicationError"
    assert facts["missing"] == [1]
    assert "rank 1 of 2" in words


def left_by_rank_0(world, leave, done):
    """What the others are told when the process leaves that is rank 0, and holds the store.

    The pool's own rank 0 only looks after that one.
    """
    if world.rank:
        watchdog._ANSWER_S = 1.0
        try:
            communicator = create(world, BRIEF, torch.device("cpu"))
            communicator.barrier()
            return told(lambda: communicator.all_reduce(torch.ones(1)))
        finally:
            done.touch()
    main = os.fork()
    if main == 0:
        try:
            create(world, BRIEF, torch.device("cpu")).barrier()
            leave()
        finally:
            os._exit(0)
    os.close(world.rendezvous.listen_fd)  # else the port would outlive its process
    while not done.exists():
        time.sleep(0.05)
    os.kill(main, signal.SIGKILL)
    os.waitpid(main, 0)
    return None


@pytest.mark.parametrize(
    "leave",
    [
        pytest.param(lambda: None, id="ended"),
        pytest.param(lambda: os.kill(os.getpid(), signal.SIGSTOP), id="stopped"),
    ],
)
def test_a_store_out_of_reach_is_told_and_nobody_is_accused(leave, tmp_path):
    with RankPool(2, join=False) as pool:
        kind, words, facts = pool.run(left_by_rank_0, leave, tmp_path / "done")[1]
    assert kind == "CommunicationError"
    assert "the process that holds the job's store (rank 0) cannot be reached" in words
    assert (facts["rank"], facts["missing"]) == (1, [])
