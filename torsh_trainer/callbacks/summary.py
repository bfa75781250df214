"""A model as a table of its modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from torch import nn
from torch.nn.parameter import is_lazy


@dataclass(frozen=True)
class _Line:
    name: str
    kind: str
    module: nn.Module
    count: int = 1

    def cells(self) -> tuple[str, str, str, str, str]:
        parameters = list(self.module.parameters())
        known = [p for p in parameters if not is_lazy(p)]
        total = sum(p.numel() for p in known)
        trains = sum(p.numel() for p in known if p.requires_grad)
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in parameters})
        size = f"{total * self.count:,}" if len(known) == len(parameters) else "not known yet"
        return (
            self.name,
            self.kind,
            size if parameters else "-",
            _share(trains, total),
            (", ".join(dtypes) or "-"),
        )


def summarise(model: nn.Module, *, depth: int = 2, layout: str = "") -> str:
    """The modules of ``model`` down to ``depth`` levels, with parameters, share that trains, dtype.

    Neighbours of the same shape (the blocks of a transformer) share one line. A parameter that
    several modules share counts once in each of them and once in the total. ``layout`` is the last
    line: how the model is cut over processes. Plain text, ASCII.
    """
    header = ("module", "type", "parameters", "trainable", "dtype")
    root = _Line(type(model).__name__, "", model)
    rows = [header, *(line.cells() for line in (root, *_lines(model, depth, "  ")))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    text = [
        f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {size:>{widths[2]}}  "
        f"{trains:>{widths[3]}}  {dtype}".rstrip()
        for name, kind, size, trains, dtype in rows
    ]
    return "\n".join([*text, _total(model), *([layout] if layout else [])])


def _lines(module: nn.Module, depth: int, indent: str) -> Iterator[_Line]:
    if depth == 0:
        return
    for _, group in groupby(module.named_children(), key=lambda child: _shape(child[1])):
        children = list(group)
        name, first = children[0]
        kind = type(first).__name__
        if len(children) > 1:
            name, kind = f"{name}..{children[-1][0]}", f"{len(children)} x {kind}"
        yield _Line(indent + name, kind, first, len(children))
        inner = indent + ("  each: " if len(children) > 1 else "  ")
        yield from _lines(first, depth - 1, inner)


def _shape(module: nn.Module) -> tuple[object, ...]:
    """What two modules have in common when one line can speak for both."""
    parameters = tuple(
        (name, None if is_lazy(p) else p.shape, p.dtype, p.requires_grad)
        for name, p in module.named_parameters()
    )
    return type(module), parameters, tuple(type(inner) for inner in module.modules())


def _share(part: int, whole: int) -> str:
    if whole == 0:
        return "-"
    if part in (0, whole):
        return "all" if part else "none"
    return f"{part / whole:.1%}"


def _total(model: nn.Module) -> str:
    parameters = [p for p in model.parameters() if not is_lazy(p)]
    count = sum(p.numel() for p in parameters)
    trains = sum(p.numel() for p in parameters if p.requires_grad)
    mib = sum(p.numel() * p.element_size() for p in parameters) / 2**20
    return f"{count:,} parameters, {trains:,} of them trainable, {mib:,.1f} MiB"
