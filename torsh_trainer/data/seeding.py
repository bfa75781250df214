"""Random numbers of a dataset by sample: each generator is seeded for a sample that draws from it.

To seed all of them for every sample costs more than to read a small one, and most samples draw from
one or from none. So it is looked at who draws: in a first batch after every sample, and later, of
generators that none has drawn from so far, after the batch. Where one has now, the batch is read
again with that generator seeded too: what had been drawn depended on its neighbours.
"""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, Protocol

import numpy as np
import torch

from torsh_trainer.data.draws import numpy_bit_generator, numpy_seeder
from torsh_trainer.data.sampler import mix, sample_keys

Key = tuple[int, int]
"""Epoch and sample id."""

_WATCHED = 0x70726F6265
"""A seed that nobody else has."""


class Generator(Protocol):
    """One that a dataset may draw from without asking for it."""

    def seed(self, key: int, /) -> Any:
        """It begins at ``key``, of 63 bits."""

    def glance(self) -> Any:
        """What is another value once somebody has drawn from it, or seeded it, since ``seed``."""

    def watch(self, key: int) -> None:
        """It gets ready for ``is_untouched(key)``, which is asked once, and cheaper to be asked."""

    def is_untouched(self, key: int) -> bool:
        """Whether nobody has drawn from it, or seeded it, since ``watch``.

        If so, it begins at ``key``.
        """


class OfTorch:
    """``torch.rand`` and its like on the CPU.

    To read its state takes longer than to put one there, so it is watched as NumPy's is.
    """

    def __init__(self) -> None:
        self.seed = torch.default_generator.manual_seed
        self._word = torch.zeros((), dtype=torch.int64, device="cpu")
        place = torch.Generator().manual_seed(_WATCHED)
        self._word.random_(generator=place)  # the 624 words after it are made
        self._place = place.get_state()
        self._next = self._word.random_(generator=place).item()

    def glance(self) -> bytes:
        return torch.default_generator.get_state().numpy().tobytes()

    def watch(self, key: int) -> None:
        torch.default_generator.set_state(self._place)

    def is_untouched(self, key: int) -> bool:
        if self._word.random_().item() != self._next:
            return False
        self.seed(key)
        return True


class OfNumPy:
    """The legacy generator, which a dataset shares with its libraries.

    To ask for its state takes longer than to read a small sample. So it is watched at a place of
    its own: the number that follows there comes next as long as nobody has drawn.
    """

    def __init__(self) -> None:
        self._of: Any = None
        self._next = 0.0

    seed = staticmethod(numpy_seeder())

    def glance(self) -> bytes:
        return pickle.dumps(np.random.get_state(legacy=False))  # noqa: NPY002

    def watch(self, key: int) -> None:
        self.seed(_WATCHED)
        of = numpy_bit_generator()
        if of is not self._of:  # another one, after set_bit_generator
            self._of, self._next = of, np.random.random_sample()  # noqa: NPY002
            self.seed(_WATCHED)

    def is_untouched(self, key: int) -> bool:
        if np.random.random_sample() != self._next:  # noqa: NPY002
            return False
        self.seed(key)
        return True


class OfPython:
    """That of the module ``random``, watched as NumPy's is: ``getstate`` makes 625 objects.

    The module's functions are methods of one hidden ``Random``. Its own ``seed`` and ``setstate``
    look at what they are given before they call those of C, which are called here at once.
    """

    def __init__(self) -> None:
        self._hidden: random.Random = random.seed.__self__  # type: ignore[attr-defined]
        of_c: Any = super(random.Random, self._hidden)
        self._seed, self._set_words = of_c.seed, of_c.setstate
        place = random.Random(_WATCHED)
        place.random()  # the 624 words after it are made, for whoever is put there
        self._words = place.getstate()[1]
        self._next = place.getrandbits(64)

    def seed(self, key: int) -> None:
        self._seed(key)
        self._hidden.gauss_next = None  # type: ignore[attr-defined]

    def glance(self) -> Any:
        return random.getstate()

    def watch(self, key: int) -> None:
        self._set_words(self._words)
        self._hidden.gauss_next = None  # type: ignore[attr-defined]

    def is_untouched(self, key: int) -> bool:
        if random.getrandbits(64) != self._next:
            return False
        self.seed(key)
        return True


@cache
def generators() -> tuple[Generator, ...]:
    """All that a dataset may draw from."""
    return OfTorch(), OfPython(), OfNumPy()


@contextlib.contextmanager
def _watch_state_reads() -> Iterator[set[int]]:
    """Numbers of the ``generators`` whose state is asked for, as by ``torch.random.fork_rng``.

    Who asks may put it back, and then nobody sees what was drawn in between. Who asks for the
    seed may make a generator of it.
    """
    asked: set[int] = set()

    def tell(number: int, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        asked.add(number)
        return own(*args, **kwargs)

    places: list[tuple[Any, str, int]] = [
        (torch, "get_rng_state", 0),
        (torch.random, "get_rng_state", 0),
        (torch, "initial_seed", 0),
        (torch.random, "initial_seed", 0),
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
        return self._fetch_seeded([key], self._keys([key]), generators())[0]

    def __getitems__(self, keys: Sequence[Key]) -> list[Any]:
        if self._drawn_from is None and not self.always:
            return self._fetch_watching(keys)
        if self.always:
            return self._fetch_seeded(keys, self._keys(keys), generators())
        assert self._drawn_from is not None
        while True:
            seeds = self._keys(keys) if self._drawn_from else [mix(self.seed, *keys[-1])]
            last = seeds[-1]
            others = [one for one in generators() if one not in self._drawn_from]
            for generator in others:
                generator.watch(last)
            try:
                samples = self._fetch_seeded(keys, seeds, self._drawn_from)
            except Exception:
                if not self._are_touched(others, last):
                    raise
                continue
            if not self._are_touched(others, last):
                return samples

    def _are_touched(self, others: Sequence[Generator], last: int) -> bool:
        """Whether somebody drew from one of ``others``, which is seeded from here on.

        All begin at ``last`` if not: a collate or a forward draws on as if all had been seeded.
        """
        assert self._drawn_from is not None
        touched = [one for one in others if not one.is_untouched(last)]
        self._drawn_from += touched
        return bool(touched)

    def _fetch_seeded(
        self, keys: Sequence[Key], seeds: Sequence[int], drawn_from: Sequence[Generator]
    ) -> list[Any]:
        dataset = self.dataset
        if not drawn_from:
            return [dataset[index] for _, index in keys]
        samples = []
        if len(drawn_from) == 1:
            begin = drawn_from[0].seed
            for (_, index), seed in zip(keys, seeds, strict=True):
                begin(seed)
                samples.append(dataset[index])
            return samples
        for (_, index), seed in zip(keys, seeds, strict=True):
            for generator in drawn_from:
                generator.seed(seed)
            samples.append(dataset[index])
        return samples

    def _keys(self, keys: Sequence[Key]) -> list[int]:
        epoch = keys[0][0]  # a batch is of one epoch
        return sample_keys(self.seed, epoch, [index for _, index in keys])

    def _fetch_watching(self, keys: Sequence[Key]) -> list[Any]:
        samples, self._drawn_from = [], []
        for (_, index), key in zip(keys, self._keys(keys), strict=True):
            for generator in generators():
                generator.seed(key)
            before = [generator.glance() for generator in generators()]
            with _watch_state_reads() as asked:
                samples.append(self.dataset[index])
            moved = [
                one for one, was in zip(generators(), before, strict=True) if one.glance() != was
            ]
            hidden = [generators()[i] for i in sorted(asked)]
            self._drawn_from += [
                one for one in generators() if one in moved + hidden and one not in self._drawn_from
            ]
        return samples
