"""What a run tells of itself: to its callbacks before the first step, and in result.json after."""

from __future__ import annotations

import math
from typing import Any

import torch

from torsh_trainer.callbacks.base import RunInfo
from torsh_trainer.callbacks.summary import summarise
from torsh_trainer.strategies.sync_batchnorm import count_normalised
from torsh_trainer.tasks.base import parameter_count
from torsh_trainer.training import attention, numerics
from torsh_trainer.training.run_parts import RunParts
from torsh_trainer.utils import hardware, peaks
from torsh_trainer.utils.masking import mask_tree


def describe_run(parts: RunParts) -> RunInfo:
    """What callbacks are given before the first step; collective."""
    spec, batch, factory = parts.spec, parts.job.batch, parts.factory
    model, first = parts.engine.model, parts.membership.kept is None
    parameters, trainable = parameter_count(model)
    flops = parts.task.flops_per_sample(model)
    peak = None if flops is None else _peak_flops(parts)
    tells_model = first and parts.world.is_rank_zero
    return RunInfo(
        run_dir=parts.run_dir,
        world=parts.world,
        strategy=parts.strategy.name,
        backend=parts.comm.backend,
        precision=parts.precision.name,
        numerics=_describe_numerics(parts),
        device=str(parts.comm.device),
        batch_size=batch.batch_size if factory.sized else 0,
        micro_batch_size=batch.micro_batch_size if factory.sized else 0,
        accumulate=batch.accumulate,
        loader_processes=factory.loader_processes,
        normalised=count_normalised(model, batch.micro_batch_size, batch.dp_size),
        max_steps=spec.max_steps,
        steps_per_epoch=factory.steps_per_epoch,
        first_step=parts.program.position.step,
        parameters=parameters,
        trainable_parameters=trainable,
        unit=parts.task.unit,
        units_per_sample=parts.task.units_per_sample,
        flops_per_sample=flops,
        peak_flops=peak,
        threads=torch.get_num_threads(),
        model_summary=summarise(model, layout=parts.engine.layout()) if tells_model else "",
        config=mask_tree(spec.config),
        total_steps=factory.total_steps,
        max_time_s=spec.max_time_s,
        trains=parts.trains,
        notes={**parts.task.notes(micro_batch_size=batch.micro_batch_size), **parts.notes},
    )


def make_result(parts: RunParts, *, wall_s: float) -> dict[str, Any]:
    """The content of result.json."""
    program = parts.program
    changing = list(parts.engine.changing_buffers())
    return {
        "strategy": parts.strategy.name,
        "comm": parts.comm.backend,
        "world_size": parts.world.size,
        "precision": parts.precision.name,
        "steps": program.position.step,
        "updates": program.position.updates,
        "epochs": program.position.epoch,
        "samples": program.position.samples,
        "train_loss": program.train_loss,
        "metrics": program.metrics,
        "wall_s": wall_s,
        "samples_per_s": program.samples_per_s,
        "peak_memory_bytes": hardware.peak_memory_bytes(parts.comm.device),
        "checkpoint": program.saved,
        "run_dir": str(parts.run_dir),
        **program.gradient_traffic,
        **({"changing_buffers": changing} if changing else {}),
        **parts.membership.findings,
        **parts.findings,
    }


def _describe_numerics(parts: RunParts) -> str:
    """What decides beside the precision's name how numbers are rounded."""
    words = (
        numerics.in_words(parts.spec.precision, parts.precision, parts.comm.device),
        attention.in_words(parts.spec.attention),
    )
    return "; ".join(filter(None, words))


def _peak_flops(parts: RunParts) -> float | None:
    """FLOP/s of all devices together, where each is known."""
    device, compute = parts.comm.device, parts.precision.compute
    mine = peaks.peak_flops(device, compute, given_tflops=parts.spec.peak_tflops)
    if mine is None and parts.world.is_rank_zero:
        peaks.tell_unknown(device, compute)
    total = parts.comm.reduce_values([math.nan if mine is None else mine])[0]
    return None if math.isnan(total) else total
