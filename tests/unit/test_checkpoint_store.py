"""Where checkpoints lie: a folder of this machine, or a store that renames nothing.

The remote store here is fsspec's own in memory; a real object store is in tests/distributed.
"""

from __future__ import annotations

import copy
import errno
import logging
import pickle
import subprocess
import sys
import uuid
from pathlib import Path

import fsspec
import pytest
import torch

from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.checkpoint.saving import Part
from torsh_trainer.checkpoint.store.finding import find
from torsh_trainer.checkpoint.store.integrity import MANIFEST, read_manifest
from torsh_trainer.checkpoint.store.places import (
    RemotePath,
    StoragePath,
    Unreachable,
    parse_storage_path,
)
from torsh_trainer.checkpoint.store.retention import candidates
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.errors import ConfigError, ResourceError

pytestmark = pytest.mark.usefixtures("warm_interpreters")


def checkpointer(folder: StoragePath, **options) -> DcpCheckpointer:
    return DcpCheckpointer(folder, LocalCommunicator(), CheckpointOptions(**options))


def state(value: float) -> dict:
    return {
        "engine": {"model": {"w": torch.full((300,), float(value)), "b": torch.ones(2, 3)}},
        "position": {"step": int(value)},
        "rng": {"rank_0": {"torch": torch.arange(5)}},
    }


def value_of(saver: DcpCheckpointer, **where) -> float:
    return float(saver.load(state(0.0), **where)["engine"]["model"]["w"][-1])


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}/run"


@pytest.fixture
def folder(url) -> StoragePath:
    return parse_storage_path(url)


def names(folder: StoragePath) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- what was saved comes back --------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_state_comes_back_from_a_url_bit_for_bit(folder, mode):
    saved = state(3.0)
    expected = copy.deepcopy(saved)
    saver = checkpointer(folder, mode=mode)
    path = saver.save(3, saved, {"loss": 0.5})
    saved["engine"]["model"]["w"].zero_()
    saver.close()
    assert str(path) == f"{folder}/step-00000003"
    loaded = checkpointer(folder).load(state(0.0))
    for name, tensor in expected["engine"]["model"].items():
        assert torch.equal(loaded["engine"]["model"][name], tensor)
    assert loaded["position"] == {"step": 3}
    assert torch.equal(loaded["rng"]["rank_0"]["torch"], torch.arange(5))
    # Nothing but what the manifest knows.
    assert names(path) == sorted([*read_manifest(path).files, MANIFEST])


def test_the_files_are_those_that_a_folder_of_this_machine_has(folder, tmp_path):
    remote = checkpointer(folder).save(1, state(1.0), {})
    local = checkpointer(tmp_path).save(1, state(1.0), {})
    assert read_manifest(remote).files == read_manifest(local).files
    for file in local.iterdir():  # copied by hand, it is a checkpoint here too
        if file.name != MANIFEST:
            assert (remote / file.name).read_bytes() == file.read_bytes()
            file.write_bytes((remote / file.name).read_bytes())
    (local / MANIFEST).write_bytes((remote / MANIFEST).read_bytes())
    assert value_of(checkpointer(tmp_path)) == 1.0


def test_resume_takes_the_url_of_a_checkpoint_a_folder_or_a_run(url, tmp_path):
    path = checkpointer(parse_storage_path(f"{url}/checkpoints")).save(1, state(1.0), {})
    for resume in (f"{url}/checkpoints/step-00000001", f"{url}/checkpoints", url, f"{url}/"):
        found = checkpointer(tmp_path).find(resume)
        assert found == path
        assert value_of(checkpointer(tmp_path), path=found) == 1.0
    with pytest.raises(ConfigError, match="nothing is there"):
        checkpointer(tmp_path).find(f"{url}/nowhere")
    assert checkpointer(parse_storage_path(f"{url}/nowhere")).find("auto") is None


def test_auto_skips_what_is_damaged_and_what_has_no_manifest(folder, caplog):
    saver = checkpointer(folder)
    for step in (1, 2, 3, 4):
        saver.save(step, state(step), {})
    (folder / "step-00000004" / MANIFEST).unlink()
    damaged = folder / "step-00000003" / "__0_0.distcp"
    content = bytearray(damaged.read_bytes())
    content[1000] ^= 1
    damaged.write_bytes(bytes(content))
    (folder / "step-00000002" / "state.json").write_bytes(b"{}")
    assert saver.steps() == [1, 3]
    with caplog.at_level(logging.WARNING, logger="torsh_trainer"):
        assert saver.find("auto") == folder / "step-00000001"
    for words in ("has no manifest.json", "__0_0.distcp is not what was written", "state.json has"):
        assert words in caplog.text


def test_a_url_with_retention_keeps_the_last_and_the_best(folder):
    saver = checkpointer(folder, keep_last=2, keep_best=1)
    for step, loss in enumerate((3.0, 1.0, 2.0, 5.0, 4.0), 1):
        saver.save(step, state(step), {"loss": loss})
    assert saver.steps() == [2, 4, 5]
    assert names(folder) == [f"step-0000000{step}" for step in (2, 4, 5)]


# -- whole or not at all --------------------------------------------------------------------------


def test_a_step_saved_again_is_whole_before_the_old_one_goes(folder):
    saver = checkpointer(folder)
    for step in (1, 2, 3):
        saver.save(step, state(step), {})
    value_of(saver, step=1)
    new = saver.save(2, state(20.0), {})
    assert names(folder) == ["step-00000001", "step-00000002.2", "step-00000003"]
    assert saver.find("auto") == new
    assert value_of(saver, step=2) == 20.0
    assert saver.steps() == [1, 2, 3]


def broken_off(folder: StoragePath, run: str) -> RemotePath:
    """What a process leaves that is killed before the manifest."""
    saver = checkpointer(folder)
    saver._store.run = run
    path = saver.save(7, state(7.0), {})
    assert isinstance(path, RemotePath)
    saver._store._mark(path)
    (path / MANIFEST).unlink()
    return path


def test_what_this_run_left_unfinished_is_swept_and_what_others_did_is_not(folder):
    first = checkpointer(folder)
    run = read_manifest(first.save(1, state(1.0), {})).run
    ours = broken_off(folder, run)
    theirs = broken_off(folder, "another")
    assert (ours.name, theirs.name) == ("step-00000007", "step-00000007.2")
    second = checkpointer(folder)
    second.find("auto")
    assert value_of(second) == 1.0  # so it is the first run that goes on
    second.save(2, state(2.0), {})
    assert names(folder) == ["step-00000001", "step-00000002", theirs.name]
    assert second.steps() == [1, 2]


def test_a_save_that_fails_leaves_nothing_of_itself(folder, monkeypatch):
    saver = checkpointer(folder)
    saver.save(1, state(1.0), {})
    memory = fsspec.filesystem("memory")

    def full(path, *args, **kwargs):
        if "step-00000002/.metadata" in path:
            raise OSError(errno.EDQUOT, "the bucket is full")
        return original(path, *args, **kwargs)

    original = memory.pipe_file
    monkeypatch.setattr(memory, "pipe_file", full)
    with pytest.raises(Unreachable, match=r"step-00000002/.metadata: .*the bucket is full"):
        saver.save(2, state(2.0), {})
    assert names(folder) == ["step-00000001"]
    saver.save(3, state(3.0), {})
    assert saver.steps() == [1, 3]


def test_a_store_that_does_not_answer_is_no_damage_and_no_fresh_start(folder, monkeypatch):
    saver = checkpointer(folder)
    for step in (1, 2):
        saver.save(step, state(step), {})
    memory = fsspec.filesystem("memory")
    for method in ("ls", "cat_file", "open"):
        with monkeypatch.context() as context:

            def away(*args, **kwargs):
                raise TimeoutError("no answer")

            context.setattr(memory, method, away)
            with pytest.raises(Unreachable, match="no answer"):
                saver.find("auto")
    assert saver.find("auto") == folder / "step-00000002"


REPLACING = """
import os, sys, torch
from pathlib import Path
from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.comm.local import LocalCommunicator

def save(value, folder, saver=None):
    saver = saver or DcpCheckpointer(folder, LocalCommunicator())
    saver.save(2, {"w": torch.full((9,), value)}, {})
    return saver

moment = 0
while True:
    moment += 1
    folder = Path(sys.argv[1]) / str(moment)
    saver = save(1.0, folder)
    child = os.fork()
    if child == 0:
        for_real, count = os.rename, 0
        def rename(*args, **kwargs):
            global count
            count += 1
            if count == moment:
                os._exit(1)
            for_real(*args, **kwargs)
        os.rename = rename
        save(2.0, folder, saver)
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        break
print(moment)
"""


def test_a_process_killed_while_it_replaces_a_checkpoint_loses_none(tmp_path):
    command = [sys.executable, "-c", REPLACING, str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    moments = int(done.stdout)
    assert moments > 3  # the new one in its place, the old one away, the new one to its name
    values = []
    for moment in range(1, moments + 1):
        saver = checkpointer(tmp_path / str(moment))
        values.append(float(saver.load({"w": torch.zeros(9)})["w"][0]))
        assert find("auto", saver.folder) is not None
    assert values[0] == 1.0
    assert values == sorted(values)
    assert values[-1] == 2.0
    assert [path.name for path in candidates(tmp_path / str(moments))] == ["step-00000002"]


# -- places ---------------------------------------------------------------------------------------


def test_a_path_stays_a_path_and_a_url_is_one(tmp_path):
    assert parse_storage_path(str(tmp_path)) == tmp_path
    assert parse_storage_path(f"file://{tmp_path}") == tmp_path
    assert parse_storage_path("~") == Path.home()
    place = parse_storage_path("memory://bucket/a/b/", {"some": 1})
    assert isinstance(place, RemotePath)
    assert (str(place), place.name, str(place.parent)) == (
        "memory://bucket/a/b",
        "b",
        "memory://bucket/a",
    )
    assert pickle.loads(pickle.dumps(place)) == place
    assert place / "c" == parse_storage_path("memory://bucket/a/b/c")


def test_a_url_of_no_known_kind_offers_the_nearest():
    with pytest.raises(ConfigError, match=r"memroy://x: nothing is known .*did you mean 'memory'"):
        parse_storage_path("memroy://x")


def test_a_library_that_is_missing_is_named_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(ResourceError) as caught:
        parse_storage_path("s3://bucket/run")
    assert str(caught.value).startswith("s3://bucket/run needs the library s3fs")
    assert caught.value.fix == "pip install 'torsh-trainer[s3]'"
    with pytest.raises(ResourceError) as caught:
        parse_storage_path("gs://bucket/run")
    assert caught.value.fix == "pip install gcsfs"


def test_options_of_a_store_reach_it_as_they_are():
    options = CheckpointOptions(storage_options={"nonsense": 1})
    with pytest.raises(Unreachable, match="nonsense"):
        parse_storage_path("s3://bucket/run", options.storage_options).exists()


def test_what_ranks_tell_one_another_through_files_is_no_code(folder):
    saver = checkpointer(folder, mode="async")
    saver.save(1, state(1.0), {})
    part = saver._saving.write()
    saver.close()
    again = Part.unpack(part.pack())
    assert again == part
    refused = Part(None, ConfigError("it is so", fix="do that", path="here"))
    back = Part.unpack(refused.pack()).error
    assert (type(back), str(back), back.facts) == (
        ConfigError,
        str(refused.error),
        {"path": "here"},
    )
