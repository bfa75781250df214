"""Members on one host reduce in memory that they share: the same numbers, and no message."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import replace
from datetime import timedelta
from functools import reduce
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel
from torsh_mpi import channel
from torsh_mpi import shared as module
from torsh_mpi.agreement import FIRST
from torsh_mpi.launcher import Mpi
from torsh_mpi.shared import MIN_COUNT, PIECE, STAGE_BYTES, STAGED_COUNT

from torsh_trainer.comm import create
from torsh_trainer.comm.reducer import BucketReducer
from torsh_trainer.errors import WorkerError
from torsh_trainer.launchers.base import LaunchContext
from torsh_trainer.strategies import builtin, engine_state, shared_buckets
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.shared_buckets import share_buckets
from torsh_trainer.strategies.sums import Entering
from torsh_trainer.testing.cases import Driver, resume
from torsh_trainer.testing.compare import same_resumed
from torsh_trainer.testing.ranks import OPTIONS, RankPool, shared_pool
from torsh_trainer.testing.reference import Scenario, TrainingOutcome
from torsh_trainer.testing.zero1 import check_zero1

MPI = replace(OPTIONS, backend="mpi")
SIZES = (2, 4)
OPS = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
FLOATS = (torch.float32, torch.float64)
HALVES = (torch.float16, torch.bfloat16)
COMPLEX = (torch.complex64, torch.complex128)
COUNTS = (
    MIN_COUNT,
    MIN_COUNT + 1,
    2 * PIECE - 1,
    2 * PIECE + 1,
    4 * PIECE + 3,
    STAGE_BYTES // 4 - 1,
    STAGE_BYTES // 4 + 1,
    2 * (STAGE_BYTES // 4) + 5,
)


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Different on every rank; sums of these floats depend on their order."""
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, (count,), generator=generator).to(
        dtype
    )


def in_order(op: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    """In plain torch, by rank; halves are added up in float32 and rounded once."""
    dtype = tensors[0].dtype
    if dtype in HALVES:
        tensors = [tensor.float() for tensor in tensors]
    if op == "AVG":
        return (reduce(torch.add, tensors) / len(tensors)).to(dtype)
    return reduce(OPS[op], tensors).to(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


def pairs():
    for op in OPS:
        bitwise = op in ("BAND", "BOR", "BXOR")
        for dtype in INTEGERS if bitwise else (*INTEGERS, *FLOATS, *HALVES, *COMPLEX):
            if not (dtype.is_complex and op in ("PRODUCT", "MIN", "MAX")):  # torch refuses those
                yield dtype, op
    for dtype in (*FLOATS, *HALVES, *COMPLEX):
        yield dtype, "AVG"


def beyond_the_first() -> None:
    """Makes as many collectives as are compared in messages; after them the room is on its own."""
    dist.all_reduce(torch.ones(STAGED_COUNT))
    for _ in range(FIRST):
        dist.all_reduce(torch.ones(1))


def trained(comm, options, *, spare=None):
    """Bits of every step, how many sizes of bucket are staged, and whether they were laid out anew.

    ``spare`` None is DDP that sums by itself, else whether the hook has processors to spare.
    """
    torch.manual_seed(0)
    wide = [torch.nn.Linear(600, 600) for _ in range(3)]
    model = torch.nn.Sequential(*wide, torch.nn.Linear(600, 3))
    ddp = DistributedDataParallel(Sometimes(model), bucket_cap_mb=1.5, **options)
    room = comm.process_group._channel.room()
    room._whole.clear()
    enter = Entering(comm.world.size)
    if spare is None:
        assert enter.drive(ddp)
    else:
        found, shared_buckets._spare_processors = shared_buckets._spare_processors, lambda _: spare
        try:
            assert share_buckets(ddp, comm, enter)
        finally:
            shared_buckets._spare_processors = found
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    x = values(comm.world.rank, 8 * 600, torch.float32).view(8, 600)
    states = []
    for step in range(4):
        leaves_out = step % 2 == 1 and "find_unused_parameters" in options
        together = step == 0 and "static_graph" in options  # learnt in a step that communicates
        with contextlib.nullcontext() if together else ddp.no_sync():
            ddp(x[:4], leaves_out).square().mean().backward()
        ddp(x[4:], leaves_out).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 2)
        states.append([bits(p.detach()) for p in ddp.parameters()])
    return states, len(room._whole), ddp._has_rebuilt_buckets


class Sometimes(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x, leaves_out):
        for number, layer in enumerate(self.layers):
            if not (leaves_out and number == 1):
                x = layer(x)
        return x


@contextlib.contextmanager
def no_messages(*, messages=False):
    """Within, whatever would be a message of MPI's fails; what lies elsewhere is staged at once."""
    channel = dist.group.WORLD._channel
    assert channel.room() is not None
    comm = channel.comm
    channel.comm = comm if messages else None
    limit, module.STAGED_COUNT = module.STAGED_COUNT, MIN_COUNT
    try:
        yield
    finally:
        channel.comm, module.STAGED_COUNT = comm, limit


@pytest.mark.parametrize("size", SIZES)
class TestSums:
    def test_every_dtype_and_operation_is_that_of_plain_torch_bit_for_bit(self, size):
        def case(comm):
            rank, size = comm.world.rank, comm.world.size
            wrong = []
            for dtype, op in pairs():
                everyone = [values(r, MIN_COUNT + 7, dtype) for r in range(size)]
                expected = bits(in_order(op, everyone))
                inside = comm.shared_memory.zeros(MIN_COUNT + 7, dtype)
                outside = everyone[rank].clone()
                inside.copy_(everyone[rank])
                with no_messages():
                    dist.all_reduce(inside, op=getattr(ReduceOp, op))
                    dist.all_reduce(outside, op=getattr(ReduceOp, op))
                if bits(inside) != expected or bits(outside) != expected:
                    wrong.append((str(dtype), op))
            return wrong

        assert shared_pool(size, options=MPI).run(case) == [[]] * size

    def test_any_number_of_elements_gives_the_same_bits_on_every_rank(self, size):
        def case(comm):
            rank, size = comm.world.rank, comm.world.size
            found = []
            for count in COUNTS:
                everyone = [values(r, count, torch.float32) for r in range(size)]
                inside = comm.shared_memory.zeros(count, torch.float32)
                outside = everyone[rank].clone()
                inside.copy_(everyone[rank])
                with no_messages():
                    dist.all_reduce(inside)
                    dist.all_reduce(outside, async_op=True).wait()
                expected = in_order("SUM", everyone)
                found.append((torch.equal(inside, expected), torch.equal(outside, expected)))
            return found

        assert shared_pool(size, options=MPI).run(case) == [[(True, True)] * len(COUNTS)] * size

    def test_premul_sum_multiplies_first(self, size):
        def case(comm):
            inside = comm.shared_memory.zeros(MIN_COUNT, torch.float32).fill_(comm.world.rank + 1.0)
            dist.all_reduce(inside, op=dist._make_nccl_premul_sum(0.5))
            return inside.unique().tolist()

        assert shared_pool(size, options=MPI).run(case) == [[sum(range(1, size + 1)) / 2]] * size

    def test_autograd_does_not_mind(self, size):
        def case(comm):
            leaf = torch.ones(STAGED_COUNT, requires_grad=True)
            dist.all_reduce(leaf)
            with torch.inference_mode():
                result = torch.ones(STAGED_COUNT)
                dist.all_reduce(result, async_op=True).wait()
            flat = comm.shared_memory.zeros(MIN_COUNT, torch.float32).requires_grad_()
            flat.sum().backward()
            return leaf.unique().tolist(), result.unique().tolist(), flat.grad.unique().tolist()

        expected = [float(size)], [float(size)], [1.0]
        assert shared_pool(size, options=MPI).run(case) == [expected] * size

    def test_it_does_not_matter_where_a_tensor_lies(self, size):
        """A part, parts that differ by rank, the room on some ranks alone, not contiguous."""

        def case(comm):
            rank, size = comm.world.rank, comm.world.size
            count = STAGED_COUNT + 8
            room = comm.shared_memory.zeros(2 * count, torch.float32)
            everyone = [values(r, count, torch.float32) for r in range(size)]
            expected = in_order("SUM", everyone)
            start = count if rank % 2 else 0
            places = {
                "a part": room[5 : 5 + count],
                "differs": room[start : start + count],
                "some": room[:count] if rank == 0 else torch.empty(count),
                "crossed": torch.empty(count, 2)[:, 0],
                "two dimensions": room[:count].view(8, -1),
            }
            found = {}
            for name, place in places.items():
                place.copy_(everyone[rank].view(place.shape))
                dist.all_reduce(place)
                found[name] = torch.equal(place.reshape(-1), expected)
            return found

        for found in shared_pool(size, options=MPI).run(case):
            assert all(found.values()), found


class TestRoom:
    def test_a_part_of_the_ranks_has_a_room_of_its_own(self):
        def case(comm):
            rank = comm.world.rank
            part = comm.split([0, 2] if rank % 2 == 0 else [1, 3])
            inside = part.shared_memory.zeros(MIN_COUNT, torch.float32).fill_(2.0**rank)
            outside = torch.full((MIN_COUNT,), 2.0**rank)
            part.all_reduce(inside)
            part.all_reduce(outside)
            rooms = [g._channel.room() for g in (part.process_group, comm.process_group)]
            return inside.unique().item(), outside.unique().item(), rooms[0] is not rooms[1]

        assert shared_pool(4, options=MPI).run(case) == [(5.0, 5.0, True), (10.0, 10.0, True)] * 2

    @pytest.mark.parametrize("failing", [0, 1])
    def test_where_one_rank_cannot_share_memory_all_exchange_messages(self, failing):
        def case(comm):
            def refuse(*_, **__):
                raise OSError("refused")

            original = module.mmap
            if comm.world.rank == failing:
                module.mmap = SimpleNamespace(mmap=refuse, ALLOCATIONGRANULARITY=4096)
            part = dist.new_group([0, 1])
            tensor = part.shared_memory.zeros(MIN_COUNT, torch.float32).fill_(comm.world.rank + 1.0)
            dist.all_reduce(tensor, group=part)
            module.mmap = original
            return tensor.unique().item(), part._channel.room() is None

        assert shared_pool(2, options=MPI).run(case) == [(3.0, True)] * 2

    def test_memory_goes_with_the_last_view_of_it(self):
        def case(comm):
            def maps():
                return Path("/proc/self/maps").read_text().count("torsh-mpi")

            comm.shared_memory.zeros(MIN_COUNT, torch.float32)  # opens the room
            before = maps()
            tensor = comm.shared_memory.zeros(MIN_COUNT, torch.float32)
            comm.all_reduce(tensor)
            view = tensor[5:]
            del tensor
            during = maps()
            del view
            return during > before, maps() == before

        assert shared_pool(2, options=MPI).run(case) == [(True, True)] * 2

    def test_gradients_are_summed_in_the_room(self):
        def case(comm):
            torch.manual_seed(0)
            model = torch.nn.Linear(200, 200)
            reducer = BucketReducer(list(model.parameters()), comm)
            x = values(comm.world.rank, 200, torch.float32)
            model(x).sum().backward()
            reducer.finish()
            place, _ = comm.process_group._channel.room()._find(reducer.buckets[0].flat)
            local = torch.autograd.grad(model(x).sum(), list(model.parameters()))
            parts = [comm.all_gather(gradient) for gradient in local]
            same = [
                torch.equal(p.grad, in_order("SUM", part))
                for p, part in zip(model.parameters(), parts, strict=True)
            ]
            reducer.close()
            return place >= 0, same

        assert shared_pool(2, options=MPI).run(case) == [(True, [True, True])] * 2

    @pytest.mark.parametrize("size", SIZES)
    def test_buckets_of_ddp_are_summed_through_the_room_to_the_same_bits(self, size):
        """As DDP sums them itself: laid out anew, in parts, of parameters that are not used."""
        ways = ("", "static_graph", "gradient_as_bucket_view", "find_unused_parameters")

        def case(comm):
            found = {}
            for way in ways:
                options = {way: True} if way else {}
                with no_messages(messages=True):
                    plain, _, _ = trained(comm, options)
                    hooked, places, rebuilt = trained(comm, options, spare=False)
                    beside, _, _ = trained(comm, options, spare=True)
                found[way] = plain == hooked == beside, places, rebuilt
            return found

        for found in shared_pool(size, options=MPI).run(case):
            for way, (same, places, rebuilt) in found.items():
                # find_unused_parameters keeps the first layout, which has more than one bucket.
                assert (same, places > 1, rebuilt) == (True, True, way != ways[-1]), (way, found)

    def test_the_engine_of_ddp_has_its_buckets_summed_through_it(self):
        """Not when it communicates after backward, in buckets of its own."""
        kinds = (DDP(overlap=False), DDP())

        def case(comm):
            room = comm.process_group._channel.room()
            limit, channel.MIN_COUNT = channel.MIN_COUNT, 1  # the model is tiny
            found = []
            try:
                for kind in kinds:
                    room._whole.clear()
                    driver = Driver(comm, kind, Scenario())
                    driver.step(0, TrainingOutcome())
                    found.append(len(room._whole))
                    driver.engine.close()
            finally:
                channel.MIN_COUNT = limit
            return found

        for afterwards, overlapping in shared_pool(2, options=MPI).run(case):
            assert (afterwards, overlapping > 0) == (0, True)

    def test_parameters_of_zero1_are_one_memory_and_each_rank_has_a_part_of_the_state(self):
        """Whoever evaluates the average, or is at the end, has parameters of its own."""
        kind = builtin.MPI(zero1=True)

        def case(comm):
            driver = Driver(comm, kind, replace(Scenario(), optimizer="adamw", ema_decay=0.5))
            engine, outcome = driver.engine, TrainingOutcome()
            for number in range(2):
                driver.step(number, outcome)
            weight = next(engine.model.parameters())
            value, main = weight.detach().clone(), comm.world.is_rank_zero

            def reaches():
                """Whether a rank sees what rank 0 writes."""
                before = weight.detach().clone()
                comm.barrier()
                if main:
                    weight.data.fill_(7.0)
                comm.barrier()
                seen = bool((weight == 7.0).all())
                comm.barrier()
                weight.data.copy_(before)
                comm.barrier()
                return seen

            within = reaches()
            with engine._evaluation.running(averaged=True):
                averaged, alone = weight.detach().clone(), reaches()
            back = torch.equal(weight, value) and not torch.equal(averaged, value)
            held = {id(p) for o in engine.optimizers.values() for p in o.state}
            names = {n for n, p in engine.model.named_parameters() if id(p) in held}
            engine.close()
            return within, alone, back, reaches(), names, averaged.tolist()

        first, second = shared_pool(2, options=MPI).run(case)
        assert first[:4] == (True, True, True, True)
        assert second[:4] == (True, False, True, False)
        assert first[4]
        assert second[4]
        assert not first[4] & second[4]
        assert first[5] == second[5], "the average"

    @pytest.mark.parametrize("kind", [builtin.MPI, DDP])
    def test_zero1_on_four_ranks_ends_where_all_of_them_step_everything(self, kind):
        check_zero1(shared_pool(4, options=MPI), kind(), kind(zero1=True))

    def test_nobody_trains_with_zero1_while_another_still_loads(self):
        def case(comm, slow):
            plain = engine_state.load_model

            def late(model, values):
                kept = {name: tensor.clone() for name, tensor in values.items()}
                if comm.world.rank == slow:
                    for tensor in model.state_dict().values():
                        tensor.fill_(0.5)
                    time.sleep(0.5)
                plain(model, kept)

            engine_state.load_model = late
            try:
                return resume(comm, builtin.MPI(zero1=True), Scenario())
            finally:
                engine_state.load_model = plain

        for slow in (0, 1):
            for went_on, resumed in shared_pool(2, options=MPI).run(case, slow):
                same_resumed(resumed, went_on, 0.0)

    def test_who_meets_somebody_who_reduces_is_told(self):
        def case(comm):
            comm.process_group._channel.room()
            beyond_the_first()
            try:
                if comm.world.rank:
                    dist.all_reduce(torch.ones(STAGED_COUNT))
                else:
                    dist.barrier()
            except RuntimeError as error:
                return str(error)
            return ""

        with RankPool(2, options=MPI) as pool:
            for words in pool.run(case):
                assert "rank 0: barrier; rank 1: all_reduce of" in words

    def test_who_waits_sleeps(self):
        def case(comm):
            beyond_the_first()
            took_s = []
            for async_op in (True, False):
                dist.all_reduce(torch.ones(STAGED_COUNT))
                if comm.world.rank == 1:
                    time.sleep(1.0)
                began_s = time.process_time()
                work = dist.all_reduce(torch.ones(STAGED_COUNT), async_op=async_op)
                if work is not None:
                    work.wait()
                took_s.append(time.process_time() - began_s)
            return took_s

        assert max(shared_pool(2, options=MPI).run(case)[0]) < 0.5


class TestFailures:
    @pytest.mark.parametrize("odd", ["size", "dtype", "operation"])
    def test_ranks_that_reduce_different_things_are_told_and_go_on(self, odd):
        def case(comm):
            differs = comm.world.rank == 1
            beyond_the_first()
            count = STAGED_COUNT + (differs and odd == "size")
            dtype = torch.float64 if differs and odd == "dtype" else torch.float32
            op = ReduceOp.MAX if differs and odd == "operation" else ReduceOp.SUM
            try:
                dist.all_reduce(torch.ones(count, dtype=dtype), op=op)
                words = ""
            except RuntimeError as error:
                words = str(error)
            again = torch.ones(STAGED_COUNT)
            dist.all_reduce(again)
            return words, again.unique().item()

        with RankPool(2, options=MPI) as pool:
            for words, again in pool.run(case):
                assert "the ranks do not do the same: rank 0: all_reduce of" in words
                assert "rank 1: all_reduce of" in words
                assert again == 2.0

    @pytest.mark.parametrize("waits", ["here", "elsewhere"])
    @pytest.mark.parametrize("revokes", [True, False])
    @pytest.mark.matrix(2)
    def test_a_rank_that_does_not_come_is_named_by_all_others(self, waits, revokes, away):
        def case(comm):
            if not revokes:
                from torsh_mpi import endings, seats

                endings.can_revoke.cache_clear()
                os.environ[seats.TOLERANT] = "0"
            beyond_the_first()
            comm.process_group.set_timeout(timedelta(seconds=2))
            if comm.world.rank == 2:
                away.until_noticed_by(3)
                return ""
            words = "nothing"
            try:
                work = dist.all_reduce(torch.ones(STAGED_COUNT), async_op=waits == "elsewhere")
                if work is not None:
                    work.wait()
            except RuntimeError as error:
                words = str(error)
            away.noticed(comm.world.rank)
            return words

        with RankPool(4, options=MPI) as pool:
            answers = pool.run(case)
        for rank in (0, 1, 3):
            assert "all_reduce did not finish within 2 s" in answers[rank]
            assert "rank 2 did not enter it" in answers[rank]

    def test_a_rank_that_dies_ends_the_job_with_one_error(self):
        def entry(world):
            comm = create(world, MPI, torch.device("cpu"))
            tensor = comm.shared_memory.zeros(MIN_COUNT, torch.float32)
            comm.all_reduce(tensor)
            if world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            comm.all_reduce(tensor)

        with pytest.raises(WorkerError) as caught:
            Mpi(num_processes=2).launch(entry, context=LaunchContext(env=dict(os.environ)))
        assert caught.value.facts["rank"] == 1
        assert "SIGKILL" in str(caught.value)
