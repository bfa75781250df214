"""Fully sharded data parallel on FSDP2: parameters, gradients and optimizer state are cut."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.compression.scatter import CompressedScatter
from torsh_trainer.errors import ConfigError
from torsh_trainer.strategies import modules, sharding
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
from torsh_trainer.strategies.compressing import compressing
from torsh_trainer.strategies.merging import Unit, merge_small, units_in_words
from torsh_trainer.strategies.native import (
    DTYPES,
    NativeEngine,
    averages_in,
    local_norm,
    no_zero_unused,
    summed_in,
)
from torsh_trainer.strategies.outputs import hook_hidden_outputs
from torsh_trainer.strategies.parameter_hooks import Hooks, carry_over, hooks_of
from torsh_trainer.strategies.rehearsal import refuse_unsharded
from torsh_trainer.strategies.trained import Change
from torsh_trainer.strategies.uncut import Uncut, check_one_dtype, find_uncut, parameters_by_unit
from torsh_trainer.strategies.uncut import tell as tell_uncut
from torsh_trainer.strategies.units import (
    CommonOrder,
    WholePass,
    forget_forward,
    merged_states,
    units_of,
)
from torsh_trainer.strategies.within_loss import Reads, in_words, refuse_second_order
from torsh_trainer.task import Task
from torsh_trainer.world import World


@dataclass(frozen=True)
class FSDP(Strategy):
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
    gradients in memory meanwhile. ``zero_unused`` gives parameters that a step does not reach
    gradients of zero, so that they decay and their momentum goes on, as under DeepSpeed.
    ``prefetch_depth`` gathers that many units ahead, explicitly; null leaves it to FSDP2.
    """

    name: ClassVar[str] = "fsdp"
    wrap_modules: tuple[str, ...] = ()
    wrap_min_parameters: int | None = None
    wrap_min_bytes: int = 8 * 2**20
    reshard_after_forward: bool = True
    shard_size: int | None = None
    reduce_every_micro_batch: bool = False
    cpu_offload: bool = False
    find_unused_parameters: bool = False
    zero_unused: bool = False
    prefetch_depth: int | None = None

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
        if self.wrap_min_bytes < 0:
            raise ConfigError(
                f"strategy.wrap_min_bytes={self.wrap_min_bytes} is below 0",
                fix="give 0 to make every block a unit",
            )

    def mesh(self, world: World) -> Mesh:
        return Mesh.data_parallel(world, shard=self.shard_size or world.size)

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
        scatter = None if knobs is None else CompressedScatter(knobs, comm, seed=job.seed)
        mesh = sharding.device_mesh(self.mesh(comm.world), comm)
        model = modules.build(job, comm, device=torch.device("cpu") if self.cpu_offload else None)
        modules.refuse_sparse(model, "strategy=fsdp", use="use strategy=ddp")
        for tensor in [*model.parameters(), *model.buffers()]:
            values = comm.place(tensor.detach().contiguous())
            comm.broadcast(values, src=0)
            if values.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(values)
        units = self._units(model)
        modules.compiled(job, units or [model])
        roots = self._roots(model) if job.manual else [model]
        uncut = self._uncut(model, [*units, *roots], job, comm)
        hooks = hooks_of(model, uncut.values(), job, self)
        whole = set(uncut.values())
        units = [u for u in units if u not in roots and any(p not in whole for p in u.parameters())]
        parts, rest = self._merged(units, roots, whole)
        layout = units_in_words(parts, rest)
        sharding.shard(
            rest,
            parts,
            job,
            mesh=mesh,
            uncut=whole,
            cpu_offload=self.cpu_offload,
            reshard_after_forward=self.reshard_after_forward and not self.find_unused_parameters,
            prefetch_depth=self.prefetch_depth,
            refuse=self.refuse,
        )
        return FSDPEngine(
            self,
            job,
            comm,
            model=model,
            roots=roots,
            shard_group=sharding.shard_group(mesh),
            uncut=uncut,
            hooks=hooks,
            scatter=scatter,
            layout=layout,
        )

    def _units(self, model: nn.Module) -> list[nn.Module]:
        if self.wrap_modules:
            units = modules.chosen_blocks(model, self.wrap_modules, "strategy.wrap_modules")
        elif self.wrap_min_parameters is None:
            units = modules.repeated_blocks(model)
        else:
            units = modules.by_size(model, self.wrap_min_parameters)
        return [unit for unit in units if not modules.shares_parameters(model, unit)]

    def _merged(
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

    def _roots(self, model: nn.Module) -> list[nn.Module]:
        """For a task that steps within a forward of ``model``: the modules that it calls there.

        Raises:
            Unsupported: a parameter is in none of them, or in several.
        """
        roots = list(modules.called(model))
        for name, _ in model.named_parameters(recurse=False):
            raise self.refuse(
                f"the parameter {name!r} of a module that steps its optimizers itself, within its "
                "own forward",
                use="put it into a submodule, or use strategy=ddp",
            )
        for root in roots:
            if modules.shares_parameters(model, root):
                raise self.refuse(
                    "parameters that submodules share, in a module that steps its optimizers "
                    "itself",
                    use="use strategy=ddp",
                )
        return roots

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
                p.data = comm.place(p.data)
        tell_uncut(names, uncut)
        return {names[p]: p for p in uncut}


class FSDPEngine(NativeEngine):
    """The engine of ``fsdp``: the model itself carries FSDP2's hooks."""

    whole_optimizers = False
    evaluates_together = True

    def __init__(
        self,
        knobs: FSDP,
        job: Job,
        comm: Communicator,
        *,
        model: nn.Module,
        roots: Sequence[nn.Module],
        shard_group: Any,
        uncut: Mapping[str, nn.Parameter],
        hooks: Hooks,
        scatter: CompressedScatter | None = None,
        layout: str = "",
    ) -> None:
        reduced_in = DTYPES[job.precision.reduce]
        self._uncut = Uncut(uncut, comm, lambda held: summed_in(held, reduced_in))
        self._means = averages_in(job.precision)
        super().__init__(
            job,
            comm,
            model=model,
            module=model,
            eval_module=model,
            averaging_ranks=comm.world.size if self._means else 1,
            wrap_optimizer=self._checked,
            compression=scatter,
        )
        self._knobs = knobs
        self._layout = layout
        self._roots: list[Any] = list(roots)
        self._units = units_of(model)
        self._merged = merged_states(model)
        self._parts = self._all_parts()
        carry_over(hooks, (part for part, _ in self._parts), self._names)
        self._pass = WholePass(roots, comm) if knobs.find_unused_parameters else None
        if self._pass is None:
            CommonOrder(roots, comm)
            refuse_second_order(model)
        self._watches = job.compile is None  # only until the first backward: it costs every call
        self._syncs = True
        self._averages = True
        self._shard_group = shard_group
        for module in model.modules() if scatter is not None else ():
            if hasattr(module, "set_custom_reduce_scatter"):
                cast(Any, module).set_custom_reduce_scatter(scatter)
        for root in self._roots:
            hook_hidden_outputs(root)
            # Whoever comes first would be the root: a unit that a hook calls before any step.
            root._get_fsdp_state()._lazy_init()

    def layout(self) -> str:
        return self._layout

    def _checked(self, optimizer: Optimizer) -> Optimizer:
        refuse_unsharded(optimizer, self.comm)
        return optimizer

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], total_weight: float, task: Task
    ) -> LossReport:
        self._reduce(averages=self._means)
        with in_words():
            report = super().forward_backward(micro_batches, total_weight, task)
        self._watches = False
        self._uncut.reduce(averages=self._means)
        if self._knobs.zero_unused:
            self._zero_unused()
        return report

    def _reduce(self, *, averages: bool) -> None:
        """Whether gradients are averaged over ranks from here on, or summed."""
        if averages is not self._averages and self.comm.world.size > 1:
            self._averages = averages
            for unit in self._units:
                unit.gradient_divide_factor = None if averages else 1.0
                # Else it is a product before the sum, which no backend but NCCL has.
                unit.force_sum_reduction_for_comms = not averages

    def _forward(self, batch: Any, task: Task) -> Tensor:
        with Reads(self._names) if self._watches else contextlib.nullcontext():
            return super()._forward(batch, task)

    def _micro_batch(
        self, micro: MicroBatch, total_weight: float, task: Task, *, last: bool
    ) -> tuple[Tensor, float]:
        part = super()._micro_batch(micro, total_weight, task, last=last)
        if self._pass is not None:
            self._pass.reduce(syncs=self._syncs)
        return part

    def backward(
        self, loss: Tensor, *, sync: bool = True, run: Callable[[Tensor], object] = Tensor.backward
    ) -> None:
        if self._knobs.zero_unused and self._manual:
            raise no_zero_unused(self._knobs)
        self._reduce(averages=True)
        with in_words():
            super().backward(loss, sync=sync, run=run)
        self._watches = False
        if self._pass is not None:
            self._pass.reduce(syncs=sync or self._knobs.reduce_every_micro_batch)
        if sync:
            self._uncut.reduce(averages=True)
        if self._knobs.zero_unused and sync:
            self._zero_unused()
        self._let_go()

    @contextlib.contextmanager
    def training_forward(self, *, manual: bool = False) -> Iterator[nn.Module]:
        self._let_go()
        # A task that steps by itself has its optimizers in there, which go over shards.
        watches = self._watches and not manual
        reads = Reads(self._names) if watches else contextlib.nullcontext()
        with in_words(), super().training_forward(manual=manual) as module, reads:
            yield module

    def step(self, clip: Clip, *, measure_norm: bool = False) -> StepOutcome:
        with self._uncut.mixed():
            return super().step(clip, measure_norm=measure_norm)

    def step_one(
        self, name: str, clip: Clip = Clip(), *, measure_norm: bool = False
    ) -> StepOutcome:
        with self._uncut.mixed():
            return super().step_one(name, clip, measure_norm=measure_norm)

    def _phantom_step(self, lr: float, *, keeps_state: bool) -> None:
        with self._uncut.mixed():
            super()._phantom_step(lr, keeps_state=keeps_state)

    def state_template(self) -> dict[str, Any]:
        with self._uncut.mixed():
            return super().state_template()

    def close(self) -> None:
        self._uncut.close()
        super().close()

    def _stepped(self, outcome: StepOutcome) -> None:
        super()._stepped(outcome)
        self._let_go()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._let_go()

    def _settle(self, loss: Tensor | None, *, shrinks: bool = True) -> bool:
        # Within a forward a module has whole parameters in the place of its shards, which alone
        # FSDP2 looks at: what was freed or frozen there is carried over. (A task that steps itself
        # does so outside of any unit's forward.)
        for part, trained in self._parts if loss is not None and not self._manual else ():
            if trained is not getattr(part, "_unsharded_param", part.sharded_param).requires_grad:
                part.sharded_param.requires_grad_(not trained)
        return super()._settle(loss, shrinks=shrinks)

    def _follow(self, change: Change) -> None:
        # FSDP2 looks at every shard before a forward itself. But of a unit in which nothing trained
        # it does not know the dtype to reduce gradients in.
        for unit in self._units:
            check_one_dtype(self._knobs, change, unit)
            unit._init_mp_dtypes()
        self._uncut.follow()
        self._parts = self._all_parts()
        for part, trained in self._parts:
            if hasattr(part, "_unsharded_param"):
                part.unsharded_param.requires_grad_(trained)

    def _all_parts(self) -> list[tuple[Any, bool]]:
        """What FSDP2 has of each parameter, and whether that trains."""
        parts = [part for unit in self._units for part in unit.fsdp_params]
        return [(part, part.sharded_param.requires_grad) for part in parts]

    @contextlib.contextmanager
    def without_sync(self) -> Iterator[None]:
        if self._knobs.reduce_every_micro_batch:
            yield
            return
        before, self._syncs = self._syncs, False
        self._set_sync(False)
        try:
            yield
        finally:
            self._syncs = before
            self._set_sync(before)

    def _set_sync(self, syncs: bool) -> None:
        for root in self._roots if self._pass is None else ():  # which reduces by itself
            root.set_requires_gradient_sync(syncs)

    @contextlib.contextmanager
    def _evaluating(self, *, averaged: bool) -> Iterator[None]:
        try:
            with super()._evaluating(averaged=averaged):
                yield
        finally:
            self._let_go()

    @contextlib.contextmanager
    def evaluation_forward(self) -> Iterator[nn.Module]:
        try:
            with super().evaluation_forward() as module:
                yield module
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Of what a forward has gathered and no backward came to (reshard_after_forward=false).

        The next one would use that instead of parameters that have changed since, or do not train.
        """
        for state in self._merged:
            forget_forward(state)
        for unit in self._units:
            unit.reshard()

    def _local(self, gradients: list[Tensor]) -> list[Tensor]:
        self._whole = [not hasattr(gradient, "placements") for gradient in gradients]
        parts = zip(gradients, self._whole, strict=True)
        return super()._local([g if whole else cast(Any, g).to_local() for g, whole in parts])

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        # Shards of one group hold the whole gradient once; replicas hold it again.
        parts = [g for g, whole in zip(gradients, self._whole, strict=True) if not whole]
        square = local_norm(parts, self.comm.device).square()
        torch.distributed.all_reduce(square, group=self._shard_group)
        if len(parts) < len(gradients):
            uncut = [g for g, whole in zip(gradients, self._whole, strict=True) if whole]
            square = square + local_norm(uncut, self.comm.device).square()
        return square.sqrt()
