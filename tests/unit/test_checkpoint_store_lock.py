"""Two runs in one folder: the second is refused; what dead ones left behind is taken over."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch

from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.checkpoint.store.lock import LOCK, Holder
from torsh_trainer.checkpoint.store.places import StoragePath, parse_storage_path
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.errors import ConfigError

STATE = {"w": torch.ones(2)}

HOLDER = """
import os, sys, time
from pathlib import Path
from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.comm.local import LocalCommunicator
saver = DcpCheckpointer(Path(sys.argv[1]), LocalCommunicator())
saver.claim()
if os.fork() == 0:  # as a worker of a DataLoader, which may outlive the run
    print("child", os.getpid(), flush=True)
    time.sleep(600)
time.sleep(0.1)
print("holds", os.getpid(), flush=True)
time.sleep(600)
"""


def checkpointer(folder: StoragePath, **options) -> DcpCheckpointer:
    return DcpCheckpointer(folder, LocalCommunicator(), CheckpointOptions(**options))


@pytest.fixture
def remote() -> StoragePath:
    """A folder of a store that renames nothing."""
    return parse_storage_path(f"memory://{uuid.uuid4().hex}/run")


@pytest.fixture
def holder(tmp_path):
    """A process that holds the folder, and a child of it."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline().split()[1])
    assert process.stdout.readline().startswith("holds")
    yield process
    for pid in (process.pid, child):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


def test_a_second_run_is_refused_and_told_who_holds_the_folder(tmp_path, holder):
    with pytest.raises(ConfigError) as caught:
        checkpointer(tmp_path).claim()
    told = str(caught.value)
    for fact in (str(tmp_path / LOCK), f"process {holder.pid} ", socket.gethostname()):
        assert fact in told
    assert "checkpoint.dir" in caught.value.fix
    assert list(tmp_path.iterdir()) == [tmp_path / LOCK]


def test_a_run_in_a_folder_that_is_taken_stops_before_it_trains(tmp_path, holder, run_door):
    command = ["+recipe=digits", "trainer.device=cpu", "trainer.max_steps=1", "hydra.run.dir=run"]
    result = run_door([*command, f"checkpoint.dir={tmp_path}"])
    assert result.returncode == 2
    assert f"{tmp_path / LOCK} is held by process {holder.pid} on" in result.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["error"]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_killed_run_holds_nothing_even_when_a_child_of_it_lives_on(tmp_path, holder):
    holder.kill()
    holder.wait()
    saver = checkpointer(tmp_path)
    saver.claim()
    saver.save(1, STATE, {})
    saver.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_reading_another_runs_checkpoint_needs_no_lock(tmp_path, holder):
    checkpointer(tmp_path).save(1, STATE, {})  # by whoever
    reader = checkpointer(tmp_path.parent / "elsewhere")
    path = reader.find(str(tmp_path))
    assert torch.equal(reader.load({"w": torch.zeros(2)}, path=path)["w"], STATE["w"])
    reader.claim()
    reader.close()


@pytest.mark.parametrize("where", ["local", "remote"])
def test_within_one_process_too_and_given_back_it_is_free(tmp_path, remote, where):
    folder = tmp_path / "run" if where == "local" else remote
    first, second = checkpointer(folder), checkpointer(folder)
    first.claim()
    with pytest.raises(ConfigError, match=f"held by process {os.getpid()} "):
        second.claim()
    first.release()
    first.release()  # a second time does nothing
    second.claim()
    first.close()  # what it gave back is not its own any more
    with pytest.raises(ConfigError):
        first.claim()
    second.close()
    assert not folder.exists() or not list(folder.iterdir())  # nothing was saved


def left_behind(folder: StoragePath, **changes) -> None:
    """The lock of some other process."""
    said = json.loads(Holder.me("theirs").as_bytes())
    folder.mkdir()
    (folder / LOCK).write_bytes(json.dumps({**said, "token": "theirs", **changes}).encode())


def ended() -> int:
    """The number of a process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_remote_lock_of_a_dead_process_of_this_host_is_taken_over(remote):
    for changes in ({"pid": ended()}, {"pid": os.getppid()}):  # the second has a new owner
        left_behind(remote, **changes)
        saver = checkpointer(remote)
        saver.claim()
        saver.close()
        assert not (remote / LOCK).exists()


def test_a_remote_lock_of_a_living_process_is_respected(remote):
    began = json.loads(Holder.me("x").as_bytes())["began"].split()
    stat = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    left_behind(remote, pid=os.getppid(), began=f"{began[0]} {stat[19]}")
    with pytest.raises(ConfigError, match=f"process {os.getppid()} on "):
        checkpointer(remote).claim()


def test_a_remote_lock_of_another_host_says_what_to_do(remote):
    left_behind(remote, host="another", pid=7)
    with pytest.raises(ConfigError, match="process 7 on another") as caught:
        checkpointer(remote).claim()
    assert "checkpoint.take_over=true" in caught.value.fix
    assert f"delete {remote / LOCK}" in caught.value.fix
    saver = checkpointer(remote, take_over=True)
    saver.claim()
    saver.save(1, STATE, {})
    saver.close()
    assert checkpointer(remote).steps() == [1]


def test_a_run_whose_folder_was_taken_over_publishes_nothing_more(remote):
    saver = checkpointer(remote)
    saver.claim()
    saver.save(1, STATE, {})
    left_behind(remote, host="another", pid=7)
    with pytest.raises(ConfigError, match="no longer this run's: process 7 on another"):
        saver.save(2, STATE, {})
    saver.close()
    assert checkpointer(remote).steps() == [1]
    assert json.loads((remote / LOCK).read_bytes())["pid"] == 7  # it is not ours to remove
