"""Batches, algorithms and the scheduler: the same as one plain collective after another."""

from __future__ import annotations

import json

import pytest
import torch

from torsh_trainer import distributed as tc
from torsh_trainer.errors import ResourceError
from torsh_trainer.testing.ranks import shared_pool

SIZES = (2, 3, 4)
OPS = ("sum", "mean", "min", "max", "product")


def run(world_size, case, *args):
    def with_place(communicator, *args):
        return case(communicator.world.rank, communicator.world.size, *args)

    return shared_pool(world_size).run(with_place, *args)


def tensors(rank, size):
    """A table: two that are reduced, an input and an output of a reduce-scatter, and so on."""
    generator = torch.Generator().manual_seed(rank)
    shapes = ((3, 5), (7,), (size * 2,), (2,), (2,), (size * 2,), (size,), (size,))
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_batch_gives_what_its_operations_give_one_by_one(world_size):
    def case(rank, size):
        one_by_one, batched = tensors(rank, size), tensors(rank, size)
        tc.all_reduce(one_by_one[0])
        tc.broadcast(one_by_one[1], size - 1)
        tc.reduce_scatter(one_by_one[3], one_by_one[2], tc.ReduceOp.Max)
        tc.all_reduce(one_by_one[3])  # needs the one before
        tc.all_gather(one_by_one[5], one_by_one[3])
        tc.all_to_all(one_by_one[7], one_by_one[6])
        tc.reduce(one_by_one[4], 0, "mean")
        batch = tc.NcclBatch().all_reduce(0, tc.ReduceOp.Sum).broadcast(1, size - 1)
        batch.reduce_scatter(2, 3, tc.ReduceOp.Max).all_reduce(3).all_gather(3, 5)
        batch.all_to_all(6, 7).reduce(4, 0, "mean")
        batch.execute(None, batched)
        return len(batch), one_by_one, batched

    for length, one_by_one, batched in run(world_size, case):
        assert length == 7
        assert all(torch.equal(a, b) for a, b in zip(one_by_one, batched, strict=True))
        assert not torch.equal(batched[0], tensors(0, world_size)[0])


def test_a_batch_takes_names_as_well_as_numbers_and_views_that_overlap_keep_their_order():
    def case(rank, size):
        whole = torch.full((4,), float(rank + 1))
        table = {"front": whole[:3], "back": whole[1:]}
        tc.CollectiveBatch().all_reduce("front").all_reduce("back").execute(None, table)
        return whole

    for answer in run(2, case):
        assert answer.tolist() == [3.0, 6.0, 6.0, 3.0]


# -- algorithms ----------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("name", ["ring", "tree", "hierarchical"])
def test_every_route_of_all_reduce_gives_what_all_reduce_gives(world_size, name):
    def case(rank, size, name):
        from torsh_trainer.distributed.algorithms import ALGORITHMS

        pairs = []
        for op in OPS:
            for count in (0, 1, 5, 1000):
                plain = (torch.arange(float(count)) + rank).remainder(5) - 2
                routed = plain.clone()
                tc.all_reduce(plain, op)
                ALGORITHMS[name](routed, op, None)
                pairs.append((plain, routed))
        crossed = torch.full((3, 4), float(rank)).t()
        ALGORITHMS[name](crossed, "sum", None)
        bits = torch.tensor([1 << rank])
        ALGORITHMS[name](bits, tc.ReduceOp.BOR, None)
        return pairs, crossed, bits

    for pairs, crossed, bits in run(world_size, case, name):
        # Whole numbers: sums are exact in any order; a mean is one division of such a sum.
        assert all(torch.equal(plain, routed) for plain, routed in pairs)
        assert (crossed == sum(range(world_size))).all()
        assert bits.item() == 2**world_size - 1


def test_hosts_are_found_or_taken_as_told_and_groups_are_made_once():
    def case(rank, size):
        from torsh_trainer.distributed.algorithms import HierarchicalAllReduce

        found, told = HierarchicalAllReduce(), HierarchicalAllReduce(ranks_per_node=2)
        tensor = torch.tensor([float(rank)])
        told(tensor, "mean")
        pair = HierarchicalAllReduce(tc.new_group([1, 3]))
        pair(tensor)
        try:
            HierarchicalAllReduce(ranks_per_node=3)
        except tc.CollectiveArgumentError as error:
            return found.nodes, told.nodes, tensor.item(), str(error)
        return None

    for rank, (found, told, value, words) in enumerate(run(4, case)):
        assert found == [[0, 1, 2, 3]]
        assert told == [[0, 1], [2, 3]]
        assert value == (3.0 if rank % 2 else 1.5)
        assert "4 processes do not divide into hosts of 3" in words


@pytest.mark.parametrize("name", ["ring", "tree"])
def test_a_route_works_in_a_group_of_some(name):
    def case(rank, size, name):
        from torsh_trainer.distributed.algorithms import ALGORITHMS

        group = tc.new_group([1, 2, 3])
        tensor = torch.full((5,), float(rank))
        ALGORITHMS[name](tensor, "sum", group)
        return tensor.unique().tolist()

    assert run(4, case, name) == [[0.0], [6.0], [6.0], [6.0]]


# -- the scheduler -------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_what_is_scheduled_is_what_would_have_been_called(fused):
    def case(rank, size, fused):
        scheduler = tc.NcclScheduler(bucket_size_mb=0.0001)  # 104 bytes: 26 numbers
        scheduler.enable_kernel_fusion(fused)
        scheduled, plain = (
            [torch.full((n,), float(rank + i)) for i, n in enumerate((3, 10, 5, 40, 2, 4))]
            for _ in range(2)
        )
        for tensor in scheduled[:4]:
            scheduler.schedule_all_reduce(tensor)
        scheduler.schedule_broadcast(scheduled[4], 1, tc.Priority.CRITICAL)
        scheduler.schedule_all_reduce(scheduled[5], "max", priority=tc.Priority.LOW)
        scheduler.execute()
        for tensor in plain[:4]:
            tc.all_reduce(tensor)
        tc.broadcast(plain[4], 1)
        tc.all_reduce(plain[5], "max")
        return scheduled, plain, scheduler.stats()

    for scheduled, plain, stats in run(2, case, fused):
        assert all(torch.equal(a, b) for a, b in zip(scheduled, plain, strict=True))
        assert stats.calls["flat"] == (3 if fused else 5)
        assert (stats.fused_tensors, stats.fused_buffers) == ((3, 1) if fused else (0, 0))
        assert stats.bytes_reduced == 4 * (3 + 10 + 5 + 40 + 4)


def test_a_table_of_rank_0_decides_the_route_on_every_rank(tmp_path):
    file = tmp_path / "table.json"
    base = {"backend": "gloo", "processes": 2, "collective": "all_reduce"}
    rows = [("flat", 64, 1.0), ("ring", 64, 2.0), ("flat", 4096, 9.0), ("ring", 4096, 3.0)]
    records = [{**base, "algorithm": a, "bytes": b, "time_us": t} for a, b, t in rows]
    file.write_text(json.dumps({"records": records}))

    def case(rank, size, file):
        scheduler = tc.NcclScheduler(table=file if rank == 0 else "nowhere")
        small, large = torch.ones(4), torch.ones(4096)
        scheduler.all_reduce(small)
        scheduler.all_reduce(large)
        names = [scheduler.algorithm_for(tensor) for tensor in (small, large)]
        try:
            tc.NcclScheduler(table="nowhere")
        except ResourceError as error:
            refused = str(error)
        return names, scheduler.stats().calls, small.sum().item(), large.sum().item(), refused

    for names, calls, small, large, refused in run(2, case, str(file)):
        assert names == ["flat", "ring"]
        assert (calls["flat"], calls["ring"]) == (1, 1)
        assert (small, large) == (8.0, 8192.0)
        assert "cannot read nowhere" in refused


def test_measuring_fills_the_table_and_all_ranks_agree_on_it():
    def case(rank, size):
        scheduler = tc.NcclScheduler()
        before = scheduler.algorithm_for(torch.ones(1024))
        table = scheduler.optimize_communication_patterns((256, 4096), iterations=2, seconds=0.05)
        tensor = torch.ones(1000)
        scheduler.all_reduce(tensor)
        return before, table, tensor.sum().item()

    answers = run(4, case)
    assert len({str(table) for _, table, _ in answers}) == 1
    before, table, total = answers[0]
    assert before == "flat"
    assert total == 4000.0
    assert set(table.times_us) == {"flat", "ring", "tree", "hierarchical"}
    assert all(time_us > 0 for points in table.times_us.values() for _, time_us in points)


# -- measurements --------------------------------------------------------------------------------


def test_values_that_do_not_arrive_are_counted_as_wrong():
    def case(rank, size):
        import torch.distributed as dist

        from torsh_trainer.distributed import measuring, process_group
        from torsh_trainer.distributed.bench import BenchPlan

        plan = BenchPlan(
            collectives=("broadcast", "all_gather"), sizes=(700,), iterations=1, seconds=0.1
        )
        whole = [record["wrong"] for record in measuring.sweep(process_group.resolve(), plan)]
        broadcast = dist.broadcast
        dist.broadcast = lambda *args, **kwargs: None
        try:
            broken = [record["wrong"] for record in measuring.sweep(process_group.resolve(), plan)]
        finally:
            dist.broadcast = broadcast
        return whole, broken

    for whole, broken in run(2, case):
        assert whole == [0, 0]
        assert broken == [174, 0]  # each of rank 1's elements: 700 bytes in two even parts
