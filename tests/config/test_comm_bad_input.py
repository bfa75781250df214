"""Backends that are not here, asked for in every way: what to install is told in one sentence."""

from __future__ import annotations

import pytest

from torsh_trainer import registry


@pytest.fixture
def core_alone(monkeypatch):
    """As where no plugin is installed."""
    for name in ("backends", "plugin_folders", "strategies", "verbs"):
        own = {"strategies": registry.STRATEGIES, "verbs": registry.VERBS}.get(name, {})
        monkeypatch.setattr(registry, name, lambda own=own: own)


@pytest.mark.usefixtures("core_alone")
@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [
        ("strategy=mpi", 1, "rank 0 cannot use mpi"),
        ("strategy=ddp comm=mpi", 1, "rank 0 cannot use mpi"),
        ("strategy=ddp comm.backend=mpi", 1, "rank 0 cannot use mpi"),
        ("launcher=mpi", 2, "unknown launcher 'mpi'"),
    ],
)
def test_without_the_plugin_for_mpi_the_error_says_what_to_install(door, typed, code, said):
    answer = door("+recipe=quick.yaml", *typed.split())
    assert answer.code == code
    assert said in answer.err
    assert "; pip install torsh-trainer-mpi" in answer.err
    assert len(answer.err.splitlines()) == 1


@pytest.mark.usefixtures("core_alone")
def test_a_recipe_that_names_its_launcher_is_told_the_same(door, home):
    text = (home / "quick.yaml").read_text()
    (home / "quick.yaml").write_text(text.replace("launcher: inline", "launcher: mpi"))
    answer = door("+recipe=quick.yaml")
    assert answer.code == 2
    assert "unknown launcher 'mpi'; pip install torsh-trainer-mpi" in answer.err


def test_what_two_processes_need_is_installed_with_the_core(project):
    """Without numpy, which torch does not ask for, its collectives of objects fail."""
    assert any(line.startswith("numpy") for line in project["dependencies"])


def test_a_backend_that_this_machine_cannot_use_offers_a_way_out(door):
    answer = door("+recipe=quick.yaml", "strategy=nccl", "trainer.device=cpu")
    assert answer.code == 1
    assert "rank 0 cannot use nccl" in answer.err
    assert "set comm.on_missing=fallback to take gloo" in answer.err
    assert "another strategy than strategy=nccl" in answer.err
    assert len(answer.err.splitlines()) == 1
