"""What both directions share: a LightningModule as a task, and its methods through an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError
from torsh_trainer.strategies.base import Engine, Job, Strategy
from torsh_trainer.tasks.base import DataSource, Task
from torsh_trainer_lightning.whole import is_cut


@dataclass(frozen=True)
class Configured:
    """What ``configure_optimizers`` has given, whatever its form, in its order.

    ``optimizers`` are the module's own objects, which its schedulers and callbacks know; an engine
    may step others in their place (see ``join_groups``).
    """

    optimizers: Sequence[Optimizer] = ()
    schedulers: Sequence[LRSchedulerConfig] = ()

    @property
    def by_name(self) -> dict[str, Optimizer]:
        """``main`` where there is one, else ``optimizer_0``, ``optimizer_1``, ..."""
        return dict(zip(optimizer_names(len(self.optimizers)), self.optimizers, strict=True))

    def plain(self, lr: float, *, manual: bool) -> Configured:
        """The same parameters under plain SGD at a constant rate.

        ``manual`` keeps the schedulers, which a module then steps itself: they change no rate.
        """
        groups = [[{"params": g["params"]} for g in one.param_groups] for one in self.optimizers]
        optimizers = tuple(torch.optim.SGD(each, lr=lr) for each in groups)
        return Configured(optimizers, self.schedulers if manual else ())

    def name_of(self, optimizer: Optimizer) -> str:
        """What an engine calls an optimizer, or the LightningOptimizer around it.

        Raises:
            ConfigError: ``configure_optimizers`` has not returned it.
        """
        inner = getattr(optimizer, "_optimizer", optimizer)
        for name, known in self.by_name.items():
            if known is inner:
                return name
        raise ConfigError(
            f"an optimizer {type(inner).__name__} steps that configure_optimizers has not returned",
            fix="return it from there, and take it from self.optimizers()",
        )


def optimizer_names(count: int) -> list[str]:
    """The names under which an engine and a checkpoint know so many optimizers."""
    return ["main"] if count == 1 else [f"optimizer_{index}" for index in range(count)]


def configure(module: LightningModule) -> Configured:
    """Calls ``configure_optimizers`` as Lightning does, with its checks of what comes back.

    The module has its trainer by then, and its parameters are what the engine holds.

    Raises:
        ConfigError: an optimizer has tensors that are none of these.
    """
    optimizers, schedulers = _init_optimizers_and_lr_schedulers(module)
    own = {id(p) for p in module.parameters()}
    for optimizer in optimizers:
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        others = [tensor for tensor in tensors if id(tensor) not in own]
        if others:
            raise _not_of(module, optimizer, others, len(tensors))
    return Configured(tuple(optimizers), tuple(schedulers))


class Thaw:
    """Frees the parameters of a module that has frozen all of them, while an engine is made.

    An engine takes hold of what trains, and follows what a callback frees or freezes later. Freed
    by a callback in the first epoch (``BaseFinetuning``), they are what it has taken hold of.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = list(module.parameters())
        self._module = module
        self.needed = bool(parameters) and not any(p.requires_grad for p in parameters)

    def begin(self) -> None:
        """Frees them."""
        for parameter in self._module.parameters() if self.needed else ():
            if parameter.is_floating_point() or parameter.is_complex():
                parameter.requires_grad = True

    def end(self, but: Collection[str] = ()) -> None:
        """Freezes them again, whatever the engine has put in their place, ``but`` those names."""
        for name, parameter in self._module.named_parameters() if self.needed else ():
            parameter.requires_grad = name in but

    @property
    def freed(self) -> list[str]:
        """Those that were freed since; nothing where the module has not frozen all."""
        named = self._module.named_parameters() if self.needed else ()
        return [name for name, parameter in named if parameter.requires_grad]

    @contextlib.contextmanager
    def undo(self) -> Iterator[None]:
        """Within, they are as the module has them."""
        self.end()
        try:
            yield
        finally:
            self.begin()


def _not_of(
    module: LightningModule, optimizer: Optimizer, others: Sequence[Tensor], count: int
) -> ConfigError:
    """Why ``others``, of the ``count`` tensors that an optimizer has, are not the module's."""
    kind = type(optimizer).__name__
    cut = {p.shape for p in module.parameters() if is_cut(p)}
    if any(tensor.shape in cut for tensor in others):
        return ConfigError(
            f"{len(others)} of the {count} parameters of the optimizer {kind} are not those that "
            "the strategy has cut over the processes: it was made before",
            fix="build it in configure_optimizers, over self.parameters()",
        )
    return ConfigError(
        f"the optimizer {kind} has a tensor of shape {tuple(others[0].shape)} which is no "
        "parameter of the module: its gradient would not be averaged over processes",
        fix="make it an nn.Parameter of the module",
    )


class ModuleTask(Task):
    """A LightningModule as a task: the model is the module itself.

    ``configure`` gives the optimizers, once the engine holds the parameters; ``configure`` keeps
    what it gave. Forward, loss and data are the loop's business, which knows the module's hooks.
    """

    data = DataSource()
    sample_weight = 1.0
    unit = "batches"

    def __init__(
        self,
        module: LightningModule,
        configure: Callable[[LightningModule], Configured] = configure,
    ) -> None:
        self.module = module
        self.configure = configure
        self.configured = Configured()
        self.thaw = Thaw(module)

    def build_model(self) -> nn.Module:
        return self.module

    def build_optimizers(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> Mapping[str, Optimizer]:
        with self.thaw.undo():
            self.configured = self.configure(self.module)
        return self.configured.by_name


def prepare_engine(strategy: Strategy, job: Job, comm: Communicator, task: ModuleTask) -> Engine:
    """``strategy.prepare``, for a module that keeps its modes and the optimizers that it knows.

    Engines put a model into training mode; in Lightning what its author has put into evaluation
    mode (a frozen backbone) stays there.
    """
    task.thaw.begin()
    try:
        with modes_kept(task.module):
            engine = strategy.prepare(job, comm)
    finally:
        task.thaw.end()
    join_groups(task.configured, engine)
    return engine


def join_groups(configured: Configured, engine: Engine) -> None:
    """Makes the settings of the module's optimizers those of what the engine steps for them.

    Horovod and a sharded optimizer step objects of their own; schedulers and callbacks change the
    groups of the module's.
    """
    for name, optimizer in configured.by_name.items():
        stepped = engine.optimizers.get(name, optimizer)
        if stepped is not optimizer:
            optimizer.param_groups = stepped.param_groups


def rejoin_groups(configured: Configured, engine: Engine) -> None:
    """As ``join_groups``, after a callback has given the module's optimizers other groups."""
    for name, optimizer in configured.by_name.items():
        stepped = engine.optimizers.get(name, optimizer)
        if stepped.param_groups is not optimizer.param_groups:
            stepped.param_groups = optimizer.param_groups


@contextlib.contextmanager
def modes_kept(module: nn.Module) -> Iterator[None]:
    """Within, modes of the module and its parts may change; then they are what they were.

    Its own ``train`` is not called: scripts override it, and count.
    """
    modes = [(each, each.training) for each in module.modules()]
    state = vars(module)
    own = {"train": state["train"]} if "train" in state else {}
    state["train"] = lambda mode=True: module
    try:
        yield
    finally:
        del state["train"]
        state.update(own)
        for each, training in modes:
            each.training = training


def through(wrapper: nn.Module, module: LightningModule, method: str, *args: Any, **kw: Any) -> Any:
    """``module.method(*args)``, called as the forward of ``wrapper`` (an engine's) around it.

    The module's forward is another for the outermost call only; within, ``self(batch)`` is its own.
    """
    if wrapper is module and not hasattr(module, "unshard"):
        return getattr(module, method)(*args, **kw)
    state = vars(module)
    own = {"forward": state["forward"]} if "forward" in state else {}

    def restore() -> None:
        state.pop("forward", None)
        state.update(own)

    def redirect(*args: Any, **kw: Any) -> Any:
        restore()
        with _enter_once(module):
            return getattr(module, method)(*args, **kw)

    state["forward"] = redirect
    try:
        return wrapper(*args, **kw)
    finally:
        restore()


@contextlib.contextmanager
def _enter_once(module: nn.Module) -> Iterator[None]:
    """Within, ``self(batch)`` does not gather, and then free, what the outer call has gathered.

    FSDP2 does both from hooks of a module, of which it expects one call at a time.
    """
    find: Any = getattr(module, "_get_fsdp_state", None)
    if find is None:
        yield
        return
    state = find()
    places: list[tuple[Any, Any]] = [
        (module._forward_pre_hooks, state._pre_forward_hook_handle),
        (module._forward_hooks, state._post_forward_hook_handle),
    ]
    taken = [(hooks, handle.id, hooks.pop(handle.id)) for hooks, handle in places]
    try:
        yield
    finally:
        for hooks, key, hook in taken:
            hooks[key] = hook
            hooks.move_to_end(key, last=hooks is module._forward_hooks)
