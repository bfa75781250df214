"""Whether a condition of a shell file holds, where that can be told without a shell."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from torsh_trainer.translate.shell.arithmetic import compare_words
from torsh_trainer.translate.shell.expansion import Expander
from torsh_trainer.translate.shell.grammar import text_of_node
from torsh_trainer.translate.shell.state import ShellState
from torsh_trainer.translate.shell.words import Hole, Text, Word, text_if_known


class ConditionResult(NamedTuple):
    """``holds`` is None where nobody can tell, for which ``cause`` is a variable, if one is.

    ``unset`` are variables that nothing in the file sets, and that were taken for empty.
    """

    holds: bool | None
    unset: tuple[str, ...] = ()
    cause: str = ""


def decide(conditions: Sequence[Any], state: ShellState, expander: Expander) -> ConditionResult:
    """Whether the conditions, nodes of the file, hold: the last one does."""
    named = [c for c in conditions if c.is_named and c.type != "comment"]
    judge = _Judge(state, expander)
    holds = judge.truth(named[-1]) if named else None
    return ConditionResult(holds, tuple(judge.unset), judge.cause)


def is_test(node: Any) -> bool:
    """Whether a statement is nothing but a condition."""
    return node.type in ("test_command", "negated_command") or (
        node.type == "compound_statement" and text_of_node(node).startswith("((")
    )


class _Judge:
    def __init__(self, state: ShellState, expander: Expander) -> None:
        self.state, self.expander = state, expander
        self.unset: dict[str, None] = {}
        self.cause = ""

    def truth(self, node: Any) -> bool | None:
        kind = node.type
        inner = [child for child in node.children if child.is_named]
        if kind in ("test_command", "parenthesized_expression") and len(inner) == 1:
            return self.truth(inner[0])
        if kind == "compound_statement" and text_of_node(node).startswith("(("):
            raw = text_of_node(node)[2:-2]
            if "$#" in raw and self.state.positional is None:
                raw = raw.replace("$#", self.count_arguments())
            value = self.expander.number(raw, self.state)
            return None if value is None else bool(value)
        if kind == "negated_command" and inner:
            found = self.truth(inner[0])
            return None if found is None else not found
        if kind == "list" and len(inner) == 2:
            sign = next((c.type for c in node.children if c.type in ("&&", "||")), "")
            return _combine(self.truth(inner[0]), sign, self.truth(inner[1]))
        if kind == "unary_expression":
            return self.unary(node, inner)
        if kind == "binary_expression":
            return self.binary(node)
        if kind == "command":
            return self.test_words(self.expander.words_of_command(node, self.state))
        if kind in ("word", "string", "concatenation", "simple_expansion", "expansion"):
            known = text_if_known(self.expander.text(node, self.state))
            return None if known is None else known != ""
        return None

    def test_words(self, words: list[Word]) -> bool | None:
        texts = [word.text for word in words]
        if texts in (["true"], [":"]):
            return True
        if texts == ["false"]:
            return False
        if texts[:1] == ["test"] and len(texts) == 4 and not any(w.open for w in words):
            return compare_words(texts[1], texts[2], texts[3])
        if texts[:1] == ["test"] and len(texts) == 3 and texts[1] in ("-z", "-n"):
            return self.is_empty(words[2].parts, texts[1])
        return None

    def unary(self, node: Any, inner: list[Any]) -> bool | None:
        if node.children[0].type == "!" or text_of_node(node).startswith("!"):
            found = self.truth(inner[-1]) if inner else None
            return None if found is None else not found
        if len(inner) != 2 or text_of_node(inner[0]) not in ("-z", "-n"):
            return None
        return self.is_empty(self.expander.text(inner[1], self.state), text_of_node(inner[0]))

    def is_empty(self, text: Text, sign: str) -> bool | None:
        """``-z`` and ``-n``; a variable that nothing in the file sets is empty."""
        known = self.text_or_unset(text)
        return None if known is None else (known == "") is (sign == "-z")

    def text_or_unset(self, text: Text) -> str | None:
        """A text that is known, or empty where it is a variable that nothing sets."""
        known = text_if_known(text)
        if known is not None:
            return known
        holes = [part for part in text if isinstance(part, Hole)]
        if len(text) == 1 and holes[0].name == "#":
            return self.count_arguments()
        if len(text) == 1 and holes[0].name == "@":
            self.unset["@"] = None
            return ""
        unset = len(text) == 1 and re.fullmatch(r"\w+", holes[0].name)
        if not unset or holes[0].choices or self.state.lookup(holes[0].name) is not None:
            return None
        self.unset[holes[0].name] = None
        return ""

    def count_arguments(self) -> str:
        """``$#`` of a file whose arguments nobody has given, or some by their numbers."""
        stated = [int(name) for name in self.state.known if name.isdigit()]
        if not stated:
            self.unset["@"] = None
        return str(max(0, max(stated, default=0) - self.state.shifted))

    def binary(self, node: Any) -> bool | None:
        if len(node.children) != 3:
            return None
        left, sign, right = node.children
        if sign.type in ("&&", "||", "-a", "-o"):
            both = self.truth(left), self.truth(right)
            return _combine(both[0], "&&" if sign.type in ("&&", "-a") else "||", both[1])
        operator = text_of_node(sign)
        sides = [self.expander.text(side, self.state) for side in (left, right)]
        texts = [text_if_known(side) for side in sides]
        if (operator in ("=", "==", "!=") and texts[1]) or sides[0] == (Hole("#", "$#"),):
            texts[0] = self.text_or_unset(sides[0])
        if texts[0] is None or texts[1] is None:
            open_ = [part for side in sides for part in side if isinstance(part, Hole)]
            self.cause = next((h.name for h in open_ if re.fullmatch(r"\w+", h.name)), "")
            return None
        return compare_words(texts[0], operator, texts[1])


def _combine(left: bool | None, sign: str, right: bool | None) -> bool | None:
    if sign == "&&":
        if left is False or right is False:
            return False
        return True if left and right else None
    if left or right:
        return True
    return False if left is False and right is False else None
