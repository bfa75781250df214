"""A disk that fails, a saver that is killed, files that are damaged."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from checkpoints import assert_same, checkpointer, flip_a_bit
from full_disk import files_of_at_most

from torsh_trainer.checkpoint.store.finding import find
from torsh_trainer.errors import ConfigError, ResourceError, TrainingError

pytestmark = pytest.mark.usefixtures("warm_interpreters")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_full_disk_is_a_resource_error_and_nothing_older_is_lost(tmp_path, mode):
    state = {"w": torch.ones(100_000)}
    saver = checkpointer(tmp_path, mode=mode, keep_last=1)
    saver.save(1, state, {})
    saver.wait()

    def save_and_wait():
        saver.save(2, state, {})
        saver.close()

    refused = pytest.raises(ResourceError, match="step-00000002: File too large")
    with files_of_at_most(100_000), refused as caught:
        save_and_wait()
    assert isinstance(caught.value.__cause__, OSError)
    assert "checkpoint.dir" in caught.value.fix
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert_same(saver.load({"w": torch.zeros(100_000)}), state)
    saver.save(3, state, {})
    saver.close()
    assert saver.steps() == [3]


def test_a_failed_async_save_is_told_once_at_the_next_call(tmp_path):
    saver = checkpointer(tmp_path, mode="async")
    with files_of_at_most(1000):
        saver.save(1, {"w": torch.ones(100_000)}, {})
        for thread in threading.enumerate():
            if thread.name == "saving step-00000001":
                thread.join()
    with pytest.raises(ResourceError, match="step-00000001"):
        saver.save(2, {"w": torch.ones(10)}, {})
    saver.save(3, {"w": torch.ones(10)}, {})
    saver.close()
    assert saver.steps() == [3]


def test_a_folder_that_is_a_file_is_a_resource_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match=r"cannot save the checkpoint .*file"):
        checkpointer(tmp_path / "file").save(1, {"w": torch.ones(2)}, {})


def test_our_own_mistake_is_told_with_its_type_and_cause(tmp_path):
    saver = checkpointer(tmp_path)
    sparse = torch.ones(2, 2).to_sparse()
    with pytest.raises(TrainingError, match="rank 0 could not save") as caught:
        saver.save(1, {"w": sparse}, {})
    assert caught.value.__cause__ is not None
    assert saver.steps() == []


CHILDREN = """
import os, signal, sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from checkpoints import checkpointer
from torsh_trainer.errors import ResourceError
import torsh_trainer.checkpoint.tensors.disk
os.chdir(sys.argv[1])

def in_child(action):
    child = os.fork()
    if child == 0:
        action()
        os._exit(0)
    return os.waitpid(child, 0)[1]

def killed_at(sync):
    sync_for_real, count = os.fsync, 0
    def fsync(descriptor):
        nonlocal count
        count += 1
        if count == sync:
            os.kill(os.getpid(), signal.SIGKILL)
        sync_for_real(descriptor)
    os.fsync = fsync
    checkpointer(Path(f"killed-{sync}"), keep_last=1).save(2, {"w": torch.full((1000,), 2.0)}, {})

sync = 0
while True:
    sync += 1
    checkpointer(Path(f"killed-{sync}")).save(1, {"w": torch.full((1000,), 1.0)}, {})
    if in_child(lambda: killed_at(sync)) == 0:
        break
    print("killed at", sync, flush=True)

def forbidden():
    if os.getuid() == 0:
        os.setuid(65534)
    try:
        checkpointer(Path("forbidden")).save(2, {"w": torch.ones(5)}, {})
    except ResourceError as error:
        print(error, flush=True)

checkpointer(Path("forbidden")).save(1, {"w": torch.ones(5)}, {})
os.chmod(".", 0o755)
os.chmod("forbidden", 0o555)
in_child(forbidden)
os.chmod("forbidden", 0o755)
"""


@pytest.fixture(scope="module")
def children(tmp_path_factory) -> tuple[Path, str]:
    """A process whose children save and are killed at every sync, or may not write."""
    folder = tmp_path_factory.mktemp("children")
    command = [sys.executable, "-c", CHILDREN, str(folder), str(Path(__file__).parent)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return folder, done.stdout


def test_a_saver_killed_at_any_moment_leaves_a_checkpoint_that_verifies(children):
    folder, told = children
    moments = told.count("killed at")
    assert moments >= 5  # tensors, plain values, metadata, manifest, folder
    for moment in range(1, moments + 1):
        there = folder / f"killed-{moment}"
        newest = find("auto", there)
        assert newest is not None
        value = {"step-00000001": 1.0, "step-00000002": 2.0}[newest.name]
        loaded = checkpointer(there).load({"w": torch.zeros(1000)})
        assert torch.equal(loaded["w"], torch.full((1000,), value))
    visible = [find("auto", folder / f"killed-{m}").name for m in range(1, moments + 1)]
    assert visible[0] == "step-00000001"
    assert visible == sorted(visible)  # from some moment on, the new one is there


def test_the_next_save_sweeps_what_a_killed_one_left(children, tmp_path):
    there = tmp_path / "copy"
    shutil.copytree(children[0] / "killed-1", there)
    assert list(there.glob(".saving-*"))
    saver = checkpointer(there)
    saver.save(3, {"w": torch.ones(1000)}, {})
    assert sorted(path.name for path in there.iterdir()) == ["step-00000001", "step-00000003"]


def test_a_run_that_saves_nothing_sweeps_too_what_a_killed_one_left(children, tmp_path):
    there = tmp_path / "copy"
    shutil.copytree(children[0] / "killed-1", there)
    assert list(there.glob(".saving-*"))
    saver = checkpointer(there)
    saver.claim()
    saver.close()
    assert [path.name for path in there.iterdir() if path.name != ".lock"] == ["step-00000001"]


def test_a_folder_that_may_not_be_written_is_a_resource_error(children):
    folder, told = children
    assert "cannot save the checkpoint forbidden/step-00000002: Permission denied" in told
    assert checkpointer(folder / "forbidden").steps() == [1]


# -- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["__0_0.distcp", "state.json", ".metadata", "manifest.json"])
def test_one_flipped_bit_anywhere_is_found_and_the_file_named(tmp_path, name):
    path = checkpointer(tmp_path).save(1, {"w": torch.ones(50), "n": 1}, {"loss": 0.5})
    size = (path / name).stat().st_size
    for at in (0, size // 3, size // 2, size - 1):
        flip_a_bit(path / name, at)
        target = torch.zeros(50)
        with pytest.raises(ResourceError, match=name.replace(".", r"\.")):
            checkpointer(tmp_path).load({"w": target}, path=path)
        assert not target.any()
        flip_a_bit(path / name, at)
    checkpointer(tmp_path).load({"w": torch.zeros(50)})


@pytest.mark.parametrize("name", ["__0_0.distcp", "state.json", ".metadata", "manifest.json"])
def test_a_truncated_or_missing_file_hides_the_checkpoint_and_is_named(tmp_path, name):
    saver = checkpointer(tmp_path)
    path = saver.save(1, {"w": torch.ones(50)}, {})
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[:-1])
    assert saver.steps() == []
    with pytest.raises(ResourceError, match=name.replace(".", r"\.")):
        saver.load({"w": torch.zeros(50)}, path=path)
    (path / name).unlink()
    assert saver.steps() == []
    with pytest.raises(ResourceError, match=name.replace(".", r"\.")):
        find(str(path), tmp_path)


def test_a_checkpoint_of_a_newer_format_is_refused(tmp_path):
    path = checkpointer(tmp_path).save(1, {"w": torch.ones(2)}, {})
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(ConfigError, match=r"format 99.*upgrade"):
        find(str(path), tmp_path)
