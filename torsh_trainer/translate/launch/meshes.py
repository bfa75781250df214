"""Sizes of a mesh that a line states: the axes of Megatron's arguments and of accelerate's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torsh_trainer.translate.launch.flags import Judge, StatedFlag
from torsh_trainer.translate.launch.job import LaunchJob
from torsh_trainer.translate.outcomes import Outcome, dead, exact, faster, refuse

MODEL_AXES: Mapping[str, str] = {
    "tensor_model_parallel_size": "tp",
    "model_parallel_size": "tp",
    "parallelism_config_tp_size": "tp",
    "megatron_lm_tp_degree": "tp",
    "pipeline_model_parallel_size": "pp",
    "pipe_parallel_size": "pp",
    "megatron_lm_pp_degree": "pp",
    "context_parallel_size": "cp",
    "megatron_lm_context_parallel_size": "cp",
    "ds_sequence_parallel_size": "cp",
    "parallelism_config_cp_size": "cp",
    "parallelism_config_sp_size": "cp",
    "expert_model_parallel_size": "ep",
    "megatron_lm_expert_model_parallel_size": "ep",
}
"""Axes along which processes have the same samples, by the names of their flags."""

NOT_YET: Mapping[str, str] = {"ep": "parts of the experts"}
"""Axes that ``torsh_trainer.mesh.axes`` refuses, which imports torch."""

DATA_AXES: Mapping[str, str] = {
    "parallelism_config_dp_replicate_size": "dp_replicate",
    "parallelism_config_dp_shard_size": "dp_shard",
}
_WORDS = {
    "tp": "each layer is cut over so many processes, as the task's plan says",
    "pp": "so many stages; micro-batches go through them as trainer.accumulate says",
    "cp": "each sequence is cut over so many processes",
    "dp_replicate": "copies of the model that see other samples",
    "dp_shard": "processes that share one copy of the parameters",
}


DDP_ALONE = frozenset(
    f"strategy.{knob}"
    for knob in (
        *("backward_passes_per_step", "broadcast_buffers", "bucket_cap_mb", "op", "overlap"),
        *("gradient_as_bucket_view", "static_graph", "zero1"),
    )
)
"""Knobs of ``strategy=ddp`` that the strategy of a cut model has not."""

NOT_BESIDE = ("strategy.cpu_offload", "strategy.gather_in_compute_dtype")
"""Knobs that are refused where a model is cut."""

_ACCELERATES = ("parallelism_config_", "megatron_lm_")
_OFF = ("0", "1", "none", "no", "false", "null", "")


def read_axes(job: LaunchJob) -> dict[str, int]:
    """Sizes above 1 of the axes that cut the model, as far as the line states them."""
    found: dict[str, int] = {}
    for name, axis in MODEL_AXES.items():
        if _why_unread(job, name):
            continue
        said = job.option(name) if name.startswith(_ACCELERATES) else job.argument(name)
        if said is not None and said.hole is None and said.text.isdigit() and int(said.text) > 1:
            found[axis] = int(said.text)
    return found


def restate(becomes: str) -> str:
    """Knobs as a row says them, for the strategy of a cut model."""
    said = (word for word in becomes.split(" ") if word.partition("=")[0] not in DDP_ALONE)
    return " ".join("strategy=parallel" if w.startswith("strategy=") else w for w in said)


def uses_megatron(job: LaunchJob) -> bool:
    """Whether accelerate is to build Megatron-LM's engine."""
    kind, said = job.option("distributed_type"), job.option("use_megatron_lm")
    return (said is not None and said.is_on) or (
        kind is not None and kind.text.upper() == "MEGATRON_LM"
    )


def _why_unread(job: LaunchJob, name: str) -> str:
    """Why accelerate passes over a size; empty where it reads it."""
    if name.startswith("megatron_lm_") and not uses_megatron(job):
        return "Megatron-LM is not switched on (--use_megatron_lm)"
    if name.startswith("parallelism_config_"):
        switch = job.option("use_parallelism_config")
        in_file = any(said.key.startswith("parallelism_config.") for said in job.yaml)
        if not in_file and (switch is None or not switch.is_on):
            return "a mesh is not switched on (--use_parallelism_config)"
    return ""


def count_model_ranks(job: LaunchJob) -> int:
    """How many processes have the same samples, as far as the line states it."""
    return math.prod(read_axes(job).values())


def name_strategy(job: LaunchJob, alone: str) -> str:
    """``parallel`` where the line cuts the model, else ``alone``."""
    return "parallel" if read_axes(job) else alone


def choose_replicas(job: LaunchJob, why: str) -> Outcome:
    """Every process, or every group that cuts one model, holds all of its parameters."""
    if read_axes(job):
        return Outcome("exact", why, {"strategy": "parallel"}, {"mesh.dp_shard": 1})
    return Outcome("exact", why, {"strategy": "ddp"})


def judge_model_axis(job: LaunchJob, said: StatedFlag) -> Outcome:
    """The size of an axis that cuts the model (``MODEL_AXES``)."""
    if unread := _why_unread(job, said.name):
        return dead(unread)
    if job.text(said).lower() in _OFF:
        return dead("1: not divided")
    axis, size = MODEL_AXES[said.name], job.whole(said, least=1)
    if axis in NOT_YET:
        return refuse(f"not in this release: {NOT_YET[axis]}")
    processes, ranks = job.world.processes, count_model_ranks(job)
    if processes is not None and processes % ranks:
        return refuse(f"{processes} processes do not divide into models of {ranks}")
    values: dict[str, Any] = {f"mesh.{axis}": size}
    if axis == "cp":
        if "pp" in read_axes(job):
            return refuse("not in this release: sequences in parts beside stages (mesh.pp)")
        if "sequence" in said.name or "_sp_" in said.name:
            values["strategy.context_exchange"] = "alltoall"  # Ulysses
    return Outcome("exact", _WORDS[axis], {"strategy": "parallel"}, values)


def judge_data_axis(job: LaunchJob, said: StatedFlag) -> Outcome:
    """Replicas and shards of accelerate's mesh."""
    if unread := _why_unread(job, said.name):
        return dead(unread)
    axis, size = DATA_AXES[said.name], job.whole(said, least=1)
    if size == 1 and not read_axes(job):
        return dead("1: not divided")
    alone = "fsdp" if axis == "dp_shard" else ""
    strategy = name_strategy(job, alone)
    choices = {"strategy": strategy} if strategy else {}
    return Outcome("exact", _WORDS[axis], choices, {f"mesh.{axis}": size})


def judge_chunks(job: LaunchJob, said: StatedFlag) -> Outcome:
    """Several stages of each process, which shorten the pipeline's bubble."""
    axes = read_axes(job)
    if axes.get("pp", 1) == 1:
        return dead("read with a pipeline alone")
    if axes.get("tp", 1) > 1:
        return faster("the order of micro-batches is strategy.schedule=1f1b beside mesh.tp")
    chunks = job.whole(said, least=1)
    if "layers" in said.name:
        layers = job.argument("num_layers")
        if layers is None:
            return faster("strategy.stages_per_rank hangs on --num-layers, which the line lacks")
        chunks = max(job.whole(layers, least=1) // (axes["pp"] * chunks), 1)
    if chunks == 1:
        return dead("one stage a process")
    return exact(
        "stages of each process, in turn",
        strategy__schedule="interleaved_1f1b",
        strategy__stages_per_rank=chunks,
    )


def judge_sequence_parallel(job: LaunchJob, said: StatedFlag) -> Outcome:
    """Activations between the layers of a pair, cut along the sequence."""
    if said.values and job.text(said).lower() in _OFF[:1] + _OFF[2:]:
        return dead("switched off")
    axes = read_axes(job)
    if "tp" not in axes:
        return dead("read with cut layers alone")
    if "pp" in axes or "cp" in axes:
        return faster("memory of activations: beside other axes every process of mesh.tp has them")
    return exact("tokens are cut between cut layers", strategy__sequence_parallel=True)


JUDGES: Mapping[str, Judge] = {
    **dict.fromkeys(MODEL_AXES, judge_model_axis),
    **dict.fromkeys(DATA_AXES, judge_data_axis),
}
