"""The command line of horovodrun as leaves: its options, the variables around it, the script."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.horovod import settings
from torsh_trainer.translate.horovod.job import Host, Leaf, Problem, near
from torsh_trainer.translate.horovod.settings import Mismatch, Setting
from torsh_trainer.translate.nodes import Place
from torsh_trainer.translate.shell.script import commands
from torsh_trainer.translate.shell.words import Command, Word

RUN = "horovodrun"
_EXCLUSIVE = (("gloo", "mpi", "jsrun"), ("hosts", "hostfile", "host_discovery_script"))
_PYTHON = re.compile(r"python[\d.]*$")
_WITH_VALUE = ("-m", "-c", "-W", "-X", "-O")
_HOST = re.compile(r"([\w.-]+)\s+slots=(\d+)\s*")
"""A line of a hostfile."""


@dataclass(frozen=True)
class Launch:
    """What a launch line says; ``script`` and its ``arguments`` are what it starts, in an
    ``environment``."""

    leaves: tuple[Leaf, ...]
    problems: tuple[Problem, ...]
    command: tuple[Word, ...]
    config_file: str | None = None
    hostfile: str | None = None
    environment: Mapping[str, Word] = field(default_factory=dict)

    @property
    def script(self) -> Word | None:
        """The Python file among the words of the command."""
        found = self.script_at
        return None if found is None else self.command[found]

    @property
    def arguments(self) -> tuple[Word, ...]:
        """What the script is given."""
        found = self.script_at
        behind = () if found is None else self.command[found + 1 :]
        return tuple(word for word in behind if not word.is_all_arguments)

    @property
    def script_at(self) -> int | None:
        """Where the script stands in the command."""
        if not self.command:
            return None
        words = [word.text for word in self.command]
        if words[0].endswith(".py"):
            return 0
        if not _PYTHON.search(PurePath(words[0]).name):
            return None
        at = 1
        while at < len(words) and words[at].startswith("-"):
            if words[at] in ("-m", "-c"):
                return None
            at += 2 if words[at] in _WITH_VALUE[2:4] else 1
        return at if at < len(words) and words[at].endswith(".py") else None


def launches(text: str) -> bool:
    """Some command of ``text`` is horovodrun, as far as a glance tells."""
    return re.search(r"(^|[\s;&|/(])horovodrun(\s|$)", text) is not None


def read(text: str, *, name: str, known: Mapping[str, str], file: str = "") -> Launch:
    """The one launch line in ``text``; ``known`` are values for the shell's variables.

    Raises:
        ConfigError: there is none, or there are several.
    """
    found: list[tuple[int, Command]] = []
    exported: dict[str, Word] = {}
    for command in commands(text, name=name, known=known):
        at = _place_of_run(command.words)
        if at is not None:
            found.append((at, command))
        elif not command.words and not found:
            exported |= command.variables
    if not found:
        raise ConfigError(f"{name}: no command of it is {RUN}", fix=f"keep the line with {RUN}")
    if len(found) > 1:
        places = ", ".join(str(command.words[at].place.line) for at, command in found)
        raise ConfigError(
            f"{name}: {RUN} stands there {len(found)} times, in lines {places}",
            fix="keep one, or give it with --command",
        )
    ((at, command),) = found
    reader = _Reader(file)
    for variable, word in {**exported, **command.variables}.items():
        if variable.startswith("HOROVOD_"):
            reader.variable(variable, word)
    around = {**command.exported, **command.variables}
    for variable, word in around.items():
        if not variable.startswith("HOROVOD_"):
            reader.leaf(variable, variable, word.text, word.place, "env.others")
    return replace(reader.launch(command.words[at + 1 :]), environment=around)


def _place_of_run(words: Sequence[Word]) -> int | None:
    for at, word in enumerate(words):
        if PurePath(word.text).name == RUN:
            return at
    return None


class _Reader:
    def __init__(self, file: str) -> None:
        self.file = file
        self.leaves: list[Leaf] = []
        self.problems: list[Problem] = []
        self.first: dict[str, Word] = {}

    def launch(self, words: Sequence[Word]) -> Launch:
        at = 0
        while at < len(words) and words[at].text.startswith("-") and len(words[at].text) > 1:
            at += self.option(words, at)
        command = tuple(words[at:])
        self.exclusive()
        names = {leaf.name for leaf in self.leaves}
        if "num_proc" not in names and not {"check_build", "version"} & names:
            place = words[0].place if words else Place(1, 1)
            self.problem(place, f"{RUN} wants -np, the number of processes", "add -np N")
        if command:
            self.leaf("command", "command", " ".join(w.text for w in command), command[0].place)
        elif not {"check_build", "version"} & names:
            place = words[-1].place if words else Place(1, 1)
            self.problem(place, f"{RUN} is given no command to start", "add it: python train.py")
        named = {leaf.name: leaf.value for leaf in self.leaves}
        files = named.get("config_file"), named.get("hostfile")
        return Launch(tuple(self.leaves), tuple(self.problems), command, *files)

    def option(self, words: Sequence[Word], at: int) -> int:
        """Reads one option; returns of how many words it consists."""
        word = words[at]
        flag, equals, inline = word.text.partition("=")
        known = self.find_option(flag, word)
        if known is None:
            return 1
        flag, setting, on = known
        if setting.takes == 0:
            self.add(flag, setting, on, word)
            return 1
        if equals:
            self.value(flag, setting, [Word(inline, word.place, word.open)], word)
            return 1
        values = words[at + 1 : at + 1 + setting.takes]
        if len(values) < setting.takes:
            many = "a value" if setting.takes == 1 else f"{setting.takes} values"
            self.problem(word.place, f"{flag} wants {many}", "add it")
        else:
            self.value(flag, setting, values, word)
        return 1 + setting.takes

    def find_option(self, flag: str, word: Word) -> tuple[str, Setting, bool] | None:
        """The option of that name, or of which it is the only beginning, as argparse has it."""
        flags = settings.by_flag()
        candidates = [flag] if flag in flags else [f for f in flags if f.startswith(flag)]
        same = {flags[candidate] for candidate in candidates}
        if len(same) == 1 and (flag in flags or flag.startswith("--")):
            return candidates[0], *flags[candidates[0]]
        if len(same) > 1 and flag.startswith("--"):
            what = f"{flag} may be {' or '.join(sorted(candidates))}"
            self.problem(word.place, what, "write it out")
            return None
        for short in ("-p", "-i", "-H"):  # with their value in the same word
            if flag.startswith(short) and not flag.startswith(("--", "-prefix")):
                self.value(short, flags[short][0], [Word(word.text[2:], word.place)], word)
                return None
        self.problem(word.place, f"{RUN} has no option {flag}", near(flag, flags))
        return None

    def value(self, flag: str, setting: Setting, words: Sequence[Word], word: Word) -> None:
        for each in words:
            if each.open:
                what = f"{flag} {each.text}: only a shell knows ${each.open.lstrip('$')}"
                self.problem(each.place, what, f"state it: --set {each.open}=VALUE")
                return
        raw: Any = [w.text for w in words] if setting.takes > 1 else words[0].text
        try:
            value = setting.value(raw)
        except Mismatch as wanted:
            self.problem(
                words[0].place, f"{flag} should be {wanted}, not {raw!r}", "correct the value"
            )
            return
        if setting.name == "hosts":
            value = tuple(Host(name, slots) for name, slots in value)
        self.add(flag, setting, value, word)

    def add(self, flag: str, setting: Setting, value: Any, word: Word) -> None:
        earlier = self.first.setdefault(setting.name, word)
        if earlier is not word and setting.name == "network_interfaces":
            (old,) = [leaf for leaf in self.leaves if leaf.name == setting.name]
            value = f"{old.value},{value}"
        if earlier is not word:  # argparse keeps the last
            self.leaves = [leaf for leaf in self.leaves if leaf.name != setting.name]
        self.leaf(flag, setting.name, value, word.place, setting.rule)

    def exclusive(self) -> None:
        given = {leaf.name: leaf for leaf in self.leaves}
        for names in _EXCLUSIVE:
            both = [given[name] for name in names if name in given]
            for leaf in both[1:]:
                what = f"{leaf.key} and {both[0].key} exclude each other"
                self.problem(leaf.place, what, "keep one")

    def variable(self, variable: str, word: Word) -> None:
        if word.open:
            what = f"{variable}={word.text}: only a shell knows it"
            self.problem(word.place, what, f"state it: --set {word.open}=VALUE")
            return
        leaf, problem = variable_leaf(variable, word.text, word.place, self.file)
        self.leaves += [leaf] if leaf else []
        self.problems += [problem] if problem else []

    def leaf(self, key: str, name: str, value: Any, place: Place, rule: str = "") -> None:
        rule = rule or "launch.command"
        self.leaves.append(Leaf(key, name, value, place, rule, self.file))

    def problem(self, place: Place, what: str, fix: str) -> None:
        self.problems.append(Problem(self.file, place, what, fix))


def variable_leaf(
    variable: str, raw: str, place: Place, file: str
) -> tuple[Leaf | None, Problem | None]:
    """The leaf that an environment variable of Horovod is, or what is wrong with it."""
    setting = settings.by_variable().get(variable)
    if setting is None:
        advice = near(variable, settings.by_variable())
        leaf = Leaf(variable, variable, raw, place, "unknown", file)
        what = f"Horovod reads no variable {variable}"
        return leaf, Problem(file, place, what, advice, overlooked=True)
    try:
        value = settings.of_variable(setting, raw)
    except Mismatch as wanted:
        what = f"{variable} should be {wanted}, not {raw!r}"
        return None, Problem(file, place, what, "correct the value")
    name = variable if setting.name.startswith("env.") else setting.name
    return Leaf(variable, name, value, place, setting.rule, file), None


def hostfile(text: str, *, file: str) -> tuple[list[Leaf], list[Problem]]:
    """The leaf of a file with a line ``HOST slots=N`` for each host."""
    hosts: list[Host] = []
    problems: list[Problem] = []
    for number, line in enumerate(text.splitlines(), start=1):
        match = _HOST.fullmatch(line)
        slots = 0 if match is None else int(match[2])
        if match is None or not slots:
            what = f"{line.strip()[:60]!r} is not HOST slots=N, as every line of a hostfile"
            fix = "correct it, or remove it: horovodrun takes neither remarks nor empty lines"
            problems.append(Problem(file, Place(number, 1), what, fix))
        else:
            hosts.append(Host(match[1], slots))
    if not hosts and not problems:
        problems.append(Problem(file, Place(1, 1), "no host stands in it", "add HOST slots=N"))
    return [Leaf("hosts", "hosts", tuple(hosts), Place(1, 1), "launch.hosts", file)], problems


def environment(text: str, *, name: str, file: str = "") -> tuple[list[Leaf], list[Problem]]:
    """The leaves of an environment file: lines KEY=VALUE."""
    leaves: list[Leaf] = []
    problems: list[Problem] = []
    for variable, word in _assignments(text, name):
        if not variable.startswith("HOROVOD_"):
            leaves.append(Leaf(variable, variable, word.text, word.place, "env.others", file))
            continue
        leaf, problem = variable_leaf(variable, word.text, word.place, file)
        leaves += [leaf] if leaf else []
        problems += [problem] if problem else []
    return leaves, problems


def _assignments(text: str, name: str) -> Iterator[tuple[str, Word]]:
    for command in commands(text, name=name, known={}):
        yield from command.variables.items()
