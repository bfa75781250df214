"""What MPI can reduce by itself, and what torch reduces here, by dtype and operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor
from torch.distributed import ReduceOp

from torsh_trainer.comm.failures import CollectiveArgumentError

SUM, AVG, PRODUCT, MIN, MAX = "sum", "avg", "product", "min", "max"
BAND, BOR, BXOR, PREMUL_SUM = "band", "bor", "bxor", "premul_sum"

_KINDS = {
    ReduceOp.SUM: SUM,
    ReduceOp.AVG: AVG,
    ReduceOp.PRODUCT: PRODUCT,
    ReduceOp.MIN: MIN,
    ReduceOp.MAX: MAX,
    ReduceOp.BAND: BAND,
    ReduceOp.BOR: BOR,
    ReduceOp.BXOR: BXOR,
    ReduceOp.PREMUL_SUM: PREMUL_SUM,
}
_FLOATS = {torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE}
_COMPLEX = {
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}
_INTEGERS = {
    torch.uint8: MPI.UINT8_T,
    torch.int8: MPI.INT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.int16: MPI.INT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.int32: MPI.INT32_T,
    torch.uint64: MPI.UINT64_T,
    torch.int64: MPI.INT64_T,
}
_SUMS = {SUM: MPI.SUM, AVG: MPI.SUM, PREMUL_SUM: MPI.SUM}
_BITS = {BAND: MPI.BAND, BOR: MPI.BOR, BXOR: MPI.BXOR}
# A bool holds 0 or 1, as torch's own arithmetic keeps it: a + b is "or", a * b is "and".
_LOGIC = {
    SUM: MPI.LOR,
    PRODUCT: MPI.LAND,
    MIN: MPI.LAND,
    MAX: MPI.LOR,
    BAND: MPI.LAND,
    BOR: MPI.LOR,
    BXOR: MPI.LXOR,
}


def _native() -> dict[tuple[torch.dtype, str], tuple[MPI.Datatype, MPI.Op]]:
    order = {MIN: MPI.MIN, MAX: MPI.MAX}
    floats = {**_SUMS, PRODUCT: MPI.PROD, **order}
    integers = {SUM: MPI.SUM, PRODUCT: MPI.PROD, **order, **_BITS}
    table: dict[tuple[torch.dtype, str], tuple[MPI.Datatype, MPI.Op]] = {}
    for types, operations in (
        (_FLOATS, floats),
        (_COMPLEX, {**_SUMS, PRODUCT: MPI.PROD}),
        (_INTEGERS, integers),
        ({torch.bool: MPI.C_BOOL}, _LOGIC),
    ):
        for dtype, datatype in types.items():
            for kind, operation in operations.items():
                table[dtype, kind] = datatype, operation
    return table


NATIVE = _native()
"""(dtype, kind) -> MPI's datatype and operation, where MPI has both."""

# MPI has no bfloat16, and a float16 only as an extension that few builds bring.
_HERE: dict[torch.dtype, torch.dtype] = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.complex32: torch.complex64,
}
"""dtype -> in which one torch accumulates it on each rank."""
_HERE_KINDS = (SUM, AVG, PRODUCT, MIN, MAX, PREMUL_SUM)

_BY_TORCH: dict[str, Callable[..., Tensor]] = {
    SUM: torch.add,
    AVG: torch.add,
    PREMUL_SUM: torch.add,
    PRODUCT: torch.mul,
    MIN: torch.minimum,
    MAX: torch.maximum,
    BAND: torch.bitwise_and,
    BOR: torch.bitwise_or,
    BXOR: torch.bitwise_xor,
}
_NOT_BY_TORCH = (torch.uint16, torch.uint32, torch.uint64)
CODES = {
    pair: number
    for number, pair in enumerate(
        [pair for pair in NATIVE if pair[0] not in _NOT_BY_TORCH]
        + [
            (dtype, kind)
            for dtype in _HERE
            for kind in _HERE_KINDS
            if not (dtype.is_complex and kind in (MIN, MAX))
        ]
    )
}
"""What ``accumulate`` takes, (dtype, kind), numbered alike on every rank."""


@dataclass(frozen=True)
class Reduction:
    """A reduce operation; ``factor`` is what PREMUL_SUM multiplies every input with."""

    kind: str
    factor: Any = None

    @classmethod
    def of(cls, op: Any) -> Reduction:
        """From what torch passes: a ``ReduceOp`` or its type."""
        if op == _TORCH_SUM:  # nearly always, and asking for the kind takes a microsecond
            return _PLAIN_SUM
        if op == _TORCH_AVG:
            return _PLAIN[AVG]
        kind = _KINDS[getattr(op, "op", op)]
        if kind != PREMUL_SUM:
            return _PLAIN[kind]
        return cls(kind, op.factor)


_TORCH_SUM, _TORCH_AVG = ReduceOp.SUM, ReduceOp.AVG
_PLAIN = {kind: Reduction(kind) for kind in _KINDS.values()}
_PLAIN_SUM = _PLAIN[SUM]


def check_reducible(dtype: torch.dtype, kind: str) -> None:
    """Refuses what has no meaning, such as the bits of a float or the mean of integers.

    Raises:
        CollectiveArgumentError: names the operation and the dtype.
    """
    if (dtype, kind) in NATIVE:
        return
    ordered = kind in (MIN, MAX)
    if dtype in _HERE and kind in _HERE_KINDS and not (dtype.is_complex and ordered):
        return
    better = {
        AVG: "reduce with SUM and divide, or convert to a floating-point dtype",
        PREMUL_SUM: "multiply the tensor yourself, then reduce with SUM",
        MIN: "complex numbers have no order: reduce real and imaginary parts",
        MAX: "complex numbers have no order: reduce real and imaginary parts",
    }
    raise CollectiveArgumentError(
        f"ReduceOp.{kind.upper()} has no meaning for {dtype} in the mpi backend",
        fix=better.get(kind, "view the tensor as integers for operations on bits"),
    )


def combine(parts: Tensor, kind: str) -> Tensor:
    """The reduction over the first dimension, accumulated in a wider dtype and rounded once.

    The order of the sum is that of ranks, so every rank that does this gets the same bits.
    """
    wide = _HERE[parts.dtype]
    if kind in (SUM, PREMUL_SUM):
        total = _wide(parts, wide).sum(0, dtype=wide)
    elif kind == AVG:
        total = _wide(parts, wide).sum(0, dtype=wide).div_(len(parts))
    elif kind == PRODUCT:
        total = parts.to(wide).prod(0)
    elif kind == MIN:
        total = parts.to(wide).amin(0)
    else:
        total = parts.to(wide).amax(0)
    return total.to(parts.dtype)


def accumulate(parts: Sequence[Tensor], kind: str, out: Tensor) -> None:
    """``out``, which may be one of the ``parts``, becomes their reduction, in their order.

    Two or more parts, of one dimension. Bits do not depend on which part ``out`` is.
    """
    if out.dtype in _HERE:
        out.copy_(combine(torch.stack(tuple(parts)), kind))
        return
    function = _BY_TORCH[kind]
    total, last = parts[0], parts[-1]
    if len(parts) > 2:
        total = function(total, parts[1])
        for part in parts[2:-1]:
            function(total, part, out=total)
    function(total, last, out=out)
    if kind == AVG:
        out.div_(len(parts))


def _wide(parts: Tensor, wide: torch.dtype) -> Tensor:
    """As torch's sum takes it: it widens bfloat16 and float16 by itself, without a copy."""
    return parts if parts.dtype in (torch.bfloat16, torch.float16) else parts.to(wide)
