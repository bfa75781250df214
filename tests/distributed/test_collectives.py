"""Collectives as functions: the result of plain arithmetic, in every form, dtype and group."""

from __future__ import annotations

import functools
import operator
import warnings

import pytest
import torch
import torch.distributed as dist

from torsh_trainer import distributed as tc
from torsh_trainer.testing.ranks import shared_pool

SIZES = (2, 4)
FOLD = {
    "SUM": operator.add,
    "PRODUCT": operator.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
FLOATS = (torch.float32, torch.float64, torch.bfloat16)
REDUCTIONS = [
    *((op, dtype) for op in ("SUM", "PRODUCT", "MIN", "MAX") for dtype in (*FLOATS, torch.int64)),
    *((op, torch.int64) for op in ("BAND", "BOR", "BXOR")),
]


def run(world_size, case, *args):
    """``case(rank, size, *args)`` on every rank."""

    def with_place(communicator, *args):
        return case(communicator.world.rank, communicator.world.size, *args)

    return shared_pool(world_size).run(with_place, *args)


def table(world_size, dtype=torch.float32, columns=3):
    """A row of values for every rank; sums and products of them are exact in every dtype."""
    row = torch.arange(columns)
    return (torch.arange(world_size)[:, None] + row).remainder(4).add(1).to(dtype)


def refusal(call):
    try:
        call()
    except tc.CollectiveArgumentError as error:
        return str(error)
    return ""


# -- reductions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize(("op", "dtype"), REDUCTIONS)
def test_all_reduce_is_the_fold_of_all_tensors(world_size, op, dtype):
    rows = table(world_size, dtype)

    def case(rank, size):
        now, later, named = (rows[rank].clone() for _ in range(3))
        assert tc.all_reduce(now, getattr(tc.ReduceOp, op)) is None
        work = tc.all_reduce(later, getattr(dist.ReduceOp, op), async_op=True)
        assert work.wait() is True
        assert work.is_completed()
        tc.all_reduce(named, op=op.lower())
        return now, later, named

    expected = functools.reduce(FOLD[op], list(rows))
    for answers in run(world_size, case):
        assert all(torch.equal(answer, expected) for answer in answers)


@pytest.mark.parametrize("world_size", SIZES)
def test_the_mean_is_of_floating_point_and_refused_for_whole_numbers(world_size):
    rows = table(world_size)

    def case(rank, size):
        tensor = rows[rank].clone()
        tc.all_reduce(tensor, tc.ReduceOp.Mean)
        return tensor, refusal(lambda: tc.all_reduce(torch.ones(2, dtype=torch.int64), op="mean"))

    for answer, words in run(world_size, case):
        assert torch.equal(answer, rows.mean(dim=0))
        assert "mean of torch.int64" in words


@pytest.mark.parametrize("world_size", SIZES)
def test_tensors_need_not_be_contiguous(world_size):
    def case(rank, size):
        whole = torch.full((4, 6), float(rank))
        tc.all_reduce(whole.t()[::2])
        tc.broadcast(whole[:, 1], size - 1)
        work = tc.all_reduce(whole[2:, 3:].t(), async_op=True)
        work.wait()
        return whole

    total, last = float(sum(range(world_size))), world_size - 1.0
    for rank, answer in enumerate(run(world_size, case)):
        expected = torch.full((4, 6), float(rank))
        expected[:, ::2] = total
        expected[:, 1] = last
        corner = torch.tensor([[float(rank), total, float(rank)]])
        expected[2:, 3:] = torch.tensor([[total, total * world_size, total]])
        assert torch.equal(answer, expected), corner


@pytest.mark.parametrize("world_size", SIZES)
def test_reduce_gives_the_result_to_one_and_leaves_the_others_alone(world_size):
    rows = table(world_size)

    def case(rank, size):
        first, second, named = (rows[rank].clone() for _ in range(3))
        tc.reduce(first, size - 1)
        tc.reduce(second, tc.ReduceOp.Max, 0)  # the operation first, as the guides have it
        work = tc.reduce(named, dst=0, op=tc.ReduceOp.SUM, async_op=True)
        work.wait()
        return first, second, named

    answers = run(world_size, case)
    for rank, (first, second, named) in enumerate(answers):
        last, main = rank == world_size - 1, rank == 0
        assert torch.equal(first, rows.sum(0) if last else rows[rank])
        assert torch.equal(second, rows.amax(0) if main else rows[rank])
        assert torch.equal(named, rows.sum(0) if main else rows[rank])


@pytest.mark.parametrize("world_size", SIZES)
def test_reduce_scatter_gives_each_its_part_in_every_form(world_size):
    rows = table(world_size, columns=2 * world_size)

    def case(rank, size):
        mine = rows[rank].clone()
        from_list, from_tensor, mean = (torch.empty(2) for _ in range(3))
        tc.reduce_scatter(from_list, list(mine.chunk(size)))
        tc.reduce_scatter(from_tensor, mine)
        tc.reduce_scatter_tensor(mean, mine, "mean")
        chunk = tc.reduce_scatter(mine.view(size, 2), op=tc.ReduceOp.MAX)
        later = tc.reduce_scatter(mine, async_op=True).wait()
        words = refusal(lambda: tc.reduce_scatter(torch.ones(size + 1)))
        return from_list, from_tensor, mean, chunk, later, words

    for rank, answers in enumerate(run(world_size, case)):
        from_list, from_tensor, mean, chunk, later, words = answers
        part = rows[:, 2 * rank : 2 * rank + 2]
        for total in (from_list, from_tensor, later):
            assert torch.equal(total, part.sum(0))
        assert torch.equal(mean, part.mean(0))
        assert torch.equal(chunk, part.amax(0).view(1, 2))
        assert "cannot cut a tensor" in words


# -- moving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", SIZES)
def test_all_gather_returns_a_list_or_a_tensor_or_fills_either(world_size):
    rows = table(world_size).view(world_size, 1, 3)

    def case(rank, size):
        mine = rows[rank].clone()
        room, whole = [torch.empty(1, 3) for _ in range(size)], torch.empty(size, 3)
        tc.all_gather(room, mine)
        tc.all_gather(whole, mine)
        listed, joined = tc.all_gather(mine), tc.all_gather(mine, concat=True)
        later = tc.all_gather(mine, async_op=True).wait()
        number = tc.all_gather(torch.tensor(rank))
        return room, whole, listed, joined, later, number

    for room, whole, listed, joined, later, number in run(world_size, case):
        for answer in (torch.cat(room), whole, torch.cat(listed), joined, torch.cat(later)):
            assert torch.equal(answer, rows.flatten(0, 1))
        assert [n.item() for n in number] == list(range(world_size))


@pytest.mark.parametrize("world_size", SIZES)
def test_tensors_of_any_size_are_gathered_when_shapes_are_told_first(world_size):
    def case(rank, size):
        return tc.all_gather_varsize(torch.full((rank, 2), float(rank)))

    for answer in run(world_size, case):
        assert [tuple(part.shape) for part in answer] == [(rank, 2) for rank in range(world_size)]
        assert all((part == rank).all() for rank, part in enumerate(answer))


@pytest.mark.parametrize("world_size", SIZES)
def test_gather_brings_everything_to_one_in_every_form(world_size):
    rows = table(world_size)

    def case(rank, size):
        mine, dst = rows[rank].clone(), size - 1
        returned = tc.gather(mine, dst)
        room = [torch.empty(3) for _ in range(size)] if rank == dst else None
        assert tc.gather(mine, room, dst) is None
        later = tc.gather(mine, async_op=True).wait()
        return returned, room, later

    answers = run(world_size, case)
    for rank, (returned, room, later) in enumerate(answers):
        last = rank == world_size - 1
        for answer in (returned, room):
            assert (answer is not None) == last
            assert not last or torch.equal(torch.stack(answer), rows)
        assert isinstance(later, list) == (rank == 0)
    assert torch.equal(torch.stack(answers[0][2]), rows)


@pytest.mark.parametrize("world_size", SIZES)
def test_scatter_hands_out_a_list_or_cuts_a_tensor_that_need_not_divide(world_size):
    whole = torch.arange(2.0 * (world_size + 1)).view(world_size + 1, 2)

    def case(rank, size):
        src = size - 1
        output = torch.empty(2)
        given = [whole[i] for i in range(size)] if rank == src else [None]
        tc.scatter(output, given, src=src)
        chunk = tc.scatter(whole if rank == src else torch.empty(0), src)
        uneven = [torch.full((i,), i) for i in range(size)] if rank == 0 else None
        piece = tc.scatter(None, uneven, src=0)
        later = tc.scatter(whole if rank == 0 else None, 0, async_op=True).wait()
        return output, chunk, piece, later

    for rank, (output, chunk, piece, later) in enumerate(run(world_size, case)):
        assert torch.equal(output, whole[rank])
        assert torch.equal(chunk, whole.tensor_split(world_size)[rank])
        assert torch.equal(later, chunk)
        assert torch.equal(piece, torch.full((rank,), rank))
        assert piece.dtype == torch.int64


@pytest.mark.parametrize("world_size", SIZES)
def test_all_to_all_exchanges_lists_of_any_sizes_and_cuts_of_one_tensor(world_size):
    def case(rank, size):
        # Rank r sends i + 1 elements to rank i.
        inputs = [torch.full((i + 1,), float(10 * rank + i)) for i in range(size)]
        outputs = [torch.empty(rank + 1) for _ in range(size)]
        tc.all_to_all(outputs, inputs)
        square, equal = torch.arange(size) + 10 * rank, torch.empty(size, dtype=torch.int64)
        tc.all_to_all(equal, square)
        uneven = torch.empty(size * (rank + 1))
        work = tc.all_to_all_single(
            uneven, torch.cat(inputs), [rank + 1] * size, range(1, size + 1), async_op=True
        )
        work.wait()
        return outputs, equal, uneven

    for rank, (outputs, equal, uneven) in enumerate(run(world_size, case)):
        parts = [torch.full((rank + 1,), float(10 * i + rank)) for i in range(world_size)]
        assert all(torch.equal(a, b) for a, b in zip(outputs, parts, strict=True))
        assert equal.tolist() == [10 * i + rank for i in range(world_size)]
        assert torch.equal(uneven, torch.cat(parts))


@pytest.mark.parametrize("world_size", SIZES)
def test_send_and_recv_pass_a_tensor_on_blocking_and_not(world_size):
    def case(rank, size):
        after, before = (rank + 1) % size, (rank - 1) % size
        taken = torch.empty(2, 3).t()
        works = [tc.isend(torch.full((3, 2), float(rank)), after), tc.irecv(taken, before)]
        for work in works:
            work.wait()
        second, source = torch.empty(1), None
        if rank == 0:
            tc.send(torch.tensor([7.0]), 1)
        if rank == 1:
            source = tc.recv(second)  # from anyone
        tc.barrier()
        words = refusal(lambda: tc.send(second, rank))
        return taken, second if rank == 1 else None, source, words

    for rank, (taken, second, source, words) in enumerate(run(world_size, case)):
        assert torch.equal(taken, torch.full((3, 2), float((rank - 1) % world_size)))
        assert (second is None) == (rank != 1)
        assert source == (0 if rank == 1 else None)
        assert "with itself" in words


def test_a_barrier_may_be_waited_for_later():
    def case(rank, size):
        work = tc.barrier(async_op=True)
        return work.wait()

    assert run(2, case) == [True, True]


def test_a_work_has_a_future_of_its_result():
    def case(rank, size):
        work = tc.all_gather(torch.tensor([float(rank)]), async_op=True)
        return [part.item() for part in work.get_future().wait()]

    assert run(2, case) == [[0.0, 1.0]] * 2


# -- groups --------------------------------------------------------------------------------------


def test_every_collective_works_in_a_group_of_some_with_the_ranks_of_the_job():
    def case(rank, size):
        odd, even = tc.new_group([1, 3]), tc.new_group([0, 2])
        mine, first = (odd, 1) if rank % 2 else (even, 0)
        tensor = torch.tensor([float(rank)])
        total, source = tensor.clone(), tensor.clone()
        tc.all_reduce(total, tc.ReduceOp.SUM, mine)
        tc.broadcast(source, first, mine)
        by_place = tensor.clone()
        tc.broadcast(by_place, group=mine, group_src=1)
        gathered = tc.all_gather(tensor, group=mine)
        wrong = refusal(lambda: tc.broadcast(tensor, 1 - first, mine))
        told = tc.get_rank(mine), tc.get_world_size(mine), mine.ranks
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            nothing = tc.all_reduce(tensor, group=even if rank % 2 else odd)
        outside = tc.get_rank(even if rank % 2 else odd)
        numbers = [t.item() for t in (total, source, by_place, *gathered)]
        return numbers, wrong, told, nothing, outside, [str(w.message) for w in caught]

    for rank, answer in enumerate(run(4, case)):
        numbers, wrong, told, nothing, outside, caught = answer
        pair = [rank % 2, rank % 2 + 2]
        assert numbers == [sum(pair), pair[0], pair[1], *pair]
        assert "is not one of this group's ranks" in wrong
        assert told == (pair.index(rank), 2, pair)
        assert nothing is None
        assert outside == -1
        assert any("not a member" in words for words in caught)


def test_functions_take_torchs_own_groups_and_ours_work_for_torch():
    def case(rank, size):
        theirs, ours = dist.new_group([0, 1]), tc.new_group([0, 1])
        first, second = torch.ones(1), torch.ones(1)
        tc.all_reduce(first, group=theirs)
        dist.all_reduce(second, group=ours.process_group)
        return first.item(), second.item()

    assert run(2, case) == [(2.0, 2.0)] * 2


# -- mistakes ------------------------------------------------------------------------------------


def test_what_one_rank_got_wrong_by_itself_is_said_there_before_anything_is_sent():
    def case(rank, size):
        one = torch.ones(2)
        return [
            refusal(lambda: tc.all_reduce(one, op="sums")),
            refusal(lambda: tc.broadcast(one)),
            refusal(lambda: tc.broadcast(one, 9)),
            refusal(lambda: tc.all_gather([one], one)),
            refusal(lambda: tc.all_gather(torch.empty(3), one)),
            refusal(lambda: tc.reduce_scatter(one, [one, one.long()])),
            refusal(lambda: tc.all_to_all_single(torch.ones(3), torch.ones(3))),
            refusal(lambda: tc.all_to_all_single(one, one, [2, 1], [1, 1])),
            refusal(lambda: tc.new_group([0, 5])),
            refusal(lambda: tc.scatter(0.5, 0)),
        ]

    for answers in run(2, case):
        assert all(answers), answers
        assert "'sums' is unknown" in answers[0]


def test_what_the_backend_cannot_do_is_a_backend_error():
    def case(rank, size):
        try:
            tc.all_reduce(torch.ones(2), tc.ReduceOp.BAND)
        except tc.BackendError as error:
            return str(error), isinstance(error, dist.DistBackendError), error.exit_code
        return None

    for words, is_torchs, code in run(2, case):
        assert words.startswith("gloo cannot do all_reduce of float32 [2], BAND")
        assert is_torchs
        assert code == 1


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "reduce_scatter", "all_gather"])
def test_the_nccl_names_are_the_same_operation_elsewhere_and_say_so_once(name):
    def case(rank, size, name):
        import logging

        from torsh_trainer.distributed import collectives

        collectives._noted.clear()
        notes = []
        handler = logging.Handler()
        handler.emit = lambda record: notes.append(record.getMessage())
        log = logging.getLogger("torsh_trainer.distributed.collectives")
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        answers = []
        for function in (getattr(tc, f"nccl_{name}"), getattr(tc, name)):
            tensor = torch.arange(4.0) + rank
            extra = (0,) if name == "broadcast" else ()
            answer = function(tensor, *extra)
            function(tensor, *extra)
            answers.append((tensor, answer))
        log.removeHandler(handler)
        return answers, notes

    for answers, notes in run(2, case, name):
        (ours, one), (plain, other) = answers
        assert torch.equal(ours, plain)
        flat = [torch.cat(list(a)) if isinstance(a, list) else a for a in (one, other)]
        assert (flat[0] is None and flat[1] is None) or torch.equal(flat[0], flat[1])
        assert notes == [f"nccl_{name} and its like use gloo here"]
