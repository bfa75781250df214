"""What every test may rely on: one thread a process, no cluster around it, and ``away``."""

from __future__ import annotations

import os
import re
import time
from types import SimpleNamespace

import pytest

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

_CLUSTER = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|MASTER_ADDR|MASTER_PORT"
    r"|(SLURM|OMPI|PMI|PMIX|MPI|PBS|LSB|HOROVOD|TORCHELASTIC)_.*"
)
for _name in [name for name in os.environ if _CLUSTER.fullmatch(name)]:
    del os.environ[_name]


@pytest.fixture
def away(tmp_path):
    """How a rank stays away from what the others do until they have noticed, and no longer.

    Made here, so that it travels to the ranks by value: importing this file there would take the
    variables away that mpirun has given them.
    """

    def noticed(rank):
        (tmp_path / f"noticed-{rank}").touch()

    def until_noticed_by(others):
        end_s = time.monotonic() + 240
        while len(list(tmp_path.glob("noticed-*"))) < others and time.monotonic() < end_s:
            time.sleep(0.02)

    return SimpleNamespace(noticed=noticed, until_noticed_by=until_noticed_by)
