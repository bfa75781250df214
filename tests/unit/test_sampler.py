"""The order of samples is a function of (seed, epoch); cutting changes who sees a sample."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from torsh_trainer.data.sampler import BatchPartition, ForwardKeys, GlobalSampler, epoch_order


def steps(sampler: GlobalSampler, consumed: int, count: int) -> list[tuple[int, list[int], int]]:
    """(epoch, ids that count on this rank, global samples) of the next steps."""
    plans = itertools.islice(sampler.plans(consumed), count)
    return [
        (p.epoch, [i for share in p.shares for i in share.ids[: share.counts]], p.samples)
        for p in plans
    ]


def sampler(*, size=23, batch=8, micro=2, ranks=1, rank=0, **knobs) -> GlobalSampler:
    return GlobalSampler(size, BatchPartition(batch, micro, ranks, rank), seed=3, **knobs)


def test_an_epoch_holds_every_sample_once() -> None:
    seen = [i for _, ids, _ in steps(sampler(), 0, 3) for i in ids]
    assert sorted(seen) == list(range(23))


@pytest.mark.parametrize(("ranks", "micro"), [(1, 8), (2, 4), (2, 2), (4, 2), (4, 1)])
def test_each_step_holds_the_same_samples_on_any_number_of_ranks(ranks: int, micro: int) -> None:
    alone = steps(sampler(micro=8), 0, 7)
    by_rank = [steps(sampler(ranks=ranks, rank=r, micro=micro), 0, 7) for r in range(ranks)]
    for step, (epoch, ids, samples) in enumerate(alone):
        together = Counter(i for rank in by_rank for i in rank[step][1])
        assert together == Counter(ids)
        assert {(rank[step][0], rank[step][2]) for rank in by_rank} == {(epoch, samples)}


def test_the_same_micro_batches_come_under_the_same_global_number_on_any_world_size() -> None:
    def numbered(ranks: int) -> dict[tuple[int, int], list[int]]:
        found = {}
        for rank in range(ranks):
            plans = itertools.islice(sampler(ranks=ranks, rank=rank).plans(0), 3)
            for step, plan in enumerate(plans):
                for i, share in enumerate(plan.shares):
                    if share.counts:
                        found[step, i * ranks + rank] = share.ids
        return found

    assert numbered(1) == numbered(2) == numbered(4)


def test_every_rank_runs_as_many_forwards_in_the_ragged_tail() -> None:
    plans = [list(itertools.islice(sampler(size=9, ranks=4, rank=r).plans(0), 2)) for r in range(4)]
    tails = [plan[1].shares for plan in plans]
    assert {len(shares) for shares in tails} == {1}
    assert [shares[0].counts for shares in tails] == [1, 0, 0, 0]
    assert all(len(shares[0].ids) == 1 for shares in tails), "a batch is never empty"


@pytest.mark.parametrize("steps_before", [0, 1, 2, 3, 4, 7])
def test_a_position_is_enough_to_go_on_from(steps_before: int) -> None:
    whole = steps(sampler(), 0, 12)
    consumed = sum(samples for _, _, samples in whole[:steps_before])
    assert steps(sampler(), consumed, 12 - steps_before) == whole[steps_before:]


def test_drop_last_leaves_the_tail_out_and_ends_the_epoch_at_a_whole_batch() -> None:
    plans = list(itertools.islice(sampler(drop_last=True).plans(0), 5))
    assert [p.samples for p in plans] == [8] * 5
    assert [p.epoch for p in plans] == [0, 0, 1, 1, 2]
    assert [p.ends_epoch for p in plans] == [False, True, False, True, False]


def test_epochs_and_seeds_give_other_orders_and_the_same_arguments_the_same() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return epoch_order(50, seed=seed, epoch=epoch, shuffle=True)

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    assert epoch_order(5, seed=0, epoch=3, shuffle=False) == [0, 1, 2, 3, 4]


def test_weighted_sampling_draws_in_proportion() -> None:
    weights = torch.tensor([0.0, 1.0, 3.0]).repeat_interleave(1000)
    drawn = Counter(
        i // 1000 for i in epoch_order(3000, seed=1, epoch=0, shuffle=True, weights=weights)
    )
    assert drawn[0] == 0
    assert drawn[2] / drawn[1] == pytest.approx(3.0, rel=0.2)


def test_keys_of_neighbours_differ_in_the_lower_bits_that_the_generator_reads() -> None:
    keys = {
        ForwardKeys.of_micro_batch(ForwardKeys(seed).of_step(step), micro) & 0xFFFFFFFF
        for seed in range(8)
        for step in range(64)
        for micro in range(8)
    }
    assert len(keys) == 8 * 64 * 8
