"""A sample in few numbers, to tell whether two processes have the same one."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

import torch
from torch import Tensor

VALUES = 64
"""Of a tensor of floating-point numbers or of bytes so many values are looked at."""

_ROUNDING, _DECODING = 1e-6, 1e-2
_DEEPEST = 6


class Sketch(NamedTuple):
    """``exact`` is a digest of structure, shapes, whole numbers and texts.

    ``numbers`` are (elements of a tensor, some of its values) where two machines may compute them
    a little differently.
    """

    exact: str
    numbers: tuple[tuple[int, tuple[float, ...]], ...]

    def resembles(self, other: Sketch) -> bool:
        """Whether both may be the same sample.

        A few numbers agree up to rounding; an image, a sound or the like to a hundredth of its
        largest value, since libraries of other versions decode it a little differently.
        """
        return self.exact == other.exact and all(
            _close(mine, its, size)
            for (size, mine), (_, its) in zip(self.numbers, other.numbers, strict=True)
        )


def sketch(sample: Any) -> Sketch:
    """What ``Sketch`` says of a sample: tensors, arrays, numbers and texts, however nested."""
    words: list[str] = []
    numbers: list[tuple[int, tuple[float, ...]]] = []
    _note(sample, words, numbers, 0)
    digest = hashlib.blake2b(repr(words).encode(), digest_size=16).hexdigest()
    return Sketch(digest, tuple(numbers))


def _note(value: Any, words: list[str], numbers: list[Any], depth: int) -> None:
    words.append(type(value).__name__)
    if isinstance(value, Tensor):
        _note_tensor(value, words, numbers)
    elif isinstance(value, float):
        numbers.append((1, (value,)))
    elif isinstance(value, str):  # the same file may lie elsewhere on another machine
        words.append(PurePath(value).name if value.startswith(os.sep) else value)
    elif value is None or isinstance(value, int | complex):
        words.append(repr(value))
    elif isinstance(value, bytes):
        words.append(hashlib.blake2b(value).hexdigest())
    elif hasattr(value, "__array_interface__"):
        _note_array(value, words, numbers)
    elif depth < _DEEPEST:
        for part in _parts(value):
            _note(part, words, numbers, depth + 1)


def _parts(value: Any) -> list[Any]:
    """What an object consists of, in an order that is the same in every process."""
    if isinstance(value, Mapping):
        return [part for key in sorted(value, key=str) for part in (str(key), value[key])]
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return _parts(getattr(value, "__dict__", {}))


def _note_array(value: Any, words: list[str], numbers: list[Any]) -> None:
    import numpy  # whoever has an array has it

    array = numpy.asarray(value)
    if array.dtype.kind in "biufc":
        _note_tensor(torch.from_numpy(numpy.array(array)), words, numbers)
    else:
        words.append(repr(array.tolist()))


def _note_tensor(value: Tensor, words: list[str], numbers: list[Any]) -> None:
    value = value.detach().cpu()
    value = value.to_dense() if value.layout is not torch.strided else value
    words.append(f"{value.dtype} {tuple(value.shape)}")
    flat = value.resolve_conj().flatten()
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    if flat.is_floating_point() or flat.dtype is torch.uint8:
        some = flat[:: max(1, len(flat) // VALUES)][:VALUES]
        numbers.append((len(flat), tuple(some.double().tolist())))
    else:
        words.append(hashlib.blake2b(bytes(flat.contiguous().view(torch.uint8))).hexdigest())


def _close(mine: tuple[float, ...], its: tuple[float, ...], size: int) -> bool:
    largest = max((abs(v) for v in (*mine, *its) if math.isfinite(v)), default=0.0)
    slack = _DECODING * largest if size > VALUES else 0.0
    return all(
        a == b or (a != a and b != b) or math.isclose(a, b, rel_tol=_ROUNDING, abs_tol=slack)
        for a, b in zip(mine, its, strict=True)
    )
