"""What sees a run from within: a callback that writes down each step, parameters included.

The run is an ordinary one. The strategy is handed on through ``WatchedStrategy``, which changes
nothing and shows the witness the engine that it has prepared.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torsh_trainer.callbacks.base import Callback, RunInfo, StepReport
from torsh_trainer.checkpoint.shards import FlatShard
from torsh_trainer.comm.base import CommOptions, Communicator
from torsh_trainer.comm.membership import Membership
from torsh_trainer.emulation import Emulation
from torsh_trainer.environments.world import World
from torsh_trainer.mesh import Groups
from torsh_trainer.strategies.base import Engine, Job, Mesh, Strategy
from torsh_trainer.verify.record import FACTS, ROWS, Arrays, parameters_file


class Witness(Callback):
    """Writes loss, gradient norm, learning rate and all parameters of every step.

    It needs ``trainer.log_every=1``. What it writes is read by ``record.Record``.
    """

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._groups: Groups | None = None
        self._folder = Path()
        self._gradient_scale = 1.0
        self._rate: float | None = None

    def sees(self, engine: Engine, groups: Groups, *, gradient_scale: float) -> None:
        """Told once the engine is there, and by how much its gradient is to exceed the mean."""
        self._engine, self._groups, self._gradient_scale = engine, groups, gradient_scale
        for optimizer in list(engine.optimizers.values())[:1]:
            optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Keeps the rate of the step: a scheduler may have set the next one before it is told."""
        self._rate = float(optimizer.param_groups[0]["lr"])

    def on_start(self, info: RunInfo) -> None:
        assert info.run_dir is not None, "a run that is watched has a directory"
        self._folder = info.run_dir
        assert self._engine is not None, "the engine is prepared before the first step"
        if info.world.is_rank_zero:
            facts = {
                "optimizers": [type(o).__name__ for o in self._engine.optimizers.values()],
                "gradient_scale": self._gradient_scale,
                "world_size": info.world.size,
                "micro_batch_size": info.micro_batch_size,
                "accumulate": info.accumulate,
                "parameters": info.parameters,
            }
            (self._folder / FACTS).write_text(json.dumps(facts))
        self._write(0, {})

    def on_step(self, report: StepReport) -> None:
        assert report.metrics is not None, "every step is reported"
        names = ("loss", "grad_norm", "lr", "skipped")
        values: dict[str, Any] = {name: report.metrics.get(name) for name in names}
        if self._rate is not None:
            values["lr"], self._rate = self._rate, None
        assert self._engine is not None
        values |= self._engine.last_step()
        values["changing_buffers"] = list(self._engine.changing_buffers())
        self._write(report.step, {**values, "samples": report.samples})

    def _write(self, step: int, values: Mapping[str, Any]) -> None:
        """Collective: parameters that several ranks hold in parts are put together."""
        assert self._engine is not None
        assert self._groups is not None
        arrays = parameters_of(self._engine, self._groups)
        sums = self._groups.whole.all_gather_object(_checksum(arrays))
        if not self._groups.whole.world.is_rank_zero:
            return
        names = numpy.array(list(arrays), dtype=str)
        with parameters_file(self._folder, step).open("wb") as file:
            numpy.savez(file, names=names, **{str(i): a for i, a in enumerate(arrays.values())})
        row = {"step": step, **values, "replicas_agree": len(set(sums)) == 1}
        with (self._folder / ROWS).open("a", encoding="utf-8") as file_of_rows:
            file_of_rows.write(json.dumps(row) + "\n")


def parameters_of(engine: Engine, groups: Groups) -> Arrays:
    """Every parameter whole, by name, in fp32 or what the engine's master copy has.

    Collective. Buffers are left out: those that matter are rank 0's, by the word of the contract.
    """
    buffers = {name for name, _ in engine.model.named_buffers()}
    state = {k: v for k, v in engine.state_dict()["model"].items() if k not in buffers}
    pieces: dict[str, list[Any]] = {}
    arrays: Arrays = {}
    for name, value in state.items():
        if isinstance(value, FlatShard):
            pieces[name] = [tuple(value.global_shape), value.offset, _array(value.tensor)]
            arrays[name] = _array(value.tensor)  # keeps its place
        else:
            arrays[name] = _array(_gather(value) if isinstance(value, DTensor) else value)
    arrays |= _join_pieces(groups.data.all_gather_object(pieces))
    if groups.mesh.pp == 1:
        return arrays
    stages = groups.pipeline.all_gather_object(arrays)
    return {name: array for stage in stages for name, array in stage.items()}


def _gather(value: DTensor) -> torch.Tensor:
    """The whole tensor; that several collectives make it is nothing that a user has to read."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return value.full_tensor()
    finally:
        logger.setLevel(level)


def _join_pieces(gathered: list[dict[str, list[Any]]]) -> Arrays:
    whole: Arrays = {}
    for pieces in gathered:
        for name, (shape, offset, piece) in pieces.items():
            if name not in whole:  # NaN: a hole must not look like a parameter
                whole[name] = numpy.full(shape, numpy.nan, dtype=piece.dtype)
            whole[name].reshape(-1)[offset : offset + piece.size] = piece.reshape(-1)
    return whole


def _array(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy()


def _checksum(arrays: Arrays) -> int:
    total = 0
    for name in sorted(arrays):
        total = zlib.crc32(numpy.ascontiguousarray(arrays[name]).tobytes(), total)
    return total


@dataclass(frozen=True)
class WatchedStrategy(Strategy):
    """``inner``, in everything; ``witness`` is shown the engine that it prepares."""

    inner: Strategy
    witness: Witness

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.inner.name

    @property
    def gradient_scale(self) -> float:  # type: ignore[override]
        return self.inner.gradient_scale

    @property
    def model_axes(self) -> frozenset[str]:  # type: ignore[override]
        return self.inner.model_axes

    @property
    def emulation(self) -> Emulation:
        return self.inner.emulation

    def gradient_scale_on(self, world: World) -> float:
        return self.inner.gradient_scale_on(world)

    def needs_process_group(self, world: World) -> bool:
        return self.inner.needs_process_group(world)

    def comm_options(self, options: CommOptions) -> CommOptions:
        return self.inner.comm_options(options)

    def membership(self, world: World, options: CommOptions) -> Membership:
        return self.inner.membership(world, options)

    def mesh(self, world: World) -> Mesh:
        return self.inner.mesh(world)

    def with_shards(self, dp_shard: int) -> Strategy:
        return WatchedStrategy(self.inner.with_shards(dp_shard), self.witness)

    def brings(self, *, schedule: str | None) -> Mapping[str, Any]:
        return self.inner.brings(schedule=schedule)

    def cannot_compile(self) -> str:
        return self.inner.cannot_compile()

    def resolve(self, job: Job, comm: Communicator) -> Strategy:
        return WatchedStrategy(self.inner.resolve(job, comm), self.witness)

    def prepare(self, job: Job, comm: Communicator) -> Engine:
        engine = self.inner.prepare(job, comm)
        scale = self.inner.gradient_scale_on(comm.world)
        groups = job.groups or Groups(self.inner.mesh(comm.world), comm)
        self.witness.sees(engine, groups, gradient_scale=scale)
        return engine
