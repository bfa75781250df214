"""Replicated data parallel: every process holds the whole model.

Losses enter with their share of the global batch, and gradients are summed over processes: what a
hook sees in a backward is this micro-batch's part of the mean, whatever the number of processes.
Where a task steps by itself its losses are as they are, and gradients are averaged.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.compression.hook import refuse_unused, register
from torsh_trainer.comm.compression.reducer import GradientReducer
from torsh_trainer.emulation.knobs import SumKnobs
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError
from torsh_trainer.strategies import buckets, modules
from torsh_trainer.strategies.base import (
    Engine,
    Job,
    LossReport,
    Mesh,
    MicroBatch,
    Strategy,
)
from torsh_trainer.strategies.compressing import compress_buckets, compressing, reducer_for
from torsh_trainer.strategies.flat import FlatReduction
from torsh_trainer.strategies.native import NativeEngine
from torsh_trainer.strategies.repeated import Repeats
from torsh_trainer.strategies.shared_buckets import share_buckets
from torsh_trainer.strategies.single import computing
from torsh_trainer.strategies.sums import Entering, sum_buckets, sum_in
from torsh_trainer.strategies.trainability import Change, change_error, check_cut
from torsh_trainer.strategies.wrapper import explain_left_out, ready_for, wrap
from torsh_trainer.strategies.zero1 import shard_optimizer
from torsh_trainer.tasks.base import Task

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DDP(SumKnobs, Strategy):
    """torch DistributedDataParallel.

    ``bucket_cap_mb`` is the size of a gradient bucket. ``overlap`` false communicates after the
    whole backward, in flat buckets, instead of during it. ``find_unused_parameters`` allows
    parameters without a gradient, and lists them. ``static_graph`` promises that every step uses
    the same ones. ``gradient_as_bucket_view`` lets gradients live in the buckets: one copy less.
    ``broadcast_buffers`` takes rank 0's buffers in every step, of those that a forward changes.
    ``zero1`` shards the optimizer state over processes (ZeroRedundancyOptimizer). ``SumKnobs`` do
    with gradients what another engine does.
    """

    name: ClassVar[str] = "ddp"
    model_axes: ClassVar[frozenset[str]] = frozenset({"model_replicate"})
    bucket_cap_mb: float = 25.0
    overlap: bool = True
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    broadcast_buffers: bool = True
    zero1: bool = False

    def __post_init__(self) -> None:
        if self.bucket_cap_mb <= 0:
            raise ConfigError(
                f"strategy.bucket_cap_mb={self.bucket_cap_mb} is not positive",
                fix="the default is 25",
            )
        if self.static_graph and self.find_unused_parameters:
            raise ConfigError(
                "strategy.static_graph and strategy.find_unused_parameters exclude each other",
                fix="a static graph finds its unused parameters by itself: drop the second",
            )
        super().__post_init__()
        self.check_unused(finds=self.find_unused_parameters or self.static_graph)

    def mesh(self, world: World) -> Mesh:
        return Mesh.data_parallel(world)

    def prepare(self, job: Job, comm: Communicator) -> Engine:
        knobs = compressing(self, job, comm)
        self.emulation.check_accumulation(job.batch.accumulate)
        model = modules.build(job, comm)
        if comm.size > 1:
            modules.refuse_accumulated(model, self)
        if not self.overlap:
            modules.refuse_sparse(model, "strategy.overlap=false", use="set strategy.overlap=true")
        if self.zero1:
            modules.refuse_several_dtypes(model, "strategy.zero1=true", use="strategy.zero1=false")
            modules.refuse_overlapping(model, self, where="strategy.zero1=true")
            modules.fill_holes(model)
        module = computing(model, job)
        modules.compile_modules(job, [module])
        reducer = reducer_for(knobs, model, job, comm)
        return DDPEngine(self, job, comm, model=model, module=module, reducer=reducer)


class DDPEngine(NativeEngine):
    """The engine of ``ddp``: torch's wrapper, or flat all-reduces after backward."""

    def __init__(
        self,
        knobs: DDP,
        job: Job,
        comm: Communicator,
        *,
        model: nn.Module,
        module: nn.Module,
        reducer: GradientReducer | None = None,
    ) -> None:
        self._knobs = knobs
        self._reducer = reducer
        self.keeps_frozen = knobs.find_unused_parameters
        self._checked = False
        self._within_forward = False
        self._ready = False  # the wrapper's forward has run since the last backward
        self._order: list[str] | None = None
        averages = job.precision.averages
        self._enter = Entering(comm.size, gives_means=reducer is not None, averages=averages)
        wrapped = self._wrap(module, comm) if knobs.overlap else module
        self._ddp = wrapped if isinstance(wrapped, DistributedDataParallel) else None
        super().__init__(
            job,
            comm,
            model=model,
            # The wrapper looks for what is unused after every forward; a step may have several.
            module=module if knobs.find_unused_parameters else wrapped,
            eval_module=module,
            averaging_ranks=comm.size if averages else 1,
            gradient_scale=knobs.gradient_scale_on(comm.world),
            wrap_optimizer=shard_optimizer(comm) if knobs.zero1 else lambda optimizer: optimizer,
            compression=compress_buckets(reducer, model, as_in_memory=knobs.overlap),
            broadcast_buffers=knobs.broadcast_buffers,
            emulation=knobs.emulation,
        )
        self._flat = FlatReduction(
            comm,
            job.precision,
            cap_mb=knobs.bucket_cap_mb,
            enter=self._enter,
            reducer=reducer,
        )
        wraps = self._ddp is not None
        # With a static graph torch counts for itself, and waits for the last.
        self._repeats = Repeats(self._parameters if wraps and not knobs.static_graph else ())
        if self._ddp is not None:
            self._ddp.register_forward_pre_hook(self._note_forward)
        if reducer is not None and self._ddp is not None:
            refuse_unused(self._ddp, reducer.knobs)
            register(self._ddp, reducer, self._names, before=self._enter)
        elif self._ddp is not None and {job.precision.gradients, job.precision.reduce} != {"fp32"}:
            sum_in(self._ddp, job.precision, self._enter)
        elif self._ddp is not None and not share_buckets(self._ddp, comm, self._enter):
            sum_buckets(self._ddp, self._enter)
        if not knobs.overlap:
            modules.share([*model.parameters(), *model.buffers()], comm)

    def _wrap(self, module: nn.Module, comm: Communicator) -> DistributedDataParallel:
        return wrap(
            module,
            comm,
            bucket_cap_mb=self._knobs.bucket_cap_mb,
            find_unused_parameters=self._knobs.find_unused_parameters,
            static_graph=self._knobs.static_graph,
            gradient_as_bucket_view=self._knobs.gradient_as_bucket_view,
        )

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], total_weight: float, task: Task
    ) -> LossReport:
        try:
            with self._looking():
                report = super().forward_backward(micro_batches, total_weight, task)
            self._check_backward()
        except RuntimeError as error:
            raise self._explain_leftover(error) or error from error
        if not self._checked:
            self._check_unused()
        if self._ddp is None:
            self._reduce_now()
        self._emulation.complete(self._parameters)
        return report

    def backward(
        self, loss: Tensor, *, sync: bool = True, run: Callable[[Tensor], object] = Tensor.backward
    ) -> None:
        self._emulation.check_backward(self._knobs.refuse, manual=self._manual)
        try:
            with self._enter.averaging(), self._looking():
                super().backward(loss, sync=sync, run=run)
            if not sync:
                return
            self._check_backward()
        except RuntimeError as error:
            raise self._explain_leftover(error) or error from error
        if not self._checked:
            self._check_unused()
        if self._ddp is None:
            with self._enter.averaging():
                self._reduce_now()
        self._emulation.complete(self._parameters)

    def _check_backward(self) -> None:
        """Makes sure that every gradient is averaged, and nothing but averaged.

        Raises:
            Unsupported: a parameter was added to again, after its gradient was on its way.
        """
        if self._ddp is not None:
            self._refuse_repeats()
            self._ddp._check_reducer_finalized()

    def _looking(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._ddp is None else self._repeats.looking()

    def _refuse_repeats(self) -> None:
        repeated = self._repeats.end()
        use = "give that checkpoint use_reentrant=False, or set strategy.overlap=false"
        if repeated:
            raise self._knobs.refuse(
                f"a backward that adds several times to one parameter, as "
                f"{self._names[id(repeated[0])]!r} here: a layer that is used several times under "
                "torch.utils.checkpoint with use_reentrant=True, whose gradient is sent after the "
                "first",
                use=use,
            )
        if self._repeats.began:
            raise self._knobs.refuse(
                "backwards that begin others within them in some steps and not in the first, as "
                "torch.utils.checkpoint with use_reentrant=True does: what they add to a gradient "
                "may come after it was sent",
                use=use,
            )

    @contextlib.contextmanager
    def training_forward(self, *, manual: bool = False) -> Iterator[nn.Module]:
        if manual and self._knobs.static_graph:
            raise self._knobs.refuse(
                "strategy.static_graph where the task itself steps", use="leave it out"
            )
        self._within_forward = manual
        try:
            with super().training_forward(manual=manual) as module:
                # torch's wrapper readies itself for one backward, after its forward has ended.
                yield self.eval_module if manual else module
        except RuntimeError as error:
            raise self._explain_leftover(error) or error from error
        finally:
            self._within_forward = False

    def _arm(self, ddp: DistributedDataParallel, loss: Tensor) -> None:
        """What torch's wrapper does around a forward, for a backward of ``loss``."""
        try:
            ready_for(ddp, [loss] if self._knobs.find_unused_parameters else [])
        except RuntimeError as error:
            raise self._explain_leftover(error) or error from error

    def _note_forward(self, *_: Any) -> None:
        self._ready = True

    def _settle(self, loss: Tensor | None, *, shrinks: bool = True) -> bool:
        settled = super()._settle(loss, shrinks=shrinks)
        if loss is not None and self._ddp is not None:
            if settled or self._within_forward or not self._ready:
                self._arm(self._ddp, loss)  # its forward has readied other buckets, or none
            self._ready = False
            self._repeats.begin()
        return settled

    def _follow(self, change: Change) -> None:
        if self._knobs.zero1:
            check_cut(self._knobs, change, self._trainable.at_start)
        if self._reducer is not None:
            self._reducer.add(change.freed)
        self._checked = False
        if self._ddp is None:
            return
        if self._knobs.static_graph:
            raise change_error(self._knobs, change, use="set strategy.static_graph=false")
        if change.held:
            raise change_error(
                self._knobs,
                change,
                use="freeze them where a step begins, or set strategy.find_unused_parameters=true",
            )
        if not buckets.lay_out_anew(self._ddp):
            raise change_error(self._knobs, change, use="set strategy.overlap=false")
        self._enter.tell()
        self._repeats.watch(change.freed.values())
        self._order = None

    def _explain_leftover(self, error: RuntimeError) -> ConfigError | None:
        """What torch means by an error about this backward or the one before, if it is that."""
        if "mark a variable ready only once" in str(error):
            self._refuse_repeats()
        if "finished reduction" not in str(error):
            return None
        return self._unused_error() or self._left_out_error(error)

    @contextlib.contextmanager
    def without_sync(self) -> Iterator[None]:
        if self._ddp is None or self._learns:
            yield
        else:
            with self._ddp.no_sync():
                yield

    @property
    def _learns(self) -> bool:
        """A static graph is learnt in the first step, which torch does not do within no_sync."""
        return self._ddp is not None and self._knobs.static_graph and not self._checked

    def _add_micro_batch(
        self, micro: MicroBatch, total_weight: float, task: Task, *, last: bool
    ) -> tuple[Tensor, float]:
        part = super()._add_micro_batch(micro, total_weight, task, last=last)
        if self._learns and not last:  # what is summed already will be summed again
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            torch._foreach_div_(gradients, float(self.comm.size))
        return part

    def close(self) -> None:
        self._repeats.close()
        super().close()

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._order is None and self._order_matters:
            assert self._ddp is not None
            self._order = buckets.ready_order(self._ddp, self._names)
        if self._order is not None:
            # What only this engine on as many ranks has a use for; others leave it alone.
            state["layout"] = {"ddp_ready_order": list(self._order)}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        order = state.get("layout", {}).get("ddp_ready_order")
        if order and self._order_matters:
            assert self._ddp is not None
            buckets.take_order(self._ddp, order, self._names)
            self._enter.tell()

    @property
    def _order_matters(self) -> bool:
        # The sum of two ranks is the same in either order; PowerSGD takes matrices by the bucket.
        more = self.comm.size > 2 or self._reducer is not None
        return self._ddp is not None and more

    # -- parameters that no loss reached ---------------------------------------------------------

    def _unused_names(self) -> list[str]:
        return [self._names[id(p)] for p in self._parameters if p.grad is None]

    def _check_unused(self) -> None:
        self._checked = True
        unused = self._unused_names()
        if not unused:
            return
        if not (self._knobs.find_unused_parameters or self._knobs.static_graph):
            raise modules.unused_parameters(unused)
        log.info("parameters without a gradient in the first step: %s", ", ".join(unused))

    def _unused_error(self) -> ConfigError | None:
        unused = self._unused_names()
        if self._knobs.find_unused_parameters or len(unused) == len(self._parameters):
            return None
        return modules.unused_parameters(unused) if unused else None

    def _left_out_error(self, error: RuntimeError) -> ConfigError | None:
        if self._ddp is None or self._knobs.find_unused_parameters:
            return None
        return explain_left_out(self._ddp, self._names, error)

    # -- overlap=false ---------------------------------------------------------------------------

    def _reduce_now(self) -> None:
        """Sums gradients over ranks after the whole backward.

        Raises:
            ConfigError: a parameter has none, and that is not allowed; other ranks go on.
        """
        finds = self._knobs.find_unused_parameters or self._knobs.static_graph
        used = self._flat.find_used(self._parameters) if finds else self._parameters
        missing = [] if finds else self._unused_names()
        self._flat.reduce([(self._names[id(p)], p) for p in used])
        if missing:
            raise modules.unused_parameters(missing)
