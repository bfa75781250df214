"""Saving and loading on one process, without a process group."""

from __future__ import annotations

import copy
import json
import logging
import resource
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.checkpoint.store import integrity
from torsh_trainer.checkpoint.store.finding import find
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.errors import ConfigError, ResourceError, TrainingError


def checkpointer(folder: Path, **options) -> DcpCheckpointer:
    return DcpCheckpointer(folder, LocalCommunicator(), CheckpointOptions(**options))


def trained(seed: int = 0, steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> dict:
    names = {id(p): name for name, p in model.named_parameters()}
    slots = {names[id(p)]: dict(s) for p, s in optimizer.state.items()}
    groups = [
        {**group, "params": [names[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {
        "engine": {
            "model": dict(model.state_dict()),
            "optimizer": {"main": {"state": slots, "groups": groups}},
        },
        "position": {"step": step, "samples": step * 16},
        "rng": {"rank_0": torch.get_rng_state()},
        "callbacks": {},
    }


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_same(found[key], value)
        elif isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype
            assert torch.equal(found[key], value), key
        else:
            assert found[key] == value, key


def flip_a_bit(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@contextmanager
def files_of_at_most(size_bytes: int):
    """What a full disk looks like, wherever this runs: the kernel refuses to write on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# -- what was saved comes back --------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_state_comes_back_bit_for_bit(tmp_path, mode):
    saved = state_of(*trained(seed=1), step=3)
    expected = copy.deepcopy(saved)
    first = checkpointer(tmp_path, mode=mode)
    path = first.save(3, saved, {"loss": 0.5})
    first.close()
    assert path == tmp_path / "step-00000003"

    target = state_of(*trained(seed=2))
    weight = target["engine"]["model"]["0.weight"]
    loaded = checkpointer(tmp_path).load(target)
    assert_same(loaded, expected)
    assert loaded["engine"]["model"]["0.weight"] is weight  # filled in place


def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path):
    model, optimizer = trained(steps=3)
    checkpointer(tmp_path).save(3, state_of(model, optimizer), {})
    again, its_optimizer = trained(seed=5, steps=1)
    state = checkpointer(tmp_path).load(state_of(again, its_optimizer))
    again.load_state_dict(state["engine"]["model"])
    torch.manual_seed(9)
    for net, optim in ((model, optimizer), (again, its_optimizer)):
        torch.manual_seed(9)
        net(torch.randn(16, 4)).square().mean().backward()
        optim.zero_grad()
        net(torch.randn(16, 4)).square().mean().backward()
        optim.step()
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_plain_pytorch_reads_the_tensors(tmp_path):
    model, optimizer = trained(seed=1)
    path = checkpointer(tmp_path).save(3, state_of(model, optimizer), {})
    other, _ = trained(seed=2)
    tensors = {"engine": {"model": dict(other.state_dict())}}
    dcp.load(tensors, checkpoint_id=path, no_dist=True)
    assert_same(tensors["engine"]["model"], dict(model.state_dict()))


def test_async_saves_the_moment_of_the_call_and_lets_training_go_on(tmp_path):
    weight = torch.zeros(1000)
    saver = checkpointer(tmp_path, mode="async")
    for step in range(1, 4):
        weight.fill_(step)
        saver.save(step, {"model": {"weight": weight}}, {})
        weight.fill_(-1.0)  # while the thread may still be writing
    saver.close()
    assert saver.steps() == [1, 2, 3]
    for step in (1, 2, 3):
        loaded = saver.load({"model": {"weight": torch.empty(1000)}}, step)
        assert torch.equal(loaded["model"]["weight"], torch.full((1000,), float(step)))


def test_an_async_save_completes_though_nobody_closes(tmp_path):
    script = (
        "import sys, torch\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from test_checkpoint import checkpointer\n"
        "checkpointer(Path(sys.argv[1]), mode='async').save(1, {'w': torch.ones(9)}, {})\n"
    )
    here = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", script, str(tmp_path), here], check=True)
    loaded = checkpointer(tmp_path).load({"w": torch.empty(9)})
    assert torch.equal(loaded["w"], torch.ones(9))


def test_views_empty_and_scalar_tensors_of_every_type_come_back(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    saved = {
        "transposed": base.t(),
        "expanded": torch.ones(1, 3).expand(5, 3),
        "part": base[1:3, ::2],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "complex": torch.ones(2, dtype=torch.complex64),
    }
    checkpointer(tmp_path).save(1, saved, {})
    target = {
        name: torch.zeros_like(t, memory_format=torch.contiguous_format)
        for name, t in saved.items()
    }
    assert_same(checkpointer(tmp_path).load(target), saved)


def test_a_file_of_the_checkpoint_holds_no_path_of_this_machine(tmp_path):
    path = checkpointer(tmp_path).save(1, {"w": torch.ones(3)}, {})
    for file in path.iterdir():
        assert str(tmp_path).encode() not in file.read_bytes(), file.name


def test_the_manifest_says_what_is_there(tmp_path):
    saver = DcpCheckpointer(tmp_path, LocalCommunicator(), facts={"strategy": "single"})
    path = saver.save(7, {"w": torch.ones(3)}, {"loss": float("nan"), "accuracy": 0.5})
    manifest = integrity.read_manifest(path)
    assert (manifest.step, manifest.world_size) == (7, 1)
    assert manifest.facts["strategy"] == "single"
    assert manifest.facts["torch"] == torch.__version__
    assert manifest.metrics == {"loss": None, "accuracy": 0.5}
    files = {file.name for file in path.iterdir()} - {"manifest.json"}
    assert set(manifest.files) == files
    assert manifest.files == {name: integrity.digest(path / name) for name in files}


# -- what does not fit is named -------------------------------------------------------------------


def save_model(folder: Path) -> None:
    model = {"a": torch.ones(3, 4), "b": torch.ones(2), "c": torch.ones(2)}
    checkpointer(folder).save(1, {"engine": {"model": model}}, {})


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"a": torch.zeros(3, 4), "b": torch.zeros(2)}, "only in it: engine.model.c"),
        (
            {n: torch.zeros(2) for n in "bcde"} | {"a": torch.zeros(3, 4)},
            "missing from it: engine.model.d, engine.model.e",
        ),
        (
            {"a": torch.zeros(5, 4), "b": torch.zeros(2), "c": torch.zeros(2)},
            r"engine.model.a \(\[3, 4\] float32 there, \[5, 4\] float32 here\)",
        ),
        (
            {"a": torch.zeros(3, 4), "b": torch.zeros(2).long(), "c": torch.zeros(2)},
            r"engine.model.b \(\[2\] float32 there, \[2\] int64 here\)",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_refused_by_name_and_not_touched(tmp_path, model, words):
    save_model(tmp_path)
    with pytest.raises(ConfigError, match=words) as caught:
        checkpointer(tmp_path).load({"engine": {"model": model}})
    assert "checkpoint.resume=never" in caught.value.fix
    assert all(not tensor.any() for tensor in model.values())


def test_a_parameter_without_optimizer_state_in_the_checkpoint_has_none_afterwards(tmp_path):
    def state(names):
        slots = {n: {"exp_avg": torch.ones(2), "step": 1} for n in names}
        return {"optimizer": {"main": {"state": slots, "groups": [{"params": ["a", "b"]}]}}}

    checkpointer(tmp_path).save(1, state("a"), {})
    loaded = checkpointer(tmp_path).load(state("ab"))
    assert list(loaded["optimizer"]["main"]["state"]) == ["a"]


def test_an_optimizer_of_another_kind_is_refused(tmp_path):
    def state(slot):
        return {"optimizer": {"main": {"state": {"a": {slot: torch.ones(2)}}}}}

    checkpointer(tmp_path).save(1, state("momentum_buffer"), {})
    with pytest.raises(ConfigError, match=r"missing.*a\.exp_avg.*only in it.*a\.momentum_buffer"):
        checkpointer(tmp_path).load(state("exp_avg"))


def test_callbacks_and_random_states_come_back_as_saved_whatever_the_run_has_now(tmp_path):
    saved = {
        "model": {"w": torch.ones(2)},
        "callbacks": {"Gone": {"best": torch.ones(3)}, "Both": {"n": 4}},
        "rng": {"rank_0": torch.arange(5), "rank_1": torch.arange(6)},
    }
    checkpointer(tmp_path).save(1, saved, {})
    now = {
        "model": {"w": torch.zeros(2)},
        "callbacks": {"New": {"best": torch.ones(1)}, "Both": {"n": 0}},
        "rng": {"rank_0": torch.zeros(9), "rank_7": torch.zeros(5)},
        "task": {},
    }
    assert_same(checkpointer(tmp_path).load(now), {**saved, "task": {}})


def test_what_cannot_be_saved_is_named_and_the_old_checkpoint_stays(tmp_path):
    saver = checkpointer(tmp_path)
    saver.save(1, {"w": torch.ones(2)}, {})
    with pytest.raises(ConfigError, match=r"callbacks\.Odd: it is a object"):
        saver.save(2, {"w": torch.ones(2), "callbacks": {"Odd": object()}}, {})
    assert saver.steps() == [1]


def test_two_tensors_of_one_dotted_name_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"both called model\.a\.b"):
        checkpointer(tmp_path).save(
            1, {"model": {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}}, {}
        )


def test_loading_what_was_never_saved_names_the_next_move(tmp_path):
    with pytest.raises(
        ConfigError, match=r"no checkpoint in .*; start with checkpoint.resume=never"
    ):
        checkpointer(tmp_path / "none").load({})
    saver = checkpointer(tmp_path)
    saver.save(4, {"w": torch.ones(2)}, {})
    with pytest.raises(ConfigError, match=r"no checkpoint of step 5 .* those of steps 4"):
        saver.load({"w": torch.ones(2)}, 5)


def test_an_unknown_mode_offers_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'async'"):
        CheckpointOptions(mode="asynk")  # type: ignore[arg-type]


# -- retention ------------------------------------------------------------------------------------


def test_keep_last_deletes_the_oldest_of_this_run_and_nothing_else(tmp_path):
    state = {"w": torch.ones(2)}
    checkpointer(tmp_path).save(1, state, {})  # another run's
    (tmp_path / "step-00000002").mkdir()  # not a checkpoint
    (tmp_path / "notes.txt").write_text("mine")
    saver = checkpointer(tmp_path, keep_last=2)
    for step in (3, 4, 5, 6):
        saver.save(step, state, {})
    assert saver.steps() == [1, 5, 6]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes.txt",
        "step-00000001",
        "step-00000002",
        "step-00000005",
        "step-00000006",
    ]


def test_a_resumed_run_goes_on_deleting_what_it_saved_before(tmp_path):
    state = {"w": torch.ones(2)}
    first = checkpointer(tmp_path)
    for step in (1, 2):
        first.save(step, state, {})
    second = checkpointer(tmp_path, keep_last=2)
    second.load(state)
    second.save(3, state, {})
    assert second.steps() == [2, 3]


def test_after_going_back_the_newest_is_the_one_saved_last(tmp_path):
    saver = checkpointer(tmp_path, keep_last=2)
    for step in (1, 2, 3):
        saver.save(step, {"w": torch.full((1,), float(step))}, {})
    saver.load({"w": torch.ones(1)}, 2)
    saver.save(2, {"w": torch.full((1,), 20.0)}, {})
    assert saver.steps() == [2, 3]
    assert saver.load({"w": torch.ones(1)})["w"].item() == 20.0
    assert find("auto", tmp_path) == tmp_path / "step-00000002"


# -- a disk that fails ----------------------------------------------------------------------------


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
from test_checkpoint import checkpointer
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


# -- checkpoint.resume ----------------------------------------------------------------------------


def save_steps(folder: Path, *steps: int) -> None:
    saver = checkpointer(folder)
    for step in steps:
        saver.save(step, {"w": torch.full((50,), float(step))}, {})


def test_never_and_an_empty_folder_start_afresh(tmp_path):
    save_steps(tmp_path / "full", 1)
    assert find("never", tmp_path / "full") is None
    assert find("auto", tmp_path) is None
    assert find("auto", tmp_path / "not there") is None


def test_auto_takes_the_newest_that_verifies_and_says_what_it_skips(tmp_path, caplog):
    save_steps(tmp_path, 1, 2, 3, 4)
    (tmp_path / "step-00000004" / "manifest.json").unlink()
    flip_a_bit(tmp_path / "step-00000003" / "__0_0.distcp", 1000)
    with caplog.at_level(logging.WARNING, logger="torsh_trainer"):
        assert checkpointer(tmp_path).find("auto") == tmp_path / "step-00000002"
    assert [record.getMessage().split(" is damaged")[0] for record in caplog.records] == [
        f"skipped: the checkpoint {tmp_path / 'step-00000004'}",
        f"skipped: the checkpoint {tmp_path / 'step-00000003'}",
    ]
    assert "has no manifest.json" in caplog.text
    assert "__0_0.distcp is not what was written" in caplog.text


def test_auto_does_not_start_afresh_over_checkpoints_that_are_all_damaged(tmp_path):
    save_steps(tmp_path, 1, 2)
    for path in tmp_path.iterdir():
        (path / "state.json").unlink()
    with pytest.raises(ResourceError, match=r"none of the 2 checkpoints .*checkpoint.resume=never"):
        find("auto", tmp_path)


def test_a_path_may_be_a_checkpoint_a_run_directory_or_a_folder_of_checkpoints(tmp_path):
    save_steps(tmp_path / "run" / "checkpoints", 1, 2)
    checkpoints = tmp_path / "run" / "checkpoints"
    assert find(str(checkpoints / "step-00000001"), tmp_path) == checkpoints / "step-00000001"
    assert find(str(tmp_path / "run"), tmp_path) == checkpoints / "step-00000002"
    assert find(str(checkpoints), tmp_path) == checkpoints / "step-00000002"
    shutil.copytree(checkpoints / "step-00000001", tmp_path / "best")
    loaded = checkpointer(tmp_path).load(
        {"w": torch.zeros(50)}, path=find(str(tmp_path / "best"), tmp_path)
    )
    assert loaded["w"][0].item() == 1.0


def test_a_path_without_a_checkpoint_is_a_configuration_error(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "notes.txt").write_text("7")
    save_steps(tmp_path / "runs" / "first" / "checkpoints", 1)
    for given, says in {
        str(
            tmp_path / "7"
        ): r"there is no checkpoint in .*7; give auto, best, never, or the path of",
        str(tmp_path / "8" / "9"): "nothing is there; give auto, best, never, or the path of",
        str(tmp_path / "notes.txt"): "that is a file, and a checkpoint is a folder; give auto",
        str(tmp_path / "runs"): r"in .*runs; name a run in it, such as .*runs/first",
        str(tmp_path / "runs" / "frist"): "nothing is there; did you mean 'first'",
        "Auto": r"checkpoint\.resume=Auto: nothing is there; did you mean 'auto'",
        "": r"checkpoint\.resume=: nothing is there; give auto, best, never, or the path of",
    }.items():
        with pytest.raises(ConfigError, match=says):
            find(given, tmp_path)


def test_looking_for_checkpoints_needs_no_torch(tmp_path):
    save_steps(tmp_path, 1)
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from torsh_trainer.checkpoint.store.finding import find\n"
        "print(find('auto', Path(sys.argv[1])).name, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert told.split() == ["step-00000001", "False"]
