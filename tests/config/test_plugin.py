"""The plugin door: installed, a distribution adds its options; uninstalled, it is gone."""

from __future__ import annotations

import json
import shutil
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

CONTRACT = """
from torsh_example.strategy import Example
from torsh_trainer.testing import StrategyContract

LEFT_OUT = ("bf16_mixed", "bf16_true", "fp16_mixed", "reduce_bf16", "ema", "skip_nonfinite",
            "sync_batchnorm", "activation_checkpointing")


class TestExample(StrategyContract):
    strategy = Example()
    refuses = dict.fromkeys(LEFT_OUT, "left out of the example")


class TestExampleInManyMessages(StrategyContract):
    strategy = Example(flatten=False)
    world_sizes = (2,)
    refuses = dict.fromkeys(LEFT_OUT, "left out of the example")
"""


@pytest.fixture(scope="module")
def environment(repository, tmp_path_factory) -> Path:
    """The Python of a new environment in which this checkout and its libraries can be imported."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home)
    (site_packages,) = (home / "lib").glob("python*/site-packages")
    # As a folder of site packages: what lies there in editable form is found as well.
    lent = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})"
    (site_packages / "lent.pth").write_text(f"{lent}\n{repository}\n")
    return home / "bin" / "python"


@pytest.fixture(scope="module")
def pip(environment, run_command, tmp_path_factory) -> Callable[..., None]:
    """``pip("install", ...)`` in that environment, without a network."""

    def run(verb: str, *args: str | Path) -> None:
        command = [sys.executable, "-m", "pip", "--python", environment, verb, "-qq", *args]
        result = run_command(command, cwd=tmp_path_factory.mktemp("pip"))
        assert result.returncode == 0, result.stdout + result.stderr

    return run


@pytest.fixture(scope="module")
def installed(pip, repository, tmp_path_factory) -> None:
    source = tmp_path_factory.mktemp("source") / "plugin_example"
    shutil.copytree(repository / "tests" / "plugin_example", source)
    pip("install", "--no-deps", "--no-index", "--no-build-isolation", source)


@pytest.fixture
def plugin_door(environment, run_command, tmp_path):
    def run(*args: str):
        return run_command([environment, "-m", "torsh_trainer", *args], cwd=tmp_path)

    return run


@pytest.mark.usefixtures("installed")
class TestInstalled:
    def test_its_options_recipes_and_verbs_stand_in_help(self, plugin_door):
        answer = plugin_door("--help")
        assert answer.returncode == 0, answer.stderr
        (strategies,) = [line for line in answer.stdout.splitlines() if "  strategy " in line]
        names = [name.strip(",") for name in strategies.split()[1:]]
        assert "example" in names
        assert names == sorted(names)
        assert "example_digits" in answer.stdout
        assert "hello" in answer.stdout

    def test_its_verb_runs(self, plugin_door):
        assert plugin_door("hello", "you").stdout == "hello you\n"

    def test_its_package_is_not_imported_until_it_is_chosen(
        self, environment, run_command, tmp_path
    ):
        script = (
            "import sys; from torsh_trainer.__main__ import main; "
            "main(['--cfg', 'job', '+recipe=example_digits']); "
            "sys.exit('torsh_example' in sys.modules)"
        )
        answer = run_command([environment, "-c", script], cwd=tmp_path)
        assert answer.returncode == 0, answer.stderr
        assert "torsh_example.strategy.Example" in answer.stdout

    def test_it_is_a_strategy_by_name_for_the_library(self, environment, run_command, tmp_path):
        script = (
            "from torsh_trainer import registry; "
            "print(registry.strategy_class('example')(flatten=False))"
        )
        answer = run_command([environment, "-c", script], cwd=tmp_path)
        assert answer.stdout == "Example(flatten=False)\n", answer.stderr

    def test_it_trains_two_processes_as_ddp_does(self, plugin_door, warm_door, tmp_path):
        few = ["trainer.max_steps=4", "trainer.stages=[fit]", "launcher.num_processes=2"]
        answers = {
            "example": plugin_door("+recipe=example_digits", *few, "hydra.run.dir=example"),
            "ddp": warm_door(
                ["+recipe=digits", "strategy=ddp", *few, "hydra.run.dir=ddp"], processes=2
            ),
        }
        losses = {}
        for strategy, answer in answers.items():
            assert answer.returncode == 0, answer.stdout + answer.stderr
            result = json.loads((tmp_path / strategy / "result.json").read_text())
            assert result["strategy"] == strategy
            assert result["world_size"] == 2
            losses[strategy] = result["train_loss"]
        assert losses["example"] == pytest.approx(losses["ddp"], rel=1e-5)

    def test_what_it_leaves_out_it_refuses_by_name(self, plugin_door):
        answer = plugin_door("+recipe=example_digits", "precision=bf16_mixed")
        assert answer.returncode == 2
        assert "strategy=example cannot honour precision=bf16-mixed" in answer.stderr

    def test_it_passes_the_suite_that_ships(self, environment, run_command, tmp_path):
        (tmp_path / "test_example.py").write_text(CONTRACT)
        command = [environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path]
        answer = run_command(command, cwd=tmp_path, timeout_s=960)
        assert answer.returncode == 0, answer.stdout + answer.stderr
        assert " passed" in answer.stdout
        assert "skipped" not in answer.stdout


def test_uninstalled_it_is_gone(installed, pip, plugin_door):
    pip("uninstall", "--yes", "torsh-example")
    answer = plugin_door("--help")
    assert answer.returncode == 0, answer.stderr
    assert "example" not in answer.stdout.replace("For example", "")
    answer = plugin_door("+recipe=digits", "strategy=example")
    assert answer.returncode == 2
    assert "unknown strategy 'example'" in answer.stderr
