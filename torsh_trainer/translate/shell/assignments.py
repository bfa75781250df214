"""Assignments, declarations and arrays of a shell file."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from torsh_trainer.translate.shell.grammar import text_of_node
from torsh_trainer.translate.shell.reader import ASSIGNMENT, ShellReader
from torsh_trainer.translate.shell.state import ShellState
from torsh_trainer.translate.shell.words import Text, Word, merge_parts, text_if_known, word_of


class AssignmentReader(ShellReader):
    """Reads what sets variables."""

    def assign(self, node: Any, state: ShellState) -> None:
        variables = self.assignment(node, state)
        place = self.expander.place(node)
        self.keep((), {name: word_of(text, place) for name, text in variables.items()}, state)

    def assignment(self, node: Any, state: ShellState) -> dict[str, Text]:
        """Carries one assignment out; returns what is assigned."""
        target = node.child_by_field_name("name") or node.children[0]
        value = node.child_by_field_name("value")
        adds = any(child.type == "+=" for child in node.children)
        if target.type == "subscript":
            self.assign_item(target, value, state)
            return {}
        name = text_of_node(target)
        if value is not None and value.type == "array":
            self.assign_array(name, value, state, adds=adds)
            return {}
        text = self.expander.text(value, state) if value is not None else ()
        if adds:
            text = merge_parts((*(state.lookup(name) or ()), *text))
        state.assign(name, text)
        return {name: state.lookup(name) or ()}

    def assign_array(self, name: str, node: Any, state: ShellState, *, adds: bool) -> None:
        if name in state.known:
            return
        items = dict(state.arrays.get(name, {})) if adds else {}
        for child in node.children:
            if not child.is_named or child.type == "comment":
                continue
            for word in self.expander.words(child, state):
                keyed = re.fullmatch(r"\[(.+?)\]=(.*)", word.text, re.DOTALL)
                if keyed and not word.open:
                    items[keyed[1].strip("\"'")] = (keyed[2],)
                else:
                    items[str(len(items))] = word.parts
        state.values.pop(name, None)
        state.arrays[name] = items

    def assign_item(self, target: Any, value: Any, state: ShellState) -> None:
        parts = [child for child in target.children if child.is_named]
        if len(parts) < 2 or value is None:
            return
        index = text_if_known(self.expander.text(parts[1], state))
        if index is not None:
            items = state.arrays.setdefault(text_of_node(parts[0]), {})
            items[index.strip("\"'")] = self.expander.text(value, state)

    def declare(self, node: Any, state: ShellState) -> None:
        word = text_of_node(node.children[0])
        names: set[str] = set()
        variables: dict[str, Word] = {}
        exports = word == "export"
        for child in node.children[1:]:
            place = self.expander.place(child)
            if child.type == "variable_assignment":
                found = self.assignment(child, state)
                variables |= {name: word_of(text, place) for name, text in found.items()}
                names |= set(found)
            elif child.type == "variable_name":
                names.add(text_of_node(child))
            elif child.is_named:
                for said in self.expander.words(child, state):
                    exports = exports or said.text.startswith("-x")
                    if match := ASSIGNMENT.fullmatch(said.text):
                        state.assign(match[1], _parts_of_value(said))
                        names.add(match[1])
        if exports:
            here = self.expander.place(node)
            state.exported |= {name: here for name in sorted(names) if name not in state.exported}
        self.keep((), variables, state)

    def unset_variables(self, node: Any, state: ShellState) -> None:
        """``unset NAME``, which the grammar tells from other commands."""
        for child in node.children[1:]:
            if child.type == "variable_name":
                state.clear(text_of_node(child))
            elif child.is_named:
                for word in self.expander.words(child, state):
                    state.clear(word.text)


def value_of(word: Word) -> Word:
    """The value of ``NAME=VALUE``; any other word as it is."""
    match = ASSIGNMENT.fullmatch(word.text)
    return replace(word, text=match[2]) if match else word


def _parts_of_value(word: Word) -> Text:
    return value_of(word).parts
