"""The pool of ranks: what it gives back, how it fails, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from torsh_trainer.testing import RankPool
from torsh_trainer.testing.ranks import RankFailure

SCRIPT = """
import sys, time
from torsh_trainer.testing import RankPool

def case(comm):
    return comm.world.rank

if __name__ == "__main__":
    pool = RankPool(2)
    pool.run(case)
    print(*pool.pids, flush=True)
    time.sleep(3600)
"""


@dataclass(frozen=True)
class OfThisModule:
    """A class that no rank could import."""

    number: int


@pytest.fixture(scope="module")
def pool():
    with RankPool(2) as pool:
        yield pool


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_answers_come_by_rank_and_everything_travels_by_value(pool):
    factor = 10

    def case(comm, given):
        return OfThisModule(given.number + factor * comm.world.rank), torch.ones(2)

    answers = pool.run(case, OfThisModule(1))
    assert [answer[0].number for answer in answers] == [1, 11]
    assert torch.equal(answers[1][1], torch.ones(2))


def test_the_same_processes_run_many_cases_with_one_thread_each(pool):
    def case(comm):
        return os.getpid(), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]

    first, second = pool.run(case), pool.run(case)
    assert first == second
    assert [pid for pid, _, _ in first] == pool.pids
    assert all(answer[1:] == (1, "1") for answer in first)


def test_an_error_names_its_rank_with_traceback_and_the_next_case_runs(pool):
    def raises(comm):
        if comm.world.rank == 1:
            raise ValueError("the label is 11")
        comm.barrier()

    before = pool.pids
    with pytest.raises(RankFailure) as caught:
        pool.run(raises)
    words = str(caught.value)
    assert "rank 1 raised" in words
    assert "ValueError: the label is 11" in words
    assert "rank 0" in words  # it was left in the barrier, and the report says where
    assert not any(alive(pid) for pid in before)
    assert pool.run(lambda comm: comm.reduce_values([1.0])[0]) == [2.0, 2.0]


def test_a_rank_that_dies_leaves_its_last_words(pool):
    def dies(comm):
        if comm.world.rank == 0:
            print("last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankFailure, match=r"(?s)rank 0 died with exit code -9.*last words"):
        pool.run(dies)


def test_a_rank_that_aborts_shows_where(pool):
    def case(comm):
        if comm.world.rank == 0:
            os.abort()  # as a library does that finds its memory spoilt

    with pytest.raises(RankFailure, match=r"(?s)rank 0 died with exit code -6.*in case\n"):
        pool.run(case)


def test_a_rank_that_hangs_shows_where(pool):
    def hang_here(comm):
        if comm.world.rank == 1:
            time.sleep(3600)

    with pytest.raises(RankFailure, match=r"(?s)rank 1 was still busy.*in hang_here"):
        pool.run(hang_here, timeout_s=1.0)


def test_an_answer_that_does_not_pickle_is_an_error_of_its_rank(pool):
    with pytest.raises(RankFailure, match="rank 0 raised"):
        pool.run(lambda comm: sys._getframe())


def test_ranks_end_when_their_parent_is_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.kill()
    parent.communicate()
    end = time.monotonic() + 120
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < end, "ranks outlive their parent"
        time.sleep(0.05)
