"""What is to be verified, checked: the knobs of the group ``verify``, and one entry of its list."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torsh_trainer.errors import ConfigError

RUNGS = ("sgd", "recipe")
_LISTED = "write strategies=[single,ddp], or with knobs 'strategies=[single,{ddp:{zero1:true}}]'"


@dataclass(frozen=True)
class Entry:
    """One strategy to compare, with the knobs that it is given.

    A knob with a dot in its name is one of another group: ``launcher.num_processes``.
    """

    strategy: str
    knobs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What it is called in tables: ``fsdp shard_size=2``."""
        return " ".join([self.strategy, *(f"{k}={_as_typed(v)}" for k, v in self.knobs.items())])

    @property
    def folder(self) -> str:
        """The same as the name of a folder."""
        return re.sub(r"[^\w.=]+", "-", self.label).strip("-")

    @classmethod
    def of_mesh(cls, sizes: Any) -> Entry:
        """``strategy=parallel`` on a mesh: ``{tp: 2, pp: 2}``.

        Raises:
            ConfigError: it is no mapping of axes to sizes.
        """
        if isinstance(sizes, Mapping) and sizes and all(type(s) is int for s in sizes.values()):
            return cls("parallel", {f"mesh.{axis}": size for axis, size in sizes.items()})
        raise ConfigError(
            f"meshes: {sizes!r} is no mesh", fix="write 'meshes=[{tp:2},{pp:2,dp_shard:2}]'"
        )

    @classmethod
    def of(cls, value: Any) -> Entry:
        """The entry that an element of the list is: a name, or ``{name: {knob: value}}``.

        Raises:
            ConfigError: it is neither.
        """
        if isinstance(value, str) and value:
            return cls(value)
        if isinstance(value, Mapping) and len(value) == 1:
            ((name, knobs),) = value.items()
            if knobs is None or isinstance(knobs, Mapping):
                return cls(str(name), dict(knobs or {}))
        raise ConfigError(f"strategies: {value!r} is no strategy", fix=_LISTED)


@dataclass(frozen=True)
class VerifyOptions:
    """The knobs of ``verify``; docs/verify.md says what they mean.

    Raises:
        ConfigError: there is nothing to compare, a strategy stands there twice, or a number is out
            of range.
    """

    strategies: tuple[Any, ...] = ()
    meshes: tuple[Any, ...] = ()
    steps: int = 10
    ladder: tuple[str, ...] = ("sgd", "recipe")
    sgd_lr: float = 0.1
    bound: float | None = None
    dir: str | None = None

    def __post_init__(self) -> None:
        if self.steps < 2:
            raise ConfigError(
                f"verify.steps={self.steps} shows no update at work: it takes a second step for "
                "what the first has changed to be seen",
                fix="give 2 or more",
            )
        unknown = [rung for rung in self.ladder if rung not in RUNGS]
        if unknown or not self.ladder or len(set(self.ladder)) < len(self.ladder):
            raise ConfigError(
                f"verify.ladder={list(self.ladder)} is no list of rungs",
                fix=f"choose from {', '.join(RUNGS)}, each once",
            )
        for name, value in (("sgd_lr", self.sgd_lr), ("bound", self.bound)):
            if value is not None and value <= 0:
                raise ConfigError(f"verify.{name}={value} is not positive", fix="give 1e-6, say")
        self._check_entries()

    def _check_entries(self) -> None:
        labels = [entry.label for entry in self.entries]
        if not labels:
            raise ConfigError("verify compares strategies, and none is named", fix=_LISTED)
        for label in labels:
            if labels.count(label) > 1:
                raise ConfigError(
                    f"strategies: {label} stands there twice",
                    fix="name it once, or give one of them a knob",
                )
        if len(labels) == 1:
            raise ConfigError(
                f"strategies=[{labels[0]}] leaves nothing to compare {labels[0]} with",
                fix="name a second one, such as single",
            )

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The strategies, in the order of the list, and ``parallel`` on each mesh behind them."""
        entries = [Entry.of(value) for value in self.strategies]
        if self.meshes and not entries:
            entries.append(Entry("single"))
        return (*entries, *map(Entry.of_mesh, self.meshes))

    @property
    def reference(self) -> Entry:
        """What the others are held against: ``single`` where it is there, else the first."""
        return next((e for e in self.entries if e.label == "single"), self.entries[0])


def _as_typed(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
