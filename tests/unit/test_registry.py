"""One registry for every kind of plugin: what it lists, loads and refuses, and in which words."""

from __future__ import annotations

import sys
from contextlib import ExitStack

import pytest

from torsh_trainer import environments
from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.testing.plugins import install_plugin
from torsh_trainer.translate.engines import find_translators
from torsh_trainer.utils import registry

SITE = """
from torsh_trainer.environments.base import Environment

class Site(Environment):
    name = "site"
    variables = ("SITE",)
    priority = {priority}

    def world(self, env):
        return None

    def absence(self, env):
        return "SITE is not set"
"""


def refused(call) -> ConfigError | ResourceError:
    with pytest.raises((ConfigError, ResourceError)) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("kind", registry.KINDS, ids=lambda kind: kind.group)
def test_every_name_of_ours_loads_and_keeps_its_contract(kind):
    for name in kind.builtin:
        loaded = kind.load(name)
        if kind.contract:
            assert issubclass(loaded, registry.load(kind.contract)), name


def test_listing_imports_nothing(tmp_path):
    points = {"torsh_trainer.stages": {"quick": "of_a_test_quick:stage"}}
    with install_plugin(tmp_path, entry_points=points, modules={"of_a_test_quick": "1 / 0"}):
        assert "quick" in registry.STAGES
        assert registry.STAGES.names() == ["find_batch_size", "find_lr", "quick"]
        assert registry.STAGES.registrations()["quick"].distribution == "torsh-of-a-test"
        assert "of_a_test_quick" not in sys.modules
    assert "quick" not in registry.STAGES


def test_an_unknown_name_is_refused_with_the_names_that_there_are():
    error = refused(lambda: registry.STRATEGIES.load("fdsp"))
    assert str(error) == "unknown strategy 'fdsp'; did you mean 'fsdp' or 'dp'?"
    error = refused(lambda: CheckpointOptions(backend="tape"))
    assert str(error) == "checkpoint.backend=tape: there is no such checkpointer; choose one of dcp"


def test_a_name_that_a_plugin_of_ours_brings_says_what_to_install():
    with ExitStack() as stack:
        if "deepspeed" in registry.STRATEGIES:  # it is installed beside the tests
            names = dict(registry.STRATEGIES.builtin)
            kind = registry.PluginKind("torsh_trainer.nobody", "strategy", names)
        else:
            kind = registry.STRATEGIES
        stack.callback(registry.refresh)
        error = refused(lambda: kind.load("deepspeed"))
    assert str(error) == "unknown strategy 'deepspeed'; pip install torsh-trainer-deepspeed"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import of_a_test_nowhere", "ModuleNotFoundError: No module named 'of_a_test_nowhere'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("", "AttributeError: module 'of_a_test_broken' has no attribute 'Broken'"),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_named_with_its_distribution(tmp_path, text, why):
    points = {"torsh_trainer.launchers": {"broken": "of_a_test_broken:Broken"}}
    with install_plugin(tmp_path, entry_points=points, modules={"of_a_test_broken": text}):
        error = refused(lambda: registry.LAUNCHERS.load("broken"))
    assert error.sentence == (
        "the launcher 'broken' of torsh-of-a-test (of_a_test_broken:Broken) cannot be loaded: "
        f"{why}"
    )
    assert error.fix == "reinstall torsh-of-a-test, or uninstall it"
    assert error.exit_code == 1


def test_a_class_of_another_kind_is_named_with_what_it_should_be(tmp_path):
    points = {"torsh_trainer.launchers": {"wrong": "of_a_test_wrong:Wrong"}}
    with install_plugin(
        tmp_path, entry_points=points, modules={"of_a_test_wrong": "class Wrong: ..."}
    ):
        error = refused(lambda: registry.LAUNCHERS.load("wrong"))
    assert error.sentence.endswith("does not inherit from torsh_trainer.launchers.base.Launcher")


def test_a_name_that_is_registered_twice_is_refused_with_both(tmp_path):
    theirs = {"torsh_trainer.strategies": {"ddp": "of_a_test_ddp:DDP"}}
    mine = {"torsh_trainer.strategies": {"new": "of_a_test_new:New"}}
    other = {"torsh_trainer.strategies": {"new": "of_a_test_other:New"}}
    with ExitStack() as stack:
        for number, points in enumerate((theirs, mine, other)):
            name = f"torsh-number-{number}"
            folder = tmp_path / name
            stack.enter_context(install_plugin(folder, name=name, entry_points=points))
        error = refused(lambda: registry.STRATEGIES.load("ddp"))
        assert error.sentence == (
            "the strategy 'ddp' is registered 2 times: by torsh-trainer "
            "(torsh_trainer.strategies.ddp:DDP) and by torsh-number-0 (of_a_test_ddp:DDP)"
        )
        assert error.fix == "uninstall torsh-number-0, or have it choose another name"
        error = refused(lambda: registry.STRATEGIES.load("new"))
        assert "torsh-number-1 (of_a_test_new:New)" in error.sentence
        assert "torsh-number-2 (of_a_test_other:New)" in error.sentence
        assert registry.STRATEGIES.load("fsdp").name == "fsdp"  # who does not use it goes on


def test_the_same_distribution_seen_twice_is_one(tmp_path):
    points = {"torsh_trainer.strategies": {"mine": "of_a_test_mine:Mine"}}
    with (
        install_plugin(tmp_path / "a", entry_points=points),
        install_plugin(tmp_path / "b", entry_points=points),
    ):
        assert registry.STRATEGIES.find("mine").reference == "of_a_test_mine:Mine"


@pytest.mark.parametrize(
    ("priority", "before"), [(95, "torchrun"), (35, "slurm"), (25, "kubernetes"), (5, None)]
)
def test_an_environment_of_a_plugin_is_asked_where_its_priority_says(tmp_path, priority, before):
    points = {"torsh_trainer.environments": {"site": "of_a_test_site:Site"}}
    modules = {"of_a_test_site": SITE.format(priority=priority)}
    with install_plugin(tmp_path, entry_points=points, modules=modules):
        names = [environment.name for environment in environments.find_environments()]
    after = names.index("site") + 1
    assert (names[after] if after < len(names) else None) == before
    names.remove("site")
    assert names == [environment.name for environment in environments.find_environments()]
    launchers, schedulers = names[:6], names[6:]
    assert launchers == ["torchrun", "horovod", "lsf", "pbs", "openmpi", "pmi"]
    assert schedulers == ["slurm", "kubernetes", "env"]


def test_an_environment_that_cannot_be_loaded_ends_the_run(tmp_path):
    points = {"torsh_trainer.environments": {"site": "of_a_test_gone:Site"}}
    with install_plugin(tmp_path, entry_points=points):
        error = refused(lambda: environments.detect({}))
    assert error.sentence.startswith("the environment 'site' of torsh-of-a-test")


def test_a_translator_that_cannot_be_loaded_is_left_out_and_said_to_be(tmp_path, capsys):
    points = {"torsh_trainer.translators": {"acme": "of_a_test_gone:Acme"}}
    with install_plugin(tmp_path, entry_points=points):
        names = [translator.name for translator in find_translators()]
    assert names == ["launch", "horovod", "deepspeed"]
    said = capsys.readouterr().err
    assert said.startswith("note: left out: the translator 'acme' of torsh-of-a-test")


def test_two_plugins_with_one_name_leave_the_options_of_one_and_say_so(tmp_path, capsys):
    with ExitStack() as stack:
        for name in ("torsh-one", "torsh-two"):
            package = name.replace("-", "_")
            points = {"torsh_trainer.plugins": {"mine": package}}
            modules = {f"{package}.__init__": ""}
            folder = tmp_path / name
            stack.enter_context(
                install_plugin(folder, name=name, entry_points=points, modules=modules)
            )
        assert list(registry.plugin_folders()).count("mine") == 1
    said = capsys.readouterr().err
    assert "plugin 'mine' is registered by torsh-" in said
    assert "are left out, until one of the two is uninstalled" in said
