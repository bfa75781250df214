"""Optimizers as values: any torch.optim class, with parameter groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer and its parameter groups, before there are parameters.

    ``target`` is a short name of a torch.optim class (``AdamW``, any case) or the import path of
    any optimizer class. ``options`` are its other keyword arguments. ``no_decay`` excludes norms
    and biases (parameters with fewer than two dimensions) from weight decay. ``groups`` are
    settings for parameters whose name matches a pattern (fnmatch): ``[{"match": "head.*", "lr":
    1e-4}]``. ``fused`` null takes fused, else foreach, where device and class have it.
    ``lr_scaling`` multiplies the learning rate by (linear) or the root of (sqrt) the data-parallel
    size; it belongs to a fixed micro-batch.
    """

    target: str | type[Optimizer] = "AdamW"
    lr: float = 1e-3
    options: Mapping[str, Any] = field(default_factory=dict)
    no_decay: bool = True
    groups: tuple[Mapping[str, Any], ...] = ()
    fused: bool | None = None
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"

    def build(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        raise NotImplementedError
