"""Random numbers of a dataset by sample: each generator is seeded for a sample that draws from it.

To seed all of them for every sample costs more than to read a small one, and most samples draw from
one or from none. So it is looked at who draws: in a first batch after every sample, and later, of
generators that none has drawn from so far, after the batch. Where one has now, the batch is read
again with that generator seeded too: what had been drawn depended on its neighbours.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, Protocol

import numpy as np
import torch

from torsh_trainer.data.sampler import sample_keys

Key = tuple[int, int]
"""Epoch and sample id."""


_WORDS = 625
"""32-bit words of a Mersenne Twister: 624, and how many of them are used up."""

_Held = ctypes.c_char * (4 * _WORDS)


class Generator(Protocol):
    """One that a dataset may draw from without asking for it."""

    def seed(self, key: int) -> None:
        """It begins at ``key``, of 63 bits."""

    def glance(self) -> Any:
        """What is another value once somebody has drawn from it, or seeded it, since ``seed``."""


class OfTorch:
    """``torch.rand`` and its like on the CPU."""

    def seed(self, key: int) -> None:
        torch.default_generator.manual_seed(key)

    def glance(self) -> bytes:
        return torch.default_generator.get_state().numpy().tobytes()


class OfNumPy:
    """The legacy generator, which a dataset shares with its libraries."""

    def __init__(self) -> None:
        self._of: Any = None
        self._held: Any = None

    def seed(self, key: int) -> None:
        np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002

    def glance(self) -> bytes:
        of = np.random.mtrand._rand._bit_generator  # another one, after set_bit_generator
        if of is not self._of:
            self._of, self._held = of, _Held.from_address(of.ctypes.state_address)
        held: bytes = self._held.raw
        return held


class OfPython:
    """That of the module ``random``."""

    def __init__(self) -> None:
        self._of: Any = random.random.__self__  # type: ignore[attr-defined]
        at = _place_of_state()
        self._held: Any = None if at is None else _Held.from_address(id(self._of) + at)

    def seed(self, key: int) -> None:
        random.seed(key)

    def glance(self) -> Any:
        return random.getstate() if self._held is None else self._held.raw


def _place_of_state() -> int | None:
    """Where CPython has the words of a ``random.Random``, in bytes from the object's beginning.

    ``getstate`` makes 625 objects, which takes longer than to read a sample. None: they are not
    found, and there is no other way.
    """
    probe = random.Random(0x70726F6265)
    *words, used = probe.getstate()[1]
    size = getattr(random.Random.__base__, "__basicsize__", 0)
    if sys.implementation.name != "cpython" or size < 4 * _WORDS:
        return None
    held = ctypes.string_at(id(probe), size)
    for ordered in ([used, *words], [*words, used]):
        at = held.find(array("I", ordered).tobytes())
        if at >= 0:
            return at
    return None


@cache
def generators() -> tuple[Generator, ...]:
    """All that a dataset may draw from."""
    return OfTorch(), OfPython(), OfNumPy()


@contextlib.contextmanager
def _asked_for_state() -> Iterator[set[int]]:
    """Numbers of the ``generators`` whose state is asked for, as by ``torch.random.fork_rng``.

    Who asks may put it back, and then nobody sees what was drawn in between.
    """
    asked: set[int] = set()

    def tell(number: int, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        asked.add(number)
        return own(*args, **kwargs)

    places: list[tuple[Any, str, int]] = [
        (torch, "get_rng_state", 0),
        (torch.random, "get_rng_state", 0),
        (random, "getstate", 1),
        (np.random, "get_state", 2),
    ]
    with contextlib.ExitStack() as stack:
        for module, name, number in places:
            own = getattr(module, name)
            stack.callback(setattr, module, name, own)
            setattr(module, name, partial(tell, number, own))
        yield asked


class Seeded:
    """A map dataset whose random numbers for a sample come from (seed, epoch, sample id).

    ``always`` seeds every generator for every sample, and reads none twice.
    """

    def __init__(self, dataset: Any, seed: int, *, always: bool = False) -> None:
        self.dataset = dataset
        self.seed = seed
        self.always = always
        self._drawn_from: list[Generator] | None = None  # None: nobody has looked

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_drawn_from": None}  # generators are those of a process

    def __getitem__(self, key: Key) -> Any:
        return self._seeded([key], generators())[0]

    def __getitems__(self, keys: Sequence[Key]) -> list[Any]:
        if self.always:
            return self._seeded(keys, generators())
        if self._drawn_from is None:
            return self._looked_at(keys)
        (last,) = self._keys(keys[-1:])
        while True:
            others = [one for one in generators() if one not in self._drawn_from]
            before = []
            for generator in others:  # a collate or a forward draws on as if all had been seeded
                generator.seed(last)
                before.append(generator.glance())
            try:
                samples = self._seeded(keys, self._drawn_from)
            except Exception:
                if not self._notice(others, before):
                    raise
                continue
            if not self._notice(others, before):
                return samples

    def _seeded(self, keys: Sequence[Key], drawn_from: Sequence[Generator]) -> list[Any]:
        dataset = self.dataset
        if not drawn_from:
            return [dataset[index] for _, index in keys]
        seeds = [generator.seed for generator in drawn_from]
        samples = []
        for (_, index), key in zip(keys, self._keys(keys), strict=True):
            for seed in seeds:
                seed(key)
            samples.append(dataset[index])
        return samples

    def _keys(self, keys: Sequence[Key]) -> list[int]:
        epoch = keys[0][0]  # a batch is of one epoch
        return sample_keys(self.seed, epoch, [index for _, index in keys])

    def _looked_at(self, keys: Sequence[Key]) -> list[Any]:
        samples, self._drawn_from = [], []
        for (_, index), key in zip(keys, self._keys(keys), strict=True):
            for generator in generators():
                generator.seed(key)
            before = [generator.glance() for generator in generators()]
            with _asked_for_state() as asked:
                samples.append(self.dataset[index])
            self._notice(generators(), before)
            hidden = [generators()[i] for i in sorted(asked)]
            self._drawn_from += [one for one in hidden if one not in self._drawn_from]
        return samples

    def _notice(self, watched: Sequence[Generator], before: Sequence[Any]) -> bool:
        """Whether one of ``watched`` is no longer as it was, and is to be seeded from here on."""
        assert self._drawn_from is not None
        moved = [one for one, was in zip(watched, before, strict=True) if one.glance() != was]
        for one in moved:
            if one not in self._drawn_from:
                self._drawn_from.append(one)
        return bool(moved)
