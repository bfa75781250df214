"""Fully sharded data parallel on FSDP2: parameters, gradients and optimizer state are cut."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.compression.scatter import CompressedScatter
from torsh_trainer.deferred.recording import DeferredInit
from torsh_trainer.emulation.knobs import UnusedKnobs
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError
from torsh_trainer.mesh import Groups
from torsh_trainer.optim.precision import DTYPES, sum_dtype
from torsh_trainer.strategies import modules, sharding
from torsh_trainer.strategies.base import (
    Engine,
    Job,
    LossReport,
    Mesh,
    MicroBatch,
    StepOutcome,
    Strategy,
)
from torsh_trainer.strategies.buffers import Buffers
from torsh_trainer.strategies.compressing import compressing
from torsh_trainer.strategies.context_parallel.door import WholeTokens
from torsh_trainer.strategies.gathering import find_rounded_by_autocast, gather_in
from torsh_trainer.strategies.merging import Unit, merge_small, units_in_words
from torsh_trainer.strategies.native import NativeEngine
from torsh_trainer.strategies.parameter_hooks import Hooks, carry_over, hooks_of
from torsh_trainer.strategies.rehearsal import refuse_unsharded
from torsh_trainer.strategies.sharded import ShardedGradients, ShardedModel, find_roots
from torsh_trainer.strategies.tensor_parallel.parallel import CutLayers, cut_layers, refuse_beside
from torsh_trainer.strategies.trainability import Change
from torsh_trainer.strategies.uncut import Uncut, check_one_dtype, find_uncut, parameters_by_unit
from torsh_trainer.strategies.uncut import tell as tell_uncut
from torsh_trainer.strategies.units import CommonOrder, WholePass, list_gathered
from torsh_trainer.strategies.within_loss import ShardReadGuard, in_words, refuse_second_order
from torsh_trainer.strategies.writes import Writes, copy_words
from torsh_trainer.tasks.base import Task


@dataclass(frozen=True)
class FSDP(UnusedKnobs, Strategy):
    """torch.distributed.fsdp.fully_shard.

    ``wrap_modules`` are the class names that become units of sharding; empty takes the repeated
    blocks. ``wrap_min_parameters`` instead makes a unit of every module with at least that many
    parameters of its own subtree (largest first). Repeated blocks that nobody named are put
    together with their neighbours until a unit has ``wrap_min_bytes``; 0 leaves each alone.
    ``reshard_after_forward`` frees gathered
    parameters after forward (true: ZeRO-3, false: ZeRO-2). ``shard_size`` shards within groups of
    that many consecutive ranks and replicates over them (hybrid); null is all ranks.
    ``reduce_every_micro_batch`` keeps gradients sharded while accumulating: less memory, more
    communication. ``cpu_offload`` keeps parameters, gradients and optimizer state in host memory.
    ``find_unused_parameters`` lets every forward go its own way on every process: all units are
    gathered before it and reduced after its backward, at the price of whole parameters and whole
    gradients in memory meanwhile. ``UnusedKnobs`` step parameters without one as another engine.
    ``prefetch_depth`` gathers that many units ahead, explicitly; null leaves it to FSDP2.
    ``gather_in_compute_dtype`` gathers weights of linear layers and convolutions as autocast rounds
    them: half the bytes, and the same numbers, as long as nothing else reads them.
    ``plan`` says which layers are cut over ``mesh.tp``: styles by patterns of module names, as
    ``tensor_parallel.plan`` has them; empty takes that of the task or of the model.
    """

    name: ClassVar[str] = "fsdp"
    model_axes: ClassVar[frozenset[str]] = frozenset({"model_replicate", "tp"})
    wrap_modules: tuple[str, ...] = ()
    wrap_min_parameters: int | None = None
    wrap_min_bytes: int = 8 * 2**20
    reshard_after_forward: bool = True
    shard_size: int | None = None
    reduce_every_micro_batch: bool = False
    cpu_offload: bool = False
    find_unused_parameters: bool = False
    prefetch_depth: int | None = None
    gather_in_compute_dtype: bool = False
    plan: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.wrap_modules and self.wrap_min_parameters is not None:
            raise ConfigError(
                "strategy.wrap_modules and strategy.wrap_min_parameters exclude each other",
                fix="keep one of them",
            )
        for name in ("wrap_min_parameters", "shard_size", "prefetch_depth"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(
                    f"strategy.{name}={value} is below 1", fix="give null to leave it"
                )
        if self.gather_in_compute_dtype and self.find_unused_parameters:
            raise ConfigError(
                "strategy.gather_in_compute_dtype and strategy.find_unused_parameters exclude each "
                "other: a loss may read the parameters that the latter keeps whole",
                fix="set one of them to false",
            )
        if self.wrap_min_bytes < 0:
            raise ConfigError(
                f"strategy.wrap_min_bytes={self.wrap_min_bytes} is below 0",
                fix="give 0 to make every block a unit",
            )

    def mesh(self, world: World) -> Mesh:
        return Mesh.data_parallel(world, shard=self.shard_size or world.size)

    def with_shards(self, dp_shard: int) -> FSDP:
        if self.shard_size not in (None, dp_shard):
            raise ConfigError(
                f"strategy.shard_size={self.shard_size}, and the mesh has dp_shard={dp_shard}: "
                "both say how many processes share one copy of the parameters",
                fix="leave strategy.shard_size out",
            )
        return replace(self, shard_size=dp_shard)

    def prepare(self, job: Job, comm: Communicator) -> Engine:
        knobs = compressing(self, job, comm)
        if (
            job.precision.gradients != "fp32"
            and job.batch.accumulate > 1
            and not self.reduce_every_micro_batch
        ):
            raise self.refuse(
                f"precision.gradients={job.precision.gradients} while it accumulates whole "
                "gradients",
                use="set strategy.reduce_every_micro_batch=true, or precision.gradients=fp32",
            )
        if self.gather_in_compute_dtype and job.manual:
            raise self.refuse(
                "strategy.gather_in_compute_dtype where the task itself steps: it may compute "
                "without autocast",
                use="set strategy.gather_in_compute_dtype=false",
            )
        groups = job.groups or Groups(self.mesh(comm.world), comm)
        if groups.mesh.tp > 1:
            refuse_beside(job, self, self._not_beside_cut_layers)
        scatter = None if knobs is None else CompressedScatter(knobs, comm, seed=job.seed)
        samples = comm
        if groups.mesh.cp > 1:
            comm = groups.gradient
        with DeferredInit() as init:
            cut = self._divide(job, comm, groups)
            init.leave(cut.model)
        units = units_in_words(cut.units, cut.rest)
        if cut.layers.names:
            units += " (before layers are cut)"
        stages = "" if cut.stages is None else cut.stages.summary
        layout = [stages, cut.layers.summary, cut.door.summary, units, init.summary]
        sharding.shard(
            cut.rest,
            cut.units,
            job,
            place=functools.partial(cut.layers.cutting.place, comm=comm, init=init),
            placement=cut.layers.cutting.placement,
            mesh=groups.data_mesh,
            uncut=set(cut.uncut.values()),
            cpu_offload=self.cpu_offload,
            reshard_after_forward=self.reshard_after_forward and not self.find_unused_parameters,
            prefetch_depth=self.prefetch_depth,
            refuse=self.refuse,
        )
        return self._make_engine(
            cut.stages,
            self,
            job,
            comm,
            model=cut.model,
            roots=cut.roots,
            norm=groups.norm,
            uncut=cut.uncut,
            hooks=cut.hooks,
            layers=cut.layers,
            door=cut.door,
            samples=samples,
            scatter=scatter,
            layout="\n".join(filter(None, layout)),
            low=cut.low,
        )

    def _make_engine(self, stages: Any, *args: Any, **kwargs: Any) -> Engine:
        return FSDPEngine(*args, **kwargs)

    def _build(self, job: Job, comm: Communicator, groups: Groups) -> tuple[nn.Module, Any]:
        """The model, or the stages of it that are this process's; and what ``_make_engine`` is to
        know of them."""
        model = modules.build(job, comm, leaves_parameters=True)
        modules.refuse_sparse(model, "strategy=fsdp", use="use strategy=ddp")
        return model, None

    @property
    def _not_beside_cut_layers(self) -> Mapping[str, bool]:
        knobs = ("cpu_offload", "gather_in_compute_dtype")
        return {f"strategy.{knob}=true": getattr(self, knob) for knob in knobs}

    def _divide(self, job: Job, comm: Communicator, groups: Groups) -> Division:
        """Builds the model and says what is cut; nothing is yet, but what stays whole is in place.

        Raises:
            Unsupported: FSDP2 cannot take the model.
        """
        model, stages = self._build(job, comm, groups)
        units = self._units(model, stages)
        modules.compile_modules(job, units or [model])
        roots = find_roots(model, self.refuse) if job.manual else [model]
        uncut = self._uncut(model, [*units, *roots], job, comm)
        hooks = hooks_of(model, uncut.values(), job, self)
        layers = self._cut_layers(model, job, groups, hooks, stages)
        whole = set(uncut.values())
        units = [u for u in units if u not in roots and any(p not in whole for p in u.parameters())]
        parts, rest = self._merge_units(units, roots, whole)
        rounds = self.gather_in_compute_dtype and job.precision.autocast
        low = find_rounded_by_autocast(model) if rounds else set()
        # All that is whole on processes that share layers is the same there, too.
        modules.share([*uncut.values(), *model.buffers()], groups.stage if layers.names else comm)
        door = self._cut_sequences(model, job, groups)
        return Division(model, roots, parts, rest, uncut, hooks, low, layers, stages, door)

    def _cut_sequences(self, model: nn.Module, job: Job, groups: Groups) -> WholeTokens:
        return WholeTokens()

    def _cut_layers(
        self, model: nn.Module, job: Job, groups: Groups, hooks: Hooks, stages: Any
    ) -> CutLayers:
        return cut_layers(
            model, job, groups, self, table=self.plan, hooked=hooks,
            splits_tokens=self._splits_tokens,
        )  # fmt: skip

    @property
    def _splits_tokens(self) -> bool:
        """Whether tokens are cut between pairs of layers."""
        return False

    def _units(self, model: nn.Module, stages: Any) -> list[nn.Module]:
        if self.wrap_modules:
            units = modules.choose_blocks(model, self.wrap_modules, "strategy.wrap_modules")
        elif self.wrap_min_parameters is None:
            units = modules.find_repeated_blocks(model)
        else:
            units = modules.by_size(model, self.wrap_min_parameters)
        return [unit for unit in units if not modules.shares_parameters(model, unit)]

    def _merge_units(
        self,
        units: Sequence[nn.Module],
        roots: Sequence[nn.Module],
        uncut: set[nn.Parameter],
    ) -> tuple[list[Unit], list[Unit]]:
        """What is sharded as one, inner units and roots."""
        own = parameters_by_unit([*units, *roots])
        blocks, outer = (
            [Unit((m,), tuple(p for p in own[m] if p not in uncut)) for m in modules]
            for modules in (units, roots)
        )
        if self.wrap_modules or self.wrap_min_parameters is not None:
            return blocks, outer
        return merge_small(blocks, roots, least=self.wrap_min_bytes), outer

    def _uncut(
        self, model: nn.Module, units: Sequence[nn.Module], job: Job, comm: Communicator
    ) -> dict[str, nn.Parameter]:
        """The parameters that stay whole, by name; the others are made contiguous in memory, as
        FSDP2 cuts them.

        Raises:
            Unsupported: one of them would not be computed with in ``precision.params``.
        """
        modules.refuse_overlapping(model, self)
        uncut = find_uncut(model, units)
        names = {p: name for name, p in model.named_parameters()}
        for p, name in names.items():
            if p not in uncut:
                p.data = p.data.contiguous()
            elif job.precision.params != "fp32" and p.dim() and p.numel():
                raise self.refuse(
                    f"precision.params={job.precision.params} with a parameter that cannot be cut: "
                    f"{name!r}, {uncut[p]}",
                    use="set precision=fp32 or bf16_mixed, or use strategy=ddp",
                )
            else:
                p.data = comm.to_device(p.data)
        tell_uncut(names, uncut)
        return {names[p]: p for p in uncut}


class Division(NamedTuple):
    """A model, and how it will be cut: ``units`` first, then the ``rest`` of ``roots``, without
    ``uncut``; ``low`` names what is gathered as autocast rounds it."""

    model: nn.Module
    roots: list[nn.Module]
    units: list[Unit]
    rest: list[Unit]
    uncut: dict[str, nn.Parameter]
    hooks: Hooks
    low: Collection[str]
    layers: CutLayers
    stages: Any
    door: WholeTokens


class FSDPEngine(NativeEngine):
    """The engine of ``fsdp``: the model itself carries FSDP2's hooks."""

    whole_optimizers = False
    evaluates_together = True

    overlaps: ClassVar[bool] = False
    """Whether forwards begin before the backwards of others have ended."""

    def __init__(
        self,
        knobs: FSDP,
        job: Job,
        comm: Communicator,
        *,
        model: nn.Module,
        roots: Sequence[nn.Module],
        norm: Communicator,
        uncut: Mapping[str, nn.Parameter],
        hooks: Hooks,
        layers: CutLayers,
        door: WholeTokens,
        samples: Communicator,
        scatter: CompressedScatter | None = None,
        layout: str = "",
        low: Collection[str] = (),
    ) -> None:
        sent = DTYPES[job.precision.reduce]
        self._uncut = Uncut(uncut, comm, lambda held: sum_dtype(held, sent))
        self._means = job.precision.averages
        self._layers = layers
        self._door = door
        self._samples = samples
        super().__init__(
            job,
            comm,
            model=model,
            module=model,
            eval_module=model,
            averaging_ranks=comm.size if self._means else 1,
            gradients=self._make_gradients(model, comm.device, norm),
            wrap_optimizer=self._check_optimizer,
            compression=scatter,
            emulation=knobs.emulation,
            around_evaluation=self._around_evaluation,
        )
        self._knobs = knobs
        self._layout = layout
        self._sharded = ShardedModel(
            model,
            roots,
            ranks=comm.size,
            resharding=knobs.reshard_after_forward,
            reduces_itself=knobs.find_unused_parameters,
        )
        carry_over(hooks, (part for part, _ in self._sharded.parts), self._names)
        self._pass = (
            WholePass(roots, comm, overlaps=self.overlaps) if knobs.find_unused_parameters else None
        )
        self._order = CommonOrder(roots, comm) if self._pass is None else None
        if self._pass is None:
            refuse_second_order(model)
        self._watches = job.compile is None  # only until the first backward: it costs every call
        self._syncs = True
        self._sharded.ready(scatter)
        self._low = low
        gather_in(DTYPES[job.precision.compute], self._sharded.units, self._names, low)

    def _make_gradients(
        self, model: nn.Module, device: torch.device, norm: Communicator
    ) -> ShardedGradients:
        return ShardedGradients(model, device, norm_group=norm, counts=self._layers.counts)

    def _make_buffers(self, job: Job, *, shares: bool) -> Buffers:
        # Processes with the same samples move them alike.
        averages = job.task.running_averages(self.model)
        return Buffers(self.model, self._samples, shares=shares, averages=averages)

    def layout(self) -> str:
        return self._layout

    def _check_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self._layers.check_optimizer(optimizer)
        refuse_unsharded(optimizer, self.comm)
        return optimizer

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], total_weight: float, task: Task
    ) -> LossReport:
        self._sharded.reduce_to(mean=self._means)
        with in_words():
            report = super().forward_backward(micro_batches, total_weight, task)
        self._watches = False
        self._uncut.reduce(averages=self._means)
        self._emulation.complete(self._parameters)
        return report

    def _watch_writes(self, job: Job) -> Writes:
        who = copy_words("strategy=fsdp")
        if job.compile is None:
            return Writes(self.model, self.comm, loses=who, hooks=True)
        # A hook on a module would have it compiled again.
        return Writes(self.model, self.comm, loses=who, copies=lambda: list_gathered(self.model))

    def _forward(self, batch: Any, task: Task) -> Tensor:
        reads = ShardReadGuard(self._names) if self._watches else contextlib.nullcontext()
        calls = self._door.watch_calls() if self._looks else contextlib.nullcontext()
        with reads, calls:
            loss = super()._forward(batch, task)
        if self._looks:
            self._door.check_loss(loss)
        return loss

    def _backpropagate(self, loss: Tensor, factor: float) -> None:
        with self._door.in_backward():
            super()._backpropagate(loss, factor)

    def _micro_batch(
        self, micro: MicroBatch, total_weight: float, task: Task, *, last: bool
    ) -> tuple[Tensor, float]:
        if self._order is not None:
            self._order.begin_micro_batch()
        part = super()._micro_batch(micro, total_weight, task, last=last)
        if self._pass is not None:
            self._pass.reduce(syncs=self._syncs)
        return part

    def backward(
        self, loss: Tensor, *, sync: bool = True, run: Callable[[Tensor], object] = Tensor.backward
    ) -> None:
        self._emulation.check_backward(self._knobs.refuse, manual=self._manual)
        self._sharded.reduce_to(mean=True)
        if self.comm.size > self._samples.size:  # an average over those with other tokens as well
            loss = loss * (self.comm.size // self._samples.size)
        with in_words(), self._door.in_backward():
            super().backward(loss, sync=sync, run=run)
        self._watches = False
        if self._pass is not None:
            self._pass.reduce(syncs=sync or self._knobs.reduce_every_micro_batch)
        if sync:
            self._uncut.reduce(averages=True)
            self._emulation.complete(self._parameters)
        self._sharded.let_go()

    @contextlib.contextmanager
    def training_forward(self, *, manual: bool = False) -> Iterator[nn.Module]:
        self._sharded.let_go()
        # A task that steps by itself has its optimizers in there, which go over shards.
        watches = self._watches and not manual
        reads = ShardReadGuard(self._names) if watches else contextlib.nullcontext()
        with in_words(), super().training_forward(manual=manual) as module, reads:
            yield module

    def _stepping(self) -> contextlib.AbstractContextManager[None]:
        return self._uncut.mix_shards()

    def close(self) -> None:
        self._uncut.close()
        if self._order is not None:
            self._order.close()
        super().close()

    def _end_step(self, outcome: StepOutcome) -> None:
        super()._end_step(outcome)
        self._sharded.let_go()
        self._layers.end_step(self._trainable.named)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._sharded.let_go()

    def _settle(self, loss: Tensor | None, *, shrinks: bool = True) -> bool:
        # A task that steps itself frees and freezes outside of any unit's forward.
        if loss is not None and not self._manual:
            self._sharded.carry_over()
        return super()._settle(loss, shrinks=shrinks)

    def _follow(self, change: Change) -> None:
        # FSDP2 looks at every shard before a forward itself. But of a unit in which nothing trained
        # it does not know the dtype to reduce gradients in.
        for unit in self._sharded.units:
            check_one_dtype(self._knobs, change, unit)
            unit._init_mp_dtypes()
        if self._autocast is not None:
            gather_in(self._autocast, self._sharded.units, self._names, self._low)
        self._uncut.follow()
        self._sharded.look_again()

    @contextlib.contextmanager
    def without_sync(self) -> Iterator[None]:
        if self._knobs.reduce_every_micro_batch:
            yield
            return
        before, self._syncs = self._syncs, False
        try:
            self._sharded.set_sync(False)
            yield
        finally:
            self._syncs = before
            self._sharded.set_sync(before)

    @contextlib.contextmanager
    def _around_evaluation(self, averaged: bool) -> Iterator[None]:
        try:
            yield
        finally:
            self._sharded.let_go()

    @contextlib.contextmanager
    def evaluation_forward(self) -> Iterator[nn.Module]:
        try:
            with super().evaluation_forward() as module:
                yield module
        finally:
            self._sharded.let_go()
