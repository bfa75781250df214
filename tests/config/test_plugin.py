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
import torch

from torsh_trainer.checkpoint.cli.contents import Contents
from torsh_trainer.utils import registry

pytestmark = pytest.mark.usefixtures("warm_interpreters")

STRATEGY = """
from torsh_example.strategy import Example
from torsh_trainer.testing import StrategyContract

LEFT_OUT = ("bf16_mixed", "bf16_true", "fp16_mixed", "reduce_bf16", "ema", "skip_nonfinite",
            "sync_batchnorm", "activation_checkpointing")


class TestExample(StrategyContract):
    strategy = Example()
    world_sizes = (2,)
    refuses = dict.fromkeys(LEFT_OUT, "left out of the example")


class TestExampleInManyMessages(StrategyContract):
    strategy = Example(flatten=False)
    world_sizes = (2,)
    refuses = dict.fromkeys(LEFT_OUT, "left out of the example")
"""
OTHERS = """
from torsh_example.checkpointer import Latest
from torsh_example.detached import Detached
from torsh_example.environment import Site
from torsh_example.launcher import Wrapped, WrappedTransport
from torsh_example.translator import AcmeTranslator
from torsh_trainer.testing import (
    CheckpointerContract, EnvironmentContract, LauncherContract, SubmitLauncherContract,
    TranslatorContract, TransportContract,
)
from torsh_trainer.testing.translator import Sample
from torsh_trainer.environments.world import Rendezvous, World

TASK = {"SITE_TASK": "3/8@node01:29500"}
WORLD = World(3, 8, 3, 8, rendezvous=Rendezvous("node01", 29500), source="site",
              reasons=("SITE_TASK=3/8@node01:29500 -> rank 3 of 8",))


class TestSite(EnvironmentContract):
    environment = Site()
    samples = {"task": (TASK, WORLD)}
    foreign = {"slurm": {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}}
    contradictions = {"no_place": {"SITE_TASK": "here"}, "beyond": {"SITE_TASK": "8/8@node01:1"}}


class TestWrapped(LauncherContract):
    launcher = Wrapped(num_processes=2)


class TestDetached(SubmitLauncherContract):
    launcher = Detached()


class TestWrappedTransport(TransportContract):
    def transport(self, payload):
        return WrappedTransport(payload, wrapper=["nice", "-n", "1"])


class TestLatest(CheckpointerContract):
    checkpointer = Latest


class TestAcme(TranslatorContract):
    translator = AcmeTranslator()
    samples = {
        "whole": Sample(
            "job.acme",
            "rate = 0.1\\nbatch = 64\\ntitle = mine\\nwarp = 9\\n",
            keys=("rate", "batch", "title", "warp"),
            choices={"strategy": "ddp"},
            values={"optimizer.lr": 0.1, "data.batch_size": 64},
        )
    }
    foreign = {"deepspeed": ("ds.json", "{}"), "horovod": ("train.py", "import horovod.torch")}
    invalid = {"stranger": ("job.acme", "speed = 9\\n")}
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

    def test_its_check_of_the_doctor_looks(self, environment, run_command, tmp_path):
        command = [environment, "-m", "torsh_trainer", "doctor", "--only", "scratch,clock"]
        answer = run_command(command, cwd=tmp_path, env={"SITE_SCRATCH": "/no/such/disk"})
        assert answer.returncode == 1, answer.stderr
        assert "/no/such/disk is not there" in answer.stdout
        assert "fix  mount /no/such/disk" in answer.stdout
        assert "1 finding; fine: 1" in answer.stdout

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

    @pytest.mark.exhaustive
    def test_it_is_a_strategy_by_name_for_the_library(self, environment, run_command, tmp_path):
        script = (
            "from torsh_trainer.utils import registry; "
            "print(registry.strategy_class('example')(flatten=False))"
        )
        answer = run_command([environment, "-c", script], cwd=tmp_path)
        assert answer.stdout == "Example(flatten=False)\n", answer.stderr

    @pytest.mark.exhaustive
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

    @pytest.mark.exhaustive
    def test_what_it_leaves_out_it_refuses_by_name(self, plugin_door):
        answer = plugin_door("+recipe=example_digits", "precision=bf16_mixed")
        assert answer.returncode == 2
        assert "strategy=example cannot honour precision=bf16-mixed" in answer.stderr

    def test_every_kind_lists_it_beside_ours(self, environment, run_command, tmp_path):
        script = (
            "from torsh_trainer.utils import registry; print(*sorted({kind.group.partition('.')[2] "
            "for kind in registry.KINDS for one in kind.registrations().values() "
            "if one.distribution == 'torsh-example'}))"
        )
        answer = run_command([environment, "-c", script], cwd=tmp_path)
        kinds = sorted(kind.group.partition(".")[2] for kind in registry.KINDS)
        assert answer.stdout.split() == kinds, answer.stderr

    def test_its_strategy_launcher_and_mesh_axis_train_as_plain_ddp_does(
        self, plugin_door, warm_door, tmp_path
    ):
        few = ["trainer.max_steps=4", "trainer.stages=[fit]", "data.batch_size=64"]
        mine = ["launcher=wrapped", "launcher.wrapper=[nice,-n1]", "mesh=twin", "mesh.twin=2"]
        answer = plugin_door(
            "+recipe=example_digits", *few, *mine, "launcher.num_processes=4", "hydra.run.dir=mine"
        )
        assert answer.returncode == 0, answer.stdout + answer.stderr
        ddp = warm_door(["+recipe=digits", "strategy=ddp", *few, "hydra.run.dir=ddp"], processes=2)
        assert ddp.returncode == 0, ddp.stdout + ddp.stderr
        mine, plain = (
            [
                row
                for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()
                if (row := json.loads(line))["split"] == "train"
            ]
            for run in ("mine", "ddp")
        )
        result = json.loads((tmp_path / "mine" / "result.json").read_text())
        assert (result["strategy"], result["world_size"]) == ("example", 4)
        assert [row["samples"] for row in mine] == [row["samples"] for row in plain]
        for name in ("loss", "grad_norm"):
            assert [row[name] for row in mine] == pytest.approx(
                [row[name] for row in plain], rel=1e-5
            )

    def test_its_rule_translates_a_key_that_nobody_here_knows(self, plugin_door, tmp_path):
        (tmp_path / "ds.json").write_text(
            '{"train_batch_size": 8, "fork": {"label_smoothing": 0.1}}'
        )
        answer = plugin_door("translate", "ds.json", "--report", "report.json")
        assert answer.returncode == 10, answer.stdout + answer.stderr
        report = json.loads((tmp_path / "report.json").read_text())
        (finding,) = [f for f in report["findings"] if f["key"] == "fork.label_smoothing"]
        assert (finding["rule"], finding["verdict"]) == ("fork.label-smoothing", "approximate")
        assert finding["why"].startswith("no knob here: give the loss of your task")

    def test_its_checkpointer_stage_callback_logger_and_backend_serve_one_run(
        self, plugin_door, tmp_path
    ):
        answer = plugin_door(
            "+recipe=example_digits",
            "trainer.max_steps=2",
            "trainer.log_every=1",
            "trainer.stages=[count_tensors,fit]",
            "checkpoint.backend=latest",
            "comm.backend=example",
            "+callbacks.farewell=true",
            "+logger.lines.filename=log.txt",
            "launcher.num_processes=2",
            "hydra.run.dir=run",
        )
        assert answer.returncode == 0, answer.stdout + answer.stderr
        run = tmp_path / "run"
        result = json.loads((run / "result.json").read_text())
        assert result["comm"] == "example"
        assert result["tensors"]["parameters"] > 0
        assert "farewell after 2 steps" in answer.stdout
        assert (run / "checkpoints" / "latest").read_text() == "step-00000002\n"
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        lines = [f"{row['split']} {row['step']} {row['loss']:.6f}" for row in rows]
        assert (run / "log.txt").read_text().splitlines() == lines

    @pytest.mark.exhaustive
    def test_its_formats_take_weights_away_and_back(self, plugin_door, tmp_path):
        answer = plugin_door("+recipe=example_digits", "trainer.max_steps=1", "hydra.run.dir=run")
        assert answer.returncode == 0, answer.stdout + answer.stderr
        out = plugin_door("checkpoint", "export", "run", "--format", "npz", "-o", "model.npz")
        assert out.returncode == 0, out.stdout + out.stderr
        back = plugin_door("checkpoint", "import", "model.npz", "-o", "back", "--step", "1")
        assert back.returncode == 0, back.stdout + back.stderr
        assert back.stderr.startswith("npz: ")
        weights = [
            {entry.name: tensor for entry, tensor in contents.read(contents.model.values())}
            for contents in (
                Contents.open(tmp_path / folder / "step-00000001", verified=True)
                for folder in ("run/checkpoints", "back")
            )
        ]
        assert weights[0].keys() == weights[1].keys()
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])

    def test_its_environment_is_asked_before_ours(self, environment, run_command, tmp_path):
        script = (
            "from torsh_trainer import environments as e; "
            "env = {'SITE_TASK': '1/2@node01:29500', 'RANK': '0', 'WORLD_SIZE': '4', "
            "'TORCHELASTIC_RUN_ID': 'x', 'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '4', "
            "'MASTER_ADDR': 'node02', 'MASTER_PORT': '1'}; "
            "print(e.detect(env).source, e.find_environments()[0].name)"
        )
        answer = run_command([environment, "-c", script], cwd=tmp_path)
        assert answer.stdout == "site site\n", answer.stderr

    def test_its_launcher_has_a_name_for_the_library(self, environment, run_command, tmp_path):
        script = (
            "from torsh_trainer.utils import registry; "
            "print(registry.LAUNCHERS.load('wrapped')(num_processes=2).wrapper)"
        )
        answer = run_command([environment, "-c", script], cwd=tmp_path)
        assert answer.stdout == "('nice',)\n", answer.stderr

    @pytest.mark.parametrize("suites", [STRATEGY, OTHERS], ids=["strategy", "others"])
    @pytest.mark.exhaustive
    def test_it_passes_the_suites_that_ship(self, suites, environment, run_command, tmp_path):
        (tmp_path / "test_example.py").write_text(suites)
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
