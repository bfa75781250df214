"""Saving and loading on one process, without a process group."""

from __future__ import annotations

import copy
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import assert_same, checkpointer, flip_a_bit, state_of, trained

from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.checkpoint.store import integrity
from torsh_trainer.checkpoint.store.finding import find
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.errors import ConfigError, ResourceError


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
        "from checkpoints import checkpointer\n"
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
