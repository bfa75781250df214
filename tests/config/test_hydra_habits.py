"""What who knows Hydra types: it does what they expect, or a command that runs is shown."""

from __future__ import annotations

import shlex

import pytest

SHOWN = "write python -m torsh_trainer "


@pytest.fixture
def folders(home):
    """A recipe beside, one in `conf/`, and a group there."""
    (home / "conf/model").mkdir(parents=True)
    (home / "conf/mine.yaml").write_text((home / "quick.yaml").read_text())
    (home / "conf/model/wide.yaml").write_text("defaults: [mlp]\nhidden: [99]\n")


@pytest.mark.parametrize(
    "typed",
    [
        ["-cn", "quick", "trainer.seed=7"],
        ["--config-name=quick", "trainer.seed=7"],
        ["--config-name", "quick.yaml", "trainer.seed=7"],
        ["-cn", "digits", "trainer.seed=7"],
        ["--config-path", "conf", "--config-name", "mine", "model=wide", "trainer.seed=7"],
        ["trainer.seed=7", "-cp", "conf", "+recipe=quick.yaml", "model=wide"],
        ["--resolve", "+recipe=quick.yaml", "trainer.seed=7"],
        ["--package", "trainer", "+recipe=quick.yaml", "trainer.seed=7"],
    ],
    ids=" ".join,
)
def test_what_to_type_instead_is_a_command_that_runs(door, folders, typed):
    answer = door(*typed)
    assert answer.code == 2
    shown = shlex.split(answer.err.strip().partition(SHOWN)[2])
    assert shown
    again = door(*shown, *(() if "--cfg" in shown else ("--cfg", "job")))
    config = again.config
    assert config.get("trainer", config)["seed"] == 7
    if "model=wide" in typed:
        assert config["model"]["hidden"] == [99]


def test_a_verb_is_part_of_the_command_that_is_shown(door):
    assert (
        f"{SHOWN}rerun --cfg job --resolve runs/one" in door("rerun", "--resolve", "runs/one").err
    )


def test_info_by_itself_shows_all_before_an_override_too(door, home):
    for typed in (["--info", "+recipe=quick.yaml"], ["+recipe=quick.yaml", "-i"]):
        answer = door(*typed)
        assert answer.code == 0, answer.err
        assert "Defaults List" in answer.out + answer.err
    assert "invalid choice: 'serchpath'" in door("--info", "serchpath").err


def test_hydra_help_tells_what_there_is_of_it(door):
    answer = door("--hydra-help")
    assert answer.code == 0
    for words in ("hydra/sweeper=optuna", "--cfg hydra", "--config-dir", "--multirun"):
        assert words in answer.out
    assert door("--cfg", "hydra").code == 0
