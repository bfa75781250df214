"""What a value of DeepSpeed's configuration may be, and what it is taken for.

Two manners, as in the engine: blocks that pydantic checks turn texts and whole floats into
numbers, ``true`` into 1; outside them a value is used as it stands.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

_TRUE = {"1", "on", "t", "true", "y", "yes"}
_FALSE = {"0", "off", "f", "false", "n", "no"}
_INTEGER = re.compile(r"\s*[-+]?\d+(_\d+)*(\.0*)?\s*\Z")


class Mismatch(ValueError):
    """The value is not what the key takes; the text says what would be."""


Kind = Callable[[Any, bool], Any]
"""(value, strict block) -> the value that the engine works with; raises Mismatch."""


def kind(name: str) -> Kind:
    """The kind that ``name`` describes: ``int``, ``int>0``, ``int0..3``, ``bool?``, ``cpu|none``.

    A question mark allows null.
    """
    base = name.removesuffix("?")
    check = _make_kind(base)
    if base == name:
        return check
    return lambda value, strict: None if value is None else check(value, strict)


def _make_kind(name: str) -> Kind:
    if name in _PLAIN:
        return _PLAIN[name]
    if match := re.fullmatch(r"(int|float)(>=?)(-?\d+)", name):
        return _at_least(match.group(1), match.group(2), float(match.group(3)))
    if match := re.fullmatch(r"(int|float)(\d+)\.\.(\d+)", name):
        return _between(match.group(1), float(match.group(2)), float(match.group(3)))
    if "|" in name:
        return _one_of(name.split("|"))
    raise AssertionError(f"no kind {name!r}")


def _bool(value: Any, strict: bool) -> bool:
    if isinstance(value, bool):
        return value
    if strict:
        if isinstance(value, int | float) and value in (0, 1):
            return bool(value)
        if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
            return value.lower() in _TRUE
    raise Mismatch("true or false")


def _int(value: Any, strict: bool) -> int:
    if isinstance(value, bool) and strict:
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    if strict and isinstance(value, str) and len(value) < 100 and _INTEGER.match(value):
        return int(value.strip().split(".")[0])
    raise Mismatch("a whole number")


def _float(value: Any, strict: bool) -> float:
    if isinstance(value, bool):
        raise Mismatch("a number")
    if strict and isinstance(value, str):
        try:
            value = float(value)
        except ValueError as error:
            raise Mismatch("a number") from error
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        number = math.nan
    if not math.isfinite(number):
        raise Mismatch("a finite number")
    return number


def _number(value: Any, strict: bool) -> int | float:
    """An integer stays one, so that a recipe shows what the file says."""
    return value if type(value) is int and abs(value) < 2**63 else _float(value, strict)


def _str(value: Any, strict: bool) -> str:
    if not isinstance(value, str):
        raise Mismatch("a text")
    return value


def _list(value: Any, strict: bool) -> list[Any]:
    if not isinstance(value, list):
        raise Mismatch("a list")
    return value


def _names(value: Any, strict: bool) -> list[str]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise Mismatch("a list of texts")
    return value


def _betas(value: Any, strict: bool) -> list[float]:
    if not isinstance(value, list) or len(value) != 2:
        raise Mismatch("two numbers")
    return [_float(item, False) for item in value]


def _map(value: Any, strict: bool) -> Any:
    if not isinstance(value, Mapping):
        raise Mismatch("an object {...}")
    return value


def _absent(value: Any, strict: bool) -> None:
    """The key of a block, where no block stands."""
    if value is not None and value != {}:
        raise Mismatch("an object {...}, or null")


def _any(value: Any, strict: bool) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise Mismatch("a finite number")
    return value


def _at_least(base: str, sign: str, bound: float) -> Kind:
    plain = _PLAIN[base]

    def check(value: Any, strict: bool) -> Any:
        number = plain(value, strict)
        if number < bound or (sign == ">" and number == bound):
            raise Mismatch(f"{'more than' if sign == '>' else 'at least'} {bound:g}")
        return number

    return check


def _between(base: str, low: float, high: float) -> Kind:
    plain = _PLAIN[base]

    def check(value: Any, strict: bool) -> Any:
        number = plain(value, strict)
        if not low <= number <= high:
            raise Mismatch(f"between {low:g} and {high:g}")
        return number

    return check


def _one_of(words: list[str]) -> Kind:
    """Any case where the word list is in capitals, as the engine itself has it."""

    def check(value: Any, strict: bool) -> str:
        if isinstance(value, str):
            if value in words:
                return value
            folded = [word for word in words if word.isupper() and word == value.upper()]
            if folded:
                return folded[0]
        raise Mismatch("one of " + ", ".join(words))

    return check


_TORCH_DTYPES = (
    "torch.float16 fp16 float16 half torch.float32 fp32 float32 float "
    "torch.int8 int8 torch.bfloat16 bf16 bfloat16"
)

_PLAIN: dict[str, Kind] = {
    "sent-dtype": _one_of(["fp32", "fp16", "bf16", "FP32", "FP16", "BF16"]),
    "torch-dtype": _one_of(_TORCH_DTYPES.split(" ")),
    "bool": _bool,
    "int": _int,
    "float": _float,
    "number": _number,
    "str": _str,
    "list": _list,
    "names": _names,
    "betas": _betas,
    "map": _map,
    "any": _any,
    "null": _absent,
}
