"""A shell file read from top to bottom: every command that would run, and files it writes.

Nothing is executed. What only a shell could tell stays a hole; a branch that cannot be decided is
read on both sides, and what then differs is a hole as well.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.nodes import Place
from torsh_trainer.translate.shell.arithmetic import compare_words
from torsh_trainer.translate.shell.conditions import ConditionResult, decide, is_test
from torsh_trainer.translate.shell.expansion import Expander
from torsh_trainer.translate.shell.grammar import check_closed, parse, text_of_node
from torsh_trainer.translate.shell.state import ShellState
from torsh_trainer.translate.shell.words import (
    Command,
    Hole,
    Text,
    Word,
    WrittenFile,
    merge_parts,
    plain,
    text_if_known,
    word_of,
)

_MOST_COMMANDS = 5000
_DEEPEST = 40
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_COUNTED = re.compile(
    r"for\s*\(\(\s*(\w+)\s*=\s*(.+?)\s*;\s*\1\s*(<=?)\s*(.+?)\s*;\s*(?:\1\+\+|\+\+\1|\1\s*\+=\s*(\d+))"
    r"\s*\)\)",
    re.DOTALL,
)
_REMARKS = re.compile(r"`#[^`\n]*`")
"""A remark within a line that goes on: a substitution of nothing."""

_TO_FILL = re.compile(r"((?:^|\s)--?[\w-]+[ =])<([A-Za-z_][\w-]*)>(?=\s|$)", re.MULTILINE)
"""``--output_dir <output_dir>``, which a user is meant to fill in."""

_ENDS = {"exit": "exit", "return": "return", "break": "break", "continue": "continue"}
_SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
_WRITERS = ("cat", "echo", "printf", "tee")
_SKIPPED = frozenset({"comment", "heredoc_body", "heredoc_end", "heredoc_start"})


OpenText = Callable[[str, str], "str | None"]


@dataclass(frozen=True)
class ShellScript:
    """What a shell file comes to: its commands in order, and files that it writes by itself.

    ``assumed`` are variables and arguments that were taken for unset, since nothing in the file
    sets them, where a branch hangs on it. ``sourced`` are files that it takes in by ``source``, and
    whether they could be read.
    """

    commands: tuple[Command, ...]
    files: Mapping[str, WrittenFile] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    sourced: Mapping[str, bool] = field(default_factory=dict)


def commands(text: str, *, name: str, known: Mapping[str, str]) -> Iterator[Command]:
    """Every command of ``text``; ``known`` are values of variables that the user gives.

    Raises:
        ConfigError: a quotation mark is never closed, or there is more than can be read.
        ResourceError: what reads the syntax is not installed.
    """
    yield from read_script(text, name=name, known=known).commands


def read_script(
    text: str,
    *,
    name: str,
    known: Mapping[str, str],
    open_text: OpenText | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> ShellScript:
    """``text`` as commands; ``name`` is how the user calls it, ``known`` what the user states,
    ``environment`` what the shell would inherit, and the text may assign anew.

    ``open_text`` gives the text of a file that ``source`` names, by its name and the folder that
    the file has entered by then; without it none is read.

    Raises:
        ConfigError: a quotation mark is never closed, or there is more than can be read.
        ResourceError: what reads the syntax is not installed.
    """
    reader = _Reader(text, name, open_text=open_text)
    given = known.get("@")
    state = ShellState(
        known=known,
        positional=None if given is None else [(word,) if word else () for word in _split(given)],
        values={key: (value,) if value else () for key, value in environment.items()},
        exported=dict.fromkeys(environment, Place(1, 1)),
    )
    reader.run(reader.root.children, state)
    return ShellScript(
        tuple(reader.commands), reader.files, tuple(reader.unset), dict(reader.sourced)
    )


@dataclass(frozen=True)
class ShellFunction:
    """The body of a function, and the reader of the text that it stands in."""

    reader: _Reader
    body: Any


class _Reader:
    def __init__(
        self,
        text: str,
        name: str,
        outer: _Reader | None = None,
        open_text: OpenText | None = None,
    ) -> None:
        text = _REMARKS.sub(lambda m: " " * len(m[0]), text.replace("\r\n", "\n"))
        text = _TO_FILL.sub(lambda m: f"{m[1]}${{{m[2].replace('-', '_')}}}", text)
        self.name = name
        self.root = parse(text)
        lines = text.encode("utf-8", "replace").split(b"\n")
        check_closed(self.root, name=name, lines=lines)
        self.expander = Expander(lines, name)
        self.commands: list[Command] = outer.commands if outer else []
        self.files: dict[str, WrittenFile] = outer.files if outer else {}
        self.counted: list[int] = outer.counted if outer else [0]
        self.depth: int = outer.depth if outer else 0
        self.unset: dict[str, None] = outer.unset if outer else {}
        self.open_text: OpenText | None = outer.open_text if outer else open_text
        self.sourced: dict[str, bool] = outer.sourced if outer else {}

    # -- statements ------------------------------------------------------------------------------

    def run(self, nodes: Sequence[Any], state: ShellState) -> None:
        """Reads statements in order, until one ends them."""
        for node in nodes:
            if state.ended:
                return
            if node.is_named and node.type not in _SKIPPED:
                self.statement(node, state)

    def statement(self, node: Any, state: ShellState) -> None:
        self.counted[0] += 1
        if self.counted[0] > _MOST_COMMANDS:
            raise ConfigError(
                f"{self.name}: it would run more than {_MOST_COMMANDS} commands",
                fix="give the line that starts the job with --command",
            )
        if self.depth > _DEEPEST:
            return
        self.depth += 1
        try:
            handler = _STATEMENTS.get(node.type)
            if handler is not None:
                handler(self, node, state)
            elif node.children:
                self.run(node.children, state)
        finally:
            self.depth -= 1

    def command(self, node: Any, state: ShellState) -> None:
        prefix: dict[str, Word] = {}
        words: list[Word] = []
        others: list[Any] = []
        within = (
            state.fork() if any(c.type == "variable_assignment" for c in node.children) else state
        )
        for child in node.children:
            if child.type == "variable_assignment":
                for variable, text in self.assignment(child, within).items():
                    prefix[variable] = word_of(text, self.expander.place(child))
            elif child.type in ("file_redirect", "herestring_redirect"):
                words += self.expander.words_of_nodes(others, state)
                words += self.after_redirect(child, state)
                others = []
            elif child.type != "comment":
                others.append(child)
        words += self.expander.words_of_nodes(others, state)
        self.start(words, prefix, state)

    def start(self, words: list[Word], prefix: dict[str, Word], state: ShellState) -> None:
        """One command with its words: those of the shell itself are followed, others are kept."""
        while (
            words and (match := _ASSIGNMENT.fullmatch(words[0].text)) and not prefix.get(match[1])
        ):
            prefix[match[1]] = _value_of(words[0])
            words = words[1:]
        if words and words[0].text in ("env", "export"):
            said, words = _split_assignments(words[1:], plain_words=words[0].text == "env")
            prefix |= said
        if not words:
            for variable, word in prefix.items():
                state.assign(variable, word.parts)
            self.keep((), prefix, state)
            return
        head = words[0].text
        if head in state.functions:
            self.call(state.functions[head], words, state)
        elif head == "eval" and len(words) > 1:
            self.text(words[1:], state)
        elif (at := _text_of_shell(words)) is not None:
            outer = replace(state, around=(*state.around, *words[: at[0]]))
            inner = outer.fork()
            for variable, word in prefix.items():
                inner.values[variable] = word.parts
            self.text([words[at[1]]], inner)
        elif not self.own_command(head, words, state):
            self.keep(tuple(words), prefix, state)

    def own_command(self, head: str, words: list[Word], state: ShellState) -> bool:
        """A command of the shell itself that changes what follows."""
        if head in _ENDS:
            state.ended = _ENDS[head]
        elif head == "cd":
            self.enter_folder(words, state)
            return False
        elif head in ("source", ".") and len(words) > 1:
            return self.take_in(words, state)
        elif head == "shift":
            count = words[1].text if len(words) > 1 else "1"
            if count.isdigit():
                state.shift(int(count))
        elif head == "set" and len(words) > 1 and words[1].text == "--":
            state.positional = [word.parts for word in words[2:]]
        elif head == "unset":
            for word in words[1:]:
                state.clear(word.text)
        elif head == "let":
            for word in words[1:]:
                if match := _ASSIGNMENT.fullmatch(word.text):
                    value = self.expander.arithmetic(match[2], state, word.text)
                    state.assign(match[1], value)
        elif head == "read":
            for word in words[1:]:
                if re.fullmatch(r"[A-Za-z_]\w*", word.text):
                    state.assign(word.text, (Hole(word.text, f"${word.text}"),))
        else:
            return False
        return True

    def enter_folder(self, words: list[Word], state: ShellState) -> None:
        if len(words) > 1 and not words[1].open:
            target = PurePosixPath(words[1].text)
            base = PurePosixPath() if target.is_absolute() else PurePosixPath(state.folder)
            state.folder = str(base / target)

    def keep(self, words: tuple[Word, ...], prefix: dict[str, Word], state: ShellState) -> None:
        exported = {
            name: word_of(value, place)
            for name, place in state.exported.items()
            if words and (value := state.lookup(name)) is not None
        }
        self.commands.append(
            Command(
                words,
                prefix,
                exported,
                state.conditions,
                state.rounds,
                state.around,
                state.folder,
            )
        )

    def take_in(self, words: list[Word], state: ShellState) -> bool:
        """``source FILE``: its commands as if they stood here; whether it could be read."""
        name = words[1].text
        text = None
        if not words[1].open and self.open_text is not None and self.depth < _DEEPEST:
            text = self.open_text(name, state.folder)
        self.sourced[name] = False
        if text is None:
            return False
        try:
            inner = _Reader(text, name, outer=self)
        except ConfigError:  # not this shell's: what it sets is not known
            return False
        self.sourced[name] = True
        outer = state.positional
        if len(words) > 2:
            state.positional = [word.parts for word in words[2:]]
        self.follow(inner, words[0].place, state)
        state.positional = outer
        if state.ended == "return":
            state.ended = ""
        return True

    def follow(self, inner: _Reader, place: Place, state: ShellState) -> None:
        """Reads another text in this one's state; its commands stand at ``place``."""
        inner.depth = self.depth + 1
        first = len(self.commands)
        inner.run(inner.root.children, state)
        self.move(first, place)

    def move(self, first: int, place: Place) -> None:
        """Commands from the ``first`` on stand in another text: here they stand at ``place``."""
        for at in range(first, len(self.commands)):
            found = self.commands[at]
            moved = tuple(replace(word, place=place) for word in found.words)
            self.commands[at] = replace(found, words=moved)

    def call(self, function: ShellFunction, words: list[Word], state: ShellState) -> None:
        outer, shifted = state.positional, state.shifted
        if [word.is_all_arguments for word in words[1:]] != [True]:  # else they are the file's own
            given = [word for word in words[1:] if not word.is_all_arguments]
            state.positional = [word.parts for word in given]
        reader, first = function.reader, len(self.commands)
        reader.depth, kept = self.depth, reader.depth
        reader.statement(function.body, state)
        reader.depth = kept
        if reader is not self:
            self.move(first, words[0].place)
        state.positional, state.shifted = outer, shifted
        if state.ended == "return":
            state.ended = ""

    def text(self, words: Sequence[Word], state: ShellState) -> None:
        """Text that a shell reads as commands once more: ``eval``, ``bash -c``."""
        pieces: list[str] = []
        for number, word in enumerate(words):
            for part in word.parts:
                if isinstance(part, Hole):
                    variable = f"_hole_{self.counted[0]}_{number}_{len(pieces)}"
                    state.values[variable] = (part,)
                    pieces.append(f"${{{variable}}}")
                else:
                    pieces.append(part)
            pieces.append(" ")
        try:
            inner = _Reader("".join(pieces), self.name, outer=self)
        except ConfigError:
            return  # an odd quotation mark in what eval would read: no command to find
        self.follow(inner, words[0].place, state)

    # -- assignments -----------------------------------------------------------------------------

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
                    if match := _ASSIGNMENT.fullmatch(said.text):
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

    # -- branches and loops ----------------------------------------------------------------------

    def choose(self, node: Any, state: ShellState) -> None:
        """``if``: the branch that is taken where that can be told, else each."""
        branches: list[tuple[list[Any], list[Any]]] = []
        conditions: list[Any] = []
        body: list[Any] = []
        at_body, last = False, []
        for child in node.children:
            if child.type == "then":
                at_body = True
            elif child.type == "elif_clause":
                cut = (
                    [c.type for c in child.children].index("then")
                    if any(c.type == "then" for c in child.children)
                    else len(child.children)
                )
                branches.append((child.children[1:cut], child.children[cut + 1 :]))
            elif child.type == "else_clause":
                last = child.children[1:]
            elif child.type not in ("if", "fi"):
                (body if at_body else conditions).append(child)
        self.branch([(conditions, body), *branches], last, state)

    def branch(
        self, branches: Sequence[tuple[list[Any], list[Any]]], last: list[Any], state: ShellState
    ) -> None:
        forks: list[ShellState] = []
        denied = cause = ""
        for conditions, body in branches:
            decision = self.decide(conditions, state)
            decided = decision.holds
            if decided and decision.unset and self.leaves(body, state):
                decided = False  # an argument that is missing ends the file: it will be given
            if decided is False:
                continue
            said = " ".join(text_of_node(c) for c in conditions if c.is_named)
            if decided is None:
                fork = state.fork(f"{denied}{_shorten(said)}")
                cause = cause or decision.cause
                self.run(body, fork)
                forks.append(fork)
                denied = denied or "not "
                denied = f"not {_shorten(said)}, and " if denied == "not " else denied
                continue
            if not forks:
                self.run(body, state)
                return
            fork = state.fork(denied.removesuffix(", and "))
            self.run(body, fork)
            self.join([*forks, fork], state, cause)
            return
        if not forks:
            self.run(last, state)
            return
        fork = state.fork(denied.removesuffix(", and ") if last else "")
        self.run(last, fork)
        self.join([*forks, fork], state, cause)

    def leaves(self, body: list[Any], state: ShellState) -> bool:
        """The branch ends the file, and starts nothing."""
        before = len(self.commands)
        fork = state.fork()
        self.run(body, fork)
        del self.commands[before:]
        return fork.ended == "exit"

    def join(self, forks: Sequence[ShellState], state: ShellState, cause: str = "") -> None:
        """Goes on with what the branches have in common that come to an end without leaving."""
        going = [fork for fork in forks if not fork.ended]
        if not going and forks:
            state.ended = forks[0].ended
        state.merge(going, cause)

    def choose_case(self, node: Any, state: ShellState) -> None:
        value = node.child_by_field_name("value")
        said = text_if_known(self.expander.text(value, state)) if value is not None else None
        forks: list[ShellState] = []
        for item in node.children:
            if item.type != "case_item":
                continue
            patterns = [item.children[i] for i in range(len(item.children)) if _is_pattern(item, i)]
            body = item.children[len(patterns) * 2 :]
            if said is not None:
                texts = [text_if_known(self.expander.text(p, state)) for p in patterns]
                if any(t is not None and compare_words(said, "=", t) for t in texts):
                    self.run(body, state)
                    return
                continue
            words = "|".join(text_of_node(p) for p in patterns)
            fork = state.fork(f"{_shorten(text_of_node(value))} is {_shorten(words)}")
            self.run(body, fork)
            forks.append(fork)
        if forks:
            self.join(forks, state)

    def repeat(self, node: Any, state: ShellState) -> None:
        """``for x in ...``: each value in turn; once, with a hole, where they cannot be told."""
        name = node.child_by_field_name("variable")
        body = node.child_by_field_name("body")
        if name is None or body is None:
            self.run(node.children, state)
            return
        values = []
        started = False
        for child in node.children:
            if child.type == "in":
                started = True
            elif child == body:
                break
            elif started and child.is_named:
                values += self.expander.words(child, state)
        self.rounds(text_of_node(name), values, body, state)

    def repeat_counted(self, node: Any, state: ShellState) -> None:
        """``for ((i = 0; i < n; i++))``."""
        body = next(
            (c for c in node.children if c.type in ("do_group", "compound_statement")), None
        )
        match = _COUNTED.match(text_of_node(node))
        if body is None:
            return
        if match is None:
            self.run([body], state.fork())
            return
        first = self.expander.number(match[2], state)
        end = self.expander.number(match[4], state)
        step = int(match[5] or 1)
        place = self.expander.place(node)
        if first is None or end is None or not step:
            self.rounds(match[1], [], body, state)
            return
        end += match[3] == "<="
        values = [Word(str(n), place) for n in range(first, end, step)[:_MOST_COMMANDS]]
        self.rounds(match[1], values, body, state)

    def rounds(self, name: str, values: Sequence[Word], body: Any, state: ShellState) -> None:
        if not values or any(word.open for word in values):
            choices = tuple(word.text for word in values if not word.open)
            fork = state.fork()
            fork.assign(name, (Hole(name, f"${name}", choices),))
            fork.rounds = (*state.rounds, (name, ""))
            self.run([body], fork)
            state.merge([fork])
            return
        outer = state.rounds
        for word in values:
            state.assign(name, (word.text,))
            state.rounds = (*outer, (name, word.text)) if len(values) > 1 else outer
            self.run([body], state)
            if state.ended == "continue":
                state.ended = ""
            if state.ended:
                break
        if state.ended == "break":
            state.ended = ""
        state.rounds = outer

    def loop(self, node: Any, state: ShellState) -> None:
        """``while`` and ``until``: read once, and what is assigned there does not count."""
        body = [child for child in node.children if child.type == "do_group"]
        self.run(body, state.fork())

    def define(self, node: Any, state: ShellState) -> None:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            state.functions[text_of_node(name)] = ShellFunction(self, body)

    def within(self, node: Any, state: ShellState) -> None:
        """A subshell: what it sets stays within."""
        self.run(node.children, state.fork())

    def chain(self, node: Any, state: ShellState) -> None:
        """``a && b``, ``a || b``."""
        parts = [child for child in node.children if child.is_named or child.type in ("&&", "||")]
        sign = ""
        decided: bool | None = True
        for part in parts:
            if part.type in ("&&", "||"):
                sign = part.type
                continue
            if sign == "" or decided is None:
                self.maybe(part, state, certain=sign == "")
            elif decided is (sign == "&&"):
                self.statement(part, state)
            else:
                continue
            decided = self.decide([part], state).holds if is_test(part) else None
            if not is_test(part) and sign != "||":
                decided = True  # commands are taken to succeed

    def maybe(self, part: Any, state: ShellState, *, certain: bool) -> None:
        if certain:
            if not is_test(part):
                self.statement(part, state)
            return
        fork = state.fork()
        self.run([part], fork)
        self.join([fork, state.fork()], state)

    def decide(self, conditions: Sequence[Any], state: ShellState) -> ConditionResult:
        decision = decide(conditions, state, self.expander)
        self.unset.update(dict.fromkeys(decision.unset))
        return decision

    # -- files -----------------------------------------------------------------------------------

    def redirect(self, node: Any, state: ShellState) -> None:
        body = node.child_by_field_name("body")
        redirects = [c for c in node.children if c != body]
        here = _find_here(redirects)
        targets = list(_find_targets(redirects))
        extra = [word for c in redirects for word in self.after_redirect(c, state)]
        if body is None:
            return
        before = len(self.commands)
        if body.type == "command" and extra:
            self.start([*self.expander.words_of_command(body, state), *extra], {}, state)
        else:
            self.statement(body, state)
        made = self.commands[before:]
        last = next((c for c in reversed(made) if c.words), None)
        if last is not None:
            for sign, target in targets:
                self.write(target, sign, last, here, state)
            for child in redirects:
                self.pipe_here(child, last, here, state)
            if last.words[0].text == "tee" and here is not None:
                self.write_words(last.words[1:], last, here, state)

    def after_redirect(self, node: Any, state: ShellState) -> list[Word]:
        """Words that stand behind ``> file`` and belong to the command."""
        if node.type != "file_redirect":
            return []
        named = [c for c in node.children if c.is_named and c.type != "file_descriptor"]
        return [word for child in named[1:] for word in self.expander.words(child, state)]

    def pipe_here(self, node: Any, last: Command, here: Any, state: ShellState) -> None:
        """``cat <<EOF | tee file``."""
        for child in node.children:
            if child.type == "pipeline":
                words = self.expander.words_of_command(child.children[-1], state)
                if words and words[0].text == "tee":
                    self.write_words(words[1:], last, here, state)

    def write_words(
        self, words: Sequence[Word], last: Command, here: Any, state: ShellState
    ) -> None:
        for word in words:
            if not word.open and not word.text.startswith("-"):
                self.enter_file(word.text, self.content(last, here, state), last, adds=False)

    def write(self, target: Any, sign: str, last: Command, here: Any, state: ShellState) -> None:
        path = plain(self.expander.text(target, state))
        if path and not path.startswith("/dev/"):
            self.enter_file(path, self.content(last, here, state), last, adds=sign == ">>")

    def enter_file(self, path: str, text: Text | None, last: Command, *, adds: bool) -> None:
        earlier = self.files.get(path)
        if adds and earlier is not None and earlier.text is not None and text is not None:
            text = merge_parts((*earlier.text, *text))
        self.files[path] = WrittenFile(text, last.words[0].place, last.words[0].text)

    def content(self, last: Command, here: Any, state: ShellState) -> Text | None:
        """What a command writes that only repeats text."""
        head = last.words[0].text
        if head not in _WRITERS:
            return None
        if here is not None:
            return self.here_text(here, state)
        if head == "echo":
            words = [w for w in last.words[1:] if w.text not in ("-e", "-n")]
            return merge_parts(p for word in words for p in (*word.parts, " "))
        if head == "printf" and len(last.words) == 2:
            return (last.words[1].text.replace("\\n", "\n"),)
        return None

    def here_text(self, node: Any, state: ShellState) -> Text:
        start = next((c for c in node.children if c.type == "heredoc_start"), None)
        body = next((c for c in node.children if c.type == "heredoc_body"), None)
        if body is None:
            return ()
        if start is not None and re.search(r"['\"\\]", text_of_node(start)):
            return (text_of_node(body),)
        return self.expander.inside(body, state)

    def pipe(self, node: Any, state: ShellState) -> None:
        parts = [child for child in node.children if child.is_named]
        for part in parts:
            self.statement(part, state)
        if len(parts) == 2 and text_of_node(parts[1]).startswith("tee"):
            words = self.expander.words_of_command(parts[1], state)
            said = self.expander.words_of_command(parts[0], state)
            if said and said[0].text in ("echo", "printf"):
                self.write_words(words[1:], Command(tuple(said)), None, state)


_STATEMENTS: Mapping[str, Callable[[_Reader, Any, ShellState], None]] = {
    "command": _Reader.command,
    "variable_assignment": _Reader.assign,
    "declaration_command": _Reader.declare,
    "if_statement": _Reader.choose,
    "case_statement": _Reader.choose_case,
    "for_statement": _Reader.repeat,
    "c_style_for_statement": _Reader.repeat_counted,
    "while_statement": _Reader.loop,
    "function_definition": _Reader.define,
    "subshell": _Reader.within,
    "list": _Reader.chain,
    "redirected_statement": _Reader.redirect,
    "pipeline": _Reader.pipe,
    "unset_command": _Reader.unset_variables,
    "test_command": lambda reader, node, state: None,
}


def _split(text: str) -> list[str]:
    """The words of a text, as a shell has them; between blanks where it has none."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _value_of(word: Word) -> Word:
    match = _ASSIGNMENT.fullmatch(word.text)
    return replace(word, text=match[2]) if match else word


def _parts_of_value(word: Word) -> Text:
    return _value_of(word).parts


def _split_assignments(
    words: Sequence[Word], *, plain_words: bool
) -> tuple[dict[str, Word], list[Word]]:
    """``NAME=VALUE`` at the front of what ``env`` is given, and the command behind them."""
    said: dict[str, Word] = {}
    for at, word in enumerate(words):
        match = _ASSIGNMENT.fullmatch(word.text)
        if match:
            said[match[1]] = _value_of(word)
        elif plain_words and not word.text.startswith("-"):
            return said, list(words[at:])
    return said, []


def _text_of_shell(words: Sequence[Word]) -> tuple[int, int] | None:
    """Where ``bash -c TEXT`` stands: of the shell, and of the text."""
    for at, word in enumerate(words[:-2]):
        if PurePosixPath(word.text).name in _SHELLS:
            for after in range(at + 1, min(at + 4, len(words) - 1)):
                if re.fullmatch(r"-[a-z]*c", words[after].text):
                    return at, after + 1
    return None


def _is_pattern(item: Any, at: int) -> bool:
    """Before the closing bracket of a ``case`` branch."""
    bracket = next((i for i, c in enumerate(item.children) if c.type == ")"), 0)
    return at < bracket and item.children[at].is_named


def _shorten(text: str) -> str:
    said = " ".join(text.split())
    return said if len(said) <= 60 else said[:57] + "..."


def _find_here(redirects: Sequence[Any]) -> Any:
    return next((c for c in redirects if c.type == "heredoc_redirect"), None)


def _find_targets(redirects: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Files that output goes to: (``>`` or ``>>``, the node that names it)."""
    for child in redirects:
        if child.type == "heredoc_redirect":
            yield from _find_targets(child.children)
        if child.type != "file_redirect":
            continue
        sign = next((c.type for c in child.children if c.type in (">", ">>", "&>", ">|")), "")
        named = [c for c in child.children if c.is_named]
        if sign and named and named[0].type != "file_descriptor":
            yield sign, named[0]
