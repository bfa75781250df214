"""The configuration of tasks, models and data says what the constructors say."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from torsh_trainer.data.loading import Loading
from torsh_trainer.tasks.base import parameter_count
from torsh_trainer.tasks.models import GPT

CONF = Path(__file__).resolve().parents[2] / "conf"
INJECTED = {"model", "data", "optimizer"}
FROM_THE_MODEL = "${oc.select:model.pretrained}"
"""The tokenizer is that of the folder that the model is from."""


def node(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def options(group: str) -> list[Path]:
    return sorted(path for path in (CONF / group).glob("*.yaml") if path.stem[0] != "_")


def defaults_of(target: str) -> dict[str, Any]:
    """Parameter -> default, ``???`` where there is none."""
    module, _, name = target.rpartition(".")
    parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    return {
        name: "???" if parameter.default is parameter.empty else plain(parameter.default)
        for name, parameter in parameters.items()
        if name not in INJECTED
    }


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize(
    "path",
    [path for group in ("task", "data", "model") for path in options(group)],
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_every_knob_stands_in_yaml_with_the_default_of_the_constructor(path: Path) -> None:
    content = node(path)
    included = content.pop("defaults", [])
    if path.parent.name == "data":
        assert included == ["_loading", "_self_"]
    elif included:  # a preset: knobs of the option that it starts from, with other values
        base = node(path.with_stem(included[0]))
        assert content.keys() <= base.keys()
        return
    if content.get("tokenizer") == FROM_THE_MODEL:
        content["tokenizer"] = None
    # SmallCNN and MLP have a size for one data set or another; the constructor's is the same.
    assert content == {"_target_": content["_target_"], **defaults_of(content["_target_"])}


def test_the_shared_knobs_of_data_are_those_of_loading() -> None:
    written = node(CONF / "data" / "_loading.yaml")
    assert written == {field.name: field.default for field in fields(Loading)}
    assert MISSING not in written.values()


@pytest.mark.parametrize(
    ("preset", "millions"), [("gpt_tiny", 1.04), ("gpt_small", 10.8), ("gpt2_124m", 124.4)]
)
def test_a_preset_has_the_parameters_that_its_comment_says(preset: str, millions: float) -> None:
    knobs = {**node(CONF / "model" / "gpt.yaml"), **node(CONF / "model" / f"{preset}.yaml")}
    del knobs["_target_"], knobs["defaults"]
    with torch.device("meta"):
        count = parameter_count(GPT(**knobs))[0]
    assert round(count / 1e6, 2 if millions < 10 else 1) == millions
    assert str(millions).split(".")[0] in (CONF / "model" / f"{preset}.yaml").read_text()
