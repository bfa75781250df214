"""Branches, loops and chains of a shell file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torsh_trainer.translate.shell.arithmetic import compare_words
from torsh_trainer.translate.shell.conditions import ConditionResult, decide, is_test
from torsh_trainer.translate.shell.grammar import text_of_node
from torsh_trainer.translate.shell.reader import MOST_COMMANDS, ShellReader
from torsh_trainer.translate.shell.state import ShellState
from torsh_trainer.translate.shell.words import Hole, Word, text_if_known

_COUNTED = re.compile(
    r"for\s*\(\(\s*(\w+)\s*=\s*(.+?)\s*;\s*\1\s*(<=?)\s*(.+?)\s*;\s*(?:\1\+\+|\+\+\1|\1\s*\+=\s*(\d+))"
    r"\s*\)\)",
    re.DOTALL,
)


class BranchReader(ShellReader):
    """Reads what decides which statements run, and how often."""

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
        values = [Word(str(n), place) for n in range(first, end, step)[:MOST_COMMANDS]]
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


def _is_pattern(item: Any, at: int) -> bool:
    """Before the closing bracket of a ``case`` branch."""
    bracket = next((i for i, c in enumerate(item.children) if c.type == ")"), 0)
    return at < bracket and item.children[at].is_named


def _shorten(text: str) -> str:
    said = " ".join(text.split())
    return said if len(said) <= 60 else said[:57] + "..."
