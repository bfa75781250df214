"""The built-in data parallel strategies: gradients summed in buckets from hooks, no wrapper.

Every process holds the whole model; ``torsh_trainer.comm.reducer`` sums the gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn

from torsh_trainer.comm.base import CommOptions, Communicator
from torsh_trainer.comm.compression.reducer import GradientReducer, Slot
from torsh_trainer.comm.reducer import Bucket, BucketReducer, Reduce
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError
from torsh_trainer.optim.precision import DTYPES, sum_dtype
from torsh_trainer.strategies import modules
from torsh_trainer.strategies.base import (
    Clip,
    Engine,
    Job,
    LossReport,
    Mesh,
    MicroBatch,
    StepOutcome,
    Strategy,
)
from torsh_trainer.strategies.compressing import compress_buckets, compressing, reducer_for
from torsh_trainer.strategies.native import NativeEngine
from torsh_trainer.strategies.single import computing
from torsh_trainer.strategies.trainability import Change, check_cut
from torsh_trainer.strategies.writes import Writes
from torsh_trainer.strategies.zero1 import CommonParameters, Wrap, shard_optimizer
from torsh_trainer.tasks.base import Task


@dataclass(frozen=True)
class BuiltIn(Strategy):
    """Data parallel on one backend of torch.distributed.

    ``bucket_cap_mb`` is the size of a gradient bucket in MiB; a larger parameter is a bucket of its
    own. ``overlap`` false communicates after the whole backward instead of during it.
    ``find_unused_parameters`` allows parameters without a gradient, at the price of one small
    reduction a step. ``broadcast_buffers`` takes rank 0's buffers in every step, of
    those that a forward changes. ``zero1`` cuts the optimizer's state and step over processes;
    where these share memory (mpi, one host) the parameters lie there, once for all of them.
    """

    backend: ClassVar[str]
    model_axes: ClassVar[frozenset[str]] = frozenset({"model_replicate"})
    bucket_cap_mb: float = 25.0
    overlap: bool = True
    find_unused_parameters: bool = False
    broadcast_buffers: bool = True
    zero1: bool = False

    def __post_init__(self) -> None:
        if self.bucket_cap_mb <= 0:
            raise ConfigError(
                f"strategy.bucket_cap_mb={self.bucket_cap_mb} is not positive",
                fix="the default is 25",
            )

    def comm_options(self, options: CommOptions) -> CommOptions:
        if options.backend not in ("auto", self.backend):
            raise ConfigError(
                f"strategy={self.name} is data parallel over {self.backend}, and "
                f"comm.backend={options.backend}",
                fix=f"drop comm, or choose strategy=ddp comm={options.backend}",
            )
        return replace(options, backend=self.backend)

    def mesh(self, world: World) -> Mesh:
        return Mesh.data_parallel(world)

    def prepare(self, job: Job, comm: Communicator) -> Engine:
        knobs = compressing(self, job, comm)
        if knobs is not None and knobs.keeps_residual and self.find_unused_parameters:
            raise self.refuse(
                "compression.memory=residual with strategy.find_unused_parameters: what is owed to "
                "a parameter that a step does not use would be lost",
                use="set compression.memory=none, or strategy=ddp strategy.overlap=false",
            )
        model = modules.build(job, comm)
        modules.refuse_sparse(model, f"strategy={self.name}", use="use strategy=ddp")
        if comm.size > 1:
            modules.refuse_accumulated(model, self)
            if self.zero1:
                modules.refuse_overlapping(model, self, where="strategy.zero1=true")
                modules.fill_holes(model)
        module = computing(model, job)
        modules.compile_modules(job, [module])
        reducer = reducer_for(knobs, model, job, comm)
        return BuiltInEngine(self, job, comm, model=model, module=module, compressor=reducer)


@dataclass(frozen=True)
class NCCL(BuiltIn):
    """Built-in data parallel over NCCL, between CUDA devices."""

    name: ClassVar[str] = "nccl"
    backend: ClassVar[str] = "nccl"


@dataclass(frozen=True)
class Gloo(BuiltIn):
    """Built-in data parallel over gloo, between CPUs."""

    name: ClassVar[str] = "gloo"
    backend: ClassVar[str] = "gloo"


@dataclass(frozen=True)
class MPI(BuiltIn):
    """Built-in data parallel over MPI."""

    name: ClassVar[str] = "mpi"
    backend: ClassVar[str] = "mpi"


class BuiltInEngine(NativeEngine):
    """The engine of ``nccl``, ``gloo`` and ``mpi``: plain modules, hooks, flat buckets.

    Gradients are summed over ranks; under manual optimization they are averaged. ``compressor``
    gives means, so they enter it times the number of ranks.
    """

    emulates = False

    def __init__(
        self,
        knobs: BuiltIn,
        job: Job,
        comm: Communicator,
        *,
        model: nn.Module,
        module: nn.Module,
        compressor: GradientReducer | None = None,
    ) -> None:
        self._common = None
        wrap: Wrap = lambda optimizer: optimizer  # noqa: E731 - the null wrapper
        if knobs.zero1 and comm.size > 1:
            trained = [p for p in model.parameters() if p.requires_grad]
            self._common = CommonParameters.of(trained, comm)
            if self._common is None:
                modules.refuse_several_dtypes(
                    model, "strategy.zero1=true", use="strategy.zero1=false"
                )
            wrap = shard_optimizer(comm) if self._common is None else self._common.wrap(comm)
        super().__init__(
            job,
            comm,
            model=model,
            module=module,
            eval_module=module,
            wrap_optimizer=wrap,
            compression=compress_buckets(compressor, model, as_in_memory=True),
            broadcast_buffers=knobs.broadcast_buffers,
            around_evaluation=self._around_evaluation,
        )
        self._knobs = knobs
        self.keeps_frozen = knobs.find_unused_parameters
        self._factor = 1.0 if compressor is None else float(comm.size)
        self._compressor = compressor
        self._reduce_dtype = DTYPES[job.precision.reduce]
        self._reducer: BucketReducer | None = None
        if comm.size == 1:
            return
        apart = [p for p in model.parameters() if self._common is None or p not in self._common]
        modules.share([*apart, *model.buffers()], comm)
        self._reducer = self._make_reducer(self._parameters)

    def _make_reducer(self, parameters: Sequence[nn.Parameter]) -> BucketReducer:
        """What sums the gradients of ``parameters`` from their hooks."""
        reducer = BucketReducer(
            parameters,
            self.comm,
            bucket_cap_mb=self._knobs.bucket_cap_mb,
            dtype=lambda held: sum_dtype(held, self._reduce_dtype),
            overlap=self._knobs.overlap,
            find_unused=self._knobs.find_unused_parameters,
            factor=self._factor,
        )
        if self._compressor is not None:
            reducer.reduce = self._compress_with(self._compressor, reducer.buckets)
        return reducer

    def _compress_with(self, compressor: GradientReducer, buckets: Sequence[Bucket]) -> Reduce:
        rows = [
            Slot.row([(self._names[id(p)], p.numel()) for p in bucket.parameters])
            for bucket in buckets
        ]
        return lambda number, flat: compressor.start(flat, rows[number])

    def _watch_writes(self, job: Job) -> Writes:
        if self._common is None or job.precision.params != "fp32":
            return super()._watch_writes(job)
        why = "the processes of a host have it in common, and others read it meanwhile"
        return Writes(self.model, self.comm, loses=("strategy.zero1=true", why))

    def _follow(self, change: Change) -> None:
        if self._knobs.zero1 and self.comm.size > 1:
            check_cut(self._knobs, change, self._trainable.at_start)
        if self._reducer is None or not (change.freed or change.frozen):
            return
        if self._compressor is not None:
            self._compressor.add(change.freed)
        before, self._reducer = self._reducer, self._make_reducer(change.trained)
        self._reducer.factor = before.factor
        before.close()

    # -- one step --------------------------------------------------------------------------------

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], total_weight: float, task: Task
    ) -> LossReport:
        report = super().forward_backward(micro_batches, total_weight, task)
        self._finish()
        return report

    def backward(
        self, loss: Tensor, *, sync: bool = True, run: Callable[[Tensor], object] = Tensor.backward
    ) -> None:
        if self._reducer is not None:
            self._reducer.factor = self._factor / self.comm.size
        try:
            super().backward(loss, sync=sync, run=run)
            if sync:
                self._finish()
        finally:
            if self._reducer is not None:
                self._reducer.factor = self._factor

    def step_one(
        self, name: str, clip: Clip = Clip(), *, measure_norm: bool = False
    ) -> StepOutcome:
        if self._common is not None:
            self.comm.barrier()  # a task may still read parameters after its backward
        return super().step_one(name, clip, measure_norm=measure_norm)

    def _around_evaluation(self, averaged: bool) -> contextlib.AbstractContextManager[None]:
        if averaged and self._common is not None:
            return self._common.private()  # the averages are put in their place
        return contextlib.nullcontext()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self._common is not None:
            self.comm.barrier()  # what another still writes would be read in our next forward

    def close(self) -> None:
        if self._reducer is not None:
            self._reducer.close()
        super().close()
        if self._common is not None:
            self._common.leave()

    def without_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._reducer is None else self._reducer.without_sync()

    def _finish(self) -> None:
        """Has every gradient summed.

        Raises:
            ConfigError: a parameter has no gradient, and that is not allowed.
        """
        unused = self._reducer.finish() if self._reducer is not None else []
        if unused and not self._knobs.find_unused_parameters:
            missing = set(unused)
            raise modules.unused_parameters(
                [self._names[id(p)] for p in self._parameters if p in missing]
            )
