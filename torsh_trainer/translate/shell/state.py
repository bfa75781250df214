"""What a shell would hold at one point of a file: variables, arrays, functions, its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torsh_trainer.translate.nodes import Place
from torsh_trainer.translate.shell.words import Hole, Text, plain, text_if_known


@dataclass
class ShellState:
    """Variables, arrays (index -> text), functions, and what holds around the next command.

    ``known`` are values that the user states: no assignment changes them. ``positional`` None:
    the file's own arguments, which nobody has given, ``shifted`` by so many. ``ended`` is
    ``exit``, ``return``, ``break`` or ``continue`` once such a command has run.
    """

    known: Mapping[str, str] = field(default_factory=dict)
    values: dict[str, Text] = field(default_factory=dict)
    arrays: dict[str, dict[str, Text]] = field(default_factory=dict)
    exported: dict[str, Place] = field(default_factory=dict)
    functions: dict[str, Any] = field(default_factory=dict)
    positional: list[Text] | None = None
    shifted: int = 0
    folder: str = ""
    conditions: tuple[str, ...] = ()
    rounds: tuple[tuple[str, str], ...] = ()
    around: tuple[Any, ...] = ()
    ended: str = ""
    cleared: set[str] = field(default_factory=set)
    """What ``unset`` has taken away, and nothing has set anew."""

    def fork(self, condition: str = "") -> ShellState:
        """A copy of its own; ``condition`` holds in it, where one is given."""
        conditions = (*self.conditions, condition) if condition else self.conditions
        return replace(
            self,
            values=dict(self.values),
            arrays={name: dict(items) for name, items in self.arrays.items()},
            functions=dict(self.functions),
            exported=dict(self.exported),
            positional=None if self.positional is None else list(self.positional),
            conditions=conditions,
            cleared=set(self.cleared),
        )

    def lookup(self, name: str) -> Text | None:
        """The value of a variable, or of a parameter (``1``); None where nothing sets it."""
        if name.isdigit() and self.positional is not None:
            at = int(name) - 1
            return self.positional[at] if 0 <= at < len(self.positional) else ()
        if name in self.known:
            return (self.known[name],)
        if name in self.arrays:
            return self.arrays[name].get("0", ())
        return self.values.get(name)

    def lacks(self, name: str) -> bool:
        """``name`` is an argument (``2``) that was not given, where all that were are known."""
        return name.isdigit() and self.positional is not None and int(name) > len(self.positional)

    def name_argument(self, name: str) -> str:
        """The name that a user knows an argument of the file by: the third after two shifts."""
        if self.shifted and name.isdigit() and name != "0" and self.positional is None:
            return str(int(name) + self.shifted)
        return name

    def shift(self, count: int) -> None:
        """``shift COUNT``."""
        if self.positional is None:
            self.shifted += count
        elif count <= len(self.positional):
            self.positional = self.positional[count:]

    def assign(self, name: str, text: Text) -> None:
        """Sets a variable, unless the user states its value."""
        if name not in self.known:
            self.arrays.pop(name, None)
            self.values[name] = text
            self.cleared.discard(name)

    def clear(self, name: str) -> None:
        """``unset NAME``, unless the user states its value."""
        if name not in self.known:
            for held in (self.values, self.arrays, self.exported, self.functions):
                held.pop(name, None)
            self.cleared.add(name)

    def merge(self, states: Sequence[ShellState], cause: str = "") -> None:
        """Becomes what ``states``, of which one will hold, have in common; holes for the rest.

        ``cause`` is what decides which of them holds, where that has a name.
        """
        if not states:
            return
        names = dict.fromkeys(name for state in states for name in state.values)
        for name in names:
            self.values[name] = _common([state.lookup(name) for state in states], name, cause)
        for state in states:
            for name, items in state.arrays.items():
                if all(other.arrays.get(name) == items for other in states):
                    self.arrays[name] = dict(items)
                else:
                    self.arrays[name] = {"0": (Hole(name, f"${{{name}[@]}}"),)}
            self.functions |= state.functions
            self.exported |= state.exported
        self.cleared = set.intersection(*(state.cleared for state in states))
        folders = {state.folder for state in states}
        self.folder = folders.pop() if len(folders) == 1 else self.folder
        self.positional, self.shifted = states[0].positional, states[0].shifted


def _common(texts: Sequence[Text | None], name: str, cause: str) -> Text:
    first = texts[0]
    if first is not None and all(text == first for text in texts):
        return first
    said = [text for text in texts if text is not None]
    choices = dict.fromkeys(known for text in said if (known := text_if_known(text)) is not None)
    if cause:
        return (Hole(cause, f"${name}"),)
    return (Hole(name, f"${name}", tuple(choices)),)


def describe_text(text: Text) -> str:
    """A text for a sentence, on one line and cut where it is long."""
    said = " ".join(plain(text).split())
    return said if len(said) <= 60 else said[:57] + "..."
