"""A Horovod job as the rules look at it: leaves from all its files, and what they say together."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.horovod.versions import NEWEST
from torsh_trainer.translate.nodes import Place
from torsh_trainer.translate.plan import Fact
from torsh_trainer.translate.python.training import TrainingScript

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
ELASTIC = ("min_num_proc", "max_num_proc", "host_discovery_script", "elastic.run")
"""Names of what lets the number of processes change."""


@dataclass(frozen=True)
class Options:
    """How a source is to be read."""

    world_size: int | None = None
    version: str = NEWEST
    mode: str = "exact"
    lenient: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    command: str | None = None


@dataclass(frozen=True)
class Leaf:
    """One thing that a job says. ``key`` is as it is written, ``name`` what all sources call it.

    ``file`` is empty for the source itself. ``over``: what overrides it, so that nothing comes of
    it. ``note``: how ``value`` came to be.
    """

    key: str
    name: str
    value: Any
    place: Place
    rule: str
    file: str = ""
    over: str = ""
    note: str = ""


@dataclass(frozen=True)
class PerProcess:
    """A number that is so much for each process: ``args.lr * hvd.size()``."""

    each: float

    def __str__(self) -> str:
        return f"{self.each:g} * hvd.size()"


@dataclass(frozen=True)
class Host:
    """A host and how many processes run there."""

    name: str
    slots: int


@dataclass(frozen=True)
class Problem:
    """Something that does not fit, and the next move. ``overlooked``: Horovod passes over it."""

    file: str
    place: Place
    what: str
    fix: str
    overlooked: bool = False


@dataclass(frozen=True)
class HorovodJob:
    """What the rules look at. ``script``: a training script has been read. ``facts`` are missing;
    ``files`` are others that were read; ``training`` is what the script says of its step."""

    name: str
    options: Options
    leaves: tuple[Leaf, ...]
    warnings: tuple[str, ...] = ()
    world_size: int | None = None
    script: bool = False
    facts: tuple[Fact, ...] = ()
    files: tuple[str, ...] = ()
    training: TrainingScript | None = None

    def leaf(self, name: str) -> Leaf | None:
        """The leaf of that name that counts."""
        return next((leaf for leaf in self.leaves if leaf.name == name and not leaf.over), None)

    def get(self, name: str, default: Any = None) -> Any:
        """Its value."""
        leaf = self.leaf(name)
        return default if leaf is None or leaf.value is None else leaf.value

    def is_given(self, name: str) -> bool:
        """Something says it."""
        return self.leaf(name) is not None

    @property
    def reproduces(self) -> bool:
        """The translation is to give the same bits, quirks included."""
        return self.options.mode == "exact"

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts of the launch line that get a process; none where it names none."""
        left = self.get("num_proc", 0)
        used = []
        for host in self.get("hosts", ()):
            mine = min(host.slots, left)
            left -= mine
            if mine:
                used.append(Host(host.name, mine))
        return tuple(used)

    @property
    def several_hosts(self) -> bool:
        """Processes run on more than one machine."""
        return len(self.hosts) > 1

    @property
    def elastic(self) -> bool:
        """The number of processes may change."""
        return any(self.is_given(name) for name in ELASTIC)


def refuse(name: str, problems: Sequence[Problem]) -> None:
    """One error for all of ``problems``, each with its place.

    Raises:
        ConfigError: there is one.
    """
    if not problems:
        return
    first, *others = sorted(problems, key=lambda p: (p.file, p.place.line, p.place.column))
    fix = first.fix
    if all(problem.overlooked for problem in problems):
        fix += "; --lenient passes over it, as Horovod does in silence"
    for problem in others[:20]:
        fix += f"\n  also {problem.file or name}:{problem.place}: {problem.what}; {problem.fix}"
    if len(others) > 20:
        fix += f"\n  and {len(others) - 20} more"
    raise ConfigError(
        f"{first.file or name}:{first.place}: {first.what}",
        fix=fix,
        line=first.place.line,
        column=first.place.column,
        problems=[(p.place.line, p.place.column, p.what) for p in (first, *others)],
    )


def near(word: str, known: Iterable[str]) -> str:
    """``did you mean ...?``, or to remove it."""
    close = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.7)
    return f"did you mean {close[0]!r}?" if close else "remove it"
