"""What a dataset draws is a function of (seed, epoch, sample), whichever generators are seeded."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Callable
from random import random as its_own_reference
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from torsh_trainer.data.sampler import mix
from torsh_trainer.data.seeding import Seeded

SIZE = 96
NUMPY: Any = np.random.mtrand._rand
TORCH = torch.default_generator


def draw_hidden() -> float:
    with torch.random.fork_rng(devices=[]):
        return torch.rand(()).item()


def draw_and_put_back() -> float:
    state = random.getstate()
    drawn = random.random()
    random.setstate(state)
    return drawn


DRAWS: dict[str, Callable[[int], Any]] = {
    "nothing": lambda i: 0.0,
    "torch": lambda i: torch.rand(3).tolist(),
    "one normal number of torch": lambda i: torch.randn(1).item(),
    "torch by its generator": lambda i: torch.rand((), generator=TORCH).item(),
    "random": lambda i: random.random(),
    "random by a reference": lambda i: its_own_reference(),
    "random.gauss": lambda i: random.gauss(0.0, 1.0),
    "a shuffle": lambda i: random.sample(range(20), 20),
    "NumPy": lambda i: np.random.rand(),  # noqa: NPY002
    "one normal number of NumPy": lambda i: np.random.randn(),  # noqa: NPY002
    "NumPy by a reference": lambda i: NUMPY.rand(),
    "all": lambda i: [torch.rand(()).item(), random.random(), NUMPY.rand()],
    "torch, for some": lambda i: torch.rand(()).item() if i % 11 == 5 else 0.0,
    "random, for one": lambda i: random.gauss(0.0, 1.0) if i == 41 else 0.0,
    "NumPy, for some": lambda i: NUMPY.randn() if i % 9 == 4 else 0.0,
    "in turns": lambda i: [torch.randn(1).item, random.random, NUMPY.randn, int][i // 4 % 4](),
    "as many words as there are": lambda i: random.getrandbits(32 * 624) if i > 40 else 0,
    "as many as NumPy has": lambda i: NUMPY.bytes(4 * 624) if i > 40 else 0,
    "torch, hidden": lambda i: draw_hidden(),
    "random, hidden": lambda i: draw_and_put_back(),
    "a generator of its own, by torch's seed": lambda i: np.random.default_rng(
        torch.initial_seed()
    ).random(),
    "after a seed of its own": lambda i: (random.seed(i), random.random())[1],
}


class Drawing(Dataset[Any]):
    """Samples that draw; ``reads`` counts how often each was asked for."""

    def __init__(self, draw: Callable[[int], Any]) -> None:
        self._draw = draw
        self.reads: Counter[int] = Counter()

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        self.reads[index] += 1
        return index, self._draw(index)


def batches(size: int, order: int) -> list[list[tuple[int, int]]]:
    """An epoch of (epoch, sample)."""
    ids = random.Random(order).sample(range(SIZE), SIZE) if order else list(range(SIZE))
    return [[(3, i) for i in ids[at : at + size]] for at in range(0, SIZE, size)]


def left() -> tuple[Any, ...]:
    """The generators, as whoever draws next finds them."""
    state: Any = NUMPY.get_state()
    return (
        TORCH.get_state().tolist(),
        random.getstate(),
        (state[1].tolist(), *state[2:]),
    )


def fetched(draw: Callable[[int], Any], parts: list[Any], **knobs: Any) -> tuple[Any, list[Any]]:
    """Draws by sample, and what each batch leaves."""
    data = Seeded(Drawing(draw), 7, **knobs)
    found, leaves = {}, []
    for part in parts:
        found.update(data.__getitems__(part))
        leaves.append(left())
        torch.randn(1), random.gauss(0.0, 1.0), NUMPY.randn()  # as a forward may
    return found, leaves


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize(("size", "order"), [(8, 0), (8, 1), (5, 2), (1, 3)])
def test_a_draw_is_the_one_after_seeding_everything(name: str, size: int, order: int) -> None:
    parts = batches(size, order)
    found, leaves = fetched(DRAWS[name], parts)
    expected, as_left = fetched(DRAWS[name], parts, always=True)
    assert found == expected
    assert leaves == as_left, "what comes after a batch draws on from its last sample"
    one_by_one = Seeded(Drawing(DRAWS[name]), 7)
    assert found == dict(one_by_one[3, i] for i in range(SIZE))


@pytest.mark.parametrize("name", ["torch", "random.gauss", "one normal number of NumPy", "all"])
def test_a_sample_draws_what_the_public_seeds_of_its_key_give(name: str) -> None:
    seeded, draw = Seeded(Drawing(DRAWS[name]), 7), DRAWS[name]
    for part in batches(8, 1):
        for (_, index), (_, drawn) in zip(part, seeded.__getitems__(part), strict=True):
            key = mix(7, 3, index)
            torch.manual_seed(key), random.seed(key), np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002
            assert drawn == draw(index)


@pytest.mark.parametrize("name", ["nothing", "torch", "random", "NumPy", "all"])
def test_a_sample_is_read_once(name: str) -> None:
    data = Drawing(DRAWS[name])
    seeded = Seeded(data, 7)
    for part in batches(8, 1):
        seeded.__getitems__(part)
    assert set(data.reads.values()) == {1}


def test_a_batch_in_which_a_generator_is_drawn_from_for_the_first_time_is_read_again() -> None:
    data = Drawing(DRAWS["random, for one"])
    seeded = Seeded(data, 7)
    for part in batches(8, 0):
        seeded.__getitems__(part)
    assert {i for i, count in data.reads.items() if count == 2} == set(range(40, 48))
    assert max(data.reads.values()) == 2


@pytest.mark.parametrize("number", range(3))
def test_a_failure_is_that_of_the_draw(number: int) -> None:
    draw = [lambda: torch.rand(()).item(), random.random, NUMPY.rand][number]

    def fails(index: int) -> float:
        if index < 16:
            return 0.0
        drawn = draw()
        if drawn < 0.3:
            raise OSError(f"{index}: {drawn}")
        return drawn

    def said(**knobs: Any) -> list[str]:
        found = []
        for part in batches(4, 0)[2:]:
            data = Seeded(Drawing(fails), 7, **knobs)
            data.__getitems__(batches(4, 0)[0])
            try:
                found.append(str(data.__getitems__(part)))
            except OSError as error:
                found.append(str(error))
        return found

    assert said() == said(always=True)
    assert sum(text[0].isdigit() for text in said()) > 3, "some failed"


def test_what_another_process_gets_has_seen_nothing() -> None:
    seeded = Seeded(Drawing(its_own_number), 7)
    first, *rest = batches(8, 1)
    seeded.__getitems__(first)
    again = pickle.loads(pickle.dumps(seeded))
    assert [again.__getitems__(part) for part in rest] == [seeded.__getitems__(p) for p in rest]


def its_own_number(index: int) -> float:
    return random.random()


@pytest.mark.parametrize("name", ["NumPy, for some", "one normal number of NumPy", "in turns"])
def test_another_bit_generator_of_numpy_is_seen_and_seeded(name: str) -> None:
    def read(order: int, **knobs: Any) -> dict[int, Any]:
        data = Seeded(Drawing(DRAWS[name]), 7, **knobs)
        return dict(sample for part in batches(8, order) for sample in data.__getitems__(part))

    ours = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))  # its state lies elsewhere than MT19937's
    try:
        assert read(1) == read(3) == read(2, always=True)
    finally:
        np.random.set_bit_generator(ours)
