"""No default hides in code: what conf/ says is what the constructors say, knob by knob."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml

from torsh_trainer import assemble
from torsh_trainer.data.loading import Loading
from torsh_trainer.optim.optimizers import RESERVED, OptimizerSpec
from torsh_trainer.training.run_spec import RunSpec
from torsh_trainer.utils import registry
from torsh_trainer.utils.lookup import import_object

REPOSITORY = Path(__file__).resolve().parents[2]
CONF = REPOSITORY / "conf"
PLUGINS = sorted(REPOSITORY.glob("plugins/*/*/conf"))
FILES = sorted(
    path for conf in (CONF, *PLUGINS) for path in conf.rglob("*.yaml") if path.parent != CONF
)
MISSING = "???"
INJECTED = {"model", "data", "optimizer"}
"""What a task is given from the groups of these names."""
ON_PURPOSE = {
    ("data/hf_text", "tokenizer"): "that of the folder that the model is from",
    ("data/hf_labelled_text", "tokenizer"): "that of the folder that the model is from",
    ("optimizer/muon", "others"): "Muon takes matrices alone, so something has to take the rest",
    ("task/lightning", "module"): "its class is named beside its arguments",
    ("task/lightning", "datamodule"): "its class is named beside its arguments",
    ("task/lightning", "callbacks"): "what is added has a name",
    ("task/lightning", "loggers"): "what is added has a name",
}
"""Values that differ from the constructor's."""


def name_of(path: Path) -> str:
    return path.relative_to(path.parents[1]).with_suffix("").as_posix()


def content_of(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text()) or {}


def defaults_of(target: Any) -> dict[str, Any]:
    """Parameter -> its default, MISSING where there is none."""
    found = {}
    for name, parameter in inspect.signature(target).parameters.items():
        if parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
            continue
        default = parameter.default
        if type(default).__name__ == "_HAS_DEFAULT_FACTORY_CLASS":
            field = {f.name: f for f in dataclasses.fields(target)}[name]
            default = field.default_factory()
        found[name] = MISSING if default is inspect.Parameter.empty else default
    return found


def plain(value: Any) -> Any:
    """As YAML would hold it."""
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def expected(group: str, target: str) -> dict[str, Any]:
    """The knobs of a node by its constructor, and those of ours that stand beside them."""
    if group == "optimizer":
        ours = {key: value for key, value in defaults_of(OptimizerSpec).items() if key in RESERVED}
        if target == MISSING:
            return {"lr": MISSING, **ours}
        options = defaults_of(import_object(target, option=group))
        del options["params"]
        return {**options, **ours}
    knobs = defaults_of(import_object(target, option=group))
    if group == "task":
        knobs = {name: value for name, value in knobs.items() if name not in INJECTED}
    return knobs


def nodes() -> list[tuple[str, str, dict[str, Any]]]:
    """(where, group, node) for every node of conf/ with a ``_target_``."""
    found = []
    for path in FILES:
        group, content = path.parent.name, content_of(path)
        if group in ("callbacks", "logger"):
            found += [(f"{group}.{name}", group, node) for name, node in content.items()]
        elif "_target_" in content:
            found.append((name_of(path), group, content))
    return found


@pytest.mark.parametrize(("where", "group", "node"), nodes(), ids=lambda value: str(value)[:40])
def test_a_node_has_every_knob_of_its_constructor_with_its_default(where, group, node):
    said = {key: value for key, value in node.items() if key not in ("_target_", "defaults")}
    if group in ("callbacks", "logger"):
        del said["enabled"]
    knobs = expected(group, node["_target_"])
    assert sorted(said) == sorted(knobs)
    different = {
        key: (value, plain(knobs[key]))
        for key, value in said.items()
        if value not in (plain(knobs[key]), MISSING) and (where, key) not in ON_PURPOSE
    }
    assert different == {}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_without_a_target_builds_on_one_of_its_group_and_says_what_differs(path):
    content = content_of(path)
    if "_target_" in content or path.parent.name in ("trainer", "callbacks", "logger"):
        return
    if path.name == "_loading.yaml":
        return
    base, own = content.pop("defaults")
    assert own == "_self_"
    canonical = content_of(path.with_name(f"{base}.yaml"))
    assert {**canonical, **content}.keys() == canonical.keys()
    assert all(canonical[key] != value for key, value in content.items())


def test_every_source_of_data_offers_the_knobs_of_loading():
    assert content_of(CONF / "data" / "_loading.yaml") == plain(defaults_of(Loading))
    for path in (CONF / "data").glob("[!_]*.yaml"):
        assert content_of(path)["defaults"] == ["_loading", "_self_"], path.name


def test_the_trainer_group_is_every_knob_of_the_trainer_that_is_no_object():
    beside = {*registry.GROUPS, *assemble.NO_KNOBS} - {"trainer"}
    knobs = {name: value for name, value in defaults_of(RunSpec).items() if name not in beside}
    assert content_of(CONF / "trainer" / "default.yaml") == plain(knobs)


def test_the_groups_that_code_knows_are_those_of_the_root_configuration():
    content = content_of(CONF / "config.yaml")
    entries = [entry for entry in content.pop("defaults") if isinstance(entry, dict)]
    groups = [next(iter(entry)) for entry in entries]
    assert tuple(group for group in groups if " " not in group) == registry.GROUPS
    assert {*content} - {"hydra"} == {*registry.SETTINGS}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_begins_by_saying_what_it_is(path):
    assert path.read_text().startswith("# ")
