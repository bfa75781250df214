"""What the door answers without training: help, configuration, where things come from."""

from __future__ import annotations

import sys

import pytest
import yaml

from torsh_trainer import __version__
from torsh_trainer.config.roots import find_roots
from torsh_trainer.testing.plugins import install_plugin
from torsh_trainer.utils import registry
from torsh_trainer.utils.registry import GROUPS


def test_help_lists_verbs_recipes_groups_and_options(door, repository):
    answer = door("--help")
    assert answer.code == 0
    for verb in registry.VERBS.names():
        assert verb in answer.out
    for recipe in (repository / "recipes").iterdir():
        assert recipe.name in answer.out
    for group in GROUPS:
        for path in (repository / "conf" / group).glob("[!_]*.yaml"):
            assert path.stem in answer.out, path
    assert "_loading" not in answer.out


def test_help_lists_the_users_own_folder(door, home):
    (home / "conf" / "strategy").mkdir(parents=True)
    (home / "conf" / "strategy" / "special.yaml").write_text("# Mine.\ndefaults: [ddp]\n")
    (home / "conf" / "recipes" / "mine").mkdir(parents=True)
    (home / "conf" / "recipes" / "mine" / "recipe.yaml").write_text("# Mine.\n")
    answer = door("--config-dir", "conf", "--help")
    assert "special" in answer.out
    assert "mine" in answer.out


def test_no_line_of_help_is_longer_than_a_wide_terminal(door):
    assert max(map(len, door("--help").out.splitlines())) <= 100


def test_a_bare_command_lists_the_recipes(door, repository):
    answer = door()
    assert answer.code == 2
    for recipe in (repository / "recipes").iterdir():
        assert f"+recipe={recipe.name}" in answer.err
    assert "--help" in answer.err


def test_version(door):
    assert door("--version").out.strip() == f"torsh-trainer {__version__}"


@pytest.mark.parametrize(
    "args", [["--help"], ["--cfg", "job", "+recipe=digits"], ["--info", "searchpath"], []]
)
def test_an_answer_without_training_imports_no_torch(args, run_command, tmp_path):
    script = (
        "import sys; from torsh_trainer.__main__ import main; "
        f"main({args!r}); "
        "heavy = {'torch', 'numpy', 'optuna', 'submitit', 'joblib', 'rich'} & set(sys.modules); "
        "print(*heavy, file=sys.stderr); sys.exit(bool(heavy))"
    )
    answer = run_command([sys.executable, "-c", script], cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr


def test_cfg_job_prints_every_group_and_no_hydra(door):
    config = door("--cfg", "job", "+recipe=digits").config
    assert {*GROUPS} <= {*config}
    assert "hydra" not in config


def test_cfg_job_takes_a_package_and_resolves(door):
    answer = door(
        "+recipe=quick.yaml",
        "--cfg",
        "job",
        "--package",
        "trainer",
        "--resolve",
        "vars={steps: 7}",
        "trainer.max_steps=${vars.steps}",
    )
    assert yaml.safe_load(answer.out)["max_steps"] == 7


def test_flags_and_overrides_may_stand_in_any_order(door):
    answer = door("trainer.seed=3", "--cfg", "job", "+recipe=quick.yaml", "--package", "trainer")
    assert yaml.safe_load(answer.out)["seed"] == 3


def test_info_says_where_configuration_is_read_from(run_door, tmp_path):
    (tmp_path / "conf").mkdir()
    answer = run_door(["--config-dir", "conf", "--info", "searchpath"])
    assert answer.returncode == 0, answer.stderr
    assert str(tmp_path / "conf") in answer.stdout
    assert str(find_roots().own.conf) in answer.stdout


def test_rerun_helps_too(door):
    assert "RUN_DIRECTORY" in door("rerun", "--help").out


def test_a_plugin_whose_package_is_gone_is_said_and_does_not_stop_other_runs(door, tmp_path):
    gone = {"torsh_trainer.plugins": {"lost": "lost_of_door.conf"}}
    with install_plugin(tmp_path / "site", entry_points=gone):
        answer = door("+recipe=quick.yaml", "--cfg", "job")
    assert answer.code == 0
    (line,) = answer.err.splitlines()
    assert line.startswith("note: plugin 'lost' is registered, but its package 'lost_of_door.conf'")
