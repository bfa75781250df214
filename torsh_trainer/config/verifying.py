"""``verify``: one configuration for each strategy, all of them of the same recipe and overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra import compose

from torsh_trainer.config.app import CONFIG, open_app
from torsh_trainer.config.command_line import CommandLine
from torsh_trainer.config.job import import_paths
from torsh_trainer.config.overrides import bare_key, parse_override
from torsh_trainer.config.roots import RECIPE, find_roots
from torsh_trainer.config.wording import plain
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.utils import registry

GROUP = "verify"
HELP = """\
python -m torsh_trainer verify +recipe=NAME strategies=[A,B,...] [OVERRIDE ...]

Trains the same few steps under each strategy, from the same weights on the same samples with the
same global batch, and says how far losses, gradient norms and parameters are apart. The first of
the list is the reference, or `single` where it is in the list.

  strategies=[single,ddp,fsdp]              any option of the group strategy
  'strategies=[single,{fsdp:{shard_size:2}}]'   with knobs; launcher.num_processes too
  'meshes=[{tp:2},{pp:2,dp_shard:2}]'       strategy=parallel on each of these
  verify.steps=10                           steps of each run
  verify.ladder=[sgd,recipe]                plain SGD without clipping, then the recipe as it is
  verify.bound=1e-6                         allowed relative difference a step; by precision
  verify.sgd_lr=0.1  verify.dir=FOLDER      the rate of the rung sgd; where everything goes
  launcher.num_processes=2                  of the strategies that spread over processes

python -m torsh_trainer verify --source ds_config.json [+recipe=NAME] [OVERRIDE ...]

Trains the original under DeepSpeed and its translation natively, from the same weights on the same
samples, and says which quantity parts first, where, and by which rule; without a recipe on a small
built-in model. Takes the options of translate: --world-size (2), --mode, --context,
--source-version, --set, --lenient.

python -m torsh_trainer verify --command 'horovodrun -np 2 python train.py' [--steps 20]
python -m torsh_trainer verify --launch run.sh [--job LINE] [--set NAME=VALUE] [--steps 20]

Runs your own line under its engine, then by drop-in, and compares every step; verify --command
LINE --help says more.

Writes a table, verify.json and verify.html. Exit code: 0 within bounds, 12 a bound is broken,
11 a strategy refuses the recipe, 1 an engine is missing, 2 your input, 3 a run failed."""

LISTS = ("strategies", "meshes")
"""Knobs of the group that are known by their last names."""

OWN = {
    "callbacks": "the runs have none but the one that compares",
    "logger": "the runs have none but metrics.jsonl",
    "checkpoint": "nothing is saved or resumed",
    "trainer.stages": "it trains only",
    "trainer.max_steps": "verify.steps says how many",
    "trainer.max_epochs": "verify.steps says how long",
    "trainer.max_time": "verify.steps says how long",
    "trainer.log_every": "every step is looked at",
    "trainer.eval_every": "nothing is evaluated",
    "trainer.eval_every_epochs": "nothing is evaluated",
    "trainer.fast_dev_run": "verify.steps says how many",
    "strategy": "name it in strategies=[...], with its knobs as {ddp:{zero1:true}}",
    "hydra": "verify.dir says where the runs go",
}
"""What verify settles itself, and why an override of it means nothing here."""


@dataclass(frozen=True)
class Verification:
    """What a command line asks for: the node of the group ``verify``, and how to compose."""

    line: CommandLine
    recipe: str
    node: Mapping[str, Any]

    @property
    def import_paths(self) -> tuple[str, ...]:
        """Where user code is found."""
        return import_paths(self.line.config_dir)

    def config(self, strategy: str, knobs: Mapping[str, Any]) -> dict[str, Any]:
        """The resolved configuration under a strategy.

        Raises:
            ConfigError: there is no such strategy or knob, or a value is missing.
            ResourceError: the strategy is a plugin's that is not installed.
        """
        own = [f"{_key(name)}={text_of(value)}" for name, value in knobs.items()]
        line = self.line.with_overrides([*self.line.overrides, f"strategy={strategy}", *own])
        try:
            config = compose_line(line)
        except ConfigError as error:
            wanted = (error.facts.get("group"), error.facts.get("name"))
            if wanted in registry.DISTRIBUTIONS:
                raise ResourceError(error.sentence, fix=error.fix, **error.facts) from error
            raise
        del config[GROUP]
        return config


def verification(line: CommandLine) -> Verification:
    """What ``line`` asks to be verified.

    Raises:
        ConfigError: no recipe, or an override that means nothing here.
    """
    if line.multirun or not line.trains or line.dry_run:
        raise ConfigError("verify trains and compares", fix="leave -m, --cfg and --info out")
    overrides = [_spell_out(text) for text in line.overrides]
    for text in overrides:
        key = bare_key(text)
        for name, reason in OWN.items():
            if key == name or key.startswith((f"{name}.", f"{name}/")):
                raise ConfigError(f"{text} means nothing to verify", fix=reason)
    roots = find_roots(line.config_dir)
    named = [text for text in overrides if bare_key(text) == RECIPE]
    if not named and not any(bare_key(text) == "task" for text in overrides):
        raise ConfigError(
            "verify trains a recipe, and none is named",
            fix=f"add +recipe=NAME, one of {', '.join(roots.recipes())}; or +recipe=FILE.yaml",
        )
    line = line.with_overrides([f"+{GROUP}=default", *overrides])
    recipe = named[-1].partition("=")[2] if named else ""
    return Verification(line, recipe, compose_line(line)[GROUP])


def compose_line(line: CommandLine) -> dict[str, Any]:
    """The resolved configuration of a command line."""
    with open_app(line, find_roots(line.config_dir)) as app:
        return plain(compose(CONFIG, app.overrides))


def _spell_out(text: str) -> str:
    """Lists under their whole names; a list without brackets is no sweep."""
    name = bare_key(text)
    if name not in LISTS:
        return text
    value = text.partition("=")[2]
    if parse_override(text).is_sweep_override():
        raise ConfigError(f"{text} is no list", fix=f"write {name}=[{value}]")
    if not value.startswith("["):
        value = f"[{value}]" if value else "[]"
    return f"{GROUP}.{name}={value}"


def _key(name: str) -> str:
    return name if "." in name else f"strategy.{name}"


def text_of(value: Any) -> str:
    """``value`` as the grammar of overrides reads it back."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{text_of(item)}" for name, item in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ",".join(map(text_of, value)) + "]"
    text = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"
