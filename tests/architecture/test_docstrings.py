"""The public API is documented: a docstring, its own or that of the contract it implements."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import yaml

import torsh_trainer
from torsh_trainer import testing
from torsh_trainer.utils import registry

LAUNCHERS = ("conf/launcher/*.yaml", "plugins/*/*/conf/launcher/*.yaml")
CONTRACTS = {
    "callbacks": ["Callback", "RunInfo", "StepReport", "EvaluationReport", "SaveReport"],
    "checkpoint": ["Checkpointer"],
    "doctor": ["Check"],
    "translate": ["Translator"],
    "comm": ["Communicator"],
    "comm.compression": ["Compression", "Compressing"],
    "environments": ["Environment"],
    "launchers": ["Launcher"],
    "optim.schedule": ["Schedule", "StatefulSchedule", "RunningSchedule"],
    "strategies": ["Strategy", "Engine", "Job"],
}
"""What a plugin implements, by its room."""

NAMES = [name for name in torsh_trainer.__all__ if not name.startswith("__")]


def modules() -> Iterator[ModuleType]:
    """What a user or a plugin imports: see docs/stability.md. ruff looks at the rooms within."""
    public = {getattr(torsh_trainer, name).__module__ for name in NAMES}
    for info in pkgutil.walk_packages(torsh_trainer.__path__, "torsh_trainer."):
        name = info.name
        if (
            name in public | {"torsh_trainer.environments.world"}
            or name.endswith(".base")
            or ".testing" in name
        ):
            yield importlib.import_module(name)


def public(names: dict[str, Any], module: str) -> Iterator[tuple[str, Any]]:
    for name, value in names.items():
        if not name.startswith("_") and getattr(value, "__module__", module) == module:
            yield name, value


def undocumented(module: ModuleType) -> Iterator[str]:
    for name, value in public(vars(module), module.__name__):
        if inspect.isfunction(value) and not inspect.getdoc(value):
            yield f"{module.__name__}.{name}"
        if not inspect.isclass(value):
            continue
        if not value.__doc__:
            yield f"{module.__name__}.{name}"
        for member in vars(value):
            attribute = inspect.getattr_static(value, member)
            is_method = inspect.isfunction(attribute) or isinstance(
                attribute, property | classmethod | staticmethod
            )
            # getdoc takes the docstring of the overridden method where there is one.
            documented = not is_method or inspect.getdoc(getattr(value, member))
            # A test of a suite that ships says it in its name.
            if not member.startswith(("_", "test_")) and not documented:
                yield f"{module.__name__}.{name}.{member}"


def test_every_public_function_class_and_method_has_a_docstring():
    assert [name for module in modules() for name in undocumented(module)] == []


def test_every_public_name_and_every_contract_stands_on_a_page_of_the_api(repository):
    pages = [page.read_text() for page in sorted((repository / "docs" / "api").glob("*.md"))]
    told = set(re.findall(r"^::: (\S+)$", "\n".join(pages), flags=re.MULTILINE))
    named = {f"{module}.{name}" for name, module in torsh_trainer._PUBLIC.items()}
    suites = {f"{module}.{name}" for name, module in testing._PLACES.items()}
    strategies = {target.replace(":", ".") for target in registry.STRATEGIES.builtin.values()}
    files = (file for pattern in LAUNCHERS for file in repository.glob(pattern))
    launchers = (yaml.safe_load(file.read_text()) for file in files)
    contracts = {
        f"torsh_trainer.{room}.base.{name}" for room, names in CONTRACTS.items() for name in names
    }
    wanted = named | suites | strategies | {node["_target_"] for node in launchers} | contracts
    assert sorted(wanted - told) == []


def test_every_public_name_of_the_package_resolves():
    for name in torsh_trainer.__all__:
        assert getattr(torsh_trainer, name) is not None, name
