"""What one process has of a model in stages, and who has the rest."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.model_check import check_alike
from torsh_trainer.errors import ConfigError, Unsupported
from torsh_trainer.mesh import Groups
from torsh_trainer.optim.precision import DTYPES
from torsh_trainer.strategies.base import Job
from torsh_trainer.strategies.pipeline.crossing import Crossing
from torsh_trainer.strategies.pipeline.exchange import Exchange
from torsh_trainer.strategies.pipeline.orders import bubble
from torsh_trainer.strategies.pipeline.stages import StagePlan, find_stages
from torsh_trainer.strategies.rehearsal import refuse_joint
from torsh_trainer.strategies.tensor_parallel.agreeing import WholeAlike


@dataclass(frozen=True)
class PipelineKnobs:
    """How a model is cut into stages and in which order they run; see ``Parallel``."""

    schedule: str
    stages_per_rank: int
    split: tuple[str, ...]
    both_ends: tuple[str, ...]


@dataclass(frozen=True)
class HeldStages:
    """The stages ``own`` of a process, of a model under ``plan``.

    ``comm`` are the processes of the pipeline, by their first stage. ``everywhere`` has a stand-in
    for each parameter of the whole model by name, in the model's order; ``buffers`` the names of
    all buffers. ``tied`` has the parameters that several processes
    hold, by name, each with these; ``counts_whole`` says whether this process counts, in a norm,
    parameters that all processes with its stages hold whole.
    """

    plan: StagePlan
    knobs: PipelineKnobs
    own: tuple[int, ...]
    comm: Communicator
    exchange: Exchange
    crossing: Crossing
    everywhere: Mapping[str, nn.Parameter]
    buffers: frozenset[str]
    tied: Mapping[str, Communicator]
    counts_whole: bool
    summary: str
    made: Sequence[Communicator] = field(default=())

    @property
    def is_last(self) -> bool:
        """Whether this process has the last stage, which computes the loss."""
        return self.plan.count - 1 in self.own

    def rank_of(self, stage: int) -> int:
        """The process of the pipeline that has ``stage``."""
        return stage % self.comm.size

    @property
    def last_rank(self) -> int:
        """The process that has the last stage."""
        return self.rank_of(self.plan.count - 1)

    def build_optimizers(
        self, job: Job, model: nn.Module
    ) -> tuple[Mapping[str, Optimizer], dict[str, list[list[str]]]]:
        """The task's optimizers over all parameters, of which those of this process are left; and
        the names of all, by optimizer and group.

        So groups are the same on every process, and a task sees the model that it has built.

        Raises:
            Unsupported: one steps parameters together.
        """
        own = dict(model.named_parameters())
        named = [(name, own.get(name, other)) for name, other in self.everywhere.items()]
        built = job.build_optimizers(named)
        names = {id(p): name for name, p in named}
        groups = {}
        for key, optimizer in built.items():
            refuse_joint(optimizer, asked_by="mesh.pp", use="use adamw, or set mesh.pp=1")
            groups[key] = [[names[id(p)] for p in g["params"]] for g in optimizer.param_groups]
            for group in optimizer.param_groups:
                kept = [p for p in group["params"] if names[id(p)] in own]
                for p in group["params"]:
                    if names[id(p)] not in own:
                        optimizer.state.pop(p, None)
                group["params"] = kept
                if "param_names" in group:
                    group["param_names"] = [names[id(p)] for p in kept]
        return built, groups

    def refuse_within(self, units: Sequence[nn.Module], model: nn.Module, knob: str) -> None:
        """Makes sure that no stage begins within a module that is run as one.

        Raises:
            Unsupported: names the module, and ``knob``, by which it is.
        """
        wanted = set(units)
        for name, module in model.named_modules():
            inside = [begin for begin in self.plan.begins if begin.startswith(f"{name}.")]
            if module in wanted and inside:
                raise Unsupported(
                    f"mesh.pp: a stage begins at {inside[0]!r}, within {name!r}, which {knob} (or "
                    "its default) takes as one",
                    fix=f"name whole blocks in strategy.split, or other classes in {knob}",
                )

    def is_computed(self, name: str) -> bool:
        """Whether this process computes the module called ``name``."""
        return bool(self.plan.places[name] & set(self.own))

    def list_uncounted(self, model: nn.Module) -> list[nn.Parameter]:
        """The parameters that count in a norm where another process holds them, too."""
        named = dict(model.named_parameters())
        return [named[name] for name, comm in self.tied.items() if comm.rank]

    def alike(self) -> Sequence[tuple[WholeAlike, str]]:
        """What looks whether tied parameters are the same still, and the name of each."""
        held = "held by several stages (mesh.pp)"
        return [(WholeAlike(comm, held), name) for name, comm in self.tied.items()]

    def close(self) -> None:
        """Lets go of the communicators that were made for it."""
        for comm in self.made:
            comm.close()


def hold_stages(model: nn.Module, job: Job, groups: Groups, knobs: PipelineKnobs) -> HeldStages:
    """Cuts ``model``, whole so far, and leaves in it what this process computes; collective.

    Raises:
        ConfigError: it has too few blocks, or a stage has no parameters that train.
        Unsupported: what is asked for cannot be honoured in stages.
    """
    check_alike(model, groups.whole)
    comm, pp = groups.pipeline, groups.mesh.pp
    count = pp * knobs.stages_per_rank
    each = f" x strategy.stages_per_rank={knobs.stages_per_rank}" * (knobs.stages_per_rank > 1)
    asked = f"mesh.pp={pp}{each}"
    plan = find_stages(model, count, split=knobs.split, both_ends=knobs.both_ends, asked=asked)
    own = tuple(range(comm.rank, count, pp))
    stages = plan.stages_of_parameters(model)
    _check_trains(stages, count, asked)
    everywhere = {name: _stand_in(p) for name, p in model.named_parameters()}
    shared = {name: stages[p] for name, p in model.named_parameters()}
    crossing = Crossing(
        model, plan, own, compute=DTYPES[job.precision.params], device=groups.whole.device
    )
    summary = _summarise(stages, plan, job, knobs, pp)
    buffers = frozenset(name for name, _ in model.named_buffers())
    crossing.remove_others()
    alone = comm.duplicate()
    tied, made = _tie(shared, groups, pp)
    return HeldStages(
        plan,
        knobs,
        own,
        comm,
        Exchange(alone),
        crossing,
        everywhere,
        buffers,
        tied,
        not any(groups.mesh.coordinates[axis] for axis in ("dp_shard", "cp", "tp")),
        summary,
        (alone, *made),
    )


def _check_trains(stages: Mapping[nn.Parameter, frozenset[int]], count: int, asked: str) -> None:
    train = {stage for p, own in stages.items() if p.requires_grad for stage in own}
    idle = sorted(set(range(count)) - train)
    if idle:
        raise ConfigError(
            f"{asked}: stage {idle[0]} of {count} has no parameters that train",
            fix="cut elsewhere by strategy.split, or free some of its parameters",
        )


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """For a parameter that another process holds: of its shape, in the memory of one number."""
    one = torch.zeros((), dtype=parameter.dtype)
    return nn.Parameter(one.expand(parameter.shape), requires_grad=parameter.requires_grad)


def _tie(
    shared: Mapping[str, Collection[int]], groups: Groups, pp: int
) -> tuple[dict[str, Communicator], list[Communicator]]:
    """The processes that hold each parameter which several do, as far as this one is one of them.

    Collective.
    """
    ranks = groups.mesh.ranks("pipeline")
    holders = {name: tuple(sorted({s % pp for s in stages})) for name, stages in shared.items()}
    made: dict[tuple[int, ...], Communicator] = {}
    for some in sorted({one for one in holders.values() if len(one) > 1}):
        if len(some) == pp:
            made[some] = groups.pipeline
            continue
        within = groups.pipeline.rank in some
        part = groups.whole.split([ranks[i] for i in some] if within else [groups.whole.rank])
        assert part is not None
        made[some] = part
    tied = {
        name: made[some]
        for name, some in holders.items()
        if len(some) > 1 and groups.pipeline.rank in some
    }
    return tied, [comm for comm in made.values() if comm is not groups.pipeline]


def _summarise(
    stages: Mapping[nn.Parameter, frozenset[int]],
    plan: StagePlan,
    job: Job,
    knobs: PipelineKnobs,
    pp: int,
) -> str:
    total = sum(p.numel() for p in stages)
    shares = [
        sum(p.numel() for p, own in stages.items() if stage in own) / max(1, total)
        for stage in range(plan.count)
    ]
    begins = ", ".join(plan.begins)
    waits = bubble(
        ranks=pp, stages_per_rank=knobs.stages_per_rank, micro_batches=job.batch.accumulate
    )
    said = (
        f"{plan.count} stages on {pp} processes ({plan.source}), the later ones from {begins} on, "
        f"with {', '.join(f'{share:.0%}' for share in shares)} of the parameters; "
        f"{knobs.schedule} with {job.batch.accumulate} micro-batches a step: a process waits "
        f"{waits:.0%} of the time"
    )
    if job.batch.accumulate < plan.count:
        more = bubble(ranks=pp, stages_per_rank=knobs.stages_per_rank, micro_batches=4 * pp)
        said += f", and {more:.0%} with trainer.accumulate={4 * pp}"
    return said


def check_beside(job: Job, model: nn.Module, knobs: PipelineKnobs) -> None:
    """Refuses what a model in several stages on one process would do wrong in silence.

    Raises:
        Unsupported: running averages of BatchNorm beside processes with other samples.
    """
    averaged = any(
        isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats
        for m in model.modules()
    ) or bool(job.task.running_averages(model))
    if averaged and knobs.stages_per_rank > 1 and job.batch.dp_size > 1:
        raise Unsupported(
            "strategy.stages_per_rank above 1 runs the stages of a process at different times, and "
            "running averages (BatchNorm) over several data-parallel processes follow one time",
            fix="set strategy.stages_per_rank=1 strategy.schedule=1f1b, or use another norm",
        )
