"""Layers cut over processes, beside parameters sharded over others: the name for a whole mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import nn

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.model_check import check_alike
from torsh_trainer.errors import ConfigError, nearest
from torsh_trainer.mesh import Groups
from torsh_trainer.strategies import modules
from torsh_trainer.strategies.base import Engine, Job
from torsh_trainer.strategies.context_parallel.door import ContextDoor, WholeTokens
from torsh_trainer.strategies.context_parallel.exchanges import EXCHANGES
from torsh_trainer.strategies.context_parallel.masks import is_of_transformers, refuse_attention
from torsh_trainer.strategies.context_parallel.plan import find_context_plan
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.parameter_hooks import Hooks
from torsh_trainer.strategies.pipeline.engine import PipelineEngine
from torsh_trainer.strategies.pipeline.held import PipelineKnobs, check_beside, hold_stages
from torsh_trainer.strategies.pipeline.orders import check_micro_batches, check_schedule
from torsh_trainer.strategies.tensor_parallel import layers
from torsh_trainer.strategies.tensor_parallel.parallel import CutLayers, cut_layers, refuse_beside
from torsh_trainer.strategies.tensor_parallel.plan import check_sizes, find_plan


@dataclass(frozen=True)
class Parallel(FSDP):
    """``fsdp``, which also cuts layers over ``mesh.tp``, the model over ``mesh.pp`` and sequences
    over ``mesh.cp``.

    ``schedule`` is the order in which stages run micro-batches: ``gpipe`` or ``1f1b``; or
    ``interleaved_1f1b`` or ``looped_bfs``, which take ``stages_per_rank`` above 1. ``split``
    names the modules at which all stages but the first begin; empty cuts between the repeated
    blocks, evenly by parameters. ``both_ends`` names modules that the first and the last stage
    compute; empty takes those of the model's ``pipeline_plan()``.
    ``context_exchange`` is how keys and values of other tokens come to a process: ``gather``,
    ``ring`` or ``alltoall``. ``context_plan`` says by name along which dimension an argument of the
    model has tokens, None for one without; empty takes that of the task or of the model, beside the
    usual names. ``pad`` fills sequences up to a length that ``mesh.cp`` divides, behind their end.
    ``sequence_parallel`` gives each process of ``mesh.tp`` its tokens between pairs of layers.

    The axis of a model that is still to come (``ep``) will be its own.
    """

    name: ClassVar[str] = "parallel"
    model_axes: ClassVar[frozenset[str]] = FSDP.model_axes | {"pp", "cp"}
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    split: tuple[str, ...] = ()
    both_ends: tuple[str, ...] = ()
    context_exchange: str = "gather"
    context_plan: Mapping[str, int | None] = field(default_factory=dict, hash=False)
    pad: bool = False
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_schedule(self.schedule, self.stages_per_rank)
        if self.context_exchange not in EXCHANGES:
            raise ConfigError(
                f"strategy.context_exchange={self.context_exchange} is unknown",
                fix=nearest(self.context_exchange, EXCHANGES),
            )

    def prepare(self, job: Job, comm: Communicator) -> Engine:
        mesh = job.groups.mesh if job.groups else None
        if self.sequence_parallel:
            tp, pp = (1, 1) if mesh is None else (mesh.tp, mesh.pp)
            if tp == 1:
                raise ConfigError(
                    "strategy.sequence_parallel=true cuts tokens over the processes that share "
                    "layers, and mesh.tp is 1",
                    fix="set mesh.tp=2 or more, or mesh.cp, which cuts them everywhere",
                )
            refuse_beside(job, self, {f"mesh.pp={pp}": pp > 1}, axis="tp")
        if mesh is not None and mesh.cp > 1:
            knobs = ("cpu_offload", "gather_in_compute_dtype")
            asked = {f"strategy.{knob}=true": getattr(self, knob) for knob in knobs}
            refuse_beside(job, self, {f"mesh.pp={mesh.pp}": mesh.pp > 1, **asked}, axis="cp")
        if mesh is None or mesh.pp == 1:
            return super().prepare(job, comm)
        refuse_beside(job, self, self._not_beside_stages(job), axis="pp")
        check_micro_batches(self.schedule, ranks=mesh.pp, micro_batches=job.batch.accumulate)
        # Whole from the first forward of a step to its last backward, and reduced after it.
        whole = replace(self, find_unused_parameters=True)
        return super(Parallel, whole).prepare(job, comm)

    def _not_beside_stages(self, job: Job) -> dict[str, bool]:
        assert job.groups is not None
        knobs = ("cpu_offload", "gather_in_compute_dtype", "reduce_every_micro_batch")
        return {
            **{f"strategy.{knob}=true": getattr(self, knob) for knob in knobs},
            f"strategy.stages_per_rank={self.stages_per_rank} and mesh.tp={job.groups.mesh.tp}": (
                self.stages_per_rank > 1 and job.groups.mesh.tp > 1
            ),
            f"precision.gradients={job.precision.gradients}": job.precision.gradients != "fp32",
            "strategy.wrap_min_parameters": self.wrap_min_parameters is not None,
        }

    def _build(self, job: Job, comm: Communicator, groups: Groups) -> tuple[nn.Module, Any]:
        if groups.mesh.pp == 1:
            return super()._build(job, comm, groups)
        model = modules.build(job, comm, leaves_parameters=True, recomputes=False)
        modules.refuse_sparse(model, "mesh.pp", use="set mesh.pp=1 and use strategy=ddp")
        knobs = PipelineKnobs(self.schedule, self.stages_per_rank, self.split, self.both_ends)
        check_beside(job, model, knobs)
        if groups.mesh.tp > 1:  # of all layers, before each process has its own
            plan = find_plan(model, job.task, self.plan, groups.mesh)
            layers.refuse_kinds(model, plan)
            check_sizes(model, plan, tp=groups.mesh.tp, dp_shard=groups.mesh.dp_shard)
            layers.find_cuts(model, plan)
        again = modules.find_recomputed(model, job)
        held = hold_stages(model, job, groups, knobs)
        held.refuse_within(again, model, "trainer.activation_checkpointing")
        modules.recompute([m for m in again if any(True for _ in m.parameters())], job)
        return model, held

    def _cut_layers(
        self, model: nn.Module, job: Job, groups: Groups, hooks: Hooks, stages: Any
    ) -> CutLayers:
        if stages is None:
            return super()._cut_layers(model, job, groups, hooks, stages)
        is_computed = stages.is_computed
        return cut_layers(
            model, job, groups, self, table=self.plan, hooked=hooks, is_computed=is_computed
        )

    def _cut_sequences(self, model: nn.Module, job: Job, groups: Groups) -> WholeTokens:
        if groups.mesh.cp == 1 and not self.sequence_parallel:
            return super()._cut_sequences(model, job, groups)
        check_alike(model, groups.stage)
        refuse_attention(model)
        plan = find_context_plan(model, job.task, self.context_plan, groups.mesh)
        if self.sequence_parallel and is_of_transformers(model):
            raise self.refuse(
                "strategy.sequence_parallel=true with a model of transformers, which counts places "
                "by the embeddings that it has",
                use="set strategy.sequence_parallel=false, or use mesh.cp",
            )
        return ContextDoor(
            model, plan, groups, self.context_exchange,
            pads=self.pad, splits_layers=self.sequence_parallel,
        )  # fmt: skip

    @property
    def _splits_tokens(self) -> bool:
        return self.sequence_parallel

    def _units(self, model: nn.Module, stages: Any) -> list[nn.Module]:
        units = super()._units(model, stages)
        if stages is None:
            return units
        stages.refuse_within(units, model, "strategy.wrap_modules")
        # What is gathered once a step needs no small units, whose hooks cost each micro-batch.
        return [unit for unit in units if self.wrap_modules or _bytes(unit) >= self.wrap_min_bytes]

    def _make_engine(self, stages: Any, *args: Any, **kwargs: Any) -> Engine:
        if stages is None:
            return super()._make_engine(stages, *args, **kwargs)
        return PipelineEngine(stages, *args, **kwargs)


def _bytes(unit: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in unit.parameters())
