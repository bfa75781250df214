"""The contracts of a strategy (knobs) and of an engine (the running thing).

A ``Strategy`` is a frozen dataclass: what YAML names. ``prepare`` turns it, with a ``Job`` and a
communicator, into an ``Engine``: what the loop drives. Nothing is half set up.

The gradient that an engine applies is the mean over the global batch by weight, times
``gradient_scale``: every micro-batch's mean loss enters with ``weight / total_weight``, summed over
micro-batches and over ranks.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_trainer.checkpoint.shards import FlatShard as FlatShard
from torsh_trainer.comm.base import CommOptions, Communicator
from torsh_trainer.comm.compression.base import Compression, NoCompression
from torsh_trainer.comm.compression.wire import Traffic
from torsh_trainer.comm.membership import Membership
from torsh_trainer.data.batch import MicroBatch as MicroBatch
from torsh_trainer.data.batch import MicroBatchPlace as MicroBatchPlace
from torsh_trainer.data.draws import forward_generators
from torsh_trainer.emulation import NONE, Emulation
from torsh_trainer.environments import advise_steady
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, Unsupported
from torsh_trainer.mesh import Groups
from torsh_trainer.mesh import Mesh as Mesh
from torsh_trainer.optim.loss_scaling import LossScaler
from torsh_trainer.optim.precision import Precision
from torsh_trainer.randomness import Randomness
from torsh_trainer.strategies.foreign import refuse_stepped
from torsh_trainer.tasks.base import Mean, Task


@dataclass(frozen=True)
class Clip:
    """Gradient clipping; None is none. ``norm`` bounds the global norm, ``value`` each element."""

    norm: float | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        for name, bound in (("max_grad_norm", self.norm), ("max_grad_value", self.value)):
            if bound is not None and bound <= 0:
                raise ConfigError(
                    f"trainer.{name}={bound} would zero every gradient",
                    fix="give a positive number, or null for no clipping",
                )


@dataclass(frozen=True)
class BatchPlan:
    """Batch arithmetic, checked: ``batch_size = micro_batch_size * accumulate * dp_size``."""

    batch_size: int
    micro_batch_size: int
    accumulate: int
    dp_size: int


class LossReport(NamedTuple):
    """This rank's losses of one step, unread: (mean loss, detached 0-dim tensor; weight) each."""

    parts: tuple[tuple[Tensor, float], ...]


class StepOutcome(NamedTuple):
    """What an optimizer step did.

    ``grad_norm`` is the global L2 norm before clipping, of the mean gradient with loss scaling
    divided out; None when neither clipping nor the caller needed it. ``skipped`` says that the
    gradients were not finite and no parameter changed.
    """

    grad_norm: Tensor | None
    skipped: bool


@dataclass(frozen=True)
class Job:
    """All that a run asks of an engine, before anything is wrapped.

    ``build_model`` gives a freshly initialised (seeded, pretrained, frozen) module on the CPU.
    ``compile`` is None or the keyword arguments of torch.compile. ``activation_checkpointing``
    wraps the modules that ``checkpoint_modules`` names (class names; empty: the children of the
    longest nn.ModuleList or nn.Sequential). ``ema_decay`` keeps an exponential moving average of
    the trainable parameters. ``skip_nonfinite`` asks for steps with non-finite gradients to be
    skipped. ``max_steps`` is None when only epochs or time bound the run. ``emulation`` is what the
    run itself does as another engine does it; precision and strategy have their own.
    ``manual`` says that the task calls ``backward`` and ``step_one`` itself, within a forward of
    the model's. ``randomness`` says what the random numbers of a forward depend on. ``groups`` are
    those of the mesh; None: every process that the engine is given sees other samples.
    """

    task: Task
    build_model: Callable[[], nn.Module]
    batch: BatchPlan
    precision: Precision = Precision()
    compression: Compression = NoCompression()
    clip: Clip = Clip()
    activation_checkpointing: bool | Literal["selective"] = False
    checkpoint_modules: tuple[str, ...] = ()
    compile: Mapping[str, Any] | None = None
    ema_decay: float | None = None
    skip_nonfinite: bool = False
    sync_batchnorm: bool = False
    max_steps: int | None = None
    emulation: Emulation = NONE
    manual: bool = False
    seed: int = 0
    deterministic: bool = False
    randomness: Randomness = "by_micro_batch"
    groups: Groups | None = None

    def build_optimizers(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> Mapping[str, Optimizer]:
        """The task's optimizers over the parameters as the engine holds them.

        Raises:
            ConfigError: none of the parameters train, an optimizer has one that is not the
                model's, or the task gave no mapping.
        """
        named = list(named_parameters)
        trainable = [(name, p) for name, p in named if p.requires_grad]
        if not trainable:
            raise ConfigError(
                "the optimizer has no parameters: nothing in the model requires a gradient",
                fix="unfreeze something (trainer.frozen), or check task.build_model",
            )
        optimizers = self.task.build_optimizers(trainable)
        if not isinstance(optimizers, Mapping):
            raise ConfigError(
                f"task.build_optimizers returned a {type(optimizers).__name__}, not a mapping of "
                "optimizers",
                fix='return {"main": optimizer}',
            )
        refuse_stepped(self.task, optimizers, [p for _, p in named])
        return optimizers


class GradientCompression(Protocol):
    """What an engine has to do with the compression of its gradients, whoever does it."""

    @property
    def traffic(self) -> Traffic:
        """Bytes of gradients on this rank's wire, all told."""

    def begin(self, unit: float) -> None:
        """Before a backward: what one stands for in gradients (the loss scale)."""

    def advance(self) -> None:
        """An optimizer step has ended."""

    def expect(self, saved: Mapping[str, Any]) -> None:
        """Before ``template``: what a checkpoint holds of compression beside tensors."""

    def template(self) -> dict[str, Any]:
        """``state_dict`` for a checkpoint to fill."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes what ``template`` gave, filled."""


class Engine(abc.ABC):
    """A model in training under one strategy, on one process.

    The loop calls ``zero_grad``, ``forward_backward`` and ``step`` once a step, in that order.
    """

    model: nn.Module
    """The user's module (unwrapped); its parameters may be shards."""

    module: nn.Module
    """What ``task.forward`` calls while training: ``model``, or the engine's wrapper around it.
    Under manual optimization a forward goes through it too."""

    optimizers: Mapping[str, Optimizer]

    whole_optimizers: ClassVar[bool] = True
    """Whether those that the task built, and that are stepped, hold whole gradients and state."""

    @property
    def compression(self) -> GradientCompression | None:
        """What compresses gradients, with what it keeps in checkpoints; None where none does."""
        return None

    randomness: Randomness = "by_micro_batch"
    """What the random numbers of its training forwards depend on; ``Job.randomness`` asks."""

    evaluates_together: bool = False
    """Whether all ranks take part in every forward without gradients, and make as many."""

    @property
    def loss_scaler(self) -> LossScaler | None:
        """What scales the loss, if anything does."""
        return None

    @abc.abstractmethod
    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], total_weight: float, task: Task
    ) -> LossReport:
        """Forward and backward over this rank's share of a step.

        ``total_weight`` is the weight of the whole global batch (all ranks, all micro-batches). On
        return the gradients are those of the global batch, communicated.

        Raises:
            ConfigError: the loss is not a scalar or has no gradient.
        """

    @abc.abstractmethod
    def step(self, clip: Clip, *, measure_norm: bool = False) -> StepOutcome:
        """Unscales, clips and applies the gradients: one update, the same on every rank.

        ``measure_norm`` asks for the norm before clipping where ``clip`` needs none. Where a loss
        scaler or ``trainer.on_nonfinite=skip`` asks for it, a step whose gradients are not finite
        changes nothing, and its outcome says so.
        """

    @abc.abstractmethod
    def zero_grad(self) -> None:
        """Forgets the gradients."""

    @abc.abstractmethod
    def backward(
        self, loss: Tensor, *, sync: bool = True, run: Callable[[Tensor], object] = Tensor.backward
    ) -> None:
        """Manual optimization: adds the gradients of ``loss``; ``sync`` communicates them.

        The gradient of ``loss`` is averaged over ranks. ``run`` is what computes it, from the loss
        as it is scaled.

        Raises:
            Unsupported: another ``run`` than the default, to an engine with a backward of its own.
        """

    def draw_for(self, micro: MicroBatch) -> None:
        """The next forwards and backwards that the caller makes draw as one of ``micro``, whose
        batch nobody looks at.

        An engine without a word on this draws by micro-batch.
        """
        if micro.rng_key is not None:
            for generator in forward_generators(next(self.model.parameters()).device):
                generator.manual_seed(micro.rng_key)

    def without_sync(self) -> contextlib.AbstractContextManager[None]:
        """Forwards and backwards within add to local gradients and communicate nothing."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def training_forward(self, *, manual: bool = False) -> Iterator[nn.Module]:
        """Around one training forward that the caller makes: gives what to call.

        ``manual`` says that ``backward`` and ``step_one`` are called within it.
        """
        yield self.module

    @contextlib.contextmanager
    def evaluation_forward(self) -> Iterator[nn.Module]:
        """Around one forward without gradients that the caller makes: gives what to call.

        Every rank makes one, and with ``evaluates_together`` as many as the others. Modes and
        gradients are the caller's to switch.
        """
        yield self.module

    def clip_one(self, name: str, clip: Clip, *, measure_norm: bool = False) -> Tensor | None:
        """Manual optimization: clips now what ``step_one`` of that optimizer will apply.

        Gives the norm before it, where there is a bound for it or ``measure_norm`` asks, and the
        engine knows it by now.

        Raises:
            Unsupported: gradients cannot be clipped apart from a step.
        """
        raise Unsupported(
            "this strategy cannot clip gradients apart from a step",
            fix="leave clipping out, or use strategy=ddp or strategy=fsdp",
        )

    @abc.abstractmethod
    def step_one(
        self, name: str, clip: Clip = Clip(), *, measure_norm: bool = False
    ) -> StepOutcome:
        """Manual optimization: steps the optimizer called ``name`` alone.

        The norm is that of its gradients; after ``clip_one`` what that has found.
        """

    @abc.abstractmethod
    def evaluate(
        self, batches: Iterable[tuple[Any, bool]], task: Task, *, averaged: bool = False
    ) -> dict[str, Mean]:
        """Sums ``task.evaluate`` over this rank's batches, on the device and unreduced.

        Each item is (batch, counts): a batch that does not count is run, because every rank runs
        as many forwards, and dropped from the sums. ``averaged`` uses the moving average.
        """

    @abc.abstractmethod
    def predict(
        self, batches: Iterable[tuple[Any, bool]], task: Task, *, averaged: bool = False
    ) -> Iterable[Any]:
        """``task.predict`` of each batch that counts, in order."""

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything that training has changed, by parameter name and independent of the engine.

        ``{"model": {name: fp32 master or buffer}, "optimizer": {optimizer name: {"state":
        {parameter name: {slot: tensor}}, "groups": [settings with "params": names]}},
        "loss_scale": {...}, "ema": {...}}``. A tensor entry is a Tensor, a DTensor or a FlatShard;
        collective: every rank calls it, and holds its own part.
        """

    @abc.abstractmethod
    def state_template(self) -> dict[str, Any]:
        """``state_dict`` for a checkpoint to fill: optimizer slots exist even before a step."""

    @abc.abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what ``state_dict`` gave, filled with a checkpoint's values.

        A parameter that ``state["optimizer"]`` does not name has no optimizer state.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Lets go of hooks and buffers; the communicator is the caller's."""

    def expect(self, saved: Mapping[str, Any]) -> None:  # noqa: B027 - most need not know
        """Told before ``state_template`` what the checkpoint's state holds beside tensors."""

    def last_step(self) -> Mapping[str, float]:
        """What the last step used: ``loss_scale`` where the loss is scaled, and ``lr`` of an engine
        that keeps its own rates."""
        return {}

    def changing_buffers(self) -> Sequence[str]:
        """Names of the buffers that training forwards change and that belong to no running average.

        Known after the first step, on several ranks. With them the result may depend on the
        number of processes.
        """
        return ()

    def name_groups(self) -> Mapping[str, Sequence[Sequence[str]]]:
        """Names of the parameters in each group of each optimizer, those included that other
        processes hold."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        return {
            key: [[names[id(p)] for p in group["params"] if id(p) in names] for group in groups]
            for key, groups in ((k, one.param_groups) for k, one in self.optimizers.items())
        }

    def whole_shapes(self) -> contextlib.AbstractContextManager[None]:
        """Within, parameters of ``model`` have the shapes that they were built with, for who counts
        them, where an engine leaves them empty between their uses; their values are not there."""
        return contextlib.nullcontext()

    def layout(self) -> str:
        """How the model is cut over processes, in one line; empty where it is whole on each."""
        return ""

    def traffic(self) -> Traffic | None:
        """Bytes of gradients on this rank's wire so far; None where the engine does not count."""
        return None


class Strategy(abc.ABC):
    """How training is spread over processes; subclasses are frozen dataclasses of knobs."""

    name: ClassVar[str]
    gradient_scale: ClassVar[float] = 1.0

    model_axes: ClassVar[frozenset[str]] = frozenset()
    """The axes of processes with the same samples (``mesh.AXES``) that its engine may stand
    beside: it reduces over the communicator that ``prepare`` is given, and no other."""

    def gradient_scale_on(self, world: World) -> float:
        """How many times the mean over the global batch the gradient is: 1, or more for a sum.

        It depends on ``world`` where ranks are summed.
        """
        return self.gradient_scale * self.emulation.gradient_scale(world.size)

    @property
    def emulation(self) -> Emulation:
        """What it does with gradients as another engine does it; nothing by default."""
        return NONE

    def needs_process_group(self, world: World) -> bool:
        """False where one process does without a torch.distributed group (single, dp)."""
        return True

    def comm_options(self, options: CommOptions) -> CommOptions:
        """The process group that it runs on, where it is bound to one; ``options`` by default.

        Raises:
            ConfigError: ``options`` ask for another backend than its own.
        """
        return options

    def membership(self, world: World, options: CommOptions) -> Membership:
        """Which processes a run that begins as ``world`` consists of.

        Raises:
            Unsupported: processes come and go there, and this strategy needs the same ones.
        """
        if world.elastic:
            raise self.refuse(
                f"processes that come and go, as {world.source} has started these",
                use=advise_steady(world.source),
            )
        return Membership()

    @abc.abstractmethod
    def mesh(self, world: World) -> Mesh:
        """How ``world`` is divided, all of whose processes see other samples.

        Raises:
            ConfigError: this strategy does not fit that many processes.
        """

    def with_shards(self, dp_shard: int) -> Strategy:
        """This strategy, with one copy of the parameters cut over that many processes.

        Raises:
            Unsupported: it cuts no parameters.
        """
        if dp_shard == 1:
            return self
        raise self.refuse(f"mesh.dp_shard={dp_shard}", use="leave it out, or use strategy=fsdp")

    @abc.abstractmethod
    def prepare(self, job: Job, comm: Communicator) -> Engine:
        """The engine, ready for its first step.

        ``comm`` are the processes that see other samples; where others have the same ones,
        ``job.groups`` knows them.

        Raises:
            Unsupported: an option that ``job`` asks for cannot be honoured here.
        """

    def brings(self, *, schedule: str | None) -> Mapping[str, Any]:
        """What its own configuration says of the run, which takes it where it says nothing itself.

        Any of ``batch_size``, ``micro_batch_size``, ``accumulate``, ``schedule`` and ``precision``
        (for ``precision.compute=auto``); nothing by default. ``schedule`` is the name of the run's
        own, None where that is constant.

        Raises:
            ConfigError: it brings a schedule to a run that has one.
        """
        return {}

    def resolve(self, job: Job, comm: Communicator) -> Strategy:
        """The strategy that will really run (``auto`` chooses another); itself by default."""
        return self

    def cannot_compile(self) -> str:
        """Why it refuses ``trainer.compile=true``; empty where it does not."""
        return ""

    def refuse(self, option: str, *, use: str) -> Unsupported:
        """The error for an option that this strategy cannot honour; the caller raises it.

        ``option`` is what was asked for (``trainer.compile``), ``use`` what to do instead.
        """
        return Unsupported(
            f"strategy={self.name} cannot honour {option}", fix=use, strategy=self.name
        )
