"""From Python, a run is told and recorded as on the command line; config.yaml says what it was."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from torsh_trainer import report, rundir
from torsh_trainer.callbacks.console import Console
from torsh_trainer.callbacks.defaults import DEFAULTS, with_defaults
from torsh_trainer.data.loading import Loading
from torsh_trainer.errors import ConfigError
from torsh_trainer.optim.optimizers import OptimizerSpec
from torsh_trainer.optim.schedule import Cosine
from torsh_trainer.rundir.description import describe
from torsh_trainer.tasks.base import DataSource, Task
from torsh_trainer.training.trainer import Trainer
from torsh_trainer.utils.lookup import import_object

pytestmark = pytest.mark.usefixtures("warm_interpreters")

CONF = Path(__file__).resolve().parents[2] / "conf"


class Points(DataSource):
    def __init__(self, noise: float = 0.1) -> None:
        self.noise = noise
        x = torch.linspace(-1, 1, 48).reshape(-1, 1)
        self.train = TensorDataset(x, 2 * x)
        self.eval = TensorDataset(x[::4], 2 * x[::4])


class Line(Task):
    optimizer = OptimizerSpec("SGD", lr=0.1, momentum=0.9)

    def __init__(self, bias: bool = True) -> None:
        self.bias = bias
        self.data = Points()

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1, bias=self.bias)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.mse_loss(outputs, batch[1])


class NoModel(Line):
    def build_model(self) -> nn.Module:
        return nn.Identity()


def line_trainer(folder: Path, **given: Any) -> Trainer:
    knobs = {"max_steps": 6, "log_every": 2, "run_dir": folder, "loading": Loading(batch_size=8)}
    return Trainer(**{"task": Line(bias=False), **knobs, **given})


# -- what a run has without being asked -----------------------------------------------------------


def test_the_defaults_are_the_callbacks_and_loggers_that_the_configuration_enables():
    files = [CONF / group / "default.yaml" for group in ("callbacks", "logger")]
    nodes = [node for file in files for node in yaml.safe_load(file.read_text()).values()]
    enabled = [node["_target_"] for node in nodes if node["enabled"] is not False]
    assert [import_object(target, option="_target_") for target in enabled] == [*DEFAULTS]


def test_a_run_from_python_shows_its_progress_and_leaves_what_a_report_draws(
    tmp_path, capsys, monkeypatch
):
    script = sys.modules["__main__"]
    monkeypatch.setattr(script, "__file__", "train.py", raising=False)  # as of no prompt
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py"])
    result = line_trainer(tmp_path).fit()
    said = capsys.readouterr().out
    assert "step 6/6" in said
    assert "Done" in said
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["split"] == "train"] == [1, 2, 4, 6]
    assert rows[-1]["loss"] == result.metrics["loss"]
    provenance = json.loads((tmp_path / "provenance.json").read_text())
    assert provenance["command"] == ["python", "train.py"]


def test_a_refused_run_has_written_all_that_it_writes(tmp_path, monkeypatch):
    def gather(**facts: Any) -> dict[str, Any]:
        time.sleep(1.0)  # far beyond what a refusal takes
        return {"command": facts["command"]}

    monkeypatch.setattr(rundir, "gather_provenance", gather)
    with pytest.raises(ConfigError, match="no parameters"):
        line_trainer(tmp_path, task=NoModel()).fit()
    assert (tmp_path / "provenance.json").is_file()
    assert report.main([str(tmp_path)]) == 0
    assert (tmp_path / "report.html").exists()


def test_without_the_defaults_a_run_is_silent_and_a_report_on_it_is_refused(tmp_path, capsys):
    line_trainer(tmp_path, default_callbacks=False).fit()
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "metrics.jsonl").exists()
    with pytest.raises(ConfigError, match=r"nothing to draw: .*default_callbacks=True"):
        report.main([str(tmp_path)])
    assert not (tmp_path / "report.html").exists()


def test_one_among_the_callbacks_takes_the_place_of_its_like():
    own = Console(style="lines", show_model=False)
    together = with_defaults([own])
    assert [callback for callback in together if isinstance(callback, Console)] == [own]
    assert len(together) == len(with_defaults([]))


def test_output_that_is_no_terminal_is_plain_where_colours_are_asked_for(monkeypatch, capsys):
    """As in a notebook, whose kernel sets these, and in a worker that it starts."""
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE"):
        monkeypatch.setenv(name, "1")
    terminal = Console().terminal()
    terminal.print("Done", style="bold green")
    assert capsys.readouterr().out == "Done\n"
    assert not terminal.is_terminal


def test_stages_without_training_need_no_end_of_training(tmp_path):
    trained = line_trainer(tmp_path / "fit").fit()
    evaluated = line_trainer(tmp_path / "eval", max_steps=None).evaluate(trained.checkpoint)
    assert evaluated.metrics == trained.metrics
    with pytest.raises(ConfigError, match="nothing says when training ends"):
        line_trainer(tmp_path / "again", max_steps=None).fit()


# -- config.yaml ----------------------------------------------------------------------------------


def test_config_yaml_says_what_the_objects_were_made_of(tmp_path):
    line_trainer(tmp_path, schedule=Cosine(warmup_steps=2), seed=3, strategy="single").fit()
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert config["task"] == {"_target_": f"{__name__}.Line", "bias": False}
    assert config["data"]["_target_"] == f"{__name__}.Points"
    assert (config["data"]["noise"], config["data"]["batch_size"]) == (0.1, 8)
    assert config["optimizer"]["target"] == "SGD"
    assert config["optimizer"]["options"] == {"momentum": 0.9}
    assert config["schedule"]["_target_"].endswith(".Cosine")
    assert config["schedule"]["warmup_steps"] == 2
    assert (config["trainer"]["seed"], config["trainer"]["max_steps"]) == (3, 6)
    assert config["strategy"]["_target_"] == "torsh_trainer.strategies.single.Single"
    assert "Jsonl" in config["callbacks"]


def test_every_knob_of_the_trainer_is_in_config_yaml(tmp_path):
    line_trainer(tmp_path).fit()
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    knobs = {field.name for field in dataclasses.fields(Trainer)}
    beside = {"task", "loading", "default_callbacks", "run_dir", "config", "command"}
    assert {*config, *config["trainer"]} >= knobs - beside


def test_what_a_task_makes_when_asked_is_a_name_and_is_not_made(tmp_path):
    class Late(Line):
        asked = 0

        def __init__(self) -> None:
            pass

        @property
        def data(self) -> DataSource:
            Late.asked += 1
            return Points()

        def build_model(self) -> nn.Module:
            return nn.Linear(1, 1)

        def build_optimizers(self, named_parameters: Any) -> Any:
            return {"main": torch.optim.SGD([p for _, p in named_parameters], lr=0.1)}

    described = line_trainer(tmp_path, task=Late())._spec().config
    assert Late.asked == 0
    assert described["data"]["_target_"].endswith("Late.data")
    assert described["optimizer"].endswith("Late.build_optimizers")


class Opaque:
    def __init__(self, size: int, secret: str) -> None:
        self.size = size
        self._secret = secret


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.bfloat16, "torch.bfloat16"),
        (Path("a/b"), "a/b"),
        (nn.Linear, "torch.nn.modules.linear.Linear"),
        (torch.ones(3), {"_target_": "torch.Tensor"}),
        (Opaque(3, "x"), {"_target_": f"{__name__}.Opaque", "size": 3}),
        ([1, (2.5, None)], [1, [2.5, None]]),
        ({1: Opaque(2, "y")}, {"1": {"_target_": f"{__name__}.Opaque", "size": 2}}),
        (list(range(1000)), "list of 1000 items"),
        (
            partial(Opaque, size=4),
            {"_target_": f"{__name__}.Opaque", "_partial_": True, "size": 4},
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_written_is_named(value: Any, said: Any) -> None:
    assert describe(value) == said


def test_an_object_that_holds_itself_ends_somewhere() -> None:
    ring: list[Any] = []
    ring.append(ring)
    assert "list of 1 items" in str(describe(ring))


# -- the page -------------------------------------------------------------------------------------


def test_the_page_does_what_it_says(repository, run_command, tmp_path):
    page = (repository / "docs" / "library.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    # Its last lines belong to the script too: one program here, and the run that it has made.
    script = "\n".join(blocks).replace('"runs/2031-01-31_18-30-05"', "result.run_dir")
    (tmp_path / "script.py").write_text(script)
    done = run_command([sys.executable, "script.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    runs = sorted((tmp_path / "runs").iterdir())
    assert len(runs) == 3
    assert all((run / "metrics.jsonl").read_text() for run in runs)
    accuracy = float(done.stdout.splitlines()[-1])
    assert 0.9 < accuracy <= 1.0
