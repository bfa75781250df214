"""Torch's random operations, which ask first whether a forward draws by sample.

Every random number of a forward, also within torch's own composites (dropout, attention, recurrent
layers), ends in one of a few operations of a device. Their kernels are replaced once a process, and
call the ones they replace wherever nobody draws by sample: outside of training steps, with a
generator of the caller's, or where samples cannot be told apart.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from torsh_trainer.randomness.layout import Layout
from torsh_trainer.randomness.words import (
    exponential_of,
    normal_of,
    pairs_of,
    uniform_of,
    words_of,
)


class Drawing(Protocol):
    """A forward in progress."""

    def keys(
        self, shape: Sequence[int], device: torch.device, operation: str
    ) -> tuple[Tensor, Layout] | None:
        """Keys of the next draw's samples and its layout; None: torch draws, as it does."""

    def leave(self, operation: str) -> None:
        """Says that torch draws, as it does."""


current: Drawing | None = None
"""Who is asked, in every thread: a backward that recomputes runs in another."""
_KEEP: list[Any] = []  # a library's kernels go with it
_KERNELS: list[Callable[..., Any]] = []
_asks: Callable[..., Any]
_hidden = False


def hide_from_compiler() -> None:
    """From now on torch.compile does not look into the kernels, nor into what they call.

    Compiled code calls them through torch's dispatcher, and its compiler would take the frames
    that it meets there for code of the model: with another key in each step, it would compile the
    arithmetic of the keys for symbols, which overflow.
    """
    global _hidden, _asks  # noqa: PLW0603 - for the process, as the kernels are
    if _hidden:
        return
    _hidden = True
    _asks = torch.compiler.disable(_ask)
    for kernel in _KERNELS:
        torch.compiler.disable(kernel, recursive=False)


@functools.cache
def install(device_type: str) -> None:
    """Replaces the kernels of a device, once a process."""
    key = torch._C._dispatch_key_for_device(device_type)
    library = torch.library.Library("aten", "IMPL")
    _KEEP.append(library)
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    with warnings.catch_warnings():  # torch tells of every replacement, which is the purpose
        warnings.simplefilter("ignore", UserWarning)
        for name in (*_KEYED, *_UNKEYED, *_UNKEYED_IF_DROPPING):
            if has(f"aten::{name}", key):
                library.impl(name, _asking(name, key), key, with_keyset=True, allow_override=True)


def _asking(name: str, key: str) -> Callable[..., Any]:
    """The kernel in the place of torch's."""
    original = torch.library.get_kernel(f"aten::{name}", key)
    draw = _KEYED.get(name)
    packet, _, overload = name.partition(".")
    schema = getattr(getattr(torch.ops.aten, packet), overload or "default")._schema
    drops = _UNKEYED_IF_DROPPING.get(name)
    at = None if drops is None else [a.name for a in schema.arguments].index(drops)

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        drawing = current
        if drawing is None or (at is not None and not (len(args) > at and args[at])):
            return original.call_boxed(keys, *args, **kwargs)
        if draw is not None and kwargs.get("generator") is None:
            kwargs.pop("generator", None)
            drawn = _asks(draw, drawing, *args, **kwargs)
            if drawn is not None:
                return drawn
        else:
            _asks(drawing.leave, name)
        return original.call_boxed(keys, *args, **kwargs)

    _KERNELS.append(kernel)
    if _hidden:
        torch.compiler.disable(kernel, recursive=False)
    return kernel


def _ask(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


_asks = _ask


def _words(
    drawing: Drawing, tensor: Tensor, name: str, of: Callable[..., Tensor] = words_of
) -> Tensor | None:
    """Words in the shape of ``tensor``, or one shape that broadcasts over it."""
    if tensor.is_complex() or not tensor.numel():
        return None
    found = drawing.keys(tensor.shape, tensor.device, name)
    if found is None:
        return None
    keys, layout = found
    words = of(keys, layout.shape)
    if layout.time_first:
        words = words.transpose(0, 1)
    return words.reshape((*tensor.shape, 2) if of is pairs_of else tensor.shape)


def _is_below(words: Tensor, p: float) -> Tensor:
    """1 where a word is among the lower share ``p`` of all, else 0; in the place of the words."""
    share = round(p * 2**32)
    return words.le_(share - 2**31 - 1) if share else words.zero_()


def _bernoulli(drawing: Drawing, tensor: Tensor, p: float = 0.5) -> Tensor | None:
    if not 0.0 <= p <= 1.0:  # torch has the words for it
        return None
    words = _words(drawing, tensor, "bernoulli_")
    return None if words is None else tensor.copy_(_is_below(words, p))


def _bernoulli_each(drawing: Drawing, tensor: Tensor, p: Tensor) -> Tensor | None:
    words = _words(drawing, tensor, "bernoulli_")
    if words is None:
        return None
    return tensor.copy_(uniform_of(words, torch.float64) < p.to(tensor.device))


def _bernoulli_out(drawing: Drawing, p: Tensor, *, out: Tensor) -> Tensor | None:
    words = _words(drawing, p, "bernoulli")
    if words is None:
        return None
    return out.resize_(p.shape).copy_(uniform_of(words, torch.float64) < p)


def _uniform(
    drawing: Drawing, tensor: Tensor, low: float = 0.0, high: float = 1.0
) -> Tensor | None:
    words = _words(drawing, tensor, "uniform_")
    if words is None:
        return None
    uniform = uniform_of(words, tensor.dtype)
    return tensor.copy_(uniform if (low, high) == (0.0, 1.0) else uniform * (high - low) + low)


def _normal(drawing: Drawing, tensor: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor | None:
    pairs = _words(drawing, tensor, "normal_", pairs_of)
    if pairs is None or std < 0.0:
        return None
    return tensor.copy_(normal_of(pairs, tensor.dtype) * std + mean)


def _normal_each(drawing: Drawing, mean: Any, std: Any) -> Tensor | None:
    """``torch.normal`` of tensors, which the reparametrised distributions draw by."""
    tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
    shape = torch.broadcast_shapes(*(value.shape for value in tensors))
    drawn = torch.empty(shape, dtype=tensors[0].dtype, device=tensors[0].device)
    pairs = _words(drawing, drawn, "normal", pairs_of)
    return None if pairs is None else normal_of(pairs, drawn.dtype) * std + mean


def _exponential(drawing: Drawing, tensor: Tensor, rate: float = 1.0) -> Tensor | None:
    words = _words(drawing, tensor, "exponential_")
    return None if words is None else tensor.copy_(exponential_of(words, tensor.dtype) / rate)


def _log_normal(
    drawing: Drawing, tensor: Tensor, mean: float = 1.0, std: float = 2.0
) -> Tensor | None:
    pairs = _words(drawing, tensor, "log_normal_", pairs_of)
    if pairs is None or std <= 0.0:
        return None
    return tensor.copy_((normal_of(pairs, tensor.dtype) * std + mean).exp_())


def _cauchy(
    drawing: Drawing, tensor: Tensor, median: float = 0.0, sigma: float = 1.0
) -> Tensor | None:
    words = _words(drawing, tensor, "cauchy_")
    if words is None or sigma <= 0.0:
        return None
    # In float64: the tangent of what float32 has nearest to a quarter turn is of another sign.
    angle = uniform_of(words, torch.float64).sub_(0.5).mul_(torch.pi)
    return tensor.copy_(angle.tan_().mul_(sigma).add_(median))


def _geometric(drawing: Drawing, tensor: Tensor, p: float) -> Tensor | None:
    if not 0.0 < p < 1.0:
        return None
    words = _words(drawing, tensor, "geometric_")
    if words is None:
        return None
    return tensor.copy_((exponential_of(words, torch.float64) / -math.log1p(-p)).ceil_())


def _rrelu(
    drawing: Drawing,
    tensor: Tensor,
    noise: Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
) -> Tensor | None:
    """Slopes of negative numbers; ``noise`` keeps them for the backward."""
    words = _words(drawing, tensor, "rrelu_with_noise") if training else None
    if words is None:
        return None
    slopes = uniform_of(words, tensor.dtype).mul_(upper - lower).add_(lower)
    return tensor * noise.copy_(torch.where(tensor <= 0, slopes, 1.0))


def _rrelu_in_place(drawing: Drawing, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    drawn = _rrelu(drawing, tensor, *args, **kwargs)
    return None if drawn is None else tensor.copy_(drawn)


def _multinomial(
    drawing: Drawing, weights: Tensor, count: int, replacement: bool = False
) -> Tensor | None:
    """torch draws these by ``exponential_``, which has keys, unless it puts back."""
    if replacement and count > 1:
        drawing.leave("multinomial")
    return None


def _random(drawing: Drawing, tensor: Tensor, low: int, high: int | None) -> Tensor | None:
    if high is None or not 0 < high - low <= 2**31:
        drawing.leave("random_")
        return None
    words = _words(drawing, tensor, "random_")
    if words is None:
        return None
    return tensor.copy_(((words.long() + 2**31) * (high - low) >> 32) + low)


def _random_to(drawing: Drawing, tensor: Tensor, high: int) -> Tensor | None:
    return _random(drawing, tensor, 0, high)


def _native_dropout(
    drawing: Drawing, tensor: Tensor, p: float, train: bool | None
) -> tuple[Tensor, Tensor] | None:
    """Dropout and its mask in one, as it runs on CUDA."""
    words = _words(drawing, tensor, "native_dropout") if train is not False else None
    if words is None:
        return None
    mask = _is_below(words, 1.0 - p).bool()
    return tensor * mask * (0.0 if p == 1.0 else 1.0 / (1.0 - p)), mask


_KEYED: dict[str, Callable[..., Any]] = {
    "bernoulli_.float": _bernoulli,
    "bernoulli_.Tensor": _bernoulli_each,
    "bernoulli.out": _bernoulli_out,
    "uniform_": _uniform,
    "normal_": _normal,
    "normal.Tensor_Tensor": _normal_each,
    "normal.Tensor_float": _normal_each,
    "normal.float_Tensor": _normal_each,
    "exponential_": _exponential,
    "random_.from": _random,
    "random_.to": _random_to,
    "log_normal_": _log_normal,
    "cauchy_": _cauchy,
    "geometric_": _geometric,
    "rrelu_with_noise": _rrelu,
    "rrelu_with_noise_": _rrelu_in_place,
    "multinomial": _multinomial,
    "native_dropout": _native_dropout,
}
_UNKEYED = (
    "random_",
    "randperm.generator_out",
    "poisson",
    "binomial",
    "_standard_gamma",
    "_sample_dirichlet",
)
_UNKEYED_IF_DROPPING = {
    "_cudnn_rnn": "dropout",
    "_flash_attention_forward": "dropout_p",
    "_efficient_attention_forward": "dropout_p",
    "_scaled_dot_product_flash_attention": "dropout_p",
    "_scaled_dot_product_efficient_attention": "dropout_p",
    "_scaled_dot_product_cudnn_attention": "dropout_p",
}
"""Fused kernels with a generator of random numbers inside, and the argument that wants any."""
