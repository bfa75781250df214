"""Neighbouring blocks that are gathered and reduced together, since each alone is small."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Unit:
    """Modules that FSDP2 shards as one, ``parameters`` of them."""

    modules: tuple[nn.Module, ...]
    parameters: tuple[nn.Parameter, ...]

    @property
    def nbytes(self) -> int:
        """What one process holds when it is gathered, in the dtypes of the model."""
        return sum(p.numel() * p.element_size() for p in self.parameters)

    @property
    def kinds(self) -> frozenset[torch.dtype]:
        """The dtypes that train."""
        return frozenset(p.dtype for p in self.parameters if p.requires_grad)

    @property
    def words(self) -> str:
        """``2 Block``."""
        counted = Counter(type(module).__name__ for module in self.modules)
        return " + ".join(f"{count} {name}" for name, count in counted.items())


def merge_small(
    blocks: Sequence[Unit], roots: Sequence[Unit], *, least: int, into_roots: bool
) -> tuple[list[Unit], list[Unit]]:
    """``blocks`` and ``roots`` with neighbours put together until they have ``least`` bytes.

    What is left at the end of a root's blocks is that root's own, if ``into_roots``, else a unit.
    Blocks that train in several dtypes stay as they are, and those of several dtypes apart: FSDP2
    reduces a unit's gradients in one.
    """
    merged: list[Unit] = []
    wider: dict[int, list[Unit]] = {}
    for (root, kinds), run in itertools.groupby(blocks, key=lambda block: _place(block, roots)):
        pending: list[Unit] = []
        for block in run:
            pending.append(block)
            if len(kinds) > 1 or sum(unit.nbytes for unit in pending) >= least:
                merged.append(_together(pending))
                pending = []
        if pending and into_roots and roots[root].kinds <= kinds:
            wider.setdefault(root, []).extend(pending)
        elif pending:
            merged.append(_together(pending))
    return merged, [
        Unit(root.modules, (*root.parameters, *_parameters(wider.get(number, ()))))
        for number, root in enumerate(roots)
    ]


def units_in_words(units: Sequence[Unit], roots: Sequence[Unit]) -> str:
    """How a model is cut, in one line."""
    kinds = Counter((unit.words, _mib(unit.nbytes)) for unit in units)
    parts = [f"{count} x {words} of {size}" for (words, size), count in kinds.items()]
    rest = _mib(sum(root.nbytes for root in roots))
    said = ", ".join([*parts[:4], *(["..."] if len(parts) > 4 else []), f"the rest of {rest}"])
    count = len(units) + len(roots)
    return f"sharded in {count} units: {said}" if units else f"sharded as one unit of {rest}"


def _place(block: Unit, roots: Sequence[Unit]) -> tuple[int, frozenset[torch.dtype]]:
    """Number of the root that ``block`` is in, and its dtypes."""
    module = block.modules[0]
    found = next(n for n, root in enumerate(roots) if _holds(root.modules[0], module))
    return found, block.kinds


def _holds(root: nn.Module, module: nn.Module) -> bool:
    return any(part is module for part in root.modules())


def _together(units: Sequence[Unit]) -> Unit:
    return Unit(tuple(m for unit in units for m in unit.modules), tuple(_parameters(units)))


def _parameters(units: Collection[Unit]) -> Iterator[nn.Parameter]:
    return (p for unit in units for p in unit.parameters)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"
