"""A run started from the command line: its directory, what it keeps, and who may write."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from torsh_trainer.config import command_line, training
from torsh_trainer.config.roots import find_roots
from torsh_trainer.errors import ConfigError, TrainingError
from torsh_trainer.utils.signals import signal_name

pytestmark = pytest.mark.usefixtures("warm_interpreters")

QUICK = "+recipe=quick.yaml"


def only_run(home: Path, name: str = "quick") -> Path:
    (found,) = (home / "runs" / name).iterdir()
    return found


class Recorder:
    """Stands where ``assemble.run`` does, and remembers what it was given."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, config: dict[str, Any], **given: Any) -> dict[str, Any]:
        self.calls.append({"config": config, **given})
        return {"metrics": {}, "train_loss": 1.0}


def train(*args: str, run: Any, env: dict[str, str] | None = None) -> int:
    line = command_line.parse(args)
    return training.train(line, find_roots(line.config_dir), run=run, wait=dict, env=env or {})


def test_a_run_trains_and_keeps_what_it_was_made_of(door, home):
    answer = door(QUICK, "trainer.seed=4")
    assert answer.code == 0, answer.err
    run = only_run(home)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d\.\d{6}", run.name)
    assert json.loads((run / "result.json").read_text())["steps"] == 2
    overrides = yaml.safe_load((run / ".hydra" / "overrides.yaml").read_text())
    assert overrides == [f"+recipe={home}/quick.yaml", "trainer.seed=4"]
    resolved = yaml.safe_load((run / "config.yaml").read_text())
    assert resolved == door("--cfg", "job", "--resolve", QUICK, "trainer.seed=4").config
    command = json.loads((run / "provenance.json").read_text())["command"]
    assert command == ["python", "-m", "torsh_trainer", *overrides]


def test_the_run_directory_is_named_by_the_recipe(home):
    (home / "mine").mkdir()
    (home / "quick.yaml").rename(home / "mine" / "recipe.yaml")
    recorder = Recorder()
    train("+recipe=mine/recipe.yaml", run=recorder)
    train("+recipe=digits", run=recorder)
    train("task=classification", run=recorder)
    names = [call["run_dir"].parent.name for call in recorder.calls]
    assert names == ["mine", "digits", "run"]


def test_the_configuration_arrives_plain_and_resolved(home):
    recorder = Recorder()
    train(QUICK, "vars.seed=9", "trainer.seed=${vars.seed}", run=recorder, env={"A": "1"})
    (call,) = recorder.calls
    assert type(call["config"]) is dict
    assert call["config"]["trainer"]["seed"] == 9
    assert type(call["config"]["trainer"]["frozen"]) is list


def test_user_code_is_found_in_the_current_directory_and_beside_the_conf_folder(home):
    (home / "project" / "conf").mkdir(parents=True)
    recorder = Recorder()
    train("--config-dir", "project/conf", QUICK, run=recorder)
    assert recorder.calls[0]["import_paths"] == (str(home), str(home / "project"))


def test_a_directory_that_holds_something_else_is_refused_and_untouched(door, home):
    (home / "thesis").mkdir()
    (home / "thesis" / "chapter1.tex").write_text("It began")
    answer = door(QUICK, "hydra.run.dir=thesis")
    assert answer.code == 2
    assert "thesis exists and is no run directory: it holds chapter1.tex" in answer.err
    assert [path.name for path in (home / "thesis").iterdir()] == ["chapter1.tex"]


def test_the_same_directory_again_goes_on_from_its_checkpoint(door, home):
    for steps in (2, 5):
        answer = door(QUICK, "hydra.run.dir=runs/mine", f"trainer.max_steps={steps}")
        assert answer.code == 0, answer.err
    assert json.loads((home / "runs" / "mine" / "result.json").read_text())["steps"] == 5
    rows = (home / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()
    steps = [row["step"] for row in map(json.loads, rows) if row["split"] == "train"]
    assert steps == sorted(set(steps))


def test_a_run_that_fails_before_it_begins_leaves_its_error(door, home):
    answer = door(QUICK, "trainer.max_steps=abc", "hydra.run.dir=runs/quick/named")
    assert answer.code == 2
    error = json.loads((only_run(home) / "result.json").read_text())["error"]
    assert error["type"] == "ConfigError"
    assert "trainer.max_steps: expected a whole number or null" in error["message"]


def test_the_error_of_a_run_is_not_hidden_by_the_result_of_an_earlier_one(door, home):
    assert door(QUICK, "hydra.run.dir=runs/mine").code == 0
    assert door(QUICK, "hydra.run.dir=runs/mine", "trainer.max_steps=abc").code == 2
    result = json.loads((home / "runs" / "mine" / "result.json").read_text())
    assert result["error"]["type"] == "ConfigError"


def test_an_exception_in_user_code_is_told_with_its_line_and_exits_3(door, home):
    (home / "broken_model.py").write_text(
        "from torsh_trainer.tasks.models import MLP\n\n\n"
        "class Broken(MLP):\n    def forward(self, x):\n        return x.view(-1, 7)\n"
    )
    answer = door(QUICK, "model._target_=broken_model.Broken")
    assert answer.code == 3
    (line,) = answer.err.splitlines()
    assert line.startswith("error: RuntimeError: ")
    assert "broken_model.py:6" in line
    assert "debug=true" in line


def test_an_evaluation_that_gives_no_mapping_is_told_what_to_give(door, home):
    (home / "broken_task.py").write_text(
        "import torch\nfrom torsh_trainer.tasks.classification import Classification\n\n\n"
        "class Broken(Classification):\n    def evaluate(self, model, batch):\n"
        "        return torch.tensor(3.0)\n"
    )
    answer = door(QUICK, "task._target_=broken_task.Broken")
    assert answer.code == 2
    said = "task.evaluate gave a Tensor, not a mapping of metrics; return {"
    assert answer.err.startswith(f"error: {said}")


def test_errors_keep_their_exit_codes(home):
    def fail(config: dict[str, Any], **given: Any) -> dict[str, Any]:
        raise TrainingError("the loss is not finite", fix="lower optimizer.lr")

    with pytest.raises(TrainingError, match="not finite"):
        train(QUICK, run=fail)
    error = json.loads((only_run(home) / "result.json").read_text())["error"]
    assert error["fix"] == "lower optimizer.lr"


def test_an_exception_while_the_users_objects_are_built_leaves_its_error(door, home):
    (home / "broken_data.py").write_text(
        "from torsh_trainer import DataSource\n\n\n"
        "class Broken(DataSource):\n    def __init__(self):\n        raise KeyError('oh no')\n"
    )
    answer = door("task=classification", "model=mlp", "+data={_target_: broken_data.Broken}")
    assert answer.code == 3
    assert "KeyError: 'oh no'" in answer.err
    assert "broken_data.py:6" in answer.err
    error = json.loads((only_run(home, "run") / "result.json").read_text())["error"]
    assert "oh no" in error["message"]


def test_a_run_directory_that_cannot_be_made_is_the_worlds_fault(door, home):
    (home / "file").write_text("")
    answer = door(QUICK, "hydra.run.dir=file/run")
    assert answer.code == 1
    (line,) = answer.err.splitlines()
    assert line.startswith("error: cannot use file/run: Not a directory")
    assert "hydra.run.dir" in line


TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}


def test_a_process_that_does_not_lead_makes_no_directory(home):
    recorder = Recorder()
    assert train(QUICK, run=recorder, env=TORCHRUN) == 0
    assert recorder.calls[0]["run_dir"] is None
    assert [path.name for path in home.iterdir()] == ["quick.yaml"]


def test_the_process_that_leads_names_the_directory(home):
    recorder = Recorder()
    assert train(QUICK, run=recorder, env={**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"}) == 0
    assert recorder.calls[0]["run_dir"] == only_run(home)


def test_all_processes_receive_the_same_configuration(home):
    recorder = Recorder()
    for rank in ("0", "1"):
        train(QUICK, run=recorder, env={**TORCHRUN, "RANK": rank, "LOCAL_RANK": rank})
    assert recorder.calls[0]["config"] == recorder.calls[1]["config"]


def test_a_sweep_among_several_processes_is_refused(home):
    with pytest.raises(ConfigError, match=r"torchrun has started this process as one of 2"):
        train(QUICK, "-m", "trainer.seed=1,2", run=Recorder(), env=TORCHRUN)


def test_variables_that_contradict_one_another_are_refused_only_when_training(door, monkeypatch):
    for name, value in {**TORCHRUN, "RANK": "7"}.items():
        monkeypatch.setenv(name, value)
    assert door("--cfg", "job", QUICK).code == 0
    assert door(QUICK).code == 2


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_the_command_of_the_readme_trains(run_door, tmp_path, processes):
    args = ["+recipe=digits", f"launcher.num_processes={processes}", "trainer.max_steps=3"]
    answer = run_door(args)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    result = json.loads((only_run(tmp_path, "digits") / "result.json").read_text())
    assert result["steps"] == 3
    assert result["world_size"] == processes


def test_a_wrong_knob_found_by_a_worker_exits_as_if_found_here(run_door):
    args = ["+recipe=digits", "launcher.num_processes=2", "trainer.max_steps=abc"]
    answer = run_door(args)
    assert answer.returncode == 2
    assert "error: trainer.max_steps: expected a whole number or null" in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_exits_as_the_shell_expects(background_door, home, number, code):
    door = background_door(QUICK, "trainer.max_steps=1000000")
    door.wait_for("runs/quick/*/metrics.jsonl")
    out, err = door.interrupted(number)
    assert door.code == code, out + err
    assert f"error: stopped by {signal_name(number)} after step" in err
    assert "Traceback" not in err
    assert list(only_run(home).glob("checkpoints/step-*"))
