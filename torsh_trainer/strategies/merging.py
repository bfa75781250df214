"""Neighbouring blocks that are gathered and reduced together, since each alone is small."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
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


def merge_small(blocks: Sequence[Unit], roots: Sequence[nn.Module], *, least: int) -> list[Unit]:
    """``blocks`` with neighbours put together until they have ``least`` bytes.

    Only those of one root, which train in one dtype, the same: FSDP2 reduces a unit's gradients in
    one. What a root has beside its blocks stays its own, since it may be used without a call.
    """
    merged: list[Unit] = []
    for (_, kinds), run in itertools.groupby(blocks, key=lambda block: _place(block, roots)):
        pending: list[Unit] = []
        for block in run:
            pending.append(block)
            if len(kinds) > 1 or sum(unit.nbytes for unit in pending) >= least:
                merged.append(_together(pending))
                pending = []
        if pending:
            merged.append(_together(pending))
    return merged


def units_in_words(units: Sequence[Unit], roots: Sequence[Unit]) -> str:
    """How a model is cut, in one line."""
    kinds = Counter(f"{unit.words} of {_mib(unit.nbytes)}" for unit in units if unit.nbytes)
    parts = [f"{count} x {words}" for words, count in kinds.items()]
    rest = [root for root in roots if root.nbytes]
    if rest:
        parts.append(f"the rest of {_mib(sum(root.nbytes for root in rest))}")
    count = kinds.total() + len(rest)
    more = ["..."] if len(parts) > 5 else []
    said = ", ".join([*parts[:4], *more, *parts[max(4, len(parts) - 1) :]])
    return f"sharded in {count} unit{'s' if count > 1 else ''}: {said}"


def _place(block: Unit, roots: Sequence[nn.Module]) -> tuple[int, frozenset[torch.dtype]]:
    """Number of the root that ``block`` is in, and its dtypes."""
    module = block.modules[0]
    found = next(n for n, root in enumerate(roots) if _holds(root, module))
    return found, block.kinds


def _holds(root: nn.Module, module: nn.Module) -> bool:
    return any(part is module for part in root.modules())


def _together(units: Sequence[Unit]) -> Unit:
    return Unit(
        tuple(module for unit in units for module in unit.modules),
        tuple(parameter for unit in units for parameter in unit.parameters),
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"
