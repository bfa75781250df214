"""``rerun RUN [overrides]``: a run again, from its directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from torsh_trainer.config.rerun import merge_overrides

QUICK = "+recipe=quick.yaml"


@pytest.fixture
def first(door, home) -> Path:
    """A run that exists."""
    answer = door(QUICK, "trainer.seed=4", "strategy=ddp", "strategy.overlap=false")
    assert answer.code == 0, answer.err
    (run,) = (home / "runs" / "quick").iterdir()
    return run


def test_a_run_is_repeated_with_the_same_result_in_a_directory_of_its_own(door, first):
    assert door("rerun", str(first)).code == 0
    (again,) = [path for path in first.parent.iterdir() if path != first]
    results = [json.loads((run / "result.json").read_text()) for run in (first, again)]
    assert results[0]["train_loss"] == results[1]["train_loss"]
    configs = [yaml.safe_load((run / "config.yaml").read_text()) for run in (first, again)]
    assert configs[0] == configs[1]


def test_later_overrides_win(door, first):
    config = door("rerun", str(first), "trainer.seed=5", "--cfg", "job").config
    assert config["trainer"]["seed"] == 5
    assert config["strategy"]["overlap"] is False


def test_a_rerun_can_be_repeated(door, first):
    assert door("rerun", str(first), "trainer.seed=5").code == 0
    (again,) = [path for path in first.parent.iterdir() if path != first]
    assert door("rerun", str(again), "--cfg", "job").config["trainer"]["seed"] == 5


def test_the_recipe_is_found_from_another_directory(door, first, home, monkeypatch):
    (home / "elsewhere").mkdir()
    monkeypatch.chdir(home / "elsewhere")
    assert door("rerun", str(first), "--cfg", "job").config["trainer"]["seed"] == 4


def test_another_recipe_takes_the_place_of_the_first(door, first, home):
    (home / "other.yaml").write_text("defaults: [/recipe/digits]\n")
    config = door("rerun", str(first), "+recipe=other.yaml", "--cfg", "job").config
    assert config["model"]["_target_"].endswith("SmallCNN")
    assert config["trainer"]["seed"] == 4


def test_another_engine_is_told_which_override_of_the_first_run_it_cannot_take(door, first):
    answer = door("rerun", str(first), "strategy=fsdp")
    assert answer.code == 2
    assert "unknown knob strategy.overlap, which the earlier run set" in answer.err
    assert "~strategy.overlap" in answer.err
    answer = door("rerun", str(first), "strategy=fsdp", "~strategy.overlap", "--cfg", "job")
    assert answer.config["strategy"]["_target_"].endswith("FSDP")


def test_the_users_folder_is_remembered(door, home):
    recipe = home / "conf" / "recipes" / "mine" / "recipe.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text((home / "quick.yaml").read_text())
    assert door("--config-dir", "conf", "+recipe=mine").code == 0
    (run,) = (home / "runs" / "mine").iterdir()
    assert door("rerun", str(run), "--cfg", "job").config["trainer"]["max_steps"] == 2
    recipe.parent.parent.parent.rename(home / "moved")
    answer = door("rerun", str(run))
    assert answer.code == 2
    assert "which is gone; give --config-dir with the folder's new place" in answer.err
    answer = door("rerun", str(run), "--config-dir", "moved", "--cfg", "job")
    assert answer.config["trainer"]["max_steps"] == 2


def test_a_recipe_file_that_is_gone_is_named(door, first, home):
    (home / "quick.yaml").rename(home / "renamed.yaml")
    answer = door("rerun", str(first))
    assert answer.code == 2
    assert f"was made from {home}/quick.yaml, which is gone" in answer.err
    assert door("rerun", str(first), "+recipe=renamed.yaml", "--cfg", "job").code == 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "none is named; write rerun RUN_DIRECTORY"),
        (["nowhere"], "nowhere is no directory"),
        (["empty"], "empty is no run of this command line: it has no .hydra/overrides.yaml"),
    ],
)
def test_what_is_no_run_is_refused(door, home, args, said):
    (home / "empty").mkdir()
    answer = door("rerun", *args)
    assert answer.code == 2
    (line,) = answer.err.splitlines()
    assert said in line


@pytest.mark.parametrize(
    ("earlier", "later", "expected"),
    [
        (["a=1", "b=2"], ["a=3"], ["b=2", "a=3"]),
        (["+a=1"], ["a=3"], ["a=3"]),
        (["a=1"], ["+a=3"], ["+a=3"]),
        (["a=1", "b=2"], ["~a"], ["b=2"]),
        (["a=1"], ["~b"], ["a=1", "~b"]),
        (["~a"], ["a=1"], ["a=1"]),
        (["strategy=ddp"], ["strategy=fsdp"], ["strategy=fsdp"]),
        (["a@b=1"], ["a=2"], ["a=2"]),
    ],
)
def test_overrides_merge_by_key(earlier, later, expected):
    assert merge_overrides(earlier, later) == expected
