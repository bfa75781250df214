"""Counts what steps ask of an accelerator: waits of the host, copies, operators, collectives."""

from __future__ import annotations

import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_OUTSIDE = tuple(
    str(path) + "/" for path in (Path(torch.__file__).parent, sysconfig.get_paths()["stdlib"])
)
_OWN = tuple(
    str(Path(__file__).with_name(name))
    for name in ("counting.py", "fake_accelerator.py", "fake_autocast.py", "fake_device.py")
)


@dataclass
class Counts:
    """What happened while counting; each Counter goes by place, ``module:line in function``.

    ``synchronisations`` are the moments at which the host waits for the accelerator, as
    ``torch.cuda.set_sync_debug_mode`` defines them: a number read (``item``, ``tolist``, ``bool``),
    an operator whose result has a shape that depends on values, a copy between devices that blocks,
    a stream or an event waited for. ``copies`` are those between devices, by direction and place.
    ``operators`` are calls of aten's, by name, views included, within a backward too.
    ``collectives`` and ``collective_bytes`` go by name; bytes are those of the larger side, so of
    the whole of what is gathered or scattered.
    """

    synchronisations: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)
    collective_bytes: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [f"{self.operators.total()} operators"]
        for name in ("synchronisations", "copies", "collectives"):
            found: Counter[str] = getattr(self, name)
            lines.append(f"{found.total()} {name}")
            for where, times in found.most_common():
                size = self.collective_bytes[where] if name == "collectives" else 0
                lines.append(f"  {times} {where}" + (f", {size} bytes" if size else ""))
        return "\n".join(lines)


class Counters:
    """Where what is counted goes: into ``counts``, or nowhere while it is None."""

    def __init__(self) -> None:
        self.counts: Counts | None = None

    def synchronise(self, what: str) -> None:
        """The host waits for the accelerator."""
        if self.counts is not None:
            self.counts.synchronisations[f"{what} at {caller()}"] += 1

    def communicate(self, name: str, nbytes: int) -> None:
        """A collective begins."""
        if self.counts is not None:
            self.counts.collectives[name] += 1
            self.counts.collective_bytes[name] += nbytes


watch = Counters()
"""That of this process."""


class CountingMode(TorchDispatchMode):
    """Counts every operator, and answers those that a fake tensor cannot answer.

    A number that is read is 1, or True; every element counts as nonzero; a copy that arrives on the
    host is full of ones. A small tensor that came from the host and was not written to since keeps
    its values, through collectives too. What has nothing to do with the device is computed.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        counts = watch.counts
        namespace, _, name = func._schema.name.partition("::")
        if counts is not None and namespace == "aten":
            counts.operators[name] += 1
        if namespace == "c10d" and name not in _NOT_COLLECTIVE:
            watch.communicate(name.rstrip("_"), max(map(_nbytes, args), default=0))
        first: Any = args[0] if args else None
        if name in _BY_VALUE and isinstance(first, FakeTensor):
            if first.device.type == self._device_type:
                watch.synchronise(name)
            known = getattr(first, "known", None)
            return _BY_VALUE[name](first if known is None else known, *args[1:])
        if name == "_pin_memory":
            return first.clone()
        if self._is_on_host(args, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if namespace == "aten" and func._schema.is_mutable and hasattr(first, "known"):
            del first.known
        if namespace == "aten" and name == "_to_copy":
            return self._copy(first, func, kwargs)
        if namespace == "aten" and name == "copy_":
            at_once = kwargs.get("non_blocking") or args[2:3] == (True,)
            self._count_copy(args[1], first, waits=not at_once)
            if not isinstance(first, FakeTensor):
                with unset_fake_temporarily():
                    return first.fill_(1)
        return func(*args, **kwargs)

    def _copy(self, source: Tensor, func: Any, kwargs: Any) -> Tensor:
        """A copy to the device is fake, one to the host real."""
        known = getattr(source, "known", None)
        if not isinstance(source, FakeTensor):
            known = source
            # Else the mode takes it for a constant, and asks the device for its value.
            source = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype)
        result: Tensor = func(source, **kwargs)
        waits = not kwargs.get("non_blocking")
        self._count_copy(source, result, waits=waits)
        if result.device.type == self._device_type:
            if known is not None and known.numel() <= _SMALL:
                with unset_fake_temporarily():
                    result.known = known.to(result.dtype, copy=True)  # type: ignore[attr-defined]
            return result
        with unset_fake_temporarily():
            if known is not None:
                return known.to(result.dtype, copy=True)
            return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype).fill_(1)

    def _is_on_host(self, args: Any, kwargs: Any) -> bool:
        """Whether an operator has nothing to do with the device: then it is computed."""
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == self._device_type:
            return False
        return not any(map(_holds_fake, args)) and not any(map(_holds_fake, kwargs.values()))

    def _count_copy(self, source: Tensor, target: Tensor, *, waits: bool) -> None:
        ends = source.device.type, target.device.type
        if ends[0] == ends[1] or watch.counts is None:
            return
        direction = f"{ends[0]} to {ends[1]}"
        watch.counts.copies[f"{direction} at {caller()}"] += 1
        if waits:
            watch.synchronise(f"a blocking copy {direction}")


def caller() -> str:
    """``module:line in function`` of the innermost code that is neither torch's nor this."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(("<", *_OUTSIDE)) and file not in _OWN:
            name = frame.f_globals.get("__name__", file)
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "torch"


def _holds_fake(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_holds_fake, value))
    return isinstance(value, FakeTensor)


_NOT_COLLECTIVE = ("barrier", "monitored_barrier_")


def _nbytes(value: Any) -> int:
    tensors: Iterable[Any] = tree_leaves(value)
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


_SMALL = 1024
"""Elements of a tensor whose values are kept when it is copied to the device."""


def _read(tensor: Tensor) -> Any:
    """A number of a tensor, which is 1 where it has none."""
    if not isinstance(tensor, FakeTensor):
        with unset_fake_temporarily():
            return tensor.item()
    if tensor.dtype.is_floating_point:
        return 1.0
    return True if tensor.dtype == torch.bool else 1


def _nonzero(tensor: Tensor) -> Tensor:
    return tensor.new_zeros((tensor.numel(), tensor.dim()), dtype=torch.int64)


def _masked_select(tensor: Tensor, mask: Tensor) -> Tensor:
    return (tensor + mask).reshape(-1).to(tensor.dtype)


_BY_VALUE: dict[str, Callable[..., Any]] = {
    "_local_scalar_dense": _read,
    "nonzero": _nonzero,
    "masked_select": _masked_select,
    "equal": lambda tensor, other: True,
    "is_nonzero": lambda tensor: True,
}
