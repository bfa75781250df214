"""Public files, translated: every recipe composes, and those that cover them all train.

Files that the engine takes, or of which it has removed keys, with "auto" as Hugging Face fills it.
What is trained is shrunk in size alone: the model is the tiny one of ``verify``, a micro-batch has
two samples, a step at most two of them, and two processes take the place of eight. The loss scale
of fp16 begins at 256: from 2 to the 32, say, two steps would only fall.

Recipes that set the same knobs of the same options are composed once, and then given their own
values. Trained are so many recipes that each strategy has met each precision, optimizer and
accumulation that it meets in any file, each precision each optimizer, and each schedule and way to
clip and to log has been there; EVERY_KIND=1 in the environment trains every combination.
"""

from __future__ import annotations

import copy
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from hydra import compose

from torsh_trainer.assemble import RunRequest, plan_run
from torsh_trainer.comm.base import Communicator
from torsh_trainer.config import command_line
from torsh_trainer.config.app import CONFIG, open_app
from torsh_trainer.config.roots import find_roots
from torsh_trainer.config.wording import plain
from torsh_trainer.errors import ConfigError
from torsh_trainer.testing.ranks import RankPool
from torsh_trainer.training.trainer import run_in
from torsh_trainer.translate.deepspeed.source import Options
from torsh_trainer.translate.deepspeed.translator import translate
from torsh_trainer.translate.recipe import recipe_of

RANKS = 2
OPTIONS = Options(
    context="hf-trainer",
    lenient=True,
    world_size=8,
    settings={"hidden_size": "768", "warmup_steps": "10", "max_steps": "100"},
)
PARTS = ["task=classification", "model=mlp", "data=digits", "trainer.max_steps=2"]
NUMBERS = ("lr", "weight_decay", "eps", "betas", "momentum")
"""Of an optimizer: whether they are sound is seen when the trainer is assembled."""


class Recipe(NamedTuple):
    config: dict[str, Any]
    files: list[str]


@pytest.fixture(scope="module")
def recipes(corpus: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Recipe]:
    """The composed configuration of every recipe, once for files that give the same."""
    files: dict[str, list[str]] = {}
    for path in corpus:
        try:
            text = recipe_of(translate(path, OPTIONS))
        except ConfigError:
            continue
        files.setdefault(text[text.index("\n\n") :], []).append(path.name)
    composed: dict[str, dict[str, Any]] = {}
    folder = tmp_path_factory.mktemp("recipes")
    found = []
    for text, names in files.items():
        content = yaml.safe_load(text)
        knobs = {key: node for key, node in content.items() if key != "defaults"}
        shape = json.dumps([content["defaults"], sorted(flat(knobs))])
        if shape not in composed:
            file = folder / f"{len(composed)}.yaml"
            file.write_text(f"# @package _global_\n{text}")
            line = command_line.parse([f"+recipe={file}", *PARTS])
            with open_app(line, find_roots(None)) as app:
                composed[shape] = plain(compose(CONFIG, app.overrides))
        config = copy.deepcopy(composed[shape])
        for path, value in flat(knobs).items():
            node = config
            for key in path.split(".")[:-1]:
                node = node[key]
            assert path.rpartition(".")[2] in node, path
            node[path.rpartition(".")[2]] = value
        found.append(Recipe(config, names))
    print(f"{len(composed)} compositions")
    return found


def flat(node: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in node.items():
        inner = isinstance(value, dict)
        values |= flat(value, f"{above}{key}.") if inner else {f"{above}{key}": value}
    return values


def accumulation(config: Mapping[str, Any]) -> int:
    steps = config["trainer"]["accumulate"]
    if steps is None:
        data = config["data"]
        steps = data["batch_size"] // data["micro_batch_size"] // OPTIONS.world_size
    return int(steps)


def shrunk(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` in small, with nothing changed but sizes, and nothing logged or saved."""
    low = config["precision"]["params"] != "fp32"
    steps = min(accumulation(config), 2)
    strategy = dict(config["strategy"])
    if strategy.get("shard_size"):
        strategy["shard_size"] = min(strategy["shard_size"], RANKS)
    precision = dict(config["precision"])
    precision["loss_scaling"] = {**precision["loss_scaling"], "initial_scale": 256.0}
    trainer = {"accumulate": None, "eval_every_epochs": None, "log_every": 1}
    checkpoint = {"at_end": False, "resume": "never"}
    return {
        **config,
        "task": {"_target_": "torsh_trainer.verify.subject.Subject", "batch_norm": not low},
        "model": None,
        "data": {"micro_batch_size": 2, "batch_size": 2 * steps * RANKS, "drop_last": True},
        "strategy": strategy,
        "precision": precision,
        "trainer": {**config["trainer"], **trainer},
        "checkpoint": {**config["checkpoint"], **checkpoint},
        "callbacks": {},
        "logger": {},
    }


def features(config: Mapping[str, Any]) -> set[str]:
    """What decides whether a recipe trains, numbers apart: parts, and pairs of them."""
    small = shrunk(config)
    trainer = {
        name: value is not None if name in ("max_grad_norm", "phantom_lr") else value
        for name, value in small["trainer"].items()
    }
    scaling = small["precision"]["loss_scaling"]
    parts: dict[str, Any] = {
        "strategy": {k: v for k, v in small["strategy"].items() if k != "bucket_cap_mb"},
        "precision": {
            **small["precision"],
            "loss_scaling": [scaling["scale"] is not None, scaling["growth_delay"]],
        },
        "optimizer": {k: v for k, v in small["optimizer"].items() if k not in NUMBERS},
        "schedule": {k: v for k, v in small["schedule"].items() if isinstance(v, str)},
        "trainer": trainer,
        "data": small["data"],
        "compression": config["compression"],
    }
    text = {name: json.dumps(part, sort_keys=True) for name, part in parts.items()}
    if os.environ.get("EVERY_KIND"):
        return {json.dumps(text)}
    ways = ("overlap", "gradient_as_bucket_view")
    slow_or_fast = {k: v for k, v in parts["strategy"].items() if k not in ways}
    strategy = json.dumps(slow_or_fast, sort_keys=True)
    pairs = [(strategy, text[name]) for name in ("precision", "optimizer", "data")]
    pairs.append((text["precision"], text["optimizer"]))
    return {*text.values(), *map(str, pairs)}


def covering(recipes: list[Recipe]) -> list[Recipe]:
    """Recipes that have every feature between them: those with the most new ones first."""
    left = {id(recipe): features(recipe.config) for recipe in recipes}
    chosen: list[Recipe] = []
    wanted = set().union(*left.values())
    while wanted:
        best = max(recipes, key=lambda recipe: len(left[id(recipe)] & wanted))
        chosen.append(best)
        wanted -= left[id(best)]
    return chosen


def steps_of(comm: Communicator, config: dict[str, Any], run_dir: Path) -> tuple[int, float | None]:
    content = run_in(comm.world, plan_run(RunRequest(config, run_dir, (), ()))).content
    return content["steps"], content["train_loss"]


@pytest.mark.exhaustive
def test_every_recipe_composes_to_a_trainer_and_those_that_cover_all_train_two_steps_on_two_ranks(
    recipes: list[Recipe], tmp_path: Path
) -> None:
    for recipe in recipes:
        plan_run(RunRequest(recipe.config, None, (), ()))
    chosen = covering(recipes)
    failed: dict[str, str] = {}
    began = time.perf_counter()
    with RankPool(RANKS) as ranks:
        for number, recipe in enumerate(chosen):
            try:
                answers = ranks.run(steps_of, shrunk(recipe.config), tmp_path / str(number))
                assert [steps for steps, _ in answers] == [2, 2], answers
                assert all(loss is not None and math.isfinite(loss) for _, loss in answers), answers
            except AssertionError as error:
                failed[recipe.files[0]] = str(error)[-1500:]
    files = sum(len(recipe.files) for recipe in recipes)
    print(
        f"{files} files, {len(recipes)} recipes, {len(chosen)} of them trained in "
        f"{time.perf_counter() - began:.0f} s"
    )
    assert not failed, "\n\n".join(f"{name}: {words}" for name, words in failed.items())
