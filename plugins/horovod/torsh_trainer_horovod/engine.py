"""The engine of ``strategy=horovod``: a native engine whose optimizers are Horovod's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.compression.base import Compressing
from torsh_trainer.comm.failures import CommunicationError
from torsh_trainer.errors import Unsupported
from torsh_trainer.strategies import modules
from torsh_trainer.strategies.base import Engine, Job, LossReport, MicroBatch
from torsh_trainer.strategies.builtin import BuiltIn, BuiltInEngine
from torsh_trainer.strategies.clipping import HeldGradients
from torsh_trainer.strategies.compressing import reducer_for
from torsh_trainer.strategies.native import NativeEngine
from torsh_trainer.strategies.state import own_attributes
from torsh_trainer.strategies.trainability import Change, change_error
from torsh_trainer.tasks.base import Task
from torsh_trainer_horovod import runtime
from torsh_trainer_horovod.wire import HorovodWire

if TYPE_CHECKING:
    from torsh_trainer_horovod.strategy import Horovod

Groups = int | list[list[nn.Parameter]] | None
NEVER = 2**31
"""More backward passes than a step has."""


def compressing_engine(
    knobs: Horovod,
    compression: Compressing,
    job: Job,
    comm: Communicator,
    *,
    model: nn.Module,
    module: nn.Module,
) -> Engine:
    """The engine for the trainer's own compression: its buckets, over Horovod's collectives.

    A method that sends anything but numbers to be added up cannot be a compressor of Horovod's
    optimizer, which adds up what it sends.
    """
    running = runtime.start(comm, knobs.variables)
    reducer = reducer_for(compression, model, job, comm, HorovodWire(comm, running.hvd))
    buckets = BuiltIn(
        bucket_cap_mb=knobs.fusion_threshold_mb or BuiltIn.bucket_cap_mb,
        find_unused_parameters=knobs.find_unused_parameters,
        broadcast_buffers=knobs.broadcast_buffers,
    )
    return _CompressedEngine(
        running, buckets, job, comm, model=model, module=module, compressor=reducer
    )


class _CompressedEngine(BuiltInEngine):
    """``BuiltInEngine``, which lets go of Horovod when it is closed."""

    def __init__(self, running: runtime.Running, *parts: Any, **more: Any) -> None:
        super().__init__(*parts, **more)
        self._running = running

    def close(self) -> None:
        super().close()
        self._running.close()


class HorovodEngine(NativeEngine):
    """Plain modules; ``horovod.torch.DistributedOptimizer`` reduces gradients from its hooks.

    Gradients are communicated in the last backward pass of a step, and are there when
    ``forward_backward`` returns, before they are unscaled, measured and clipped. They are summed
    over ranks, so that hooks see this rank's part of the whole gradient; with fp16,
    ``gradient_predivide_factor``, and where the task itself calls backward they are averaged.

    A backward may add to one parameter several times (``repeated`` of the trainer's own engines
    says when). So a gradient that comes for the first time is sent at the end of its backward, and
    always if it came more than once.
    """

    emulates = False

    def __init__(
        self,
        knobs: Horovod,
        job: Job,
        comm: Communicator,
        *,
        model: nn.Module,
        module: nn.Module,
        groups: Groups = None,
        gradients: HeldGradients | None = None,
    ) -> None:
        self._knobs = knobs
        self.keeps_frozen = knobs.find_unused_parameters
        self._running = runtime.start(comm, knobs.variables)
        hvd = self._running.hvd
        modules.share([*model.parameters(), *model.buffers()], comm)
        fp16 = "fp16" in (knobs.compression, job.precision.reduce)
        ops = {"average": hvd.Average, "sum": hvd.Sum, "adasum": hvd.Adasum}
        self._means, self._op_of = True, {True: hvd.Average, False: hvd.Sum}
        self._may_sum = knobs.may_sum(job)
        self._waits: set[nn.Parameter] = set()  # not known to be added to once in a backward
        self._repeated: set[nn.Parameter] = set()  # those of them that are known not to be
        options = {
            "compression": _contiguous(hvd.Compression.fp16 if fp16 else hvd.Compression.none),
            "op": ops[knobs.op],
            "gradient_predivide_factor": knobs.gradient_predivide_factor,
            "sparse_as_dense": knobs.sparse_as_dense,
        }
        super().__init__(
            job,
            comm,
            model=model,
            module=module,
            eval_module=module,
            averaging_ranks=1 if self._may_sum or knobs.op == "sum" else comm.world.size,
            gradient_scale=knobs.gradient_scale_on(comm.world),
            gradients=gradients,
            wrap_optimizer=_distribute_with(hvd, model, groups, options),
            broadcast_buffers=knobs.broadcast_buffers,
        )
        self._hooked: set[nn.Parameter] = set()
        for optimizer in self._distributed:
            self._hooked |= optimizer._requires_update
        if comm.world.size > 1 and not self._odd:
            for name, parameter in self._trainable.named.items():
                if parameter.requires_grad and parameter not in self._hooked:
                    self._reduce_too(name, parameter)  # an optimizer may be given it later
        if knobs.op != "adasum":
            self._waits |= self._hooked
            self._wait_for(1)

    @property
    def _odd(self) -> str:
        """The knob by which Horovod reduces otherwise than parameter by parameter."""
        if self._knobs.groups is not None:
            return "groups"
        return "op" if self._knobs.op == "adasum" else ""

    def _follow(self, change: Change) -> None:
        if self._odd:
            raise change_error(
                self._knobs, change, use=f"leave strategy.{self._odd} at its default"
            )
        if self.comm.world.size == 1:
            return
        for optimizer in self._distributed:
            optimizer._requires_update.difference_update(change.frozen.values())
        for name, parameter in change.freed.items():
            self._reduce_too(name, parameter)

    def _reduce_too(self, name: str, parameter: nn.Parameter) -> None:
        """Has Horovod reduce one more gradient, whichever optimizer steps by it."""
        optimizer = self._distributed[0]
        for other in self._distributed:
            if any(parameter is p for group in other.param_groups for p in group["params"]):
                optimizer = other
        optimizer._requires_update.add(parameter)
        if parameter in self._hooked:
            return
        # As Horovod does where it makes an optimizer its own.
        self._hooked.add(parameter)
        optimizer._parameter_names[parameter] = name
        optimizer._allreduce_delay[parameter] = NEVER
        self._waits.add(parameter)
        with torch.enable_grad():
            view: Any = parameter.expand_as(parameter)
        accumulated = view.grad_fn.next_functions[0][0]
        accumulated.register_hook(optimizer._make_hook(parameter))
        optimizer._grad_accs.append(accumulated)

    # -- one step --------------------------------------------------------------------------------

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], total_weight: float, task: Task
    ) -> LossReport:
        self._reduce_to(mean=False)
        report = super().forward_backward(micro_batches, total_weight, task)
        self._finish()
        return report

    def _reduce_to(self, *, mean: bool) -> None:
        """Makes what a gradient becomes the mean, or the sum, over ranks."""
        if self._may_sum and mean != self._means:
            self._means = mean
            for optimizer in self._distributed:
                optimizer.op = self._op_of[mean]

    def _backpropagate(self, loss: Tensor, factor: float) -> None:
        try:
            super()._backpropagate(loss, factor)
        except AssertionError as error:
            raise _repeats(error) or error from error

    def backward(
        self, loss: Tensor, *, sync: bool = True, run: Callable[[Tensor], object] = Tensor.backward
    ) -> None:
        if self._knobs.op == "sum":
            raise self._knobs.refuse(
                "op=sum under manual optimization, where a gradient is averaged over ranks",
                use="set strategy.op=average, and multiply the loss",
            )
        self._reduce_to(mean=True)
        try:
            super().backward(loss, sync=sync, run=run)
        except AssertionError as error:
            raise _repeats(error) or error from error
        if sync:
            self._finish()

    def close(self) -> None:
        self._wait_for(NEVER)  # the hooks stay on a model that outlives its engine
        super().close()
        self._running.close()

    @contextlib.contextmanager
    def without_sync(self) -> Iterator[None]:
        self._wait_for(NEVER)
        try:
            yield
        finally:
            self._wait_for(1)

    def _wait_for(self, passes: int) -> None:
        """The hooks send a gradient in the ``passes``-th backward from now on."""
        for optimizer in self._distributed:
            optimizer.set_backward_passes_per_step(passes)
        if passes == 1 and self._waits:
            self._hold_back()

    def _hold_back(self) -> None:
        """Has the gradients that may come again wait for ``_finish``."""
        for optimizer in self._distributed:
            delays = optimizer._allreduce_delay
            delays.update(dict.fromkeys(self._waits & delays.keys(), NEVER))

    def _learn(self) -> None:
        """Has those wait no longer whose gradient came once in this backward."""
        for optimizer in self._distributed:
            delays = optimizer._allreduce_delay
            for parameter in self._waits & delays.keys() - self._repeated:
                times = NEVER - delays[parameter]
                if times == 1:
                    self._waits.discard(parameter)
                elif times > 1:
                    self._repeated.add(parameter)

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[None]:
        """An optimizer's step takes the gradients as they are: they are reduced by then, and the
        step that makes slots exist has nothing to reduce."""
        with contextlib.ExitStack() as stack:
            for optimizer in self._distributed:
                stack.enter_context(optimizer.skip_synchronize())
            yield

    def _finish(self) -> None:
        """Waits until every gradient is reduced.

        Raises:
            ConfigError: a parameter has no gradient, and that is not allowed.
            CommunicationError: Horovod has failed.
        """
        unused = self._find_unused()
        if len(self._waits) > len(self._repeated):
            self._learn()
        try:
            for optimizer in self._distributed:
                optimizer.synchronize()
        except RuntimeError as error:  # what Horovod's own error is
            raise CommunicationError(
                f"Horovod could not reduce the gradients on rank {self.comm.world.rank}: {error}",
                fix="look for the rank that failed first, in its log",
                rank=self.comm.world.rank,
                operation="all_reduce",
            ) from error
        if self._waits:
            self._hold_back()
        for parameter in unused:
            parameter.grad = None  # Horovod has filled it with zeros

    def _find_unused(self) -> list[nn.Parameter]:
        """The parameters that no rank has a gradient for.

        Raises:
            ConfigError: this rank has none for some, and that is not allowed.
        """
        missing = [p for p in self._parameters if p.grad is None]
        if not self._knobs.find_unused_parameters:
            if missing:
                raise modules.unused_parameters([self._names[id(p)] for p in missing])
            return []
        flags = torch.tensor([float(p.grad is not None) for p in self._parameters])
        flags = self.comm.to_device(flags)
        self.comm.all_reduce(flags, op="max")
        used = flags.tolist()
        return [p for p, anywhere in zip(self._parameters, used, strict=True) if not anywhere]

    @property
    def _distributed(self) -> Sequence[Any]:
        return list(self.optimizers.values())


def _repeats(error: AssertionError) -> Unsupported | None:
    """The error for a gradient that comes again when it is on its way; None for another."""
    if "Gradients were computed more than" not in str(error):
        return None
    return Unsupported(
        "backward has added again to a gradient that Horovod was already sending to the other "
        "processes; until now it had added to it once (a layer that is used several times under "
        "torch.utils.checkpoint with use_reentrant=True, in some steps)",
        fix="give that checkpoint use_reentrant=False, or use strategy=ddp strategy.overlap=false",
        strategy="horovod",
    )


def _contiguous(compression: Any) -> Any:
    """``compression``, which gives Horovod a contiguous tensor, as it wants them, of any other.

    The gradient of a parameter that is transposed, or channels_last, is laid out as that is.
    """

    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        smaller, context = compression.compress(tensor)
        return smaller.contiguous(), context

    return type(
        compression.__name__,
        (compression,),
        {"compress": staticmethod(compress)},
    )


# -- optimizers ----------------------------------------------------------------------------------


def _distribute_with(
    hvd: Any, model: nn.Module, groups: Groups, options: Mapping[str, Any]
) -> Callable[[Optimizer], Optimizer]:
    names = {id(p): name for name, p in model.named_parameters()}

    def wrap(optimizer: Optimizer) -> Optimizer:
        mine = [p for group in optimizer.param_groups for p in group["params"]]
        return hvd.DistributedOptimizer(
            _adoptable(optimizer),
            named_parameters=[(names[id(p)], p) for p in mine],
            groups=_among(mine, groups),
            **options,
        )

    return wrap


def _adoptable(optimizer: Optimizer) -> Optimizer:
    """``optimizer`` in a form that Horovod can make its own without losing anything.

    Horovod makes a subclass of the optimizer's class and calls its constructor with the parameter
    groups alone: settings beside the groups would fall back to their defaults, state and attributes
    would be lost, and a constructor that wants more would fail. So the class that it takes has a
    constructor that adopts all that ``optimizer`` holds.
    """
    kind = type(optimizer)

    def adopt(self: Optimizer, params: object) -> None:
        self.__dict__.update(own_attributes(optimizer))

    adopting = type(kind.__name__, (kind,), {"__init__": adopt})
    adopted: Optimizer = object.__new__(adopting)
    adopt(adopted, None)
    return adopted


def _among(parameters: Sequence[nn.Parameter], groups: Groups) -> Groups:
    """``groups`` of one optimizer's parameters."""
    if groups is None:
        return None
    if isinstance(groups, int):
        return min(groups, len(parameters))
    mine = {id(p) for p in parameters}
    cut = [[p for p in group if id(p) in mine] for group in groups]
    return [group for group in cut if group]
