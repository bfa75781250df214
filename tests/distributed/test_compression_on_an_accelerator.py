"""Compression as it runs where the host must not look at values, with the values of a CPU.

The ways that are taken on an accelerator are taken here on CPU tensors: they give what a CPU's own
ways give, bit for bit, and ask the host for nothing, or once a bucket.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.compression import (
    BF16,
    Compressing,
    GradientReducer,
    Int4,
    Int8,
    OneBit,
    PowerSGD,
    RandomK,
    SignSGD,
    Slot,
    Threshold,
    TopK,
    method,
    reducer,
    selection,
    sparse,
)
from torsh_trainer.testing.ranks import shared_pool

SHAPES = {"a": (60, 40), "small": (7,), "b": (60, 80), "c": (60, 40)}
BUCKET = Slot.row([(name, math.prod(shape)) for name, shape in SHAPES.items()])
METHODS: dict[str, Compressing] = {
    "bf16": BF16(memory="residual"),
    "topk": TopK(0.05),
    "topk of all": TopK(1.0),
    "randomk": RandomK(0.05),
    "threshold": Threshold(1.5),
    "int8": Int8(),
    "int4": Int4(),
    "signsgd": SignSGD(),
    "onebit": OneBit(),
    "powersgd": PowerSGD(rank=4, min_compression_rate=1.0),
}
for _name, _knobs in METHODS.items():
    METHODS[_name] = dataclasses.replace(_knobs, min_size=100)
WAITS = {"threshold": 1, "powersgd": 1}
"""How often a bucket waits for the host: for how many elements there are, or for any overflow."""


class Questions(TorchDispatchMode):
    """Counts what an accelerator would have to end its work for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(function)
        dynamic = name.startswith(("aten._local_scalar_dense", "aten.nonzero.", "aten.masked_sel"))
        if dynamic or (name.startswith("aten.index") and _has_mask(args)):
            self.asked.append(name)
        return function(*args, **(kwargs or {}))


def _has_mask(args: tuple[object, ...]) -> bool:
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(one, Tensor) and one.dtype == torch.bool for one in indices)


@contextlib.contextmanager
def taken_for_an_accelerator() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (method, reducer, selection, sparse):
            patch.setattr(module, "asks_host", lambda tensor: False)
        patch.setattr(sparse, "subset", _unwatched(sparse.subset))  # drawn on a CPU everywhere
        yield


def _unwatched(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*args: object) -> Tensor:
        with _disable_current_modes():
            return function(*args)

    return run


def reduced(
    comm: Communicator, knobs: Compressing, spoilt: bool, accelerator: bool
) -> tuple[list[Tensor], dict[str, Tensor], list[list[str]]]:
    """Results of four steps, residuals, and the questions of each step."""
    parameters = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    results, questions = [], []
    with taken_for_an_accelerator() if accelerator else contextlib.nullcontext():
        made = GradientReducer(knobs, parameters, comm, seed=3)
        told = made.wire.counts
        for step in range(4):
            numbers = torch.Generator().manual_seed(10 * step + comm.world.rank)
            flat = torch.randn(sum(slot.size for slot in BUCKET), generator=numbers)
            if spoilt and step == 1 and comm.world.rank == 1:
                flat[100] = math.inf
            watch = Questions()

            def counted(mine: Tensor, watch: Questions = watch) -> list[list[int]]:
                watch.asked.append("counts")
                return told(mine)

            made.wire.counts = counted  # type: ignore[method-assign]
            with watch:
                results.append(made.reduce(flat, BUCKET))
            questions.append(watch.asked)
            made.advance()
    return results, made.residuals, questions


@pytest.mark.matrix(7)
@pytest.mark.parametrize("memory", ["residual", "none"])
@pytest.mark.parametrize("name", METHODS)
def test_its_ways_give_what_those_of_a_cpu_give(name: str, memory: Any) -> None:
    knobs = dataclasses.replace(METHODS[name], memory=memory)
    on_cpu = shared_pool(2).run(reduced, knobs, False, False)
    elsewhere = shared_pool(2).run(reduced, knobs, False, True)
    for (results, owed, _), (others, owed_there, _) in zip(on_cpu, elsewhere, strict=True):
        assert all(map(torch.equal, results, others))
        assert all(torch.equal(owed[key], owed_there[key]) for key in owed)


@pytest.mark.parametrize("name", METHODS)
def test_a_bucket_asks_the_host_at_most_once(name: str) -> None:
    for *_, questions in shared_pool(2).run(reduced, METHODS[name], False, True):
        assert [len(asked) for asked in questions] == [WAITS.get(name, 0)] * 4, questions


@pytest.mark.matrix(7)
@pytest.mark.parametrize("memory", ["residual", "none"])
@pytest.mark.parametrize("name", METHODS)
def test_an_overflow_shows_on_every_rank_and_the_rank_that_had_it_keeps_what_it_owes(
    name: str, memory: Any
) -> None:
    knobs = dataclasses.replace(METHODS[name], memory=memory)
    on_cpu = shared_pool(2).run(reduced, knobs, True, False)
    elsewhere = shared_pool(2).run(reduced, knobs, True, True)
    for results, *_ in elsewhere:
        assert [bool(result.isfinite().all()) for result in results] == [True, False, True, True]
    (_, owed, _), (_, owed_there, _) = on_cpu[1], elsewhere[1]
    assert all(torch.equal(owed[key], owed_there[key]) for key in owed)
