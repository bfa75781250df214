"""One job of a launch file: who starts it, what, with which arguments; and what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torsh_trainer.errors import ConfigError, TorshError
from torsh_trainer.translate.launch.flags import NUMBER, FlagProblem, StatedFlag
from torsh_trainer.translate.plan import Fact
from torsh_trainer.translate.shell.words import GPUS, Command, Hole, Word

AUTO: Literal["auto"] = "auto"
"""As many processes as the machine has GPUs."""

Count = int | Literal["auto"] | None


class Asked(TorshError):
    """A value that only the user knows; ``fact`` is what is asked."""

    def __init__(self, fact: Fact) -> None:
        super().__init__(fact.name)
        self.fact = fact


@dataclass(frozen=True)
class Link:
    """One launcher in a line, with what it was told; several may stand in one another."""

    launcher: str
    word: Word
    said: tuple[StatedFlag, ...]
    problems: tuple[FlagProblem, ...] = ()

    def find(self, *names: str) -> StatedFlag | None:
        """The last flag of one of these names (``num_gpus``), as argparse keeps it."""
        return next((said for said in reversed(self.said) if said.name in names), None)


@dataclass(frozen=True)
class LaunchLine:
    """A line that starts something: wrappers, launchers, the script, and the words behind it."""

    command: Command
    links: tuple[Link, ...]
    script: Word | None
    module: bool
    behind: tuple[Word, ...]
    wrappers: tuple[Word, ...] = ()

    @property
    def arguments(self) -> tuple[Word, ...]:
        """What the script is given, but for the file's own arguments, which nobody has given."""
        return tuple(word for word in self.behind if not word.is_all_arguments)

    @property
    def hands_on(self) -> bool:
        """The file hands its own arguments on (``$@``)."""
        return len(self.arguments) < len(self.behind)

    @property
    def launcher(self) -> Link:
        """The innermost launcher: who starts the processes."""
        return self.links[-1]

    @property
    def is_kept(self) -> bool:
        """srun or mpirun stand around the script, and go on to start the processes."""
        return any(link.launcher in ("srun", "mpirun") for link in self.links)

    @property
    def line(self) -> int:
        """Where it begins."""
        return self.links[0].word.place.line


@dataclass(frozen=True)
class WorldShape:
    """How many processes: on each of so many nodes, or in all; None where nobody said."""

    per_node: Count = None
    nodes: int | None = 1
    total: int | None = None

    @property
    def processes(self) -> int | None:
        """All of them."""
        if self.total is not None:
            return self.total
        if isinstance(self.per_node, int) and self.nodes is not None:
            return self.per_node * self.nodes
        return None

    @property
    def is_one_machine(self) -> bool:
        """All on the machine where the line is typed."""
        return self.nodes == 1


@dataclass
class LaunchJob:
    """What verdicts look at, and what they collect on their way.

    ``configured`` are dotted keys that the DeepSpeed file of the job holds, with their values;
    ``lacks_file``: a configuration is named that is not there.
    """

    line: LaunchLine
    source: str
    arguments: tuple[StatedFlag, ...] = ()
    yaml: tuple[StatedFlag, ...] = ()
    fsdp: tuple[StatedFlag, ...] = ()
    family: str = ""
    world: WorldShape = field(default_factory=WorldShape)
    configured: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    lacks_file: bool = False
    facts: dict[str, Fact] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def ask(self, fact: Fact) -> None:
        """Enters a question, once for each name."""
        earlier = self.facts.setdefault(fact.name, fact)
        if fact.used not in earlier.used and earlier is not fact:
            self.facts[fact.name] = replace(earlier, used=f"{earlier.used}, {fact.used}")

    def argument(self, name: str) -> StatedFlag | None:
        """The last argument of the script of that name."""
        return next((said for said in reversed(self.arguments) if said.name == name), None)

    def option(self, *names: str) -> StatedFlag | None:
        """A flag of any launcher of the line, else the key of its YAML."""
        for link in reversed(self.line.links):
            if (said := link.find(*names)) is not None:
                return said
        return next((said for said in reversed(self.yaml) if said.name in names), None)

    @property
    def is_configured(self) -> bool:
        """A configuration of DeepSpeed belongs to the job."""
        return bool(self.configured) or self.lacks_file

    def holds(self, prefix: str) -> bool:
        """The DeepSpeed file has the key, or keys below it."""
        return any(key == prefix or key.startswith(f"{prefix}.") for key in self.configured)

    def text(self, said: StatedFlag) -> str:
        """The value of a flag.

        Raises:
            Asked: only a shell could tell it.
        """
        hole = said.hole
        if hole is not None:
            raise Asked(fact_of(hole, said))
        return said.text

    def number(self, said: StatedFlag) -> float:
        """The value as a number.

        Raises:
            Asked: only a shell could tell it.
            ConfigError: it is none.
        """
        text = self.text(said)
        if NUMBER.fullmatch(text) is None:
            raise ConfigError(
                f"{self.source}:{said.place}: {said.key} should be a number, not {text[:60]!r}",
                fix="correct the value",
                line=said.place.line,
                column=said.place.column,
            )
        return float(text)

    def whole(self, said: StatedFlag, *, least: int = 0) -> int:
        """The value as a whole number, ``least`` or more.

        Raises:
            Asked: only a shell could tell it.
            ConfigError: it is none.
        """
        value = self.number(said)
        if value != value // 1 or value < least or value > 1e15:
            raise ConfigError(
                f"{self.source}:{said.place}: {said.key} should be a whole number, {least} or "
                f"more, not {said.text}",
                fix="correct the value",
                line=said.place.line,
                column=said.place.column,
            )
        return int(value)

    def count(self, said: StatedFlag) -> Count:
        """A number of processes of a machine: a number, or all GPUs.

        Raises:
            Asked: only a shell could tell it.
            ConfigError: it is neither.
        """
        if said.hole is not None and said.hole.means == GPUS and len(said.values) == 1:
            return AUTO
        if said.text in ("auto", "gpu", "cuda"):
            return AUTO
        return self.whole(said, least=1)

    def count_known(self, said: StatedFlag) -> Count:
        """The same; None where only a shell could tell."""
        try:
            return self.count(said)
        except Asked:
            return None

    @property
    def starts_here(self) -> bool:
        """The processes are all on this machine, and the recipe's own launcher starts them."""
        return self.world.is_one_machine and not self.line.is_kept


def fact_of(hole: Hole, said: StatedFlag) -> Fact:
    """The question for a value that only a shell could tell."""
    used = f"{said.key} (line {said.place.line})" if said.place.line else said.key
    if hole.choices:
        look = "a branch or a loop of the file sets it, among others to " + ", ".join(
            hole.choices[:4]
        )
    elif hole.name == "@":
        look = "all arguments that you give to the file"
    elif hole.name.isdigit():
        look = f"argument {hole.name} that you give to the file"
    elif hole.name.startswith(("SLURM_", "PBS_", "LSB_")):
        look = "what the scheduler sets for the job: echo it there"
    elif hole.name.startswith("$(") or hole.name.startswith("`"):
        look = "what this command prints in your shell"
    else:
        look = f"your environment: echo ${hole.name}"
    return Fact(hole.name, used, look, said.place.line)


def list_holes(words: Sequence[Word]) -> list[Hole]:
    """Everything in ``words`` that only a shell could tell."""
    return [hole for word in words for hole in word.holes]
