"""From a resolved configuration to objects: types, names, nesting, and what is given to a task."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import cloudpickle
import pytest
import torch
import yaml
from torch import nn

from torsh_trainer import assemble
from torsh_trainer.assemble.plan import plan, plan_call
from torsh_trainer.assemble.values import fit_value, words
from torsh_trainer.errors import ConfigError
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.tasks.base import DataSource, Task
from torsh_trainer.tasks.models import MLP


@dataclass(frozen=True)
class Inner:
    size: int = 1
    name: str | None = None


@dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    inners: tuple[Inner, ...] = ()
    by_name: Mapping[str, Inner] = field(default_factory=dict)


FITS = [
    (3, int, 3),
    (3.0, int, 3),
    (3, float, 3.0),
    (True, bool, True),
    (None, int | None, None),
    ("a", str, "a"),
    ("a/b", Path, Path("a/b")),
    ([1, 2], tuple[int, ...], (1, 2)),
    ([1, 2.0], tuple[int, float], (1, 2.0)),
    ([1], list[int], [1]),
    ([1], Sequence[int], [1]),
    ({"a": 1}, Mapping[str, float], {"a": 1.0}),
    ("auto", int | Literal["auto"], "auto"),
    (2, int | Literal["auto"], 2),
    ("1h", str | float | None, "1h"),
    (60, str | float | None, 60.0),
    (1, float | int, 1),
    ([0.9, 0.999], tuple[float | torch.Tensor, float | torch.Tensor], (0.9, 0.999)),
    ("anything", nn.Module, "anything"),
    ({"a": [1]}, Any, {"a": [1]}),
]


@pytest.mark.parametrize(("value", "wanted", "expected"), FITS)
def test_a_value_that_fits_becomes_what_the_annotation_asks_for(value, wanted, expected):
    result = fit_value(value, wanted, key="group.knob")
    assert result == expected
    assert type(result) is type(expected)


UNFIT = [
    ("3", int, "a whole number"),
    (3.5, int, "a whole number"),
    (True, int, "a whole number"),
    (True, float, "a number"),
    ("yes", bool, "true or false"),
    (1, bool, "true or false"),
    (1, str, "a text"),
    (None, int, "a whole number"),
    ("a", list[str], "a list, each a text"),
    ([1, "b"], tuple[int, ...], "a whole number"),
    ([1], tuple[int, int], "a list of 2: a whole number, a whole number"),
    ([1], Mapping[str, int], "a mapping"),
    ("x", Literal["a", "b"] | None, "one of a, b or null"),
    ("x", int | Literal["auto"] | None, "a whole number or auto or null"),
    (3, Inner, "a mapping"),
]


@pytest.mark.parametrize(("value", "wanted", "said"), UNFIT)
def test_a_value_that_does_not_fit_is_told_by_its_key_and_what_was_expected(value, wanted, said):
    with pytest.raises(ConfigError) as caught:
        fit_value(value, wanted, key="group.knob")
    assert str(caught.value).startswith("group.knob")
    assert f"expected {said}, got" in str(caught.value)
    assert caught.value.fix


def test_the_words_of_an_annotation_put_null_last():
    assert words(None | int | str) == "a whole number or a text or null"


def test_a_mapping_becomes_the_dataclass_that_the_annotation_names_however_deep():
    node = {"inner": {"size": 2}, "inners": [{"size": 3}], "by_name": {"x": {"name": "y"}}}
    expected = Outer(Inner(2), (Inner(3),), {"x": Inner(name="y")})
    assert plan_call(Outer, node, key="outer").build() == expected


def test_a_wrong_knob_deep_inside_is_told_by_its_whole_key():
    with pytest.raises(ConfigError, match=r"outer\.inners\[0\]\.sise.*outer\.inners\[0\]\.size"):
        plan_call(Outer, {"inners": [{"sise": 3}]}, key="outer")


def test_nodes_within_a_node_are_built_with_it():
    node = {
        "_target_": "torch.nn.Sequential",
        "_args_": [],
    }
    with pytest.raises(ConfigError, match=r"model\._args_ is not known"):
        plan(node, key="model")
    node = {
        "_target_": "torch.nn.ModuleDict",
        "modules": {"a": {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}},
    }
    built = plan(node, key="model").build()
    assert built["a"].weight.shape == (3, 2)


def test_partial_hands_over_a_function_with_some_arguments_set():
    node = {"_target_": "torch.nn.Linear", "_partial_": True, "in_features": 2}
    assert plan(node, key="x").build()(out_features=5).weight.shape == (5, 2)


def test_every_build_makes_a_new_object():
    planned = plan({"_target_": "torsh_trainer.tasks.models.MLP"}, key="model")
    assert planned.build() is not planned.build()


def test_a_plan_crosses_processes():
    planned = plan({"_target_": "torsh_trainer.tasks.models.MLP", "hidden": [4]}, key="model")
    again = cloudpickle.loads(cloudpickle.dumps(planned.build))
    assert again().layers[1].out_features == 4


def test_a_constructor_that_refuses_is_told_with_its_node():
    node = {"_target_": "torch.nn.Linear", "in_features": -2, "out_features": "x"}
    with pytest.raises(ConfigError, match=r"model\.out_features: expected a whole number"):
        plan(node, key="model")
    node = {"_target_": "torch.nn.Conv2d", "in_channels": 3, "out_channels": 2, "kernel_size": 1}
    with pytest.raises(ConfigError, match=r"model: torch.*Conv2d refuses.*divisible"):
        plan({**node, "groups": 2}, key="model").build()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise RuntimeError('oh no')", r"importing it fails with RuntimeError: oh no"),
        ("import not_there_at_all", r"importing it needs 'not_there_at_all'"),
        ("def f(:", r"importing it fails with SyntaxError"),
        ("Net = 3", r"is a int, which cannot be called"),
    ],
)
def test_user_code_that_cannot_be_imported_is_one_clear_error(tmp_path, monkeypatch, text, said):
    name = f"module_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Exception, match=said) as caught:
        plan({"_target_": f"{name}.Net"}, key="model")
    assert f"model._target_={name}.Net" in str(caught.value)


# -- the whole trainer ---------------------------------------------------------------------------


@pytest.fixture
def config(door) -> dict[str, Any]:
    """The resolved configuration of the quick recipe."""
    return door("--cfg", "job", "--resolve", "+recipe=quick.yaml").config


def trainer(config: dict[str, Any], **changes: Any):
    order = assemble.RunRequest({**config, **changes}, None, (), ())
    return assemble.plan_run(order)


def test_the_trainer_holds_what_the_configuration_says(config):
    made = trainer(config)
    assert made.max_steps == 2
    assert made.loading.batch_size == 32
    assert made.task.optimizer.lr == config["optimizer"]["lr"]
    assert isinstance(made.task.build_model(), MLP)
    assert made.config == config


def test_loading_takes_its_knobs_and_the_source_the_others(config):
    made = trainer(config, data={**config["data"], "num_workers": 3, "split_seed": 5})
    assert made.loading.num_workers == 3
    assert made.task.data.split_seed == 5


def test_a_group_that_was_left_out_takes_the_trainers_default(config):
    for group in ("schedule", "strategy", "comm", "precision", "checkpoint", "launcher"):
        config.pop(group)
    made = trainer(config)
    assert made.strategy == "auto"
    assert made.schedule is None


def test_callbacks_and_loggers_are_those_that_are_enabled(config):
    stopping = {**config["callbacks"]["early_stopping"], "enabled": True}
    made = trainer(
        config,
        callbacks={"early_stopping": stopping, "nothing": None},
        logger={**config["logger"], "csv": {**config["logger"]["csv"], "enabled": True}},
    )
    assert [type(c).__name__ for c in made.callbacks] == ["EarlyStopping", "Jsonl", "Csv"]


def test_auto_enables_a_logger_where_its_library_is_installed(config, tmp_path, monkeypatch):
    (tmp_path / "own_loggers.py").write_text(
        "from torsh_trainer.callbacks.base import Callback\n"
        "class Here(Callback):\n    requires = 'json'\n"
        "class NotHere(Callback):\n    requires = 'a_library_that_nobody_has'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    nodes = {n: {"_target_": f"own_loggers.{n}", "enabled": "auto"} for n in ("Here", "NotHere")}
    made = trainer(config, callbacks={}, logger=nodes)
    assert [type(c).__name__ for c in made.callbacks] == ["Here"]


def test_a_disabled_callback_is_not_made_and_its_knobs_are_checked(config, tmp_path, monkeypatch):
    (tmp_path / "own_disabled.py").write_text(
        "from torsh_trainer.callbacks.base import Callback\n"
        "class Made(Callback):\n"
        "    def __init__(self, size: int = 1):\n"
        "        raise AssertionError('made')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def mine(**knobs):
        return {"mine": {"_target_": "own_disabled.Made", "enabled": False, **knobs}}

    assert not list(trainer(config, callbacks=mine(size=3), logger={}).callbacks)
    with pytest.raises(ConfigError, match=r"callbacks\.mine\.size"):
        trainer(config, callbacks=mine(size="x"), logger={})
    elsewhere = {"mine": {"_target_": "nowhere.at.All", "enabled": False}}
    assert not list(trainer(config, callbacks=elsewhere, logger={}).callbacks)


class OwnSource(DataSource):
    pass


class OwnTask(Task):
    """Takes nothing in its constructor."""

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)


def test_a_task_without_a_constructor_has_its_data_and_optimizer_as_attributes(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "own", sys.modules[__name__])
    made = trainer(
        config,
        task={"_target_": "own.OwnTask"},
        model=None,
        data={"_target_": "own.OwnSource", "batch_size": 4},
    )
    assert isinstance(made.task.data, OwnSource)
    assert made.task.optimizer.lr == config["optimizer"]["lr"]


def test_a_model_that_the_task_would_ignore_is_refused(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "own", sys.modules[__name__])
    with pytest.raises(ConfigError, match=r"model is chosen, and .*OwnTask builds its own"):
        trainer(config, task={"_target_": "own.OwnTask"})


@pytest.mark.parametrize("name", ["ddp", "single", "fsdp", "dp", "auto"])
def test_every_strategy_of_conf_builds_with_its_knobs(config, repository, name):
    node = yaml.safe_load((repository / "conf" / "strategy" / f"{name}.yaml").read_text())
    made = trainer(config, strategy=node).strategy
    assert made == type(made)()


def test_knobs_reach_the_strategy(config):
    node = {"_target_": "torsh_trainer.strategies.ddp.DDP", "zero1": True}
    assert trainer(config, strategy=node).strategy == DDP(zero1=True)


def test_the_process_that_launches_loads_no_torch(config, tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    script = (
        "import sys, yaml; from torsh_trainer import assemble; "
        "config = yaml.safe_load(open('config.yaml')); "
        "config['launcher'] = {'_target_': 'torsh_trainer.launchers.local.Local'}; "
        "assemble.launcher_of(config); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)


def test_options_of_a_torch_scheduler_are_keywords_in_python_and_a_mapping_in_a_configuration():
    node = {"_target_": "torsh_trainer.optim.schedule.TorchSchedule", "scheduler": "StepLR"}
    with pytest.raises(ConfigError, match=r"unknown knob schedule\.step_size"):
        plan({**node, "step_size": 2}, key="schedule")
    assert plan({**node, "options": {"step_size": 2}}, key="schedule").build().options == {
        "step_size": 2
    }
