"""Classes of one's own, named with `_target_`: on the command line, in a recipe, in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("warm_interpreters")

MINE = """\
import torch
from torch.utils.data import TensorDataset

from torsh_trainer import Callback, DataSource
from torsh_trainer.strategies.single import Single


class Points(DataSource):
    def __init__(self, count: int = 16):
        data = TensorDataset(torch.randn(count, 4), torch.randint(0, 2, (count,)))
        self.train = self.eval = data


class Net(torch.nn.Module):
    def __init__(self, hidden: int = 8):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, hidden), torch.nn.Linear(hidden, 2))

    def forward(self, points):
        return self.layers(points)


class Stop(Callback):
    def __init__(self, at: int):
        self.at = at

    def on_step(self, report):
        return report.step >= self.at


class Own(Single):
    pass
"""
QUIET = [
    "launcher=inline",
    "log_level=warning",
    "callbacks.console.enabled=false",
    "logger.tensorboard.enabled=false",
    "checkpoint.at_end=false",
    "trainer.eval_every_epochs=null",
]
LOADING = {"batch_size": 8, "shuffle": True, "weighted": False, "num_workers": 0}
RECIPE = """\
task: {_target_: torsh_trainer.tasks.classification.Classification}
model: {_target_: mine_of_door.Net}
data: {_target_: mine_of_door.Points, count: 24}
strategy: {_target_: mine_of_door.Own}
callbacks: {stop: {_target_: mine_of_door.Stop, at: 3}}
"""


@pytest.fixture
def mine(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with code of one's own, and a recipe that names its classes."""
    (home / "mine_of_door.py").write_text(MINE)
    (home / "mine.yaml").write_text(RECIPE)
    monkeypatch.syspath_prepend(str(home))
    return home


def test_classes_that_the_command_line_alone_names_are_trained(mine, door):
    answer = door(
        *QUIET,
        "task=classification",
        "data._target_=mine_of_door.Points",
        "data.count=32",
        "data.batch_size=8",
        "data.weighted=false",
        "model._target_=mine_of_door.Net",
        "model.hidden=5",
        "strategy._target_=mine_of_door.Own",
        "callbacks.stop._target_=mine_of_door.Stop",
        "callbacks.stop.at=2",
        "trainer.max_steps=9",
        "hydra.run.dir=out",
    )
    assert answer.code == 0, answer.err
    assert '"steps": 2' in (mine / "out/result.json").read_text()


@pytest.mark.parametrize(
    "typed",
    [
        ["data._target_=mine_of_door.Points", "data.count=3"],
        ["data={_target_: mine_of_door.Points, count: 3}"],
        ["+data={_target_: mine_of_door.Points, count: 3}"],
        ["+recipe=mine.yaml", "data.count=3"],
        ["+recipe=digits", "data._target_=mine_of_door.Points", "data.count=3"],
        ["--config-dir", "conf", "data=points", "data.count=3"],
    ],
    ids=" ".join,
)
def test_whoever_names_a_source_gets_the_knobs_of_loading_and_no_others(mine, door, typed):
    (mine / "conf/data").mkdir(parents=True)
    (mine / "conf/data/points.yaml").write_text("_target_: mine_of_door.Points\ncount: 16\n")
    node = door(*typed, "data.batch_size=8", "--cfg", "job").config["data"]
    assert node["count"] == 3
    assert {name: node[name] for name in LOADING} == LOADING
    assert "eval_fraction" not in node


def test_a_knob_that_neither_the_source_nor_loading_has_is_refused(mine, door):
    own = [*QUIET, "task=classification", "model._target_=mine_of_door.Net"]
    answer = door(*own, "data._target_=mine_of_door.Points", "data.bach_size=8")
    assert "unknown knob data.bach_size; did you mean data.batch_size" in answer.err
    answer = door(*QUIET, "+recipe=mine.yaml", "data.bach_size=8")
    assert "did you mean data.batch_size" in answer.err


def test_a_recipes_own_classes_do_not_get_the_knobs_of_options_chosen_before(mine, door):
    (mine / "more.yaml").write_text("defaults: [/recipe/digits]\n" + RECIPE)
    config = door("+recipe=more.yaml", "--cfg", "job").config
    assert config["strategy"] == {"_target_": "mine_of_door.Own"}
    assert "eval_fraction" not in config["data"]
    assert "in_features" not in config["model"]


def test_an_option_that_is_chosen_beside_a_class_keeps_its_knobs(mine, door):
    (mine / "more.yaml").write_text("defaults: [override /strategy: ddp]\n" + RECIPE)
    assert "zero1" in door("+recipe=more.yaml", "--cfg", "job").config["strategy"]
    typed = ["strategy=ddp", "strategy._target_=mine_of_door.Own"]
    assert "zero1" in door(*typed, "--cfg", "job").config["strategy"]


def test_a_callback_of_a_recipe_is_switched_off_like_any_other(mine, door):
    answer = door(
        "+recipe=mine.yaml",
        *QUIET,
        "callbacks.stop.enabled=false",
        "trainer.max_steps=4",
        "data.batch_size=8",
        "hydra.run.dir=out",
    )
    assert answer.code == 0, answer.err
    assert '"steps": 4' in (mine / "out/result.json").read_text()
    assert "did you mean callbacks.stop" in door("+recipe=mine.yaml", "callbacks.stp.at=1").err


def test_a_run_with_classes_named_on_its_command_line_is_repeated(mine, door):
    typed = ["+recipe=mine.yaml", *QUIET, "trainer.max_steps=1", "data.batch_size=8"]
    typed += ["model._target_=mine_of_door.Net", "model.hidden=3", "hydra.run.dir=out"]
    assert door(*typed).code == 0
    assert door("rerun", "out", "hydra.run.dir=again").code == 0
    again = door("rerun", "out", "model.hidden=4", "--cfg", "job").config
    assert again["model"] == {"_target_": "mine_of_door.Net", "hidden": 4}


def test_defaults_that_are_no_list_are_refused_with_their_file(mine, door):
    (mine / "odd.yaml").write_text("defaults: 3\n")
    answer = door("+recipe=odd.yaml")
    assert answer.code == 2
    assert "odd.yaml: defaults is 3, and no list; write" in answer.err


def test_code_in_src_of_a_project_is_found(home, run_door):
    (home / "src/inner_of_door").mkdir(parents=True)
    (home / "src/inner_of_door/__init__.py").write_text(MINE)
    (home / "mine.yaml").write_text(RECIPE.replace("mine_of_door", "inner_of_door"))
    typed = ["+recipe=mine.yaml", *QUIET[1:], "data.batch_size=8", "trainer.max_steps=4"]
    answer = run_door(typed, home)
    assert answer.returncode == 2
    assert "it lies in src/, which counts beside a pyproject.toml" in answer.stderr
    (home / "pyproject.toml").write_text("[project]\nname = 'inner'\n")
    answer = run_door(typed, home)
    assert answer.returncode == 0, answer.stderr
