"""Recipes and files: found by name, by path and in the user's folder; and who wins over whom."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_config_loses_to_the_recipe_and_the_recipe_to_the_command_line(door, home, repository):
    default = yaml.safe_load((repository / "conf" / "trainer" / "default.yaml").read_text())
    write(home / "mine.yaml", "trainer: {seed: 1, log_every: 2}\n")
    trainer = door("--cfg", "job", "+recipe=mine.yaml", "trainer.log_every=3").config["trainer"]
    assert trainer == {**default, "seed": 1, "log_every": 3}


def test_a_group_chosen_on_the_command_line_wins_over_the_recipes_choice(door, home):
    write(home / "mine.yaml", "defaults:\n  - override /strategy: ddp\n")
    chosen = door("--cfg", "job", "+recipe=mine.yaml").config["strategy"]
    assert chosen["_target_"].endswith("DDP")
    chosen = door("--cfg", "job", "+recipe=mine.yaml", "strategy=fsdp").config["strategy"]
    assert chosen["_target_"].endswith("FSDP")


@pytest.mark.parametrize("spelling", ["+recipe=", "recipe="])
@pytest.mark.parametrize(
    "file", ["sub/mine.yaml", "./sub/mine.yaml", "{home}/sub/mine.yaml", "sub/mine.yml"]
)
def test_a_recipe_is_found_by_its_path(door, home, spelling, file):
    path = Path(file.format(home=home))
    write(home / path, "trainer: {seed: 5}\n")
    assert door("--cfg", "job", f"{spelling}{path}").config["trainer"]["seed"] == 5


def test_a_recipe_is_found_by_its_folder(door, home):
    write(home / "mine" / "recipe.yaml", "trainer: {seed: 5}\n")
    assert door("--cfg", "job", "+recipe=./mine").config["trainer"]["seed"] == 5


def test_a_path_may_hold_spaces_commas_and_quotes(door, home):
    write(home / "it's, my=odd {dir}" / "mine.yaml", "trainer: {seed: 5}\n")
    answer = door("--cfg", "job", r"+recipe='it\'s, my=odd {dir}/mine.yaml'")
    assert answer.config["trainer"]["seed"] == 5


def test_a_recipe_builds_on_another(door, home):
    write(home / "mine.yaml", "defaults: [/recipe/digits]\ntrainer: {seed: 5}\n")
    config = door("--cfg", "job", "+recipe=mine.yaml").config
    assert config["task"]["_target_"].endswith("Classification")
    assert config["trainer"]["seed"] == 5


def test_a_recipe_with_a_package_header_is_the_same(door, home):
    write(home / "mine.yaml", "# @package _global_\ntrainer: {seed: 5}\n")
    assert door("--cfg", "job", "+recipe=mine.yaml").config["trainer"]["seed"] == 5


def test_any_group_takes_a_file(door, home, repository):
    text = (repository / "conf" / "strategy" / "ddp.yaml").read_text()
    write(home / "my" / "ddp.yaml", text.replace("zero1: false", "zero1: true"))
    config = door("--cfg", "job", "+recipe=quick.yaml", "strategy=my/ddp.yaml").config
    assert config["strategy"]["zero1"] is True
    config = door("--cfg", "job", "+recipe=quick.yaml", "+strategy=my/ddp.yaml").config
    assert config["strategy"]["zero1"] is True


def test_a_file_may_build_on_an_option_of_its_group(door, home):
    write(home / "my" / "ddp.yaml", "defaults: [ddp, _self_]\nzero1: true\n")
    config = door("--cfg", "job", "+recipe=quick.yaml", "strategy=my/ddp.yaml").config
    assert config["strategy"]["zero1"] is True
    assert config["strategy"]["bucket_cap_mb"] == 25.0


def test_an_option_may_be_named_with_its_extension(door):
    config = door("--cfg", "job", "+recipe=quick.yaml", "strategy=ddp.yaml").config
    assert config["strategy"]["_target_"].endswith("DDP")


def test_a_group_is_left_out_with_null_or_a_tilde(door):
    for text in ("schedule=null", "~schedule"):
        assert "schedule" not in door("--cfg", "job", "+recipe=quick.yaml", text).config


@pytest.mark.parametrize("place", ["recipes/mine/recipe.yaml", "recipe/mine.yaml"])
def test_config_dir_holds_recipes_and_groups(door, home, place):
    write(home / "conf" / place, "defaults:\n  - override /strategy: mine\n")
    write(home / "conf" / "strategy" / "mine.yaml", "defaults: [ddp, _self_]\nzero1: true\n")
    config = door("--config-dir", "conf", "--cfg", "job", "+recipe=mine").config
    assert config["strategy"]["zero1"] is True


def test_config_dir_comes_before_ours(door, home):
    write(home / "conf" / "recipes" / "digits" / "recipe.yaml", "trainer: {seed: 5}\n")
    config = door("--config-dir", "conf", "--cfg", "job", "+recipe=digits").config
    assert config["trainer"]["seed"] == 5
    assert "task" not in config


def test_a_config_yaml_in_config_dir_does_not_take_the_place_of_the_root(door, home):
    write(home / "conf" / "config.yaml", "something: else\n")
    config = door("--config-dir", "conf", "--cfg", "job", "+recipe=digits").config
    assert "something" not in config
    assert config["task"]["_target_"].endswith("Classification")


def test_a_knob_that_is_a_path_of_a_yaml_file_stays_one(door, home):
    write(home / "weights.yaml", "a: 1\n")
    answer = door("--cfg", "job", "+recipe=quick.yaml", "trainer.pretrained=weights.yaml")
    assert answer.config["trainer"]["pretrained"] == "weights.yaml"


def test_every_recipe_of_ours_composes(door, repository):
    for recipe in (repository / "recipes").iterdir():
        config = door("--cfg", "job", f"+recipe={recipe.name}").config
        assert config["task"]["_target_"]
        assert config["data"]["_target_"]
