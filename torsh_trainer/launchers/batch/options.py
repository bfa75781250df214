"""Knobs that launchers of batch systems share, checked."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torsh_trainer.errors import ConfigError

_LONG = re.compile(r"--([a-z][a-z0-9-]*)(?:=(.*))?", re.DOTALL)
_GPUS = re.compile(r"(?:[\w.-]+:)?([1-9]\d*)")
_MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE)


def check_count(name: str, value: Any) -> None:
    """Refuses what is no number of 1 or more, nor None."""
    if value is not None and (isinstance(value, str) or value < 1):
        raise ConfigError(
            f"launcher.{name}={value} is no number of {name.split('_')[0]}", fix="give 1 or more"
        )


def check_gpus(value: int | str | None) -> None:
    """Refuses what is neither a number nor TYPE:NUMBER."""
    if value is not None and _GPUS.fullmatch(str(value)) is None:
        raise ConfigError(
            f"launcher.gpus_per_node={value} is neither a number nor TYPE:NUMBER",
            fix="write 4 or a100:4, or null for none",
        )


def count_gpus(value: int | str | None) -> int:
    """The number of ``launcher.gpus_per_node``; 0 for none."""
    found = None if value is None else _GPUS.fullmatch(str(value))
    return 0 if found is None else int(found[1])


def check_memory(value: int | str | None) -> None:
    """Refuses what Slurm would not read as memory of a node."""
    if value is not None and _MEMORY.fullmatch(str(value)) is None:
        raise ConfigError(
            f"launcher.mem={value} is no amount of memory",
            fix="write 32G (K, M, G or T); a bare number is MB, 0 all of the node's",
        )


def check_text(name: str, value: str | None) -> None:
    """Refuses an empty text, and one with characters that no terminal shows."""
    if value is not None and (not value or not value.isprintable()):
        raise ConfigError(
            f"launcher.{name}={value!r} is empty, or holds what cannot be printed",
            fix="give a name, or null",
        )


def check_long_options(
    knob: str,
    words: Sequence[str],
    owned: Mapping[str, str],
    *,
    why: Mapping[str, str],
    whole: Collection[str] = (),
) -> None:
    """Refuses further options that are no long ones, or that a knob sets.

    ``owned`` are the names of these, with their knob; ``why`` says more of some. ``whole`` are
    names that are the beginning of an owned one, and mean something else.
    """
    for word in words:
        found = _LONG.fullmatch(word)
        if found is None or "\0" in word:
            raise ConfigError(
                f"launcher.{knob}: {word!r} is no long option",
                fix="write each as one item, --NAME or --NAME=VALUE"
                + ("; heterogeneous jobs (:) are not possible" if word == ":" else ""),
            )
        name = found[1]
        same = [one for one in owned if one == name or (one.startswith(name) and name not in whole)]
        if same:
            knob_of = owned[same[0]]
            fix = why.get(same[0]) or (f"set {knob_of}" if knob_of else "leave it out")
            raise ConfigError(f"launcher.{knob}: {word} is not yours to set here", fix=fix)
