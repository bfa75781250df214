"""What every test may rely on: one thread a process, no cluster around it, and none left behind."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

_CLUSTER = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|MASTER_ADDR|MASTER_PORT"
    r"|(SLURM|OMPI|PMI|PMIX|MPI|PBS|LSB|HOROVOD|TORCHELASTIC)_.*"
)
for _name in [name for name in os.environ if _CLUSTER.fullmatch(name)]:
    del os.environ[_name]

sys.path.insert(0, str(Path(__file__).parent))  # helpers are imported by name


@pytest.fixture(autouse=True)
def environment():
    """The variables that loading DeepSpeed sets are gone when a test has ended."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
