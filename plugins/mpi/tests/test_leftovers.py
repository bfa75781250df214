"""What a job of MPI leaves behind, and where it listens: nothing, and on this host alone."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torsh_mpi import folders
from torsh_mpi.folders import PREFIX, Folder, remove_orphans
from torsh_mpi.launcher import Mpi
from torsh_mpi.seats import Mpirun, ProcessSlots

from torsh_trainer.launchers import loopback
from torsh_trainer.launchers.base import LaunchContext

SHARED_MEMORY = Path("/dev/shm")
BACKING = "OMPI_MCA_btl_sm_backing_directory"
TRANSPORTS = "OMPI_MCA_btl"


@pytest.fixture
def impatient(monkeypatch):
    """Folders are removed however young they are."""
    monkeypatch.setattr(folders, "_YOUNG_S", -1.0)


def test_a_folder_goes_that_nobody_holds_and_one_that_is_held_stays(tmp_path, impatient):
    held = Folder(tmp_path)
    orphan = tmp_path / f"{PREFIX}orphan"
    (orphan / "session").mkdir(parents=True)
    (tmp_path / "another").mkdir()
    assert remove_orphans(tmp_path) == [orphan]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["another", held.path.name])
    held.close()
    assert [path.name for path in tmp_path.iterdir()] == ["another"]


def test_a_folder_is_held_as_long_as_a_process_that_was_given_it_lives(tmp_path, impatient):
    held = Folder(tmp_path)
    heir = subprocess.Popen(["sleep", "60"], pass_fds=[held.descriptor])
    os.close(held.descriptor)
    assert remove_orphans(tmp_path) == []
    heir.kill()
    heir.wait()
    assert remove_orphans(tmp_path) == [held.path]


def test_what_is_young_or_another_users_or_a_link_stays(tmp_path, monkeypatch):
    (tmp_path / f"{PREFIX}young").mkdir()
    assert remove_orphans(tmp_path) == []
    monkeypatch.setattr(folders, "_YOUNG_S", -1.0)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert remove_orphans(tmp_path) == []
    monkeypatch.undo()
    monkeypatch.setattr(folders, "_YOUNG_S", -1.0)
    precious = tmp_path / "precious"
    precious.mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(precious)
    remove_orphans(tmp_path)
    assert precious.exists()


def test_the_next_job_removes_what_a_killed_one_has_left(tmp_path, monkeypatch, impatient):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    script = (
        "import os, signal; from torsh_mpi.seats import *; "
        "seats = ProcessSlots(2, mpirun=Mpirun(), env=os.environ); "
        "print(seats._process.pid, *[f.path for f in seats._folders], flush=True); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    answer = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        env=env,
        text=True,
        timeout=60,
        check=False,
    )
    assert answer.returncode == -signal.SIGKILL
    mpirun, *left = answer.stdout.split()
    assert left
    end_s = time.monotonic() + 30
    while Path("/proc", mpirun).exists() and time.monotonic() < end_s:
        time.sleep(0.05)
    with ProcessSlots(2, mpirun=Mpirun(), env=env):
        assert not [path for path in left if Path(path).exists()]
    assert list(tmp_path.iterdir()) == []


def listening(pid: int | str) -> list[tuple[str, bytes]]:
    """Addresses that process ``pid``, this one's child or itself, listens on, with its devices."""
    handle = os.pidfd_open(os.getpid() if pid == "self" else int(pid))
    found = []
    for number in loopback._sockets(pid):
        descriptor = loopback.ctypes.CDLL(None).syscall(loopback._PIDFD_GETFD, handle, number, 0)
        with socket.socket(fileno=descriptor) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                device = one.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)
                found.append((one.getsockname()[0], device.rstrip(b"\0")))
    os.close(handle)
    return found


def test_mpirun_listens_on_the_loopback_device_alone():
    seats = ProcessSlots(2, mpirun=Mpirun(), env=os.environ)
    try:
        found = listening(seats._process.pid)
        assert found
        assert {device for _, device in found} == {b"lo"}
    finally:
        seats.close()


def test_the_ranks_of_a_job_listen_on_the_loopback_alone_and_leave_nothing():
    def entry(world):
        import os

        from mpi4py import MPI

        MPI.COMM_WORLD.allreduce(1)
        backing = os.environ[BACKING]
        return listening("self"), backing, len(list(Path(backing).iterdir()))

    found, backing, segments = Mpi(num_processes=2).launch(
        entry, context=LaunchContext(env=dict(os.environ))
    )
    assert {address for address, _ in found} <= {"127.0.0.1", "::1"}
    assert Path(backing).parent == SHARED_MEMORY
    assert segments >= 1
    assert not Path(backing).exists()


def test_the_users_own_settings_of_open_mpi_stay():
    def entry(world):
        import os

        return os.environ[TRANSPORTS]

    env = {**os.environ, TRANSPORTS: "self,sm"}
    assert Mpi(num_processes=2).launch(entry, context=LaunchContext(env=env)) == "self,sm"


def test_a_lock_can_be_had_here(tmp_path):
    """What the tests above stand on."""
    held = Folder(tmp_path)
    other = os.open(held.path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
    held.close()
