"""Our engines in Fabric: ``Fabric(strategy=TorshFabricStrategy("fsdp"))``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.strategies import ParallelStrategy
from lightning.fabric.strategies.strategy import (
    _BackwardSyncControl,
    _validate_keys_for_strict_loading,
)
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_trainer.errors import ConfigError, TrainingError, Unsupported
from torsh_trainer.optim.precision import Precision
from torsh_trainer.strategies import modules
from torsh_trainer.strategies.base import BatchPlan, Clip, Engine, Job
from torsh_trainer.strategies.outputs import tensors_in
from torsh_trainer.tasks.base import DataSource, Task
from torsh_trainer_lightning.adapter import modes_kept, optimizer_names
from torsh_trainer_lightning.checkpoint_io import SafeCheckpointIO
from torsh_trainer_lightning.precision import precision_of, wants_closure
from torsh_trainer_lightning.processes import Chosen
from torsh_trainer_lightning.starting import FabricLauncher
from torsh_trainer_lightning.state import ModuleState


class TorshFabricStrategy(Chosen, ParallelStrategy):
    """A strategy of the trainer's in ``lightning.fabric.Fabric``; see ``TorshStrategy``.

    A model and its optimizers are set up together: ``fabric.setup(model, optimizer)``. The
    optimizers may be made over the whole parameters also where the engine cuts these. Several
    models may be set up: ``fabric.backward(loss)`` averages the gradients of all that the loss has
    come through, and of ``model=...`` where it says one.

    Raises:
        ConfigError: an unknown name or knob, or one that is out of range.
    """

    _launcher_class = FabricLauncher

    def _begin(self, precision: Precision | None, plugin: Any, **lightnings: Any) -> None:
        self._knobs = precision
        self._setups: list[Setup] = []
        if lightnings["checkpoint_io"] is None:
            allowed = "pass weights_only=False"
            lightnings["checkpoint_io"] = SafeCheckpointIO(allowed=allowed, of_any=True)
        ParallelStrategy.__init__(self, precision=plugin, **lightnings)
        self._backward_sync_control = _Without(self)

    # -- processes -------------------------------------------------------------------------------

    def _set_world_ranks(self) -> None:
        self.set_world_ranks()

    def setup_environment(self) -> None:
        """Meets the other processes.

        Raises:
            TorshError: they did not come, or have no such backend.
        """
        super().setup_environment()
        self.set_world_ranks()
        self._meet(self.chosen, self._comm_options)

    def all_reduce(
        self, tensor: Any, group: Any | None = None, reduce_op: Any | str | None = "mean"
    ) -> Any:
        """The sum or the mean over ranks, in place."""
        return self.reduce(tensor, group, reduce_op)

    # -- setting up ------------------------------------------------------------------------------

    def module_to_device(self, module: nn.Module) -> None:
        """Moves the module itself."""
        module.to(self.root_device)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """A model without optimizers: each process evaluates the whole of it."""
        modules.share([*module.parameters(), *module.buffers()], self.comm)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Raises Unsupported: an engine is made of a model and its optimizers."""
        raise Unsupported(
            "TorshFabricStrategy sets up a model and its optimizers together",
            fix="model, optimizer = fabric.setup(model, optimizer)",
        )

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """The model in its engine.

        Raises:
            TorshError: something cannot be honoured, or an optimizer holds other parameters.
        """
        task = _Given(module, optimizers)
        size = self.chosen.mesh(self.comm.world).dp
        job = Job(
            task=task,
            build_model=lambda: module,
            batch=BatchPlan(size, 1, 1, size),
            precision=self._engine_precision(),
            compression=self.compression,
        )
        with modes_kept(module), self._reword_errors():
            engine = self._resolve(job).prepare(job, self.comm)
        named = dict(zip(optimizer_names(len(optimizers)), optimizers, strict=True))
        for name, optimizer in named.items():
            if engine.optimizers[name] is not optimizer:
                optimizer.param_groups = engine.optimizers[name].param_groups
        made = Setup(engine, ModuleState(engine, self.comm, module, named))
        self._setups.append(made)
        return made.forward, optimizers, scheduler

    def _engine_precision(self) -> Precision:
        """What the engine is told of precision.

        Raises:
            ConfigError: Fabric and the strategy both say something.
        """
        asked = precision_of(self.precision)
        if self._knobs is None:
            return asked
        if asked != Precision() or self.precision.precision != "32-true":
            raise ConfigError(
                f"Fabric has precision={self.precision.precision}, and the strategy has "
                f"precision={self._knobs.name}",
                fix="drop one of them",
            )
        return self._knobs

    # -- steps -----------------------------------------------------------------------------------

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """The gradients of a loss, averaged over ranks unless ``no_backward_sync`` is around it.

        Raises:
            ConfigError: nothing is set up, or the loss has come through none of several models.
            Unsupported: it has come through several, and they scale it.
        """
        setups = self._find_reached(tensor, module)
        if len(setups) > 1 and any(made.engine.loss_scaler is not None for made in setups):
            raise Unsupported(
                f"a loss that has come through {len(setups)} models, each of which scales it for "
                "itself",
                fix="use another precision than 16-mixed, or a backward for each model",
            )
        with self._reword_errors():
            if args or kwargs:
                _backward(setups, lambda loss: loss.backward(*args, **kwargs), tensor)
            else:
                _backward(setups, Tensor.backward, tensor)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Has the engine step; a closure runs before.

        Raises:
            Unsupported: other arguments, where the engine steps its own way.
        """
        made, name = self._of_optimizer(optimizer)
        closure = kwargs.pop("closure", None)
        if kwargs or wants_closure(optimizer):
            if not made.held.plainly(name):
                raise Unsupported(
                    "this strategy steps optimizers its own way, without arguments",
                    fix='use TorshFabricStrategy("ddp") or TorshFabricStrategy("single")',
                )
            return optimizer.step(**({} if closure is None else {"closure": closure}), **kwargs)
        result = None if closure is None else closure()
        made.engine.step_one(name)
        optimizer._opt_called = True  # what a scheduler looks for
        return result

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clips by the norm over all ranks, and gives what it was.

        Raises:
            Unsupported: another norm than the second.
            TrainingError: it is not finite, with ``error_if_nonfinite``.
        """
        if float(norm_type) != 2.0:
            raise Unsupported(
                f"clip_gradients(norm_type={norm_type}) has no engine", fix="leave norm_type at 2"
            )
        made, name = self._of_optimizer(optimizer)
        norm = made.engine.clip_one(name, Clip(norm=float(max_norm)))
        if norm is None:
            return torch.tensor(float("nan"))  # the engine clips in its step
        if error_if_nonfinite and made.engine.loss_scaler is None and not torch.isfinite(norm):
            raise TrainingError(
                f"the gradients' norm is {float(norm)}",
                fix="see the loss, or clip with error_if_nonfinite=False",
            )
        return norm

    def clip_gradients_value(
        self, module: nn.Module, optimizer: Optimizer, clip_val: float | int
    ) -> None:
        """Clips each element."""
        made, name = self._of_optimizer(optimizer)
        made.engine.clip_one(name, Clip(value=float(clip_val)))

    def _find_reached(self, loss: Tensor, module: nn.Module | None) -> list[Setup]:
        """The models whose gradients a backward of ``loss`` adds to."""
        if len(self._setups) == 1:
            return self._setups
        through = _marks(loss)
        found = [made for made in self._setups if id(made) in through or made.forward is module]
        return found or [self._of_module(module)]

    def _of_module(self, module: nn.Module | None) -> Setup:
        found = [made for made in self._setups if module in (None, made.forward)]
        if len(found) == 1:
            return found[0]
        if not self._setups:
            raise ConfigError(
                "fabric.backward before a model and its optimizers are set up",
                fix="model, optimizer = fabric.setup(model, optimizer)",
            )
        raise ConfigError(
            f"{len(self._setups)} models are set up, and the loss has come through none of them",
            fix="call the models that fabric.setup has returned",
        )

    def _of_optimizer(self, optimizer: Optimizer) -> tuple[Setup, str]:
        for made in self._setups:
            for name, known in made.held.optimizers.items():
                if known is optimizer:
                    return made, name
        raise ConfigError(
            f"an optimizer {type(optimizer).__name__} that no fabric.setup has seen",
            fix="model, optimizer = fabric.setup(model, optimizer)",
        )

    # -- checkpoints -----------------------------------------------------------------------------

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Whole tensors; under a sharding engine on rank 0 alone."""
        made = next((made for made in self._setups if module is made.forward), None)
        return super().get_module_state_dict(module) if made is None else made.held.module_state()

    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        """Loads whole tensors, each rank its part."""
        made = next((made for made in self._setups if module is made.forward), None)
        if made is None:
            super().load_module_state_dict(module, state_dict, strict=strict)
        else:
            made.held.load_module(state_dict, strict=strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state as torch writes it; where it is cut over ranks, on rank 0 alone."""
        made, name = self._of_optimizer(optimizer)
        return made.held.optimizer_state(name)

    def load_checkpoint(
        self,
        path: Any,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads into modules, optimizers and whatever else has a state, each rank its part."""
        if isinstance(state, Optimizer):
            content = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
            self._load_optimizers({"": state}, {"": content})
            return {}
        if not isinstance(state, dict):
            return super().load_checkpoint(path, state, strict, weights_only)
        content = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        _validate_keys_for_strict_loading(state.keys(), content.keys(), strict=strict)
        optimizers = {
            key: each
            for key, each in state.items()
            if isinstance(each, Optimizer) and key in content
        }
        for key, each in list(state.items()):
            if key not in content or key in optimizers:
                continue
            if isinstance(each, nn.Module):
                self.load_module_state_dict(each, content.pop(key), strict=strict)
            elif hasattr(each, "load_state_dict"):
                each.load_state_dict(content.pop(key))
            else:
                state[key] = content.pop(key)
        self._load_optimizers(optimizers, {key: content.pop(key) for key in optimizers})
        return content

    def _load_optimizers(
        self, optimizers: Mapping[str, Optimizer], saved: Mapping[str, Any]
    ) -> None:
        for made in self._setups:
            names = {
                name: saved[key]
                for key, optimizer in optimizers.items()
                for name, known in made.held.optimizers.items()
                if known is optimizer
            }
            if names:
                made.held.load_optimizers(names)


class Setup:
    """A model that ``fabric.setup`` has put into an engine; ``forward`` is what Fabric calls."""

    def __init__(self, engine: Engine, held: ModuleState) -> None:
        self.engine = engine
        self.held = held
        self.syncs = True
        self.forward = _Forward(engine, id(self))


class _Forward(nn.Module):
    """The engine's module, with what the engine does around a forward."""

    def __init__(self, engine: Engine, mark: int) -> None:
        super().__init__()
        self.module = engine.module
        self._mark = mark
        self._engine = [engine]  # no child of this module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        (engine,) = self._engine
        trains = torch.is_grad_enabled() and self.training
        around = engine.training_forward() if trains else engine.evaluation_forward()
        with around as module:
            output = module(*args, **kwargs)
        for tensor in tensors_in(output) if trains else ():
            node: Any = tensor.grad_fn
            if node is not None:
                node.metadata.setdefault(_MARK, set()).add(self._mark)
        return output


_MARK = "torsh_trainer: the models that it is an output of"


def _marks(loss: Tensor) -> set[int]:
    """Those of all forwards that ``loss`` depends on."""
    found: set[int] = set()
    waiting: list[Any] = [loss.grad_fn]
    seen = {*waiting}
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        found |= node.metadata.get(_MARK, set())
        for before, _ in node.next_functions:
            if before not in seen:
                seen.add(before)
                waiting.append(before)
    return found


def _backward(setups: Sequence[Setup], run: Callable[[Tensor], object], loss: Tensor) -> None:
    """One backward, with what the engine of each model does around it."""
    made, *others = setups
    within = functools.partial(_backward, others, run) if others else run
    made.engine.backward(loss, sync=made.syncs, run=within)


class _Without(_BackwardSyncControl):
    """``fabric.no_backward_sync``."""

    def __init__(self, strategy: TorshFabricStrategy) -> None:
        self._strategy = strategy

    @contextlib.contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        """Forwards and backwards within add to this rank's gradients alone."""
        if not enabled:
            yield
            return
        made = self._strategy._of_module(module)
        made.syncs = False
        try:
            with made.engine.without_sync():
                yield
        finally:
            made.syncs = True


class _Given(Task):
    """A model and optimizers that are made already."""

    data = DataSource()

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._names = {id(p): name for name, p in module.named_parameters()}

    def build_optimizers(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> Mapping[str, Optimizer]:
        """The same optimizers, over the parameters as the engine holds them.

        Raises:
            ConfigError: one holds parameters of something else, or has stepped already.
        """
        held = dict(named_parameters)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["params"] = [self._now(p, held, optimizer) for p in group["params"]]
        return dict(zip(optimizer_names(len(self._optimizers)), self._optimizers, strict=True))

    def _now(
        self, parameter: nn.Parameter, held: Mapping[str, nn.Parameter], optimizer: Optimizer
    ) -> nn.Parameter:
        name = self._names.get(id(parameter))
        kind = type(optimizer).__name__
        if name is None:
            raise ConfigError(
                f"the optimizer {kind} holds a parameter of another model",
                fix="set up each model with its own optimizers",
            )
        now = held.get(name, parameter)
        if now is not parameter and optimizer.state:
            raise ConfigError(
                f"the optimizer {kind} has stepped before its model is cut over the processes",
                fix="set them up first, and load a state by fabric.load",
            )
        return now
