"""``trainer.compile=auto``: whether torch.compile pays within the length of a run."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from torsh_trainer.checkpoint.rng import rng_state, set_rng_state
from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.compression.base import NoCompression
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.data.batch import MicroBatch
from torsh_trainer.emulation import NONE
from torsh_trainer.strategies.base import BatchPlan, Engine, Job, Strategy
from torsh_trainer.strategies.compiling import records_graphs
from torsh_trainer.strategies.modules import randomness_of
from torsh_trainer.strategies.single import Single
from torsh_trainer.training.out_of_memory import is_out_of_memory, release
from torsh_trainer.training.program import TrainingProgramFactory
from torsh_trainer.training.run_spec import RunSpec

log = logging.getLogger(__name__)

LEAST = 1000
"""Micro-batches of a process; with fewer no compilation has paid, and nothing is measured."""

WORTH_TRYING_S = 120.0
"""What is left of the run, eagerly, from which on a compilation is tried."""

_WARM, _TIMED = 3, 10

Clock = Callable[[], float]


@dataclass(frozen=True)
class Measured:
    """What was measured of this run's model: seconds of the slowest process.

    ``eager_s`` and ``compiled_s`` are those of forward and backward of one micro-batch,
    ``compile_s`` those of compiling, ``count`` the micro-batches that a process has before it.
    """

    count: int
    eager_s: float
    compiled_s: float = math.inf
    compile_s: float = math.inf

    @property
    def pays(self) -> bool:
        """Whether the run ends earlier. It compiles once more, from caches or not."""
        compiled = 2 * self.compile_s + self.count * self.compiled_s
        return compiled < self.count * self.eager_s

    def __str__(self) -> str:
        if self.count * self.eager_s < WORTH_TRYING_S:
            return f"off: the {self.count:,} micro-batches of a process take too short a time"
        if not math.isfinite(self.compiled_s):
            return "off: the model could not be measured"
        ratio = self.compiled_s / self.eager_s
        told = f"forward and backward take {ratio:.2f} of the time"
        if not self.pays:
            return f"off: {told}, and compiling {self.compile_s:.0f} s"
        repaid = math.ceil(self.compile_s / (self.eager_s - self.compiled_s))
        return (
            f"on: {told}, and {self.compile_s:.0f} s of compiling are repaid after {repaid:,} of "
            f"{self.count:,} micro-batches"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values; what was not measured is None."""
        facts = {k: v if math.isfinite(v) else None for k, v in asdict(self).items()}
        return {"compiles": self.pays, **facts}


@dataclass(frozen=True)
class Settled:
    """What ``trainer.compile=auto`` has come to, in words for the summary; none on a CPU."""

    compiles: bool
    words: str = ""
    measured: Measured | None = None


def settle(
    spec: RunSpec,
    job: Job,
    strategy: Strategy,
    factory: TrainingProgramFactory,
    comm: Communicator,
    *,
    saved: bool | None,
    steps: int | None,
) -> Settled:
    """Whether this run is compiled; collective, and the same on all ranks.

    ``job`` is what it asks of an engine, eagerly. ``saved`` says how the checkpoint that it goes on
    from was trained, which then holds. ``steps`` are those before it, where their number is known.
    """
    if not asks_on(comm.device):
        return Settled(False)
    why = _why_eager(spec, job, strategy)
    if why:
        return Settled(False, f"off: {why}")
    if saved is not None:
        return Settled(saved, f"{'on' if saved else 'off'}, as the checkpoint was trained")
    count = (steps or 0) * job.batch.accumulate
    why = _why_unmeasured(factory, count)
    if why:
        return Settled(False, f"off: {why}")
    read, options = factory.read_micro_batch, spec.compile_options
    measured = measure(job, read, comm, options=options, count=count)
    return Settled(measured.pays, str(measured), measured)


def asks_on(device: torch.device) -> bool:
    """Whether the question is worth asking: a CPU compiles long, and gains little."""
    return device.type != "cpu"


def _why_eager(spec: RunSpec, job: Job, strategy: Strategy) -> str:
    """Why a run is not compiled, whatever it would gain; empty where it may be."""
    options = dict(spec.compile_options)
    if job.groups is not None and job.groups.mesh.pp > 1:
        return "mesh.pp leaves a forward where the next stage begins, which nothing compiles yet"
    if job.groups is not None and job.groups.mesh.tp > 1:
        return "mesh.tp cuts layers, whose sums over processes nothing compiles yet"
    if spec.deterministic:
        return "trainer.deterministic=true takes the same kernels in every run"
    if records_graphs(options) and job.batch.accumulate > 1:
        return f"trainer.compile_options={options} records CUDA graphs, beside accumulation"
    if randomness_of(replace(job, compile=options)) != job.randomness:
        return f"under trainer.compile_options={options} a dropout would draw by micro-batch"
    return strategy.cannot_compile()


def _why_unmeasured(factory: TrainingProgramFactory, count: int) -> str:
    if not factory.has_fixed_shapes:
        return "batches may differ in shape, and each shape is compiled"
    if not factory.reads_again:
        return "the data cannot be read beside the run"
    if count < LEAST:
        return "too few steps, or nobody knows how many"
    return ""


def measure(
    job: Job,
    read: Callable[[Communicator], MicroBatch],
    comm: Communicator,
    *,
    options: Mapping[str, Any],
    count: int,
    clock: Clock = time.perf_counter,
) -> Measured:
    """How fast this model is, eager and compiled; collective, and the same on all ranks.

    Each process measures by itself, on engines of one process that are thrown away: one that fails,
    for want of memory too, leaves nobody waiting. ``read`` gives a micro-batch, ``count`` are those
    that the run has before it. Random numbers go on as if nothing had happened.
    """
    alone = LocalCommunicator(comm.device)
    eager = _alone(job)
    with _random_numbers_kept(comm.device):
        (eager_s,) = _slowest(comm, _time(eager, read, alone, clock)[1:])
        if not math.isfinite(eager_s) or count * eager_s < WORTH_TRYING_S:
            return Measured(count, eager_s)
        compiled = replace(eager, compile=dict(options))
        first_s, compiled_s = _slowest(comm, _time(compiled, read, alone, clock))
    return Measured(count, eager_s, compiled_s, max(0.0, first_s - eager_s))


def _alone(job: Job) -> Job:
    """The same work for one process, eager, without what only several have."""
    size = job.batch.micro_batch_size
    return replace(
        job,
        batch=BatchPlan(size, size, 1, 1),
        compile=None,
        compression=NoCompression(),
        sync_batchnorm=False,
        ema_decay=None,
        emulation=NONE,
        groups=None,
    )


def _time(
    job: Job, read: Callable[[Communicator], MicroBatch], comm: Communicator, clock: Clock
) -> tuple[float, float]:
    """Seconds of the first forward and backward, and of each of those that follow.

    Both are infinite where it fails, which is told.
    """
    engine = None
    try:
        engine = Single().prepare(job, comm)
        micro = read(comm)
        first = _run(engine, micro, job, clock, times=1)
        _run(engine, micro, job, clock, times=_WARM)
        return first, _run(engine, micro, job, clock, times=_TIMED) / _TIMED
    except Exception as error:  # noqa: BLE001 - what torch.compile raises has no kind of its own
        what = "compiled" if job.compile is not None else "eager"
        short = "out of memory" if is_out_of_memory(error) else str(error).strip().split("\n")[0]
        log.warning("trainer.compile=auto: the model was not measured %s: %s", what, short)
        return math.inf, math.inf
    finally:
        if engine is not None:
            engine.close()
        del engine
        if job.compile is not None:
            torch.compiler.reset()  # what it has compiled holds the model
        release(comm.device)


def _run(engine: Engine, micro: MicroBatch, job: Job, clock: Clock, *, times: int) -> float:
    began = clock()
    for _ in range(times):
        engine.zero_grad()
        engine.forward_backward([micro], micro.weight, job.task)
    _wait(engine.model)
    return clock() - began


def _wait(model: nn.Module) -> None:
    device = next(model.parameters()).device
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def _slowest(comm: Communicator, seconds: Sequence[float]) -> list[float]:
    return comm.reduce_values(seconds, op="max")


@contextlib.contextmanager
def _random_numbers_kept(device: torch.device) -> Iterator[None]:
    """Generators of torch, Python and NumPy are afterwards as they were."""
    before = rng_state(device)
    try:
        yield
    finally:
        set_rng_state(before, device)
