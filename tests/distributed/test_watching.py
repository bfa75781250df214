"""A watch names the rank that does not come, where no call to the backend fails by itself.

gloo's asynchronous calls stand in for NCCL's: they return at once, and nobody waits for them here.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torsh_trainer.comm import watching
from torsh_trainer.comm.base import CommOptions
from torsh_trainer.testing.ranks import RankPool

LIMIT_S = 10.0
HERE = Path(__file__).name


@pytest.fixture(scope="module")
def ranks():
    with RankPool(2, options=CommOptions(timeout_s=240.0)) as pool:
        yield pool


def told_by_a_watch(comm, work, *, limit_s=LIMIT_S):
    """The errors with which a watch over ``work(said)`` would have ended this process.

    ``said`` is set by the first of them, on any rank.
    """
    watching.BACKENDS = ("gloo",)
    store = dist.distributed_c10d._get_default_store().clone()
    errors = []

    def give_up(error):
        errors.append((error.sentence, error.fix, error.facts["missing"]))
        store.set(work.__name__, "")

    with watching.watch_group(comm.process_group, timeout_s=limit_s, give_up=give_up):
        work(lambda: store.check([work.__name__]))
    return errors


def begin_a_collective():
    return dist.all_reduce(torch.ones(4), async_op=True)


def one_does_not_come(comm):
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    watching.log.addHandler(handler)
    works = [begin_a_collective()]

    def work(over):
        if comm.world.is_rank_zero:
            works.append(begin_a_collective())
            while not over():
                time.sleep(0.1)  # where rank 0 is
        while not over():
            time.sleep(0.1)  # where rank 1 is

    errors = told_by_a_watch(comm, work)
    if not comm.world.is_rank_zero:
        works.append(begin_a_collective())
    for work in works:
        work.wait()
    return errors, heard


def test_the_rank_that_has_not_come_is_named_with_its_line_before_the_backend_gives_up(ranks):
    (errors, heard), others = ranks.run(one_does_not_come)
    assert others == ([], []), "the one that is waited for ends nothing"
    ((sentence, fix, missing),) = errors
    assert missing == [1]
    assert "rank 1 of 2 had not come to collective" in sentence, sentence
    assert "rank 0 waited at" in fix, fix
    assert "rank 1 was at" in fix, fix
    assert fix.count(HERE) == 2, fix
    assert "comm.timeout_s=10 waits longer" in fix
    (warning,) = heard
    assert warning.startswith("rank 1: not come to collective"), "at half of the time, once"
    assert warning.endswith("the run fails after 8 s")


def nobody_begins_any(comm):
    def work(over):
        end_s = time.monotonic() + 1.5 * LIMIT_S / 5
        while time.monotonic() < end_s and not over():
            time.sleep(0.1)

    return told_by_a_watch(comm, work, limit_s=LIMIT_S / 5)


def test_ranks_that_are_all_busy_with_something_else_are_left_alone(ranks):
    assert ranks.run(nobody_begins_any) == [[], []]


class Broken(Exception):
    pass


def one_raises(comm):
    def work(over):
        if not comm.world.is_rank_zero:
            raise Broken("the words of rank 1")
        begin_a_collective()
        while not over():
            time.sleep(0.1)

    try:
        return told_by_a_watch(comm, work)
    except Broken:
        time.sleep(2)  # else gloo notices, as NCCL would not
        return "raised"


def test_a_rank_that_fails_has_its_words_told_by_those_that_wait_for_it():
    with RankPool(2) as ranks:
        told, raised = ranks.run(one_raises)
    assert raised == "raised"
    ((sentence, _, missing),) = told
    assert missing == [1]
    assert "rank 1 has failed" in sentence
    assert "Broken: the words of rank 1" in sentence


def backends(comm):
    return [
        type(watching.watch_group(group, timeout_s=9.0, give_up=print)).__name__
        for group in (comm.process_group, None)
    ]


def test_nothing_is_watched_where_calls_fail_by_themselves():
    with RankPool(2) as ranks:
        assert ranks.run(backends) == [["nullcontext"] * 2] * 2


def test_one_look_at_a_process_that_moves_asks_the_store_once():
    """The price of a watch, twice a second: no step pays any of it."""

    class Group:
        group_name = "0"
        begun = 0

        def _get_sequence_number_for_group(self):
            self.begun += 1
            return self.begun

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        watch = watching.GroupWatch(dist.group.WORLD, timeout_s=100.0, give_up=print)
        asked = []

        class Store:
            def check(self, keys):
                asked.append(keys)
                return False

        watch._group, watch._store = Group(), Store()
        watch.look()
    finally:
        dist.destroy_process_group()
    assert asked == [["failed"]]
