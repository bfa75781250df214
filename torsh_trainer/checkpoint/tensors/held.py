"""Hashes of what all ranks of a run hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torsh_trainer.checkpoint.base import MODULUS, Sum
from torsh_trainer.checkpoint.plain import Leaf, dotted_name
from torsh_trainer.checkpoint.plain import Path as Key
from torsh_trainer.checkpoint.tensors.planner import Planner
from torsh_trainer.comm.base import Communicator

_LIMB_BITS = 16


def sum_held(
    tensors: Mapping[Key, Leaf], names: Sequence[str], comm: Communicator
) -> dict[str, Sum]:
    """What all ranks hold of the tensors called ``names``, replicas included; collective.

    ``names`` are the same on every rank, which may hold some of them.
    """
    wanted = set(names)
    planner = Planner(is_rank_zero=comm.world.is_rank_zero)
    planner.hold({path: leaf for path, leaf in tensors.items() if dotted_name(path) in wanted})
    mine = planner.sum_offered()
    planner.close()
    # In parts that float64 adds up without rounding, on any number of ranks.
    flat: list[float] = []
    for name in names:
        elements, number = mine.get(name, Sum(0, 0))
        flat += [float(elements)]
        flat += [float(number >> shift & 0xFFFF) for shift in range(0, 64, _LIMB_BITS)]
    totals = iter(comm.reduce_values(flat) if flat else [])
    found: dict[str, Sum] = {}
    for name in names:
        elements = int(next(totals))
        number = sum(int(next(totals)) << shift for shift in range(0, 64, _LIMB_BITS))
        found[name] = Sum(elements, number % MODULUS)
    return found
