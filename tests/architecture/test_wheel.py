"""The built wheel works on its own: conf and recipes travel inside, nothing else does."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def wheel(repository, run_command, tmp_path_factory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder]
    result = run_command([*command, repository], cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, repository, run_command, tmp_path_factory) -> Path:
    """The Python of a new environment with the wheel, and this environment's libraries beneath.

    A .pth file lends the libraries. Python does not read .pth files found through one, so the
    editable install of the checkout stays behind.
    """
    home = tmp_path_factory.mktemp("installed")
    venv.create(home / "venv")
    python = home / "venv" / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", python, "install", "-qq"]
    result = run_command([*command, "--no-deps", "--no-index", wheel], cwd=home)
    assert result.returncode == 0, result.stdout + result.stderr
    (site_packages,) = (home / "venv" / "lib").glob("python*/site-packages")
    # Plugins are registered there as well, and their code is where they were installed from.
    places = [sysconfig.get_path("purelib"), *(repository / "plugins").iterdir()]
    (site_packages / "libraries.pth").write_text("\n".join(map(str, places)) + "\n")
    return python


def run(python: Path, args: list[str], cwd: Path, run_command) -> subprocess.CompletedProcess[str]:
    return run_command([python, "-m", "torsh_trainer", *args], cwd=cwd)


def test_the_wheel_holds_the_package_with_conf_and_recipes_and_nothing_else(wheel, repository):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {
        f"torsh_trainer/_data/{path.relative_to(repository)}"
        for folder in ("conf", "recipes")
        for path in (repository / folder).rglob("*")
        if path.is_file()
    } | {
        str(path.relative_to(repository))
        for path in (repository / "torsh_trainer").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == expected


def test_the_wheel_carries_both_licences(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    licences = {Path(name).name for name in names if "/licenses/" in name}
    assert licences == {"LICENSE-MIT", "LICENSE-APACHE"}


def test_the_installed_package_is_not_the_checkout(installed, repository, run_command, tmp_path):
    script = "import torsh_trainer; print(torsh_trainer.__file__)"
    result = run_command([installed, "-c", script], cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert str(installed.parents[1]) in result.stdout
    assert str(repository) not in result.stdout


def test_the_door_of_the_wheel_lists_the_recipes_that_travelled(installed, run_command, tmp_path):
    result = run(installed, ["--help"], tmp_path, run_command)
    assert result.returncode == 0, result.stderr
    assert "digits" in result.stdout


def test_the_wheel_composes_a_recipe_from_inside_itself(
    installed, repository, run_command, tmp_path
):
    args = ["+recipe=digits", "--info", "searchpath"]
    result = run(installed, args, tmp_path, run_command)
    assert result.returncode == 0, result.stderr
    assert "_data" in result.stdout
    others = result.stdout.replace(str(repository / "plugins"), "")
    assert str(repository) not in others


def test_the_wheel_trains_a_recipe_in_an_empty_directory(installed, run_command, tmp_path):
    args = ["+recipe=digits", "strategy=ddp", "launcher.num_processes=2", "trainer.max_steps=3"]
    result = run(installed, args, tmp_path, run_command)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = tmp_path.rglob("result.json")
    answer = json.loads(path.read_text())
    assert answer["steps"] == 3
    assert answer["world_size"] == 2
