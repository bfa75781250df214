"""Data with marks in it: for weights that lie elsewhere in a checkpoint, and for numpy's numbers.

A mark is a dictionary of one key that begins with ``$``. torch reads numbers of numpy and paths
only as code; as marks they are data, and come back as what they were.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import torch

_WEIGHT, _SCALAR, _ARRAY, _PATH, _AS_IT_IS = "$weight", "$number", "$array", "$path", "$as_it_is"
_MARKS = (_WEIGHT, _SCALAR, _ARRAY, _PATH, _AS_IT_IS)
_NUMBERS = "biufc"


def mark_tensors(value: Any, weight: Callable[[Any], str | None]) -> Any:
    """A copy of ``value`` with marks; ``weight`` names a tensor that is not to be saved again.

    Tensors are the same objects; what is of no known kind stays as it is.
    """
    if isinstance(value, torch.Tensor):
        name = weight(value)
        return value if name is None else {_WEIGHT: name}
    if type(value) in (dict, OrderedDict):
        copied = type(value)((key, mark_tensors(item, weight)) for key, item in value.items())
        return {_AS_IT_IS: copied} if _is_mark(value) else copied
    if type(value) in (list, tuple):
        return type(value)(mark_tensors(item, weight) for item in value)
    if isinstance(value, PurePath):
        return {_PATH: str(value)}
    numpy: Any = sys.modules.get("numpy")  # whoever has a number of its kind has it
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in _NUMBERS:
        return {_SCALAR: [value.dtype.str, value.item()]}
    if numpy is not None and type(value) is numpy.ndarray and value.dtype.kind in _NUMBERS:
        content = torch.frombuffer(bytearray(value.tobytes() or b"\0"), dtype=torch.uint8)
        return {_ARRAY: [value.dtype.str, list(value.shape), content]}
    return value


def resolve_marks(value: Any, weight: Callable[[str], Any]) -> Any:
    """What ``mark_tensors`` was given; ``weight`` finds a tensor by its name."""
    if type(value) in (list, tuple):
        return type(value)(resolve_marks(item, weight) for item in value)
    if type(value) not in (dict, OrderedDict):
        return value
    if not _is_mark(value):
        return type(value)((key, resolve_marks(item, weight)) for key, item in value.items())
    kind, held = next(iter(value.items()))
    if kind == _WEIGHT:
        return weight(held)
    if kind == _PATH:
        return Path(held)
    if kind == _AS_IT_IS:
        return type(held)((key, resolve_marks(item, weight)) for key, item in held.items())
    import numpy  # what was saved was of its kind

    if kind == _SCALAR:
        dtype, number = held
        return numpy.dtype(dtype).type(number)
    dtype, shape, content = held
    count = numpy.dtype(dtype).itemsize * int(numpy.prod(shape))
    return numpy.frombuffer(content.numpy().tobytes()[:count], dtype).reshape(shape).copy()


def weights_in(value: Any) -> set[str]:
    """The names of all weights that ``value`` has marks of."""
    if type(value) in (list, tuple):
        return {name for item in value for name in weights_in(item)}
    if not isinstance(value, Mapping):
        return set()
    if _is_mark(value) and _WEIGHT in value:
        return {value[_WEIGHT]}
    return {name for item in value.values() for name in weights_in(item)}


def _is_mark(value: Mapping[Any, Any]) -> bool:
    return len(value) == 1 and next(iter(value)) in _MARKS
