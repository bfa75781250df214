"""A knob that was renamed keeps working under its old name, and says so."""

from __future__ import annotations

import pytest

from torsh_trainer.config import app, command_line, renamed, roots
from torsh_trainer.config.renamed import RENAMED, Renamed
from torsh_trainer.errors import ConfigError

TABLE = {
    "trainer.steps": Renamed("trainer.max_steps", removed_in="9.0"),
    "strategy.bucket_mb": Renamed("strategy.bucket_cap_mb", removed_in="9.0"),
    "strategy.seed": Renamed("trainer.seed", removed_in="9.0"),
    "trainer.epochs": Renamed("trainer.max_epochs", removed_in="0.1"),
}


@pytest.fixture(autouse=True)
def untold(monkeypatch):
    monkeypatch.setattr(renamed, "_told", set())


@pytest.fixture
def composed(home, capsys):
    """``composed(overrides) -> (configuration, warnings)`` under the table above."""

    def compose(*overrides):
        line = command_line.parse([*overrides, "--cfg", "job"])
        with app.open_app(line, roots.find_roots(), renamed=TABLE) as opened:
            config = opened.hydra.compose_config(app.CONFIG, opened.overrides, run_mode=None)
        return config, capsys.readouterr().err.splitlines()

    return compose


def test_an_override_by_the_old_name_sets_the_new_one_and_says_so_once(composed):
    config, said = composed("+recipe=quick.yaml", "trainer.steps=7")
    assert config.trainer.max_steps == 7
    assert said == [
        "note: trainer.steps is now called trainer.max_steps; the old name goes in release 9.0"
    ]


def test_a_recipe_by_the_old_name_sets_the_new_one(composed, home):
    (home / "old.yaml").write_text("trainer: {steps: 7}\n")
    config, said = composed("+recipe=old.yaml")
    assert config.trainer.max_steps == 7
    assert "steps" not in config.trainer
    assert len(said) == 1


def test_a_group_file_by_the_old_name_sets_the_new_one(composed, home):
    (home / "old.yaml").write_text("defaults: [ddp, _self_]\nbucket_mb: 3\n")
    config, said = composed("+recipe=quick.yaml", "strategy=old.yaml")
    assert config.strategy.bucket_cap_mb == 3
    assert len(said) == 1


def test_both_names_at_once_are_refused(composed, home):
    (home / "old.yaml").write_text("trainer: {steps: 7, max_steps: 8}\n")
    with pytest.raises(ConfigError, match=r"old\.yaml sets trainer\.max_steps and.*trainer\.steps"):
        composed("+recipe=old.yaml")


def test_both_names_on_the_command_line_are_refused(composed):
    with pytest.raises(ConfigError, match=r"trainer\.max_steps is set and, by its old name"):
        composed("+recipe=quick.yaml", "trainer.steps=7", "trainer.max_steps=8")


def test_the_command_line_wins_over_the_old_name_in_a_recipe(composed, home):
    (home / "old.yaml").write_text("trainer: {steps: 7}\n")
    config, _ = composed("+recipe=old.yaml", "trainer.max_steps=8")
    assert config.trainer.max_steps == 8


@pytest.mark.parametrize("where", ["override", "file"])
def test_a_name_that_is_gone_is_an_error_with_the_new_one(composed, home, where):
    (home / "old.yaml").write_text("trainer: {epochs: 7}\n" if where == "file" else "{}")
    given = ["trainer.epochs=7"] if where == "override" else []
    with pytest.raises(ConfigError, match=r"trainer\.epochs is gone; it is called trainer\.max_ep"):
        composed("+recipe=old.yaml", *given)


def test_a_group_file_cannot_set_a_knob_that_moved_to_another_group(composed, home):
    (home / "old.yaml").write_text("defaults: [ddp, _self_]\nseed: 3\n")
    with pytest.raises(ConfigError, match="belongs to another group"):
        composed("+recipe=quick.yaml", "strategy=old.yaml")


def test_names_of_today_say_nothing(composed):
    _, said = composed("+recipe=quick.yaml", "trainer.max_steps=7")
    assert said == []


def test_every_entry_of_the_real_table_names_a_knob_that_exists(door):
    config = door("--cfg", "job", "+recipe=digits").config
    for old, entry in RENAMED.items():
        group, _, knob = entry.new.partition(".")
        assert knob in config[group], f"{old} -> {entry.new}"
