"""Precision in Lightning's Trainer: its plugins' meaning, our engines' backward and step."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins import DoublePrecision as FabricDoublePrecision
from lightning.fabric.plugins import HalfPrecision as FabricHalfPrecision
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.fabric.plugins import Precision as FabricPrecision
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
)
from lightning.pytorch.plugins import Precision as LightningPrecision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_trainer.errors import Unsupported
from torsh_trainer.optim.precision import DTYPES, LossScaling, Precision
from torsh_trainer.strategies.base import Clip, StepOutcome

if TYPE_CHECKING:  # the strategy makes its plugin
    from torsh_trainer_lightning.strategy import EngineStrategy


COMPRESSION = "torsh_trainer.compression"
"""Where a ``.ckpt`` has what compression keeps; Lightning passes it over."""


class StepWatcher:
    """Whom a strategy tells of the steps of its optimizers; this one does not listen."""

    def before_step(self) -> bool:
        """The next step of an optimizer is about to be made: whether its norm is wanted."""
        return False

    def after_step(self, name: str, outcome: StepOutcome) -> None:
        """The optimizer called ``name`` has stepped."""


class EnginePrecision(LightningPrecision):
    """What Lightning asks of a precision plugin, by an engine of ours.

    ``inner`` is the plugin that stands for the Trainer's flag and keeps its meaning; ``knobs`` is
    what the engine is told. Where ``knobs`` is the user's own, ``inner`` is a plain one.
    """

    def __init__(
        self, strategy: EngineStrategy, knobs: Precision, inner: LightningPrecision
    ) -> None:
        self._strategy = strategy
        self.knobs = knobs
        self.inner = inner
        self.precision: Any = inner.precision if knobs == precision_of(inner) else _flag(knobs)

    # -- modules and inputs: as the flag says ----------------------------------------------------

    def convert_module(self, module: nn.Module) -> nn.Module:
        """The module in the dtype that its parameters are to have."""
        return self.inner.convert_module(module)

    def convert_input(self, data: Any) -> Any:
        """A batch in the dtype of the forward."""
        return self.inner.convert_input(data)

    def convert_output(self, data: Any) -> Any:
        """What a forward gives, in the dtype of the outside."""
        return self.inner.convert_output(data)

    def tensor_init_context(self) -> contextlib.AbstractContextManager[Any]:
        """Around what makes tensors."""
        return self.inner.tensor_init_context()

    def module_init_context(self) -> contextlib.AbstractContextManager[Any]:
        """Around what makes a module."""
        return self.inner.module_init_context()

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        """Around a step of the module's, of whatever kind."""
        device = self._strategy.root_device.type
        autocast = (
            torch.autocast(device, dtype=DTYPES[self.knobs.compute], cache_enabled=False)
            if self.knobs.autocast
            else contextlib.nullcontext()
        )
        # A MixedPrecision would open an autocast for what Lightning takes for the device.
        inner = isinstance(self.inner, MixedPrecision)
        around = contextlib.nullcontext() if inner else self.inner.forward_context()
        with around, autocast:
            yield

    # -- gradients: the engine's -----------------------------------------------------------------

    def backward(
        self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """The engine's backward; it calls the module's own where that is overridden."""
        engine, sync = self._strategy.engine, self._strategy.syncs
        tensor = self._strategy.weigh(tensor)
        if args or kwargs or is_overridden("backward", model):
            engine.backward(
                tensor, sync=sync, run=lambda loss: model.backward(loss, *args, **kwargs)
            )
        else:
            engine.backward(tensor, sync=sync)

    def optimizer_step(
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Runs the closure, then has the engine step.

        Raises:
            Unsupported: an optimizer that calls the closure itself, or arguments to its step, where
                the engine steps another object.
        """
        strategy = self._strategy
        if kwargs or wants_closure(optimizer):
            strategy.check_steps_itself(optimizer)
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        result = closure()
        nothing = result is None and model.automatic_optimization
        name = strategy.configured.name_of(optimizer)
        if self.knobs.scales_loss and not nothing:
            strategy.engine.clip_one(name, Clip())  # hooks see gradients without the scale
        self._after_closure(model, optimizer)
        if not nothing or (strategy.engine.whole_optimizers and not self.knobs.scales_loss):
            watcher = strategy.watcher
            outcome = strategy.engine.step_one(name, measure_norm=watcher.before_step())
            watcher.after_step(name, outcome)
            optimizer._opt_called = True  # what a scheduler looks for
        return result

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clips by the norm over all ranks, or by value; the engine knows where gradients are."""
        if clip_val > 0:
            by_norm = gradient_clip_algorithm == GradClipAlgorithmType.NORM
            clip = Clip(norm=float(clip_val)) if by_norm else Clip(value=float(clip_val))
            strategy = self._strategy
            strategy.engine.clip_one(
                strategy.configured.name_of(optimizer),
                clip,
                measure_norm=strategy.watcher.before_step(),
            )

    # -- checkpoints: the loss scale where Lightning has it, and what Lightning has not ------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Writes the loss scale under the name of Lightning's plugin, and residuals under ours."""
        scaler = self._strategy.loss_scaler
        if scaler is not None:
            checkpoint["MixedPrecision"] = {
                "scale": scaler.scale,
                "growth_factor": scaler.options.growth_factor,
                "backoff_factor": scaler.options.backoff_factor,
                "growth_interval": scaler.options.growth_interval,
                "_growth_tracker": scaler.state_dict().get("good_steps", 0),
            }
        kept = self._strategy.held.compression() if self._strategy.trains else {}
        if kept:
            checkpoint[COMPRESSION] = kept

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes the loss scale and the residuals that a checkpoint has, if any."""
        scaler, saved = self._strategy.loss_scaler, checkpoint.get("MixedPrecision")
        if scaler is not None and saved:
            known = scaler.state_dict()
            scaler.load_state_dict(
                {**known, "scale": saved["scale"], "good_steps": saved["_growth_tracker"]}
            )
        owed = checkpoint.get(COMPRESSION)
        if owed and self._strategy.trains:
            self._strategy.held.load_compression(owed)


def precision_of(plugin: FabricPrecision) -> Precision:
    """What a plugin of Lightning's asks of an engine.

    Raises:
        Unsupported: no engine of ours knows it.
    """
    if isinstance(plugin, MixedPrecision | FabricMixedPrecision):
        if plugin.precision == "bf16-mixed":
            return Precision(compute="bf16")
        return Precision(compute="fp16", loss_scaling=_scaling(plugin.scaler))
    if type(plugin) in _CONVERTING:
        return Precision()  # the plugin converts the module itself
    raise Unsupported(
        f"TorshStrategy cannot honour the precision plugin {type(plugin).__name__}",
        fix="use precision 32-true, 16-mixed, bf16-mixed, 16-true, bf16-true or 64-true, or "
        "TorshStrategy(precision=Precision(...))",
    )


_CONVERTING = (
    LightningPrecision,
    HalfPrecision,
    DoublePrecision,
    FabricPrecision,
    FabricHalfPrecision,
    FabricDoublePrecision,
)


def _scaling(scaler: Any) -> LossScaling:
    if scaler is None:
        return LossScaling()
    return LossScaling(
        initial_scale=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
    )


def _flag(knobs: Precision) -> str:
    """Lightning's name for what is nearest to ``knobs``."""
    return {"fp32": "32-true", "fp16-mixed": "16-mixed", "fp16-true": "16-true"}.get(
        knobs.name, knobs.name
    )


def wants_closure(optimizer: Optimizer) -> bool:
    """Whether an optimizer computes the loss itself, maybe several times (LBFGS)."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
