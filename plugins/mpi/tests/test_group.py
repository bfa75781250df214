"""The process group under torch.distributed: every dtype and operation against plain torch."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp

from torsh_trainer.testing.ranks import OPTIONS, shared_pool

MPI = replace(OPTIONS, backend="mpi")
SIZES = (2, 4)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
EIGHTS = (torch.float8_e4m3fn, torch.float8_e5m2)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
DTYPES = (*FLOATS, *EIGHTS, *COMPLEX, *INTEGERS, *UNSIGNED, torch.bool)
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
SHAPES = ((), (0,), (5,), (7, 3), (40_001,))


def on_ranks(case, size, *args, backend="mpi"):
    return shared_pool(size, options=replace(OPTIONS, backend=backend)).run(case, *args)


def numbers(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = (6,)) -> torch.Tensor:
    """Small whole numbers, so that products and sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(100 + rank)
    values = torch.randint(0, 2 if dtype == torch.bool else 3, shape, generator=generator)
    if dtype.is_complex:
        return torch.complex(values.float(), values.float().flip(0)).to(dtype)
    return values.to(dtype)


def plain(op: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    """The operation in plain torch, in a wide dtype."""
    dtype = tensors[0].dtype
    bitwise = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
    if dtype == torch.bool:
        logic = {"SUM": "or", "PRODUCT": "and", "MIN": "and", "MAX": "or"}.get(op)
        if logic is not None:
            stacked = torch.stack(tensors)
            return stacked.any(0) if logic == "or" else stacked.all(0)
    if op in bitwise:
        wide = [t if dtype == torch.bool else t.to(torch.int64) for t in tensors]
        result = wide[0]
        for other in wide[1:]:
            result = bitwise[op](result, other)
        return result.to(dtype)
    wide_dtype = torch.complex128 if dtype.is_complex else torch.float64
    stacked = torch.stack([t.to(wide_dtype) for t in tensors])
    if op in ("SUM", "AVG"):
        total = stacked.sum(0)
        return (total / len(tensors) if op == "AVG" else total).to(dtype)
    if op == "PRODUCT":
        return stacked.prod(0).to(dtype)
    return (stacked.amin(0) if op == "MIN" else stacked.amax(0)).to(dtype)


def refused(op: str, dtype: torch.dtype) -> bool:
    real_float = dtype in (*FLOATS, *EIGHTS)
    if op in ("BAND", "BOR", "BXOR"):
        return real_float or dtype.is_complex
    if op in ("MIN", "MAX"):
        return dtype.is_complex
    return op == "AVG" and not (real_float or dtype.is_complex)


def same(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal numbers of one dtype; of complex ones a zero may have another sign."""
    if ours.dtype.is_complex:
        return torch.equal(ours, expected)
    return bits(ours) == bits(expected)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist() if tensor.numel() else []


@pytest.mark.parametrize("size", SIZES)
class TestReductions:
    def test_every_dtype_and_operation_is_that_of_plain_torch_or_refused_by_name(self, size):
        def case(comm):
            wrong = []
            for dtype, op in itertools.product(DTYPES, OPS):
                group = dist.group.WORLD
                options = dist.AllreduceOptions()
                options.reduceOp = getattr(ReduceOp, op)
                options.asyncOp = False
                everyone = [numbers(r, dtype) for r in range(comm.world.size)]
                mine = everyone[comm.world.rank].clone()
                try:
                    group.allreduce([mine], options)
                except RuntimeError as error:
                    text = str(error)
                    if not refused(op, dtype) or op not in text or str(dtype) not in text:
                        wrong.append((str(dtype), op, text))
                    continue
                if refused(op, dtype):
                    wrong.append((str(dtype), op, "was not refused"))
                elif not same(mine, plain(op, everyone)):
                    wrong.append((str(dtype), op, mine.tolist(), plain(op, everyone).tolist()))
            return wrong

        assert on_ranks(case, size) == [[]] * size

    def test_the_other_reductions_do_the_same_as_all_reduce(self, size):
        def case(comm):
            rank, size = comm.world.rank, comm.world.size
            wrong = []
            for dtype, op in itertools.product((torch.float32, torch.bfloat16, torch.int64), OPS):
                if refused(op, dtype):
                    continue
                kind = getattr(ReduceOp, op)
                everyone = [numbers(r, dtype, (size * 3,)) for r in range(size)]
                expected = plain(op, everyone)
                total = everyone[rank].clone()
                dist.reduce(total, dst=size - 1, op=kind)
                if bits(total) != bits(expected if rank == size - 1 else everyone[rank]):
                    wrong.append(("reduce", str(dtype), op))
                part, listed = torch.empty(3, dtype=dtype), torch.empty(3, dtype=dtype)
                dist.reduce_scatter_tensor(part, everyone[rank].clone(), op=kind)
                dist.reduce_scatter(listed, list(everyone[rank].split(3)), op=kind)
                mine = bits(expected[3 * rank : 3 * rank + 3])
                if not bits(part) == bits(listed) == mine:
                    wrong.append(("reduce_scatter", str(dtype), op))
            return wrong

        assert on_ranks(case, size) == [[]] * size

    def test_premul_sum_multiplies_by_a_number_or_a_tensor(self, size):
        def case(comm):
            found = []
            for factor in (0.5, torch.tensor(0.25)):
                op = dist._make_nccl_premul_sum(factor)
                for dtype in (torch.float32, torch.bfloat16):
                    tensor = torch.full((3,), comm.world.rank + 1.0, dtype=dtype)
                    dist.all_reduce(tensor, op=op)
                    out = torch.empty(1)
                    given = torch.full((comm.world.size,), comm.world.rank + 1.0)
                    dist.reduce_scatter_tensor(out, given, op=op)
                    found.append((float(factor), tensor.tolist(), out.item(), given[0].item()))
            return found

        total = sum(range(1, size + 1))
        for rank, found in enumerate(on_ranks(case, size)):
            for factor, summed, scattered, untouched in found:
                assert summed == [factor * total] * 3
                assert scattered == factor * total
                assert untouched == rank + 1

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_a_half_sum_is_rounded_once_and_alike_on_every_rank(self, size, dtype):
        def case(comm):
            tensors = [
                torch.randn(shape, generator=torch.Generator().manual_seed(r)).to(dtype)
                for r in range(comm.world.size)
                for shape in [(70_001,)]
            ]
            mine = tensors[comm.world.rank].clone()
            dist.all_reduce(mine)
            small = tensors[comm.world.rank][:33].clone()
            dist.all_reduce(small)
            exact = torch.stack(tensors).float().sum(0)
            same = torch.equal(mine, exact.to(dtype)), torch.equal(small, exact[:33].to(dtype))
            naive = tensors[0].clone()
            for other in tensors[1:]:
                naive = naive + other
            errors = [(t.double() - exact.double()).abs().sum().item() for t in (mine, naive)]
            return same, errors, mine.view(torch.int16).sum().item()

        answers = on_ranks(case, size)
        assert all(answer[0] == (True, True) for answer in answers)
        assert len({answer[2] for answer in answers}) == 1
        ours, naive = answers[0][1]
        assert ours <= naive
        if size > 2:
            assert ours < naive, "a sum that rounds at every step is worse"

    def test_coalesced_is_one_by_one(self, size):
        def case(comm):
            rank = comm.world.rank
            makes = [numbers(rank, dtype, shape) for dtype in FLOATS for shape in SHAPES]
            one, many = [t.clone() for t in makes], [t.clone() for t in makes]
            many[2] = torch.stack([many[2], many[2]], 1)[:, 0]  # not contiguous
            for tensor in one:
                dist.all_reduce(tensor)
            with dist._coalescing_manager(async_ops=True) as manager:
                for tensor in many:
                    dist.all_reduce(tensor)
            manager.wait()
            return all(map(torch.equal, one, many))

        assert all(on_ranks(case, size))


@pytest.mark.parametrize("size", SIZES)
class TestMoving:
    def test_every_dtype_travels_bit_for_bit_contiguous_or_not(self, size):
        def case(comm):
            rank, size = comm.world.rank, comm.world.size
            wrong = []
            for dtype, crossed in itertools.product(DTYPES, (False, True)):

                def of(rank, dtype=dtype, crossed=crossed):
                    tensor = numbers(rank, dtype, (size, 4))
                    return tensor.t().contiguous().t() if crossed else tensor

                everyone = [of(r) for r in range(size)]
                sent = of(rank)
                dist.broadcast(sent, src=size - 1)
                into = torch.empty_like(sent)
                gathered = [torch.empty_like(into) for _ in range(size)]
                dist.all_gather(gathered, of(rank))
                flat = torch.empty(size * size, 4, dtype=dtype)
                dist.all_gather_into_tensor(flat, of(rank).contiguous())
                swapped = torch.empty_like(into)
                dist.all_to_all_single(swapped, of(rank))
                found = [
                    bits(sent) == bits(everyone[-1]),
                    [bits(t) for t in gathered] == [bits(t) for t in everyone],
                    bits(flat) == [b for t in everyone for b in bits(t)],
                    bits(swapped) == bits(torch.stack([t[rank] for t in everyone])),
                ]
                if not all(found):
                    wrong.append((str(dtype), crossed, found))
            return wrong

        assert on_ranks(case, size) == [[]] * size

    def test_parts_may_differ_in_size(self, size):
        def case(comm):
            rank, size = comm.world.rank, comm.world.size
            root = size - 1
            chunks = [torch.full((r + 1, 2), float(r)) for r in range(size)] if rank == root else []
            mine = torch.empty(rank + 1, 2)
            dist.scatter(mine, chunks or None, src=root)
            places = [torch.empty(r + 1, 2) for r in range(size)] if rank == 0 else None
            dist.gather(mine, places, dst=0)
            listed = [torch.empty(r + 1, 2) for r in range(size)]
            dist.all_gather(listed, mine)
            parts = [torch.full((r + 1,), float(rank)) for r in range(size)]
            summed = torch.empty(rank + 1)
            dist.reduce_scatter(summed, parts)
            given = torch.arange(float(size * (size + 1) // 2)) + 100 * rank
            taken = torch.empty(size * (rank + 1))
            dist.all_to_all_single(
                taken, given, [rank + 1] * size, [other + 1 for other in range(size)]
            )
            turns = [torch.empty(rank + 1) for _ in range(size)]
            dist.all_to_all(turns, list(given.split([r + 1 for r in range(size)])))
            return (
                mine.unique().tolist(),
                None if places is None else [p.unique().item() for p in places],
                [p.unique().item() for p in listed],
                summed.unique().tolist(),
                taken.tolist(),
                torch.cat(turns).tolist(),
            )

        for rank, answer in enumerate(on_ranks(case, size)):
            mine, places, listed, summed, taken, turns = answer
            assert mine == [float(rank)]
            assert places == (list(range(size)) if rank == 0 else None)
            assert listed == list(range(size))
            assert summed == [float(sum(range(size)))]
            start = rank * (rank + 1) // 2
            expected = [100.0 * other + start + i for other in range(size) for i in range(rank + 1)]
            assert taken == expected
            assert turns == expected

    def test_messages_have_tags_and_may_come_from_anybody(self, size):
        def case(comm):
            rank, size = comm.world.rank, comm.world.size
            if rank:
                dist.send(torch.tensor([10.0 * rank]), dst=0, tag=7)
                works = [dist.isend(torch.tensor([rank + tag]), dst=0, tag=tag) for tag in (1, 2)]
                for work in works:
                    work.wait()
                return None
            late = {}
            for other in range(1, size):
                for tag in (2, 1):  # not in the order in which they were sent
                    taken = torch.zeros(1, dtype=torch.int64)
                    dist.recv(taken, src=other, tag=tag)
                    late[other, tag] = taken.item()
            anybody = {}
            for _ in range(1, size):
                taken = torch.zeros(1)
                sender = dist.recv(taken, tag=7)
                anybody[sender] = taken.item()
            return late, anybody

        late, anybody = on_ranks(case, size)[0]
        assert late == {(o, tag): o + tag for o in range(1, size) for tag in (1, 2)}
        assert anybody == {other: 10.0 * other for other in range(1, size)}

    def test_objects_and_batches_of_messages_travel(self, size):
        def case(comm):
            rank, size = comm.world.rank, comm.world.size
            box = [None]
            dist.scatter_object_list(box, [{"for": r} for r in range(size)] if rank == 0 else None)
            everything = [None] * size
            dist.gather_object({"of": rank}, everything if rank == 0 else None)
            taken = torch.zeros(1000)
            right, left = (rank + 1) % size, (rank - 1) % size
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, torch.full((1000,), float(rank)), right),
                    dist.P2POp(dist.irecv, taken, left),
                ]
            )
            for work in works:
                work.wait()
            return box[0]["for"], everything, taken.unique().tolist()

        for rank, (mine, everything, taken) in enumerate(on_ranks(case, size)):
            assert mine == rank
            if rank == 0:
                assert everything == [{"of": r} for r in range(size)]
            assert taken == [float((rank - 1) % size)]


class TestCounts:
    @pytest.mark.parametrize("size", SIZES)
    def test_more_elements_than_a_count_can_name_travel_in_pieces(self, size):
        """The real path, with a limit of 100 elements or bytes instead of 2^31."""

        def case(comm):
            channel = dist.group.WORLD._channel
            limit, channel._largest = channel._largest, 100
            try:
                rank, size = comm.world.rank, comm.world.size
                wrong = []
                for dtype in (torch.float32, torch.bfloat16):
                    everyone = [numbers(r, dtype, (size * 333,)) for r in range(size)]
                    mine = everyone[rank]
                    total = plain("SUM", everyone)
                    summed, moved = mine.clone(), mine.clone()
                    dist.all_reduce(summed)
                    dist.broadcast(moved, src=1)
                    part = torch.empty(333, dtype=dtype)
                    dist.reduce_scatter_tensor(part, mine.clone())
                    whole = torch.empty(size * size * 333, dtype=dtype)
                    dist.all_gather_into_tensor(whole, mine)
                    swapped, uneven = torch.empty_like(mine), torch.empty_like(mine)
                    dist.all_to_all_single(swapped, mine)
                    dist.all_to_all_single(uneven, mine, [333] * size, [333] * size)
                    here = slice(333 * rank, 333 * rank + 333)
                    found = [
                        torch.equal(summed, total),
                        torch.equal(moved, everyone[1]),
                        torch.equal(part, total[here]),
                        torch.equal(whole, torch.cat(everyone)),
                        torch.equal(swapped, torch.cat([t[here] for t in everyone])),
                        torch.equal(uneven, swapped),
                    ]
                    if not all(found):
                        wrong.append((str(dtype), found))
            finally:
                channel._largest = limit
            return wrong

        assert on_ranks(case, size) == [[]] * size


class TestOrder:
    def test_an_asynchronous_collective_goes_on_while_this_thread_does_something_else(self):
        """By the order of events: rank 1 comes only after rank 0 has been seen to be free."""

        def case(comm):
            tensor = torch.full((1 << 20,), comm.world.rank + 1.0)
            if comm.world.rank == 0:
                work = dist.all_reduce(tensor, async_op=True)
                free = not work.is_completed()  # it cannot be: rank 1 waits for this message
                dist.send(torch.ones(1), dst=1)
                seen = threading.Event()
                work.get_future().then(lambda _: seen.set())
                finished = seen.wait(240)  # nobody called wait(): it moved by itself
                return free, finished, tensor.unique().tolist(), work.wait()
            dist.recv(torch.ones(1), src=0)
            dist.all_reduce(tensor)
            return None

        assert on_ranks(case, 2)[0] == (True, True, [3.0], True)

    def test_asynchronous_and_synchronous_calls_keep_their_order(self):
        def case(comm):
            tensor = torch.ones(4) * (comm.world.rank + 1)
            works = [dist.all_reduce(tensor, async_op=True) for _ in range(5)]
            dist.all_reduce(tensor)
            after = [work.is_completed() for work in works]
            return tensor.tolist(), after

        total = 3.0 * 2**5
        assert on_ranks(case, 2) == [([total] * 4, [True] * 5)] * 2

    def test_groups_that_overlap_do_not_wait_for_each_other(self):
        """A row and a column under way at once, in different orders on different ranks."""

        def case(comm):
            rank = comm.world.rank
            rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
            columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
            mine = [rows[rank // 2], columns[rank % 2]]
            tensors = [torch.tensor([2.0**rank]), torch.tensor([2.0**rank])]
            order = (0, 1) if rank in (0, 3) else (1, 0)
            works = {i: dist.all_reduce(tensors[i], group=mine[i], async_op=True) for i in order}
            for i in reversed(order):
                works[i].wait()
            return [tensor.item() for tensor in tensors]

        assert on_ranks(case, 4) == [[3.0, 5.0], [3.0, 10.0], [12.0, 5.0], [12.0, 10.0]]

    def test_a_future_has_the_tensors_and_runs_callbacks(self):
        def case(comm):
            tensor = torch.full((3,), comm.world.rank + 1.0)
            work = dist.all_reduce(tensor, async_op=True)
            halved = work.get_future().then(lambda future: future.value()[0] / 2)
            done = halved.wait().tolist()
            late = work.get_future().wait()[0].tolist()
            return done, late, work.is_success(), work.exception()

        assert on_ranks(case, 2) == [([1.5] * 3, [3.0] * 3, True, None)] * 2

    def test_a_callback_may_wait_for_a_collective_of_its_own(self):
        def case(comm):
            first, second = torch.ones(2), torch.ones(3)

            def again(future):
                dist.all_reduce(second, async_op=True).get_future().wait()
                return future.value()[0] + 1

            chained = dist.all_reduce(first, async_op=True).get_future().then(again)
            return chained.wait().tolist(), second.tolist()

        assert on_ranks(case, 2) == [([3.0] * 2, [2.0] * 3)] * 2

    def test_wait_with_a_limit_says_what_is_late_and_the_work_goes_on(self):
        def case(comm):
            tensor = torch.ones(2)
            if comm.world.rank == 1:
                dist.recv(torch.ones(1), src=0)
                dist.all_reduce(tensor)
                return None
            work = dist.all_reduce(tensor, async_op=True)
            try:
                work.wait(timedelta(seconds=0.05))
                words = ""
            except RuntimeError as error:
                words = str(error)
            dist.send(torch.ones(1), dst=1)
            work.wait()
            return words, tensor.tolist()

        words, tensor = on_ranks(case, 2)[0]
        assert "all_reduce did not finish within the 0.05 s" in words
        assert tensor == [2.0, 2.0]


class TestDevices:
    """There is no GPU here: a CPU tensor stands in, taken for one that MPI cannot reach."""

    def test_a_tensor_on_a_device_is_copied_and_done_with_when_the_call_returns(self):
        def case(comm):
            from torsh_mpi import group, staging

            direct, reachable = group.is_direct, staging._reachable

            def far(tensor, *, copies=True):
                return tensor.clone() if copies else tensor.new_empty(0)

            group.is_direct = lambda tensor: False
            staging._reachable = far
            try:
                rank = comm.world.rank
                summed = torch.full((5,), rank + 1.0, dtype=torch.bfloat16)
                works = [dist.all_reduce(summed, async_op=True)]
                moved, whole = torch.full((3, 2), float(rank)).t(), torch.empty(2 * 3)
                works.append(dist.broadcast(moved, src=1, async_op=True))
                given = torch.full((3,), float(rank))
                works.append(dist.all_gather_into_tensor(whole, given, async_op=True))
                done = [work.is_completed() for work in works]
            finally:
                group.is_direct, staging._reachable = direct, reachable
            return done, summed.tolist(), moved.unique().tolist(), whole.tolist()

        expected = ([True] * 3, [3.0] * 5, [1.0], [0.0] * 3 + [1.0] * 3)
        assert on_ranks(case, 2) == [expected] * 2

    def test_the_copying_is_told_once(self, caplog):
        from torsh_mpi.staging import warn_of_staging

        warn_of_staging.cache_clear()
        for _ in range(2):
            warn_of_staging("cuda")
        assert caplog.text.count("copied to the host and back") == 1


class TestTraining:
    """torch's own engines, over mpi and over gloo, on the same data."""

    @staticmethod
    def _losses(comm, engine):
        from torch.distributed.fsdp import fully_shard
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
        if engine == "ddp":
            model = DistributedDataParallel(model, bucket_cap_mb=0.002)
        else:
            for layer in (model[0], model[2]):
                fully_shard(layer)
            fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(6):
            generator = torch.Generator().manual_seed(100 * step + comm.world.rank)
            x = torch.randn(8, 16, generator=generator)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    @pytest.mark.matrix(2)
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
    def test_losses_are_those_of_gloo(self, engine, size):
        ours = on_ranks(self._losses, size, engine)
        gloos = on_ranks(self._losses, size, engine, backend="gloo")
        assert ours == [pytest.approx(losses, rel=1e-6) for losses in gloos]
        assert len({tuple(losses) for losses in ours}) == size, "ranks have data of their own"

    def test_tensor_parallel_equals_the_plain_layers(self):
        def case(comm):
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.tensor.parallel import (
                ColwiseParallel,
                RowwiseParallel,
                parallelize_module,
            )

            torch.manual_seed(0)
            plain_model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
            x = torch.randn(4, 8)
            expected = plain_model(x)
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            model = parallelize_module(plain_model, mesh["tp"], plan)
            return torch.allclose(model(x), expected, atol=1e-6), dist.get_backend(
                mesh.get_group("tp")
            )

        assert on_ranks(case, 4) == [(True, "mpi")] * 4

    def test_a_distributed_checkpoint_saved_over_mpi_is_read_over_gloo_and_back(self, tmp_path):
        def save(comm, folder):
            import torch.distributed.checkpoint as dcp
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.tensor import Shard, distribute_tensor

            mesh = init_device_mesh("cpu", (comm.world.size,))
            whole = torch.arange(24.0).view(6, 4)
            state = {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "step": 3}
            dcp.save(state, checkpoint_id=folder)

        def load(comm, folder):
            import torch.distributed.checkpoint as dcp
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.tensor import Shard, distribute_tensor

            mesh = init_device_mesh("cpu", (comm.world.size,))
            state = {"sharded": distribute_tensor(torch.zeros(6, 4), mesh, [Shard(0)]), "step": 0}
            dcp.load(state, checkpoint_id=folder)
            return state["sharded"].full_tensor().tolist(), state["step"]

        expected = (torch.arange(24.0).view(6, 4).tolist(), 3)
        for saver, loader in (("mpi", "gloo"), ("gloo", "mpi"), ("mpi", "mpi")):
            folder = tmp_path / f"{saver}-{loader}"
            on_ranks(save, 2, folder, backend=saver)
            assert on_ranks(load, 2, folder, backend=loader) == [expected] * 2
