"""Replicated data parallel: every process holds the whole model.

Losses enter with their share of the global batch, and gradients are summed over processes: what a
hook sees in a backward is this micro-batch's part of the mean, whatever the number of processes.
Where a task steps by itself its losses are as they are, and gradients are averaged.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.compression.hook import refuse_unused, register
from torsh_trainer.comm.compression.reducer import GradientReducer, Slot
from torsh_trainer.errors import ConfigError, nearest
from torsh_trainer.strategies import buckets, modules
from torsh_trainer.strategies.base import (
    Engine,
    Job,
    LossReport,
    Mesh,
    MicroBatch,
    Strategy,
)
from torsh_trainer.strategies.compressing import compressed, compressing, reducer_for
from torsh_trainer.strategies.native import (
    DTYPES,
    NativeEngine,
    averages_in,
    no_zero_unused,
    summed_in,
)
from torsh_trainer.strategies.repeated import Repeats
from torsh_trainer.strategies.shared_buckets import share_buckets
from torsh_trainer.strategies.single import computing
from torsh_trainer.strategies.sums import Entering, sum_buckets, sum_in
from torsh_trainer.strategies.trained import Change, check_cut, refused
from torsh_trainer.strategies.zero1 import sharded
from torsh_trainer.task import Task
from torsh_trainer.world import World

log = logging.getLogger(__name__)

OPS = ("average", "sum")


@dataclass(frozen=True)
class DDP(Strategy):
    """torch DistributedDataParallel.

    ``bucket_cap_mb`` is the size of a gradient bucket. ``overlap`` false communicates after the
    whole backward, in flat buckets, instead of during it. ``find_unused_parameters`` allows
    parameters without a gradient, and lists them. ``static_graph`` promises that every step uses
    the same ones. ``gradient_as_bucket_view`` lets gradients live in the buckets: one copy less.
    ``broadcast_buffers`` takes rank 0's buffers in every step, of those that a forward changes.
    ``backward_passes_per_step`` sums that many backward passes instead of averaging them, and
    ``op`` sum adds gradients up over processes (both multiply the gradient, as Horovod's options of
    these names do). ``zero_unused`` gives parameters that a step does not reach gradients of zero,
    so that they decay and their momentum goes on, as under Horovod and DeepSpeed. ``zero1`` shards
    the optimizer state over processes (ZeroRedundancyOptimizer).
    """

    name: ClassVar[str] = "ddp"
    bucket_cap_mb: float = 25.0
    overlap: bool = True
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    broadcast_buffers: bool = True
    backward_passes_per_step: int = 1
    op: Literal["average", "sum"] = "average"
    zero_unused: bool = False
    zero1: bool = False

    def __post_init__(self) -> None:
        if self.bucket_cap_mb <= 0:
            raise ConfigError(
                f"strategy.bucket_cap_mb={self.bucket_cap_mb} is not positive",
                fix="the default is 25",
            )
        if self.backward_passes_per_step < 1:
            raise ConfigError(
                f"strategy.backward_passes_per_step={self.backward_passes_per_step} is below 1",
                fix="give 1 for a plain mean",
            )
        if self.static_graph and self.find_unused_parameters:
            raise ConfigError(
                "strategy.static_graph and strategy.find_unused_parameters exclude each other",
                fix="a static graph finds its unused parameters by itself: drop the second",
            )
        if self.op not in OPS:
            raise ConfigError(f"strategy.op={self.op} is unknown", fix=nearest(self.op, OPS))
        if self.zero_unused and not (self.find_unused_parameters or self.static_graph):
            raise ConfigError(
                "strategy.zero_unused does nothing where every parameter needs a gradient",
                fix="set strategy.find_unused_parameters=true as well",
            )

    def gradient_scale_on(self, world: World) -> float:
        ranks = world.size if self.op == "sum" else 1
        return float(self.backward_passes_per_step * ranks)

    def mesh(self, world: World) -> Mesh:
        return Mesh.data_parallel(world)

    def prepare(self, job: Job, comm: Communicator) -> Engine:
        knobs = compressing(self, job, comm)
        if job.batch.accumulate % self.backward_passes_per_step:
            raise ConfigError(
                f"strategy.backward_passes_per_step={self.backward_passes_per_step} does not "
                f"divide trainer.accumulate={job.batch.accumulate}",
                fix="accumulate counts every backward of a step: make it a multiple",
            )
        model = modules.build(job, comm)
        if not self.overlap:
            modules.refuse_sparse(model, "strategy.overlap=false", use="set strategy.overlap=true")
        if self.zero1:
            modules.refuse_several_dtypes(model, "strategy.zero1=true", use="strategy.zero1=false")
            modules.refuse_overlapping(model, self, where="strategy.zero1=true")
            modules.fill_holes(model)
        module = computing(model, job)
        modules.compiled(job, [module])
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
        averages = averages_in(job.precision)
        self._enter = Entering(comm.world.size, gives_means=reducer is not None, averages=averages)
        wrapped = _wrap(module, knobs, comm) if knobs.overlap else module
        self._ddp = wrapped if isinstance(wrapped, DistributedDataParallel) else None
        super().__init__(
            job,
            comm,
            model=model,
            # The wrapper looks for what is unused after every forward; a step may have several.
            module=module if knobs.find_unused_parameters else wrapped,
            eval_module=module,
            averaging_ranks=comm.world.size if averages else 1,
            gradient_scale=knobs.gradient_scale_on(comm.world),
            wrap_optimizer=sharded(comm) if knobs.zero1 else lambda optimizer: optimizer,
            compression=compressed(reducer, model, as_in_memory=knobs.overlap),
            broadcast_buffers=knobs.broadcast_buffers,
        )
        self._reduce_dtype = DTYPES[job.precision.reduce]
        wraps = self._ddp is not None
        # With a static graph torch counts for itself, and waits for the last.
        self._repeats = Repeats(self._parameters if wraps and not knobs.static_graph else ())
        if self._ddp is not None:
            self._ddp.register_forward_pre_hook(self._note_forward)
        if reducer is not None and self._ddp is not None:
            refuse_unused(self._ddp, reducer.knobs)
            register(self._ddp, reducer, self._names, before=self._enter)
        elif self._ddp is not None and not _in_fp32(job):
            sum_in(self._ddp, job.precision, self._enter)
        elif self._ddp is not None and not share_buckets(self._ddp, comm, self._enter):
            sum_buckets(self._ddp, self._enter)
        if not knobs.overlap:
            modules.share([*model.parameters(), *model.buffers()], comm)

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], total_weight: float, task: Task
    ) -> LossReport:
        try:
            with self._looking():
                report = super().forward_backward(micro_batches, total_weight, task)
            self._check_backward()
        except RuntimeError as error:
            raise self._left_over(error) or error from error
        if not self._checked:
            self._check_unused()
        if self._ddp is None:
            self._reduce_now()
        if self._knobs.zero_unused:
            self._zero_unused()
        return report

    def backward(
        self, loss: Tensor, *, sync: bool = True, run: Callable[[Tensor], object] = Tensor.backward
    ) -> None:
        if self._knobs.zero_unused and self._manual:
            raise no_zero_unused(self._knobs)
        if self._knobs.op == "sum":
            raise self._knobs.refuse(
                "strategy.op=sum under manual optimization, where a gradient is averaged",
                use="set strategy.op=average, and multiply the loss",
            )
        try:
            with self._enter.averaging(), self._looking():
                super().backward(loss, sync=sync, run=run)
            if not sync:
                return
            self._check_backward()
        except RuntimeError as error:
            raise self._left_over(error) or error from error
        if not self._checked:
            self._check_unused()
        if self._ddp is None:
            with self._enter.averaging():
                self._reduce_now()
        if self._knobs.zero_unused:
            self._zero_unused()

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
            raise self._left_over(error) or error from error
        finally:
            self._within_forward = False

    def _arm(self, ddp: DistributedDataParallel, loss: Tensor) -> None:
        """What torch's wrapper does around a forward, for a backward of ``loss``."""
        try:
            ddp.reducer.prepare_for_forward()
            ddp.reducer._rebuild_buckets()
            reached = [loss] if self._knobs.find_unused_parameters else []
            ddp.reducer.prepare_for_backward(reached)
        except RuntimeError as error:
            raise self._left_over(error) or error from error

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
            check_cut(self._knobs, change, self._at_start)
        if self._reducer is not None:
            self._reducer.add(change.freed)
        self._checked = False
        if self._ddp is None:
            return
        if self._knobs.static_graph:
            raise refused(self._knobs, change, use="set strategy.static_graph=false")
        if change.held:
            raise refused(
                self._knobs,
                change,
                use="freeze them where a step begins, or set strategy.find_unused_parameters=true",
            )
        if not buckets.lay_out_anew(self._ddp):
            raise refused(self._knobs, change, use="set strategy.overlap=false")
        self._enter.tell()
        self._repeats.watch(change.freed.values())
        self._order = None

    def _left_over(self, error: RuntimeError) -> ConfigError | None:
        """What torch means by an error about this backward or the one before, if it is that."""
        if "mark a variable ready only once" in str(error):
            self._refuse_repeats()
        if "finished reduction" not in str(error):
            return None
        return self._unused_error() or self._left_out(error)

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

    def _added(
        self, micro: MicroBatch, total_weight: float, task: Task, *, last: bool
    ) -> tuple[Tensor, float]:
        part = super()._added(micro, total_weight, task, last=last)
        if self._learns and not last:  # what is summed already will be summed again
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            torch._foreach_div_(gradients, float(self.comm.world.size))
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
        more = self.comm.world.size > 2 or self._reducer is not None
        return self._ddp is not None and more

    # -- parameters that no loss reached ---------------------------------------------------------

    def _unused(self) -> list[str]:
        return [self._names[id(p)] for p in self._parameters if p.grad is None]

    def _check_unused(self) -> None:
        self._checked = True
        unused = self._unused()
        if not unused:
            return
        if not (self._knobs.find_unused_parameters or self._knobs.static_graph):
            raise modules.unused_parameters(unused)
        log.info("parameters without a gradient in the first step: %s", ", ".join(unused))

    def _unused_error(self) -> ConfigError | None:
        unused = self._unused()
        if self._knobs.find_unused_parameters or len(unused) == len(self._parameters):
            return None
        return modules.unused_parameters(unused) if unused else None

    def _left_out(self, error: RuntimeError) -> ConfigError | None:
        """The error for parameters that have gradients, and none from the last micro-batch."""
        found = _LEFT_OUT.search(str(error))
        if found is None or self._ddp is None or self._knobs.find_unused_parameters:
            return None
        trained = [p for p in self._ddp.parameters() if p.requires_grad]
        names = [self._names[id(trained[int(place)])] for place in found.group(1).split()]
        return ConfigError(
            f"{len(names)} parameters got no gradient from the last micro-batch of a step, while "
            f"others of the step used them: {', '.join(names[:8])}"
            + (", ..." if len(names) > 8 else ""),
            fix="set strategy.find_unused_parameters=true or strategy.overlap=false",
            unused=names,
        )

    # -- overlap=false ---------------------------------------------------------------------------

    def _reduce_now(self) -> None:
        """Sums gradients over ranks in flat buckets, after the whole backward."""
        finds = self._knobs.find_unused_parameters or self._knobs.static_graph
        used = self._used_anywhere() if finds else self._parameters
        missing = [] if finds else self._unused()
        gradients = []
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        names = [self._names[id(parameter)] for parameter in used]
        for bucket in _buckets(gradients, self._knobs.bucket_cap_mb):
            flat = self._enter(_flatten_dense_tensors(bucket))
            if self._reducer is not None:
                mine, names = names[: len(bucket)], names[len(bucket) :]
                sizes = [gradient.numel() for gradient in bucket]
                self._reducer.reduce(flat, Slot.row(list(zip(mine, sizes, strict=True))))
                for gradient, part in zip(
                    bucket, _unflatten_dense_tensors(flat, bucket), strict=True
                ):
                    gradient.copy_(part)
                continue
            held = flat if self._held is None else flat.to(summed_in(flat.dtype, self._held))
            reduced = held.to(summed_in(flat.dtype, self._reduce_dtype))
            self.comm.all_reduce(reduced, op="sum")
            for gradient, part in zip(
                bucket, _unflatten_dense_tensors(reduced.to(flat.dtype), bucket), strict=True
            ):
                gradient.copy_(part)
        if missing:
            raise modules.unused_parameters(missing)

    def _used_anywhere(self) -> list[nn.Parameter]:
        used = torch.tensor([float(p.grad is not None) for p in self._parameters])
        used = self.comm.place(used)
        self.comm.all_reduce(used, op="max")
        return [p for p, flag in zip(self._parameters, used.tolist(), strict=True) if flag]


_LEFT_OUT = re.compile(r"indices which did not receive grad for rank \d+: ([\d ]+)")
"""In torch's error: the places of parameters among those that the wrapper reduces."""


def _in_fp32(job: Job) -> bool:
    """Gradients are held, and travel, in fp32: torch's own averaging does."""
    return job.precision.reduce == "fp32" and job.precision.gradients == "fp32"


def _wrap(module: nn.Module, knobs: DDP, comm: Communicator) -> DistributedDataParallel:
    on_gpu = comm.device.type == "cuda"
    options: dict[str, Any] = {_BUFFERS: False}  # they are the engine's, once a step
    return DistributedDataParallel(
        module,
        device_ids=[comm.device.index] if on_gpu else None,
        process_group=comm.process_group,
        bucket_cap_mb=knobs.bucket_cap_mb,
        find_unused_parameters=knobs.find_unused_parameters,
        static_graph=knobs.static_graph,
        gradient_as_bucket_view=knobs.gradient_as_bucket_view,
        **options,
    )


_BUFFERS = (  # torch 2.13 renamed the option
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


def _buckets(gradients: Sequence[Tensor], cap_mb: float) -> Iterator[list[Tensor]]:
    """Gradients of one dtype together, each bucket at most ``cap_mb`` MiB (or one tensor)."""
    cap = cap_mb * 2**20
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        nbytes = gradient.numel() * gradient.element_size()
        if bucket and (size + nbytes > cap or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += nbytes
    if bucket:
        yield bucket
