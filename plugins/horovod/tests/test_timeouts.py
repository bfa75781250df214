"""A collective for which a process does not come fails after as long here as under Horovod."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torsh_trainer_horovod import runtime

from torsh_trainer.comm.base import CommOptions, Communicator
from torsh_trainer.errors import TorshError
from torsh_trainer.testing.ranks import RankPool
from torsh_trainer.translate.horovod.job import Options
from torsh_trainer.translate.horovod.translator import translate

proves = partial(pytest.mark.proves, engine="horovod")
Reduce = Callable[[torch.Tensor], Any]


def alone(comm: Communicator, reduce: Reduce) -> str:
    """What rank 0 is told when rank 1 is stopped."""
    pids: list[int] = comm.all_gather_object(os.getpid())
    if comm.world.rank:
        os.kill(os.getpid(), signal.SIGSTOP)
        return ""
    try:
        reduce(torch.ones(4))
    except (RuntimeError, TorshError) as error:
        return str(error)
    finally:
        os.kill(pids[1], signal.SIGCONT)
    return "it came to an end"


def under_horovod(comm: Communicator, variables: dict[str, str]) -> str:
    running = runtime.start(comm, variables)
    running.hvd.kept = running  # whoever leaves ends it for the other
    return alone(comm, lambda tensor: running.hvd.allreduce(tensor, name="x"))


def natively(comm: Communicator) -> str:
    return alone(comm, comm.all_reduce)


@proves("gloo-timeout")
def test_a_process_that_is_stopped_ends_the_job_on_both_sides(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text("horovodrun -np 2 --gloo-timeout-seconds 2 python train.py")
    limit = translate(path, Options()).values["comm.timeout_s"]
    assert limit == 2
    variables = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "2"}
    with RankPool(2) as ranks:
        theirs, _ = ranks.run(under_horovod, variables, timeout_s=800.0)
    with RankPool(2, options=CommOptions(timeout_s=limit, startup_timeout_s=60.0)) as ranks:
        mine, _ = ranks.run(natively)
    assert "Horovod has been shut down" in theirs
    assert "did not" in mine
