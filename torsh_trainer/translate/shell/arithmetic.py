"""Numbers as a shell computes them: ``$(( ))``, and comparisons of ``[ ]`` and ``[[ ]]``."""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Mapping

_LARGEST = 2**63
_OPERATORS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b) if abs(a) < 2**52 else a // b,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: lambda a, b: a - b * int(a / b),
    ast.Pow: lambda a, b: a**b if 0 <= b <= 64 and abs(a) <= 1000 else _too_large(),
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.LShift: lambda a, b: a << b if 0 <= b < 64 else _too_large(),
    ast.RShift: lambda a, b: a >> b if 0 <= b < 64 else _too_large(),
}
_COMPARED: Mapping[type, Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
NUMERIC: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
"""Operators of ``[ ]`` on whole numbers."""

_NUMBER = re.compile(r"[+-]?\d+")


def compute(text: str) -> int | None:
    """The value of an expression of whole numbers; None where it is none."""
    text = re.sub(r"\b0+(?=\d)", "", text.strip())
    text = text.replace("&&", " and ").replace("||", " or ")
    text = re.sub(r"!(?!=)", " not ", text)
    if len(text) > 200 or not text:
        return None
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
    except (ArithmeticError, SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return None
    return value if abs(value) < _LARGEST else None


def _too_large() -> int:
    raise ValueError("too large")


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value):
            return int(value)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            a, b = _value(left), _value(right)
            if max(abs(a), abs(b)) > _LARGEST:
                _too_large()
            return _OPERATORS[type(op)](a, b)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return int(not _value(operand))
        case ast.BoolOp(op=ast.And(), values=values):
            return int(all(map(_value, values)))
        case ast.BoolOp(op=ast.Or(), values=values):
            return int(any(map(_value, values)))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARED:
            return int(_COMPARED[type(op)](_value(left), _value(right)))
    raise ValueError(ast.dump(node))


def compare_words(left: str, sign: str, right: str) -> bool | None:
    """``[ left sign right ]``; None where nobody can tell."""
    if sign in ("=", "=="):
        return fnmatch.fnmatchcase(left, right)
    if sign == "!=":
        return not fnmatch.fnmatchcase(left, right)
    if sign in NUMERIC and _NUMBER.fullmatch(left.strip()) and _NUMBER.fullmatch(right.strip()):
        return NUMERIC[sign](int(left), int(right))
    if sign == "<":
        return left < right
    if sign == ">":
        return left > right
    if sign == "=~":
        return _matches(right, left)
    return None


def _matches(pattern: str, text: str) -> bool | None:
    if len(pattern) > 100 or re.search(r"[*+}]\)?[*+{]|\[\[", pattern):
        return None  # what may take long, and the classes of POSIX
    try:
        return re.search(pattern, text[:200]) is not None
    except re.error:
        return None
