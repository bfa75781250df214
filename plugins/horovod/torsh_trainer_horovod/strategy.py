"""The knobs of ``strategy=horovod``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from torsh_trainer.comm.base import CommOptions, Communicator
from torsh_trainer.comm.compression.base import Compressing, NoCompression
from torsh_trainer.comm.membership import Membership
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, ResourceError, nearest
from torsh_trainer.strategies import modules
from torsh_trainer.strategies.base import Engine, Job, Mesh, Strategy
from torsh_trainer.strategies.compressing import compressing
from torsh_trainer.strategies.single import computing
from torsh_trainer_horovod.settings import variables_of

OPS = ("average", "sum", "adasum")
COMPRESSIONS = ("none", "fp16")
LEAST = {
    "fusion_threshold_mb": 0,
    "cycle_time_ms": 0,
    "cache_capacity": 0,
    "autotune_warmup_samples": 0,
    "autotune_steps_per_sample": 1,
    "autotune_bayes_opt_max_samples": 1,
    "autotune_gaussian_process_noise": 0,
    "stall_warning_s": 0,
    "stall_shutdown_s": 0,
    "backward_passes_per_step": 1,
    "elastic_keep_every": 1,
}
"""The smallest value of each number."""


@dataclass(frozen=True)
class Horovod(Strategy):
    """Every process holds the whole model; Horovod's DistributedOptimizer reduces the gradients.

    The first knobs are Horovod's own settings; None leaves one to what horovodrun or the HOROVOD_*
    variables say, else to Horovod. ``fusion_threshold_mb`` MiB of gradients travel together, at
    most (0: each tensor alone). ``cycle_time_ms`` is how long gradients are collected,
    ``cache_capacity`` how many are remembered (0: none). ``hierarchical_allreduce`` and
    ``hierarchical_allgather`` reduce within nodes first. ``autotune`` lets Horovod look for the
    best of these while training; ``autotune_log`` is a file for what it tried, the other
    ``autotune_`` knobs are its own. ``timeline`` is a file for Chrome's tracing,
    ``timeline_mark_cycles`` marks the cycles in it. ``stall_check`` warns of ranks that do not come
    for ``stall_warning_s``, and ends the job after ``stall_shutdown_s`` (0: never).
    ``dynamic_process_sets`` lets the user's own code make process sets (``hvd.add_process_set``)
    for collectives of its own.

    ``compression`` fp16 rounds gradients to fp16 on the wire (Horovod's Compression.fp16).
    ``backward_passes_per_step`` sums so many backward passes instead of averaging them, and ``op``
    sum adds gradients up over ranks instead of averaging them: both multiply the gradient. ``op``
    adasum, with Horovod built and running on MPI, combines the ranks' own steps, see ``adasum``.
    ``gradient_predivide_factor`` splits the division by the number of ranks into one before and
    one after the sum. ``groups`` reduces parameters in so many groups, or in the groups of names
    given. ``sparse_as_dense`` makes the sparse gradients of embeddings dense on the wire.
    ``find_unused_parameters`` allows parameters without a gradient, at the price of one small
    reduction a step. ``broadcast_buffers`` takes rank 0's buffers before every step; Horovod
    itself leaves each rank its own. ``process_set`` names the ranks among which gradients are
    reduced: all of them, for a run trains one model.

    In horovodrun's elastic mode the state of training is copied to the CPU every
    ``elastic_keep_every`` steps, and at most so many are done again when a process is lost.

    Raises:
        ConfigError: a knob is out of range, or two exclude each other.
    """

    name: ClassVar[str] = "horovod"
    fusion_threshold_mb: float | None = None
    cycle_time_ms: float | None = None
    cache_capacity: int | None = None
    hierarchical_allreduce: bool | None = None
    hierarchical_allgather: bool | None = None
    autotune: bool | None = None
    autotune_log: str | None = None
    autotune_warmup_samples: int | None = None
    autotune_steps_per_sample: int | None = None
    autotune_bayes_opt_max_samples: int | None = None
    autotune_gaussian_process_noise: float | None = None
    timeline: str | None = None
    timeline_mark_cycles: bool | None = None
    stall_check: bool | None = None
    stall_warning_s: int | None = None
    stall_shutdown_s: int | None = None
    dynamic_process_sets: bool | None = None
    compression: Literal["none", "fp16"] = "none"
    backward_passes_per_step: int = 1
    op: Literal["average", "sum", "adasum"] = "average"
    gradient_predivide_factor: float = 1.0
    groups: int | tuple[tuple[str, ...], ...] | None = None
    sparse_as_dense: bool = False
    find_unused_parameters: bool = False
    broadcast_buffers: bool = True
    process_set: tuple[int, ...] | None = None
    elastic_keep_every: int = 10

    def __post_init__(self) -> None:
        for knob, least in LEAST.items():
            value = getattr(self, knob)
            if value is not None and value < least:
                raise ConfigError(
                    f"strategy.{knob}={value} is below {least}", fix=f"give {least} or more"
                )
        for knob, known in (("op", OPS), ("compression", COMPRESSIONS)):
            word = getattr(self, knob)
            if word not in known:
                raise ConfigError(f"strategy.{knob}={word} is unknown", fix=nearest(word, known))
        if self.process_set is not None:
            object.__setattr__(self, "process_set", tuple(self.process_set))  # YAML has lists
        self._check_groups()
        self._check_predivide()
        self._check_adasum()

    def _check_groups(self) -> None:
        if self.groups is None:
            return
        if not isinstance(self.groups, int):
            # From YAML they come as lists; as tuples they can be compared and travel.
            object.__setattr__(self, "groups", tuple(tuple(group) for group in self.groups))
            names = [name for group in self.groups for name in group]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ConfigError(
                    f"strategy.groups names {twice[0]!r} twice", fix="a parameter is in one group"
                )
        elif self.groups < 1:
            raise ConfigError(
                f"strategy.groups={self.groups} is below 1", fix="give null for no groups"
            )
        if self.find_unused_parameters:
            raise ConfigError(
                "strategy.groups and strategy.find_unused_parameters exclude each other: a group "
                "is reduced once all of it has a gradient",
                fix="drop one of them",
            )

    def _check_predivide(self) -> None:
        if self.gradient_predivide_factor <= 0:
            raise ConfigError(
                f"strategy.gradient_predivide_factor={self.gradient_predivide_factor} is not "
                "positive",
                fix="1 divides after the sum, the number of ranks before it",
            )
        if self.gradient_predivide_factor == 1.0:
            return
        for knob, value, plain in (("op", self.op, "average"), ("groups", self.groups, None)):
            if value != plain:
                raise ConfigError(
                    f"strategy.gradient_predivide_factor does nothing with strategy.{knob}={value}",
                    fix="drop one of them",
                )

    def _check_adasum(self) -> None:
        for knob in ("groups", "sparse_as_dense", "find_unused_parameters"):
            if self.op == "adasum" and getattr(self, knob):
                raise ConfigError(
                    f"strategy.{knob} does nothing with strategy.op=adasum", fix="drop one of them"
                )

    def gradient_scale_on(self, world: World) -> float:
        ranks = world.size if self.op == "sum" else 1
        return float(self.backward_passes_per_step * ranks)

    def mesh(self, world: World) -> Mesh:
        return Mesh.data_parallel(world)

    @property
    def variables(self) -> dict[str, str]:
        """What Horovod finds in its environment when it starts."""
        return variables_of(self)

    def membership(self, world: World, options: CommOptions) -> Membership:
        if not world.elastic:
            return super().membership(world, options)
        self._check_elastic(options)
        check_installed()
        # Imported late, as in ``prepare``.
        from torsh_trainer_horovod.elastic import ElasticMembership

        return ElasticMembership(self, options)

    def prepare(self, job: Job, comm: Communicator) -> Engine:
        check_installed()
        self._check_job(job)
        self._check_process_set(comm.world)
        if comm.world.elastic and not isinstance(job.compression, NoCompression):
            raise self.refuse(
                f"compression={job.compression.name} while processes come and go: what a process "
                "still owes to the gradient goes with it",
                use="set compression=none, or strategy.compression=fp16",
            )
        # Imported late: it loads Horovod, which is not there on a machine that only composes.
        from torsh_trainer_horovod.adasum import adasum_engine
        from torsh_trainer_horovod.engine import HorovodEngine, compressing_engine

        knobs = compressing(self, job, comm)
        if knobs is not None:
            self._check_compression(knobs)
        model = modules.build(job, comm)
        modules.refuse_kinds(model, self, float64=True, without_dimensions=True)
        if comm.world.size > 1:
            modules.refuse_accumulated(model, self)
            if knobs is None and self.op == "average" and not self.may_sum(job):
                self._check_hooks(model)
        groups = self._find_groups(model)
        module = computing(model, job)
        modules.compile_modules(job, [module])
        if knobs is not None:
            return compressing_engine(self, knobs, job, comm, model=model, module=module)
        if self.op == "adasum":
            return adasum_engine(self, job, comm, model=model, module=module)
        return HorovodEngine(self, job, comm, model=model, module=module, groups=groups)

    def may_sum(self, job: Job) -> bool:
        """Whether ``op=average`` is a sum of what the loss was multiplied for, with the same bits.

        In fp16 small numbers are rounded otherwise.
        """
        fp16 = "fp16" in (self.compression, job.precision.reduce, job.precision.compute)
        return self.op == "average" and self.gradient_predivide_factor == 1.0 and not fp16

    def _check_hooks(self, model: nn.Module) -> None:
        """Raises Unsupported for a hook that would see a gradient times the number of ranks."""
        for name, p in model.named_parameters():
            if p._backward_hooks:
                raise self.refuse(
                    f"the parameter {name!r} with a hook of its own beside "
                    "gradient_predivide_factor or fp16, where the hook sees the "
                    "gradient times the number of processes",
                    use="leave these at their defaults",
                )

    def _check_elastic(self, options: CommOptions) -> None:
        """Raises Unsupported for what cannot be where processes come and go."""
        here = "while processes come and go"
        if options.backend not in ("auto", "gloo"):
            raise self.refuse(
                f"comm.backend={options.backend} {here}: only gloo notices that one is gone",
                use="set comm=auto",
            )
        if self.autotune:
            raise self.refuse(
                f"autotune {here}: each process counts the samples by itself, and those who come "
                "would not agree with the others",
                use="look for the settings in a run of its own (strategy.autotune_log), and set "
                "them here",
            )
        if self.op != "average":
            raise self.refuse(
                f"op={self.op} {here}: the step would follow their number",
                use="set strategy.op=average",
            )
        if self.backward_passes_per_step > 1:
            raise self.refuse(
                f"backward_passes_per_step={self.backward_passes_per_step} {here}: "
                "trainer.accumulate follows their number",
                use="set strategy.backward_passes_per_step=1",
            )

    def _check_compression(self, knobs: Compressing) -> None:
        """Raises Unsupported for what excludes the trainer's own compression."""
        asked = f"compression={knobs.name}"
        if knobs.name in ("bf16", "powersgd"):
            why = "cannot add bf16 numbers" if knobs.name == "bf16" else "is not what it runs on"
            raise self.refuse(
                f"{asked}: Horovod {why}", use="set compression=fp16 or topk, or strategy=ddp"
            )
        for knob in (
            "compression",
            "op",
            "backward_passes_per_step",
            "gradient_predivide_factor",
            "groups",
            "sparse_as_dense",
        ):
            if getattr(self, knob) != getattr(type(self), knob):
                raise self.refuse(
                    f"{asked} with strategy.{knob}={getattr(self, knob)}, which belongs to "
                    "Horovod's own optimizer",
                    use="drop one of them",
                )
        if knobs.keeps_residual and self.find_unused_parameters:
            raise self.refuse(
                "compression.memory=residual with strategy.find_unused_parameters: what is owed to "
                "a parameter that a step does not use would be lost",
                use="set compression.memory=none",
            )

    def _check_process_set(self, world: World) -> None:
        if self.process_set is None or sorted(self.process_set) == list(range(world.size)):
            return
        others = sorted(set(range(world.size)) - set(self.process_set))
        which = f"rank {others[0]}" if others else "ranks that are not there"
        raise self.refuse(
            f"process_set={list(self.process_set)} of {world.size} processes: {which} would train "
            "another model, and a run has one",
            use="leave it null, and start only those processes; dynamic_process_sets=true is for "
            "collectives of your own",
        )

    def _check_job(self, job: Job) -> None:
        if job.precision.reduce == "bf16":
            raise self.refuse(
                "precision.reduce=bf16: Horovod 0.28.1 cannot add bf16 numbers",
                use="set precision.reduce=fp32, or strategy.compression=fp16",
            )
        if job.batch.accumulate % self.backward_passes_per_step:
            raise ConfigError(
                f"strategy.backward_passes_per_step={self.backward_passes_per_step} does not "
                f"divide trainer.accumulate={job.batch.accumulate}",
                fix="accumulate counts every backward of a step: make it a multiple",
            )

    def _find_groups(self, model: nn.Module) -> int | list[list[nn.Parameter]] | None:
        """``groups`` as Horovod takes it.

        Raises:
            ConfigError: the model has no parameter of that name.
        """
        if self.groups is None or isinstance(self.groups, int):
            return self.groups
        parameters = dict(model.named_parameters())
        for name in (name for group in self.groups for name in group):
            if name not in parameters:
                raise ConfigError(
                    f"strategy.groups names {name!r}, and the model has no such parameter",
                    fix=nearest(name, parameters),
                )
        return [[parameters[name] for name in group] for group in self.groups]


def check_installed() -> None:
    """Raises ResourceError where Horovod cannot be imported, with the command that makes it."""
    try:
        # Imported here: listing and composing this strategy must not need it.
        import horovod.torch  # noqa: F401
    except ImportError as error:
        raise ResourceError(
            f"strategy=horovod needs Horovod, which this Python cannot import ({error})",
            fix="build and install it: python -m torsh_trainer_horovod.build",
        ) from error
