"""How near is near enough, and the words of a difference."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torsh_trainer.environments.world import World
from torsh_trainer.testing.reference import TrainingOutcome


class Tolerance(NamedTuple):
    """How far an engine may be from plain PyTorch.

    ``first`` is relative, for losses of the first step: no gradient has entered them yet.
    ``relative`` is for later losses, gradient norms and metrics, ``parameters`` for parameters and
    optimizer state, relative to the largest element of each tensor.
    """

    first: float
    relative: float
    parameters: float


U32, U16, UB16 = 2.0**-24, 2.0**-11, 2.0**-8
"""Unit roundoff of fp32, fp16 and bf16."""

# A sum of n numbers in another order differs by at most (n - 1) * u * sum |x|. Gradients are sums
# over at most 12 micro-batches here, each step multiplies them by a factor or two that are rounded
# as well, and there are up to four steps: about 64 u, and as much again for the norm's own sum.
FP32 = Tolerance(first=8 * U32, relative=128 * U32, parameters=128 * U32)

# Adam divides a gradient by its own size, so where the terms of a gradient cancel to 1/100 of
# their size, the relative error of the update is 100 times that of the terms.
FP32_ADAM = FP32._replace(relative=1000 * U32, parameters=10000 * U32)

# In low precision a micro-batch runs the same operations as in the reference, so the first losses
# agree as in fp32. After a step, parameters that differ by an fp32 rounding may fall on two sides
# of a rounding to low precision: single activations differ by u of the low precision.
BF16 = Tolerance(first=8 * U32, relative=2 * UB16, parameters=2 * UB16)
FP16 = Tolerance(first=8 * U32, relative=2 * U16, parameters=4 * U16)

# Every rank rounds its share of the gradient to bf16 before the sum, which is rounded itself.
REDUCED = Tolerance(first=8 * U32, relative=4 * UB16, parameters=4 * UB16)


# Below fp32 a layer that is cut by rows rounds the sums of both processes, and then their sum,
# where one process rounds once: an output differs by at most 3 u of the sum of its terms' sizes.
# Losses of the first step, exact elsewhere, differ as those of later ones may: by u. Gradients pass
# six such sums, each with two roundings more than one process has: by 12 u.
OF_CUT_LAYERS = {
    "bf16-mixed": BF16._replace(first=UB16, parameters=12 * UB16),
    "bf16-true": BF16._replace(first=UB16, parameters=12 * UB16),
    "fp16-mixed": FP16._replace(first=U16),
}


def world_of(rank: int, size: int) -> World:
    """The place of one of ``size`` processes on one host."""
    return World(rank=rank, size=size, local_rank=rank, local_size=size, source="test")


def is_frozen(value: Any, name: str) -> bool:
    """Whether a dataclass refuses to have a field set."""
    try:
        setattr(value, name, getattr(value, name))
    except dataclasses.FrozenInstanceError:
        return True
    return False


def close(ours: float | None, plain: float | None, bound: float, what: str) -> None:
    """Asserts that two numbers are as near as ``bound``, relative; None and inf are themselves."""
    if ours is None or plain is None:
        assert ours is plain, f"{what} is {ours}, and {plain} in plain PyTorch"
        return
    if not math.isfinite(plain):
        assert not math.isfinite(ours), f"{what} is {ours}, and {plain} in plain PyTorch"
        return
    difference = abs(ours - plain) / max(abs(plain), 1e-30)
    assert difference <= bound, (
        f"{what} is {ours:.9g}, and {plain:.9g} in plain PyTorch "
        f"(ratio {ours / plain if plain else math.inf:.6g}; "
        f"{difference:.2g} apart, {bound:.2g} allowed)"
    )


def same_tensors(
    ours: Mapping[str, Tensor], plain: Mapping[str, Tensor], bound: float, what: str
) -> None:
    """Asserts that two sets of tensors have the same names and are near, one by one."""
    assert set(ours) == set(plain), f"{what}: {sorted(set(ours) ^ set(plain))} on one side only"
    for name, expected in plain.items():
        same_tensor(ours[name], expected, bound, f"{what}: {name}")


def same_slots(ours: Mapping[str, Any], plain: Mapping[str, Any], bound: float, what: str) -> None:
    """Asserts that the optimizer state of the same parameters is near, tensor by tensor."""
    assert set(ours) == set(plain), f"{what}: {sorted(set(ours) ^ set(plain))} on one side only"
    for name, slots in plain.items():
        for slot, expected in slots.items():
            if isinstance(expected, Tensor):
                same_tensor(ours[name][slot], expected, bound, f"{what}: {slot} of {name}")


def same_tensor(ours: Tensor, plain: Tensor, bound: float, what: str) -> None:
    """Asserts that no element is further away than ``bound`` times the largest."""
    assert ours.shape == plain.shape, f"{what} has shape {tuple(ours.shape)}"
    if not plain.numel():
        return
    scale = max(float(plain.abs().max()), 1e-30)
    wide = torch.complex128 if plain.is_complex() else torch.float64
    difference = float((ours.to(wide) - plain.to(wide)).abs().max()) / scale
    assert difference <= bound, (
        f"{what} is {difference:.2g} of its largest element away from plain PyTorch, "
        f"{bound:.2g} allowed"
    )


def same_resumed(resumed: TrainingOutcome, went_on: TrainingOutcome, bound: float) -> None:
    """Asserts that an engine that took a state did in its last step what the other one did."""
    close(resumed.losses[-1][0][0], went_on.losses[-1][0][0], bound, "resumed: next loss")
    close(resumed.norms[-1], went_on.norms[-1], bound, "resumed: next gradient norm")
    same_tensors(resumed.parameters, went_on.parameters, bound, "resumed")
    for name, slots in went_on.optimizer.items():
        same_slots(resumed.optimizer[name], slots, bound, f"resumed: {name}")
    for kind in ("metrics", "averaged_metrics"):
        ours, theirs = getattr(resumed, kind), getattr(went_on, kind)
        assert set(ours) == set(theirs), kind
        for name in theirs:
            close(ours[name], theirs[name], bound, f"resumed: {kind} {name}")
    assert resumed.loss_scale == went_on.loss_scale, "resumed: the loss scale"
