"""Gradients unscaled, measured and bounded before a step: a part of a native engine."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_trainer.errors import Unsupported
from torsh_trainer.optim.loss_scaling import LossScaler
from torsh_trainer.strategies.base import Clip, StepOutcome
from torsh_trainer.strategies.modules import sparse_embeddings


class HeldGradients:
    """What this process holds of a model's gradients, as plain tensors, and their global norm.

    By itself all of every gradient, the same on every rank.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        self.sparse = {model.get_submodule(name).weight for name in sparse_embeddings(model)}
        """Parameters that get a sparse gradient."""
        self.complex = [name for name, p in model.named_parameters() if p.is_complex()]
        """Names of those whose gradient is complex."""

    def coalesce(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sums up what a sparse gradient holds several times: only then has it a norm."""
        for parameter in parameters if self.sparse else ():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()

    def storage(self, gradients: list[Tensor]) -> list[Tensor]:
        """The storage behind gradients, as plain tensors of real numbers."""
        if self.sparse:
            gradients = [g.values() if g.is_sparse else g for g in gradients]
        if self.complex:
            gradients = [torch.view_as_real(g) if g.is_complex() else g for g in gradients]
        return gradients

    def norm(self, storage: list[Tensor]) -> Tensor:
        """The global L2 norm of what ``storage`` gave last, 0-dim, the same on every rank."""
        return local_norm(storage, self.device)


class Clipping:
    """Unscales, measures and bounds gradients in place, and says whether a step is to be skipped.

    ``scaler`` is what the loss was multiplied by. ``skips_nonfinite`` skips a step whose gradients
    are not finite.
    """

    def __init__(
        self, gradients: HeldGradients, scaler: LossScaler | None, *, skips_nonfinite: bool
    ) -> None:
        self._gradients = gradients
        self._scaler = scaler
        self._skips_nonfinite = skips_nonfinite or scaler is not None

    def check(self, clip: Clip) -> None:
        """Raises Unsupported where torch has no clamp for a gradient."""
        names = self._gradients.complex
        if clip.value is not None and names:
            raise Unsupported(
                f"trainer.max_grad_value={clip.value} bounds each number of a gradient, and the "
                f"parameter {names[0]!r} is complex, which torch does not order",
                fix="set trainer.max_grad_norm instead",
            )

    def apply(
        self,
        parameters: Iterable[nn.Parameter],
        clip: Clip,
        *,
        measure_norm: bool,
        scaled: bool = True,
    ) -> StepOutcome:
        """Of ``parameters``; ``scaled`` False: they were unscaled before.

        Raises:
            Unsupported: see ``check``.
        """
        scaler = self._scaler if scaled else None
        wants_norm = measure_norm or clip.norm is not None or self._skips_nonfinite
        if not wants_norm and clip.value is None:
            return _APPLIED
        self._gradients.coalesce(parameters)
        gradients = self._gradients.storage([p.grad for p in parameters if p.grad is not None])
        if scaler is not None:
            torch._foreach_mul_(gradients, 1.0 / scaler.scale)
        if clip.value is not None:
            self.check(clip)
        norm = self._gradients.norm(gradients) if wants_norm else None
        if norm is not None and self._skips_nonfinite and not bool(torch.isfinite(norm)):
            return StepOutcome(norm, skipped=True)
        if scaler is not None and scaler.divisor != scaler.scale:
            share = scaler.scale / scaler.divisor
            torch._foreach_mul_(gradients, share)
            clipped = None if norm is None else norm * share
        else:
            clipped = norm
        if clipped is not None and clip.norm is not None:
            # The formula of torch.nn.utils.clip_grad_norm_, epsilon included.
            coefficient = torch.clamp(clip.norm / (clipped + 1e-6), max=1.0)
            _foreach_scale(gradients, coefficient)
        if clip.value is not None:
            torch._foreach_clamp_min_(gradients, -clip.value)
            torch._foreach_clamp_max_(gradients, clip.value)
        return StepOutcome(norm, skipped=False)


class ClippedApart:
    """What a task that steps itself has clipped of one optimizer's gradients, before its step."""

    def __init__(self, clipping: Clipping) -> None:
        self._clipping = clipping
        self._outcomes: dict[str, StepOutcome] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._outcomes

    def clear(self) -> None:
        """Gradients are others from here on."""
        self._outcomes.clear()

    def clip(
        self, name: str, optimizer: Optimizer, clip: Clip, *, measure_norm: bool
    ) -> Tensor | None:
        """Clips the gradients of ``optimizer``, and gives their norm before.

        They are unscaled once, and nothing is done again to what is not finite.
        """
        before = self._outcomes.get(name)
        if before is not None and before.skipped:
            return before.grad_norm
        outcome = self._outcomes[name] = self._clipping.apply(
            [p for group in optimizer.param_groups for p in group["params"]],
            clip,
            measure_norm=measure_norm,
            scaled=before is None,
        )
        return outcome.grad_norm

    def take(self, name: str) -> StepOutcome:
        """What the step of that optimizer applies."""
        return self._outcomes.pop(name)


def local_norm(
    gradients: list[Tensor], device: torch.device, *, dtype: torch.dtype | None = None
) -> Tensor:
    """The L2 norm over all gradients of this process, in ``dtype``, else float32 or wider."""
    if dtype is None:
        is_wide = any(g.dtype is torch.float64 for g in gradients)
        dtype = torch.float64 if is_wide else torch.float32
    if not gradients:
        return torch.zeros((), dtype=dtype, device=device)
    by_device: dict[torch.device, list[Tensor]] = {}
    for norm in torch._foreach_norm(gradients, 2.0, dtype=dtype):
        by_device.setdefault(norm.device, []).append(norm)
    # One copy for all of a device: offloaded gradients are on the host.
    parts = [torch.stack(norms).to(device) for norms in by_device.values()]
    return torch.linalg.vector_norm(torch.cat(parts) if len(parts) > 1 else parts[0], 2.0)


def _foreach_scale(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiplies by a 0-dim tensor without reading it on the host."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    for device, group in by_device.items():
        torch._foreach_mul_(group, factor.to(device))


_APPLIED = StepOutcome(None, skipped=False)
