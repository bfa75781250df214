"""docs/user_code.md, done as it says: its files written, its commands run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("warm_interpreters")

FILE = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def page() -> str:
    return (Path(__file__).parents[2] / "docs" / "user_code.md").read_text()


@pytest.fixture
def project(page, tmp_path) -> Path:
    for name, text in FILE.findall(page):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def commands(page: str) -> list[list[str]]:
    """The arguments of every command on the page."""
    lines = "".join(COMMANDS.findall(page)).replace("\\\n", " ").splitlines()
    words = [shlex.split(line) for line in lines]
    assert all(line[:3] == ["python", "-m", "torsh_trainer"] for line in words)
    return [line[3:] for line in words]


def results(project: Path) -> list[dict[str, Any]]:
    """Of the runs so far, the oldest first."""
    found = sorted(project.glob("runs/waves/*/result.json"), key=lambda path: path.parent.name)
    return [json.loads(path.read_text()) for path in found]


def test_every_command_of_the_page_works(page, project, run_door, warm_door):
    for args in commands(page):
        several = any("num_processes" in text for text in args)
        answer = (run_door if several else warm_door)(args, project)
        assert answer.returncode == 0, (args, answer.stdout + answer.stderr)
    first, sharded, deeper, stopped = results(project)
    assert first["metrics"]["test_accuracy"] > 0.95
    assert (sharded["strategy"], sharded["world_size"]) == ("fsdp", 2)
    assert deeper["steps"] == first["steps"]
    assert stopped["steps"] < first["steps"]
    assert len(list(project.glob("runs/sweeps/*/*/result.json"))) == 2


@pytest.mark.exhaustive
def test_its_code_is_found_from_another_directory(project, run_door):
    (project / "elsewhere").mkdir()
    args = ["--config-dir", "../conf", "+recipe=waves", "trainer.max_steps=1"]
    answer = run_door([*args, "launcher.num_processes=2"], project / "elsewhere")
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.parametrize(
    "change",
    ["task._target_=my_project.task.TelApart", "model.hiden=3", "model.hidden=big"],
)
def test_mistakes_are_told_as_the_page_says(page, project, door, change):
    answer = door("--config-dir", "conf", "+recipe=waves", change)
    assert answer.code == 2
    said = answer.err.strip().removeprefix("error: ").partition(" (to hand it to")[0]
    assert f"`{said}`" in page


def test_a_recipe_in_a_folder_that_was_not_named_is_told(project, door):
    answer = door("+recipe=waves")
    assert answer.code == 2
    assert "unknown recipe 'waves'; add --config-dir conf" in answer.err


def test_a_place_that_a_recipe_has_filled_from_a_group_takes_another_option(tmp_path, door):
    files = {
        "conf/mine/sizes/small.yaml": "in_features: 4\n",
        "conf/mine/sizes/large.yaml": "in_features: 8\n",
        "conf/recipes/sized/recipe.yaml": "defaults:\n  - /mine/sizes@model: small\n"
        "  - override /task: classification\n  - override /model: mlp\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    args = ["--config-dir", str(tmp_path / "conf"), "+recipe=sized"]
    for choice, features in (([], 4), (["mine/sizes@model=large"], 8)):
        config = door(*args, *choice, "--cfg", "job").config
        assert config["model"]["in_features"] == features


SAYS = """
import json
import os

from torsh_trainer.callbacks.base import Callback


class Says(Callback):
    def __init__(self, **said):
        self.said = said

    def on_start(self, info):
        with open(f"said-{os.environ['RANK']}.json", "w") as file:
            json.dump(self.said, file)
"""


def test_what_hydra_and_the_clock_say_is_the_same_on_processes_that_torchrun_has_started(
    project, warm_door
):
    (project / "my_project" / "says.py").write_text(SAYS)
    says = {
        "_target_": "my_project.says.Says",
        "folder": "${vars.paths.output_dir}/kept",
        "at": "${now:%H-%M-%S-%f}",
        "size": "${hydra:runtime.choices}",
    }
    args = ["--config-dir", "conf", "+recipe=waves", "trainer.max_steps=1", "strategy=ddp"]
    args += [f"+callbacks.says.{name}={value}" for name, value in says.items()]
    args += ["vars.paths.output_dir=${hydra:runtime.output_dir}"]
    answer = warm_door(args, project, processes=2)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    main, other = (json.loads((project / f"said-{rank}.json").read_text()) for rank in range(2))
    assert main == other
    (run,) = project.glob("runs/waves/*")
    assert main["folder"] == f"{run}/kept"
    assert main["size"]["strategy"] == "ddp"
