"""Overrides as the user typed them, checked and made ready for Hydra.

What Hydra would take in silence, or refuse in its own words, is settled here: a file path given to
a group, a group that does not exist, an option that does not exist, a list of values without a
sweep, a knob under its old name.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    ChoiceSweep,
    Override,
    OverrideType,
    Quote,
    QuotedString,
    ValueType,
)
from hydra.errors import HydraException

from torsh_trainer.config import own_nodes
from torsh_trainer.config.command_line import CommandLine
from torsh_trainer.config.renamed import Table, today
from torsh_trainer.config.roots import FREE, RECIPE, YAML, Roots
from torsh_trainer.errors import ConfigError, nearest
from torsh_trainer.utils import registry
from torsh_trainer.utils.registry import GROUPS, SETTINGS

HYDRA_GROUPS = ("hydra/launcher", "hydra/sweeper", "hydra/help", "hydra/env", "hydra/output")
FOR_SWEEPS = ("hydra.sweep", "hydra.launcher", "hydra/sweeper", "hydra/launcher")
OTHER_LIBRARIES = {
    "optuna": "hydra-optuna-sweeper",
    "joblib": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
}
"""Options of Hydra's groups that come with a distribution of their own."""

_SIGNS = {"": OverrideType.CHANGE, "+": OverrideType.ADD, "++": OverrideType.FORCE_ADD}
_QUOTED_KEY = re.compile(r"([{,]\s*)[\"']([^\"']*)[\"']\s*:")
_PLAIN = re.compile(
    r"(\+{0,2})([a-z_]\w*(?:(?:\.[a-z_]\w*)+|(?:/[a-z_]\w*)*))="
    r"(?:([+-]?(?:0|[1-9]\d*))|([+-]?(?:0|[1-9]\d*)(?:\.\d+|(?:\.\d+)?e[+-]?\d+))|(true|false)"
    r"|((?!(?:true|false|null|inf|nan)$)[a-z_][\w-]*))",
    re.ASCII | re.IGNORECASE,
)


@dataclass(frozen=True)
class Overrides:
    """Checks the overrides of ``line`` against what ``roots`` offer; paths start at ``cwd``.

    ``loader`` knows the options of Hydra's own groups.
    """

    roots: Roots
    loader: ConfigLoader
    cwd: Path
    line: CommandLine
    renamed: Table

    def prepare(self) -> list[str]:
        """The overrides of the command line, as Hydra is to be given them.

        Raises:
            ConfigError: one of them cannot mean anything; the nearest names are offered.
        """
        keys = {bare_key(text) for text in self.line.overrides}
        values = [parse_override(text) for text in self.line.overrides]
        placed = own_nodes.places([(o.key_or_group, o.value()) for o in values])
        chosen = {o.key_or_group for o in values if not isinstance(o.value(), dict)}
        prepared = [self._prepare(text, keys, placed) for text in self.line.overrides]
        return own_nodes.remove_replaced(placed, chosen) + prepared

    def _prepare(self, text: str, keys: set[str], placed: set[str]) -> str:
        override = parse_override(text)
        if override.is_sweep_override() and not self.line.multirun:
            raise _several_values(override)
        key = override.key_or_group
        if key.startswith(("hydra.", "hydra/")):
            return self._hydra(override)
        if key in self._groups and not isinstance(override.value(), dict):
            return self._choose(override)
        self._check_key(override)
        # What a mapping may hold its owner knows, whom it is held against before anything is built.
        mapping = "." in key and isinstance(override.value(), dict)
        free = key.partition(".")[0] == FREE or mapping or own_nodes.within(key, placed)
        if free and not override.is_delete():
            return f"++{text.lstrip('+')}"
        new = today(key, self.renamed)
        if new == key:
            return text
        if new in keys:
            raise ConfigError(f"{new} is set and, by its old name, {key}", fix=f"keep {new} alone")
        return text.replace(key, new, 1)

    # -- knobs ----------------------------------------------------------------------------------

    def _check_key(self, override: Override) -> None:
        """Refuses a name at the top that nobody knows, whatever sign stands before it."""
        top, dot, rest = override.key_or_group.partition(".")
        if top == RECIPE and dot:
            raise ConfigError(
                f"{override.input_line}: a recipe has no knobs of its own",
                fix=f"set the knob where it lives: {_after_equals(override, rest)}",
            )
        if top in (*SETTINGS, *GROUPS) or (dot and top in self._groups):
            return
        known = {*self._groups, *SETTINGS}
        what = "group" if dot or _looks_like_a_path(override.value()) else "group or setting"
        raise ConfigError(f"there is no {what} {top!r}", fix=nearest(top, known), name=top)

    # -- choosing an option of a group ----------------------------------------------------------

    @cached_property
    def _groups(self) -> dict[str, list[str]]:
        # Not Hydra's own listing: that copies everything it knows at each question.
        return {**self.roots.groups(), RECIPE: list(self.roots.recipes())}

    def _choose(self, override: Override) -> str:
        group = override.key_or_group
        key = override.get_key_element().lstrip("+")
        if override.is_delete():
            return str(override.input_line)
        if override.value() is None:
            if group == RECIPE:
                raise ConfigError(
                    f"{override.input_line} names no recipe", fix=self._offer(group, "")
                )
            return f"~{key}"
        # A group of the user's own is added, unless it says where: then a recipe has chosen there.
        placed = "@" in key and not str(override.input_line).startswith("+")
        sign = "" if group in GROUPS or placed else "+"
        if override.is_sweep_override() and not isinstance(override._value, ChoiceSweep):
            return f"{sign}{key}={_after(override)}"  # glob(...): Hydra asks for the options
        if isinstance(override._value, ChoiceSweep):
            options = [self._option(group, element) for element in override._value.list]
            words = ",".join(options)
            simple = override._value.simple_form
            return f"{sign}{key}={words if simple else f'choice({words})'}"
        if isinstance(override._value, list):
            options = [self._option(group, element) for element in override._value]
            return f"{sign}{key}=[{','.join(options)}]"
        return f"{sign}{key}={self._option(group, override._value)}"

    def _option(self, group: str, element: Any) -> str:
        """``element`` as Hydra finds it: an option's name, or the absolute path of a file."""
        name = element.text if isinstance(element, QuotedString) else str(element)
        try:
            file = self._file(group, name)
        except OSError as error:  # such as a name that no file system takes
            raise ConfigError(
                f"{group}={name[:40]}{'...' * (len(name) > 40)} cannot be looked for: "
                f"{error.strerror}",
                fix="correct the name",
            ) from error
        if file is not None:
            return _quote_value(file.as_posix())
        name = name.removesuffix(".yaml")
        folder, _, stem = name.rpartition("/")
        if stem not in self._groups.get(f"{group}/{folder}".rstrip("/"), ()):
            fix = self._beside(group, name) or self._offer(group, name)
            raise ConfigError(f"unknown {group} {name!r}", fix=fix, group=group, name=name)
        return _quote_value(name)

    def _beside(self, group: str, name: str) -> str:
        """What to type for an option that lies in the current directory; nothing if none does."""
        if (self.cwd / f"{name}.yaml").is_file():
            return f"did you mean the file {name}.yaml?"
        own = [f"{group}/{name}.yaml"]
        own += [f"recipes/{name}/recipe.yaml"] if group == "recipe" else []
        if any((self.cwd / "conf" / path).is_file() for path in own):
            return "add --config-dir conf: it lies in ./conf, which is not looked into by itself"
        return ""

    def _file(self, group: str, name: str) -> Path | None:
        """The file that ``name`` is a path of; None when it is an option's name.

        Raises:
            ConfigError: it can only be a path, and there is no such file.
        """
        path = (self.cwd / Path(name).expanduser()).absolute()
        if group == RECIPE and (path / "recipe.yaml").is_file() and "/" in name:
            return path / "recipe.yaml"
        if path.suffix not in YAML:
            return None
        if path.is_file():
            return path
        if "/" not in name and path.stem in self._groups[group]:
            return None
        beside = [file.name for file in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        offer = nearest(path.name, beside) if beside else ""
        raise ConfigError(
            f"{group}={name}: there is no such file"
            + ("" if Path(name).is_absolute() else f" in {self.cwd}"),
            fix=offer or self._offer(group, path.stem),
        )

    def _offer(self, group: str, name: str) -> str:
        options = self._groups[group]
        if (group, name) in registry.DISTRIBUTIONS:
            return f"pip install {registry.DISTRIBUTIONS[group, name]}"
        return nearest(name, options) if options else "no option of it is installed"

    # -- Hydra's own ----------------------------------------------------------------------------

    def _hydra(self, override: Override) -> str:
        group = override.key_or_group
        value = override.value()
        text = str(override.input_line)
        if group in ("hydra.run.dir", "hydra.sweep.dir") and "://" in str(value):
            raise ConfigError(
                f"{text} is a URL, and a run directory is a folder",
                fix="name a folder; checkpoint.dir may be a URL",
            )
        if self.line.trains and self.line.multirun and group.startswith("hydra.run."):
            raise ConfigError(
                f"{text} is for a single run, and -m starts a sweep",
                fix="set hydra.sweep.dir, in which every job gets a directory",
            )
        if self.line.trains and not self.line.multirun and group.startswith(FOR_SWEEPS):
            raise ConfigError(
                f"{text} is for a sweep, and this is a single run",
                fix="add -m, or leave it out (launcher=... starts the processes of a run)",
            )
        if group not in HYDRA_GROUPS or not isinstance(value, str):
            return text
        options = self.loader.get_group_options(group)
        if value not in options:
            distribution = OTHER_LIBRARIES.get(value)
            raise ConfigError(
                f"unknown {group} {value!r}",
                fix=f"pip install {distribution}" if distribution else nearest(value, options),
            )
        return text


@functools.lru_cache(maxsize=4096)
def parse_override(text: str) -> Override:
    """One override.

    Raises:
        ConfigError: it is no override.
    """
    return _plain(text) or _by_grammar(text)


def _plain(text: str) -> Override | None:
    """``text`` where it is a name and a plain value; None leaves it to Hydra's grammar.

    What most are, at a hundredth of what the grammar takes. Hydra reads each by its grammar again.
    """
    found = _PLAIN.fullmatch(text)
    if found is None:
        return None
    signs, key, whole, fraction, switch, word = found.groups()
    value: Any = word
    if whole is not None:
        value = int(whole)
    elif fraction is not None:
        value = float(fraction)
    elif switch is not None:
        value = switch.lower() == "true"
    return Override(_SIGNS[signs], key, ValueType.ELEMENT, value, input_line=text)


def _by_grammar(text: str) -> Override:
    if "=" not in text and not text.startswith("~"):
        raise ConfigError(
            f"{text!r} sets nothing", fix=f"write {text}=VALUE, or ~{text} to drop it"
        )
    try:
        return _parser().parse_override(text)
    except HydraException as error:
        key, _, value = text.partition("=")
        hint = f"put the value in quotes: '{key}=\"{value}\"'"
        if value.count("[") != value.count("]") or value.count("{") != value.count("}"):
            hint = "close the brackets, and put the whole override in quotes: '...'"
        elif _QUOTED_KEY.search(value):
            bare = _QUOTED_KEY.sub(r"\1\2:", value)
            hint = f"write its keys without quotes: '{key}={bare}'"
        raise ConfigError(f"{text!r} cannot be read as NAME=VALUE", fix=hint) from error


@functools.cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


def bare_key(text: str) -> str:
    """What an override sets: its key without ``+``, ``~`` or a package."""
    return text.partition("=")[0].lstrip("+~").partition("@")[0]


def _several_values(override: Override) -> ConfigError:
    text, key, value = override.input_line, override.get_key_element(), _after(override)
    listed = f"; for one value that is a list write {key}=[{value}]" if "." in key else ""
    return ConfigError(f"{text} names several values", fix=f"add -m to run each of them{listed}")


def _after(override: Override) -> str:
    return str(override.input_line).partition("=")[2]


def _after_equals(override: Override, key: str) -> str:
    return f"{key}={_after(override)}"


def _looks_like_a_path(value: Any) -> bool:
    return isinstance(value, str) and value.endswith(YAML)


def _quote_value(text: str) -> str:
    """``text`` as one value, quoted where the grammar of overrides needs it."""
    plain = all(char.isalnum() or char in "_-./" for char in text) and not text[0].isdigit()
    return text if plain else QuotedString(text, Quote.single).with_quotes()
