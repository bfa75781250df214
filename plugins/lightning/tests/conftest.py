"""What every test may rely on: one thread a process, no cluster around it, siblings to import."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

_CLUSTER = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|MASTER_ADDR|MASTER_PORT"
    r"|(SLURM|OMPI|PMI|PMIX|MPI|PBS|LSB|HOROVOD|TORCHELASTIC)_.*"
)


def _leave_cluster() -> None:
    for name in [name for name in os.environ if _CLUSTER.fullmatch(name)]:
        del os.environ[name]


_leave_cluster()

# ``recorder`` and ``modules`` are imported by name, in the ranks of the tests too.
sys.path.insert(0, str(Path(__file__).parent))

import torch.distributed as dist  # noqa: E402 - with one thread
from torch.distributed import TCPStore  # noqa: E402

from torsh_trainer.testing.ranks import RankPool  # noqa: E402


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test may leave a folder, a process group and its variables, as Lightning does."""
    monkeypatch.chdir(tmp_path)
    yield
    _leave_cluster()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def on_ranks() -> Iterator[Callable[..., list[Any]]]:
    """``on_ranks(case, *args)``: the answers of ``case(world, port, *args)`` on two warm processes.

    They are the same for all tests of the session; ``port`` is that of a store such as torchrun's.
    """
    with RankPool(2, join=False) as ranks:

        def run(case: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            return ranks.run(case, store.port, *args, **options)

        yield run


@pytest.fixture(scope="session")
def door(on_ranks) -> Callable[..., tuple[int, str]]:
    """``door(args, folder, processes=1)``: the command line on warm processes.

    Two are as torchrun would have started them. Gives the exit code and what was printed.
    """

    from loops import typed  # once it is found

    def run(args: Sequence[str], folder: Path, *, processes: int = 1) -> tuple[int, str]:
        # A sweep starts processes of its own, beside other tests.
        answers = on_ranks(typed, folder, list(args), processes, timeout_s=1120)
        return max(code for code, _ in answers), "".join(said for _, said in answers)

    return run
