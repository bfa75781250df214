"""The contract of a communicator as a test suite; expected values are plain arithmetic."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from torsh_trainer.comm.base import CommOptions, Communicator, Reduction
from torsh_trainer.errors import ConfigError
from torsh_trainer.testing.ranks import OPTIONS, RankPool, shared_pool

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)

_REDUCE: dict[Reduction, Callable[[list[float]], float]] = {
    "sum": sum,
    "mean": lambda values: sum(values) / len(values),
    "min": min,
    "max": max,
    "product": math.prod,
}


class CommunicatorContract:
    """What every communicator must do; a plugin's test is one class that inherits this one.

    ``communicator`` makes the one under test on a rank, from torch's communicator of the same
    processes; by default it is that one. ``comm_options`` choose its backend, gloo where they do
    not. ``world_sizes`` are the numbers of processes.
    """

    world_sizes: ClassVar[tuple[int, ...]] = (2, 4)
    device: ClassVar[str] = "cpu"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = DTYPES
    comm_options: ClassVar[CommOptions] = OPTIONS

    @staticmethod
    def communicator(comm: Communicator) -> Communicator:
        """The communicator under test."""
        return comm

    @classmethod
    def pytest_generate_tests(cls, metafunc: Any) -> None:
        """pytest's hook: one test for each world size, dtype and operation."""
        if "world_size" in metafunc.fixturenames:
            sizes = metafunc.cls.world_sizes
            metafunc.parametrize("world_size", sizes, ids=[f"{size}-ranks" for size in sizes])
        if "dtype" in metafunc.fixturenames:
            metafunc.parametrize("dtype", metafunc.cls.dtypes, ids=str)
        if "op" in metafunc.fixturenames:
            metafunc.parametrize("op", list(_REDUCE))

    # -- facts ------------------------------------------------------------------------------------

    def test_ranks_are_numbered_and_know_their_number(self, world_size: int) -> None:
        def case(comm: Communicator) -> tuple[int, int, str, str]:
            return comm.world.rank, comm.world.size, comm.backend, comm.device.type

        answers = self._run(case, world_size)
        assert [answer[:2] for answer in answers] == [(r, world_size) for r in range(world_size)]
        assert len({answer[2:] for answer in answers}) == 1
        assert answers[0][2]

    def test_place_moves_a_tensor_to_the_device(self, world_size: int) -> None:
        def case(comm: Communicator) -> bool:
            return comm.to_device(torch.ones(2)).device == comm.device

        assert all(self._run(case, world_size))

    # -- reductions -------------------------------------------------------------------------------

    def test_all_reduce_leaves_the_reduction_everywhere(
        self, world_size: int, op: Reduction
    ) -> None:
        dtypes = [dtype for dtype in self.dtypes if op != "mean" or dtype in FLOATS]

        def case(comm: Communicator) -> list[list[float]]:
            found = []
            for dtype in dtypes:
                tensor = comm.to_device(torch.tensor(_values(comm.world.rank, dtype)).to(dtype))
                assert comm.all_reduce(tensor, op=op) is None
                found.append(tensor.tolist())
            return found

        expected: dict[torch.dtype, list[float]] = {}
        for dtype in dtypes:
            reduced = [_REDUCE[op](list(column)) for column in self._columns(world_size, dtype)]
            expected[dtype] = [bool(v) for v in reduced] if dtype == torch.bool else reduced
        assert expected
        for found in self._run(case, world_size):
            assert dict(zip(dtypes, found, strict=True)) == expected

    def test_the_mean_of_what_has_no_fractions_is_refused(self, world_size: int) -> None:
        dtypes = [dtype for dtype in self.dtypes if dtype not in FLOATS]

        def case(comm: Communicator) -> list[bool]:
            tensors = [comm.to_device(torch.ones(2).to(dtype)) for dtype in dtypes]
            return [_is_refused(partial(comm.all_reduce, t, op="mean")) for t in tensors]

        assert self._run(case, world_size) == [[True] * len(dtypes)] * world_size

    def test_an_asynchronous_all_reduce_is_done_after_wait(
        self, world_size: int, op: Reduction
    ) -> None:
        def case(comm: Communicator) -> list[list[float]]:
            first, second = (
                comm.to_device(torch.tensor(_values(comm.world.rank + shift, torch.float32)))
                for shift in (0, 5)
            )
            works = [comm.all_reduce(t, op=op, async_op=True) for t in (first, second)]
            for work in works:
                assert work is not None
                work.wait()
            return [first.tolist(), second.tolist()]

        expected = [
            [_REDUCE[op](list(column)) for column in self._columns(world_size, shift=shift)]
            for shift in (0, 5)
        ]
        assert self._run(case, world_size) == [expected] * world_size

    def test_reduce_gives_the_result_to_one_and_leaves_the_others_alone(
        self, world_size: int
    ) -> None:
        dst = world_size - 1

        def case(comm: Communicator) -> list[float]:
            tensor = comm.to_device(torch.tensor([1.0, comm.world.rank]))
            comm.reduce(tensor, dst=dst)
            return tensor.tolist()

        answers = self._run(case, world_size)
        assert answers[dst] == [world_size, sum(range(world_size))]
        assert answers[:dst] == [[1.0, rank] for rank in range(dst)]

    def test_reduce_scatter_gives_each_its_part(self, world_size: int) -> None:
        def case(comm: Communicator) -> tuple[list[float], list[float]]:
            parts = [
                comm.to_device(torch.full((2, 3), float(10 * comm.world.rank + i))).t()
                for i in range(comm.world.size)
            ]
            total, mean = (comm.to_device(torch.empty(2, 3)).t() for _ in range(2))
            comm.reduce_scatter(total, parts)
            comm.reduce_scatter(mean, parts, op="mean")
            return total.unique().tolist(), mean.unique().tolist()

        for rank, (total, mean) in enumerate(self._run(case, world_size)):
            expected = sum(10 * other + rank for other in range(world_size))
            assert total == [expected]
            assert mean == [expected / world_size]

    def test_numbers_are_reduced_in_double_precision(self, world_size: int) -> None:
        def case(comm: Communicator) -> list[float]:
            return comm.reduce_values([1 / 3, 1e12 + comm.world.rank])

        expected = [world_size / 3, sum(1e12 + rank for rank in range(world_size))]
        for answer in self._run(case, world_size):
            pairs = zip(answer, expected, strict=True)
            assert all(math.isclose(ours, plain, rel_tol=1e-15) for ours, plain in pairs)

    # -- moving -----------------------------------------------------------------------------------

    def test_broadcast_copies_the_tensor_of_the_source(
        self, world_size: int, dtype: torch.dtype
    ) -> None:
        src = world_size - 1

        def case(comm: Communicator) -> tuple[list[float], list[float]]:
            mine = torch.tensor(_values(comm.world.rank, dtype)).to(dtype)
            now, later = comm.to_device(mine.clone()), comm.to_device(mine.clone())
            comm.broadcast(now, src=src)
            work = comm.broadcast(later, src=src, async_op=True)
            assert work is not None
            work.wait()
            return now.tolist(), later.tolist()

        expected = torch.tensor(_values(src, dtype)).to(dtype).tolist()
        assert self._run(case, world_size) == [(expected, expected)] * world_size

    def test_all_gather_keeps_the_order_of_ranks(self, world_size: int, dtype: torch.dtype) -> None:
        def case(comm: Communicator) -> list[list[float]]:
            mine = comm.to_device(torch.tensor(_values(comm.world.rank, dtype)).to(dtype))
            gathered = comm.all_gather(mine)
            mine.zero_()  # what was gathered is a copy
            return [tensor.tolist() for tensor in gathered]

        expected = [
            torch.tensor(_values(rank, dtype)).to(dtype).tolist() for rank in range(world_size)
        ]
        assert self._run(case, world_size) == [expected] * world_size

    def test_gather_brings_everything_to_one(self, world_size: int) -> None:
        dst = world_size - 1

        def case(comm: Communicator) -> list[Any] | None:
            gathered = comm.gather(comm.to_device(torch.tensor([comm.world.rank])), dst=dst)
            return None if gathered is None else [tensor.item() for tensor in gathered]

        answers = self._run(case, world_size)
        assert answers[dst] == list(range(world_size))
        assert answers[:dst] == [None] * dst

    def test_scatter_hands_out_what_one_has(self, world_size: int) -> None:
        src = world_size - 1

        def case(comm: Communicator) -> list[float]:
            given = None
            if comm.world.rank == src:
                given = [comm.to_device(torch.full((2,), 7.0 * i)) for i in range(comm.world.size)]
            mine = comm.to_device(torch.empty(2))
            comm.scatter(mine, given, src=src)
            return mine.tolist()

        assert self._run(case, world_size) == [[7.0 * r, 7.0 * r] for r in range(world_size)]

    def test_all_to_all_exchanges_parts_of_any_size(
        self, world_size: int, dtype: torch.dtype
    ) -> None:
        def case(comm: Communicator) -> list[tuple[int, float]]:
            rank, size = comm.world.rank, comm.world.size
            # Rank r sends i + 1 elements to rank i, so rank i receives i + 1 from each.
            inputs = [
                comm.to_device(torch.full((i + 1,), (rank + i) % 2).to(dtype)) for i in range(size)
            ]
            outputs = [comm.to_device(torch.zeros(rank + 1).to(dtype)) for _ in range(size)]
            comm.all_to_all(outputs, inputs)
            return [(len(o), o.float().mean().item()) for o in outputs]

        expected = [
            [(rank + 1, float((other + rank) % 2)) for other in range(world_size)]
            for rank in range(world_size)
        ]
        assert self._run(case, world_size) == expected

    def test_send_and_recv_pass_a_tensor_around_a_ring(self, world_size: int) -> None:
        def case(comm: Communicator) -> Any:
            rank, size = comm.world.rank, comm.world.size
            mine = comm.to_device(torch.full((2, 3), float(rank), dtype=torch.bfloat16)).t()
            taken = comm.to_device(torch.empty(2, 3, dtype=torch.bfloat16)).t()
            assert _is_refused(lambda: comm.send(mine, dst=rank)), "sent to itself"
            if size == 1:
                return 0.0
            if rank == 0:
                comm.send(mine, dst=1)
            comm.recv(taken, src=(rank - 1) % size)
            if rank > 0:
                comm.send(mine, dst=(rank + 1) % size)
            return taken.float().unique().item()

        ring = [float((rank - 1) % world_size) for rank in range(world_size)]
        assert self._run(case, world_size) == ring

    def test_tensors_need_not_be_contiguous_nor_have_a_dimension_nor_an_element(
        self, world_size: int
    ) -> None:
        def case(comm: Communicator) -> list[Any]:
            rank = comm.world.rank
            crossed = comm.to_device(torch.full((4, 3), float(rank))).t()
            every_other = comm.to_device(torch.full((6,), float(rank)))[::2]
            late = comm.to_device(torch.full((4, 3), float(rank)))[:, 1:]
            number, nothing = (
                comm.to_device(torch.tensor(float(rank))),
                comm.to_device(torch.empty(0)),
            )
            comm.all_reduce(crossed)
            comm.broadcast(every_other, src=comm.world.size - 1)
            work = comm.all_reduce(late, op="max", async_op=True)
            assert work is not None
            work.wait()
            comm.all_reduce(number)
            comm.all_reduce(nothing)
            gathered = comm.all_gather(crossed)
            parts = [crossed, every_other, late, number, *gathered]
            return [part.unique().tolist() for part in parts]

        total, last = float(sum(range(world_size))), world_size - 1.0
        expected = [[total], [last], [last], [total], *[[total]] * world_size]
        assert self._run(case, world_size) == [expected] * world_size

    # -- objects, barrier -------------------------------------------------------------------------

    def test_objects_travel(self, world_size: int) -> None:
        src = world_size - 1

        def case(comm: Communicator) -> tuple[Any, list[Any]]:
            mine = {"rank": comm.world.rank, "text": "x" * (1000 * comm.world.rank)}
            return comm.broadcast_object(mine, src=src)["rank"], comm.all_gather_object(mine)

        for value, values in self._run(case, world_size):
            assert value == src
            assert [(v["rank"], len(v["text"])) for v in values] == [
                (rank, 1000 * rank) for rank in range(world_size)
            ]

    def test_nobody_leaves_a_barrier_before_everybody_has_come(self, world_size: int) -> None:
        def case(comm: Communicator, folder: Path) -> list[int]:
            seen = []
            for turn in range(5):
                (folder / f"{turn}-{comm.world.rank}").touch()
                comm.barrier()
                seen.append(len(list(folder.glob(f"{turn}-*"))))
            return seen

        with tempfile.TemporaryDirectory() as folder:
            answers = self._run(case, world_size, Path(folder))
        assert answers == [[world_size] * 5] * world_size

    # -- parts ------------------------------------------------------------------------------------

    def test_a_part_has_its_own_numbers_and_the_whole_goes_on(self, world_size: int) -> None:
        chosen = sorted({world_size - 1, 0})

        def case(comm: Communicator) -> tuple[Any, float]:
            part = comm.split(chosen[::-1])
            mine: Any = None
            if part is not None:
                tensor = part.to_device(torch.tensor([float(comm.world.rank + 1)]))
                part.all_reduce(tensor)
                last = part.broadcast_object(comm.world.rank, src=part.world.size - 1)
                mine = (part.world.rank, part.world.size, tensor.item(), last)
                part.close()
            whole = comm.to_device(torch.ones(1))
            comm.all_reduce(whole)
            return mine, whole.item()

        total = float(sum(rank + 1 for rank in chosen))
        for rank, (mine, whole) in enumerate(self._run(case, world_size)):
            assert whole == world_size
            if rank not in chosen:
                assert mine is None
            else:
                assert mine == (chosen.index(rank), len(chosen), total, chosen[-1])

    def test_members_may_name_different_parts_at_once(self, world_size: int) -> None:
        half = max(1, world_size // 2)

        def case(comm: Communicator) -> list[int]:
            first = comm.world.rank // half * half
            part = comm.split(range(first, first + half))
            assert part is not None
            members: list[int] = part.all_gather_object(comm.world.rank)
            part.close()
            return members

        for rank, members in enumerate(self._run(case, world_size)):
            first = rank // half * half
            assert members == list(range(first, first + half))

    # -- mistakes and the end ---------------------------------------------------------------------

    def test_a_rank_that_does_not_exist_is_refused(self, world_size: int) -> None:
        def case(comm: Communicator) -> list[bool]:
            tensor, beyond = comm.to_device(torch.ones(1)), comm.world.size
            return [
                _is_refused(lambda: comm.broadcast(tensor, src=beyond)),
                _is_refused(lambda: comm.gather(tensor, dst=-1)),
                _is_refused(lambda: comm.split([0, beyond])),
            ]

        assert self._run(case, world_size) == [[True] * 3] * world_size

    def test_closing_twice_does_no_harm(self, world_size: int) -> None:
        def case(comm: Communicator) -> None:
            comm.barrier()
            comm.close()
            comm.close()

        with RankPool(world_size, device=self.device, options=self.comm_options) as pool:
            pool.run(_with_communicator, type(self).communicator, case)

    # -- how it is done ---------------------------------------------------------------------------

    def _run(self, case: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        pool = shared_pool(world_size, self.device, self.comm_options)
        return pool.run(_with_communicator, type(self).communicator, case, *args)

    def _columns(
        self, world_size: int, dtype: torch.dtype = torch.float32, shift: int = 0
    ) -> list[tuple[float, ...]]:
        rows = [_values(rank + shift, dtype) for rank in range(world_size)]
        return list(zip(*rows, strict=True))


def _with_communicator(
    comm: Communicator,
    make: Callable[[Communicator], Communicator],
    case: Callable[..., Any],
    *args: Any,
) -> Any:
    return case(make(comm), *args)


def _values(rank: int, dtype: torch.dtype) -> list[float]:
    """A few numbers of a rank; sums and products of them are exact in every dtype."""
    if dtype == torch.bool:
        return [rank % 2, 1, 0]
    if dtype in FLOATS:
        return [rank + 1, 0.5, -2.0]
    return [rank + 1, 2, 0]


def _is_refused(call: Callable[[], Any]) -> bool:
    try:
        call()
    except ConfigError as error:
        return bool(error.fix)
    return False
