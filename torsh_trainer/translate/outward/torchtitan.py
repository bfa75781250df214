"""Native to torchtitan: the TOML of `--job.config_file`.

Read from torchtitan 0.2.2 (``config/job_config.py``, ``components``), the last release that takes
a file; 0.3 has Python functions in its place, whose fields bear the same names on the command line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.outward.native import (
    Native,
    Outcome,
    RuleTable,
    approximate,
    dead,
    enter_scripts,
    enter_torchs,
    exact,
    faster,
    off,
    refuse,
)
from torsh_trainer.translate.plan import Plan
from torsh_trainer.translate.recipe import nest

VERSION = "0.2.2"
"""The release of torchtitan that was read."""

TABLE = RuleTable("torchtitan")
REPLICATED = ("DDP", "Gloo", "NCCL", "MPI")
SHARDED = ("FSDP", "Parallel")

enter_scripts(TABLE)
enter_torchs(TABLE, "torchtitan")
for _name in ("trainer.max_steps", "trainer.seed", "trainer.deterministic"):
    del TABLE.rules[_name]  # torchtitan's file says these


def to_torchtitan(native: Native) -> Plan:
    """The translation of ``native``; its ``values`` are the content of the file.

    Raises:
        ConfigError: the strategy is none of ddp and fsdp, or ddp of an unknown number of processes.
    """
    kind = native.kind("strategy")
    if kind not in (*SHARDED, *REPLICATED):
        raise ConfigError(
            f"{native.name}: torchtitan has no strategy {kind}",
            fix="add strategy=fsdp, strategy=parallel or strategy=ddp",
        )
    if kind in REPLICATED and native.processes is None:
        raise ConfigError(
            f"{native.name}: torchtitan wants the number of replicas",
            fix="add launcher.num_processes=8, say",
        )
    return TABLE.plan(native, target_version=VERSION)


def text_of(plan: Plan) -> str:
    """The file."""
    parts = []
    for section, content in nest(plan.values).items():
        lines = [f"{name} = {_toml(value)}" for name, value in content.items()]
        parts.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(parts) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value)


# -- how the model is cut ------------------------------------------------------------------------


@TABLE.rule("strategy")
def _strategy(native: Native, key: str, value: Any) -> Outcome:
    prefix = "parallelism.data_parallel"
    if value not in SHARDED:
        written = {f"{prefix}_replicate_degree": native.processes, f"{prefix}_shard_degree": 1}
        return Outcome("exact", "whole in every process", values=written)
    size = native.get("strategy.shard_size") or native.get("mesh.dp_shard")
    copies = native.get("mesh.dp_replicate")
    written = {f"{prefix}_shard_degree": size or -1}
    if size in (None, -1):
        if copies not in (None, -1):
            written[f"{prefix}_replicate_degree"] = copies
    elif native.processes:
        models = native.processes // math.prod(native.get(f"mesh.{axis}") or 1 for axis in _AXES)
        written[f"{prefix}_replicate_degree"] = models // size
    return Outcome("exact", "FSDP2, as here", values=written)


_AXES = ("tp", "pp", "cp")
"""Axes that cut a model, which a file of torchtitan knows as well."""

_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
}


@TABLE.rule("mesh.dp_replicate", "mesh.dp_shard")
def _copies(native: Native, key: str, value: Any) -> Outcome:
    if value not in (None, 1, -1) and native.processes is None:
        return refuse("how many replicas there are depends on launcher.num_processes: state it")
    return exact("says the degrees") if value else dead("what remains")


@TABLE.rule("mesh.tp")
def _layers(native: Native, key: str, value: Any) -> Outcome:
    if value in (None, 1):
        return exact("off")
    why = "layers are cut as the plan of torchtitan's model says"
    return exact(why, parallelism__tensor_parallel_degree=value)


@TABLE.rule("mesh.cp")
def _sequences(native: Native, key: str, value: Any) -> Outcome:
    if value in (None, 1):
        return exact("off")
    if native.get("strategy.context_exchange") == "ring":
        return refuse("torchtitan exchanges keys and values by allgather or alltoall")
    return faster(
        "torchtitan gathers keys and values, or shuffles them between processes",
        parallelism__context_parallel_degree=value,
        parallelism__context_parallel_rotate_method="allgather",
    )


TABLE.fixed_rules("dead", "stands with the degree of cp", "strategy.context_exchange")
TABLE.rule("strategy.pad")(off("torchtitan wants lengths that divide", False))
TABLE.rule("strategy.sequence_parallel")(
    lambda native, key, value: faster("its tensor parallel cuts tokens between layers always")
)
TABLE.fixed_rules(
    "dead", "says how sequences lie", "strategy.context_plan", "strategy.context_plan.*"
)


@TABLE.rule("mesh.pp")
def _stages(native: Native, key: str, value: Any) -> Outcome:
    if value in (None, 1):
        return exact("off")
    micro = native.get("data.micro_batch_size")
    if micro is None:
        return refuse("torchtitan wants the samples of a micro-batch: state data.micro_batch_size")
    schedule = _SCHEDULES[native.get("strategy.schedule", "1f1b")]
    return exact(
        "stages",
        parallelism__pipeline_parallel_degree=value,
        parallelism__pipeline_parallel_schedule=schedule,
        parallelism__pipeline_parallel_microbatch_size=micro,
    )


@TABLE.rule("strategy.schedule", "strategy.stages_per_rank")
def _order(native: Native, key: str, value: Any) -> Outcome:
    if key == "strategy.stages_per_rank" and value > 1:
        return approximate("torchtitan counts layers: pipeline_parallel_layers_per_stage says it")
    return exact("stands with the degree of pp")


TABLE.rule("strategy.split", "strategy.both_ends")(
    off("torchtitan's model says where it is cut, or module_fqns_per_model_part", [])
)


@TABLE.rule("strategy.shard_size")
def _groups(native: Native, key: str, value: Any) -> Outcome:
    if value is not None and native.processes is None:
        return refuse("how many replicas there are depends on launcher.num_processes: state it")
    return exact("says the degrees")


@TABLE.rule("strategy.reshard_after_forward")
def _reshard(native: Native, key: str, value: Any) -> Outcome:
    return exact("the same", parallelism__fsdp_reshard_after_forward="always" if value else "never")


@TABLE.rule("strategy.cpu_offload")
def _offload(native: Native, key: str, value: Any) -> Outcome:
    return exact("the same policy", training__enable_cpu_offload=bool(value))


@TABLE.rule("strategy.zero1")
def _zero1(native: Native, key: str, value: Any) -> Outcome:
    return faster("torchtitan's ddp keeps the optimizer state whole") if value else dead("off")


@TABLE.rule("strategy.backward_passes_per_step")
def _passes(native: Native, key: str, value: Any) -> Outcome:
    return exact("off") if value == 1 else refuse("a sum of backward passes has no key")


TABLE.rule("strategy.op")(off("torchtitan averages gradients", "average"))
TABLE.fixed_rules(
    "performance-only",
    "torchtitan wraps block by block, and chooses when to gather and to reduce",
    "strategy.wrap_modules",
    "strategy.wrap_min_parameters",
    "strategy.wrap_min_bytes",
    "strategy.prefetch_depth",
    "strategy.gather_in_compute_dtype",
    "strategy.reduce_every_micro_batch",
    "strategy.bucket_cap_mb",
    "strategy.overlap",
    "strategy.static_graph",
    "strategy.broadcast_buffers",
    "strategy.find_unused_parameters",
    "strategy.gradient_as_bucket_view",
    "trainer.checkpoint_modules",
    "trainer.compile_options",
)


@TABLE.rule("trainer.activation_checkpointing")
def _recompute(native: Native, key: str, value: Any) -> Outcome:
    mode = value if value == "selective" else "full" if value else "none"
    return faster("of every block", activation_checkpoint__mode=mode)


@TABLE.rule("trainer.compile")
def _compile(native: Native, key: str, value: Any) -> Outcome:
    if value == "auto":
        return faster("off: torchtitan measures nothing", compile__enable=False)
    return faster("torch.compile", compile__enable=bool(value))


# -- the run -------------------------------------------------------------------------------------


@TABLE.rule("trainer.max_steps")
def _steps(native: Native, key: str, value: Any) -> Outcome:
    if value is None:
        return approximate("torchtitan counts steps: state trainer.max_steps, or take its 10000")
    return exact("steps", training__steps=value)


@TABLE.rule("trainer.seed")
def _seed(native: Native, key: str, value: Any) -> Outcome:
    return approximate("other generators draw from the same seed", debug__seed=value)


@TABLE.rule("trainer.deterministic")
def _deterministic(native: Native, key: str, value: Any) -> Outcome:
    return faster("deterministic kernels", debug__deterministic=bool(value))


@TABLE.rule("trainer.log_every")
def _log_every(native: Native, key: str, value: Any) -> Outcome:
    return faster("steps between reports", metrics__log_freq=value)


@TABLE.rule("data.batch_size")
def _total(native: Native, key: str, value: Any) -> Outcome:
    if value is None:
        return dead("follows from the other sizes")
    return exact("samples of one step", training__global_batch_size=value)


@TABLE.rule("data.micro_batch_size")
def _micro(native: Native, key: str, value: Any) -> Outcome:
    if value is None:
        return dead("follows from the other sizes")
    if (native.get("mesh.pp") or 1) > 1:
        steps = native.get("trainer.accumulate")
        if steps is None:
            return refuse("a pipeline of torchtitan takes all micro-batches: trainer.accumulate")
        return exact("and the micro-batches of a step", training__local_batch_size=value * steps)
    return exact("samples of one forward of one process", training__local_batch_size=value)


@TABLE.rule("trainer.accumulate")
def _accumulate(native: Native, key: str, value: Any) -> Outcome:
    micro, processes = native.get("data.micro_batch_size"), native.processes
    if value in (None, 1):
        return exact("follows from the sizes")
    if native.get("data.batch_size"):
        return exact("follows from the two sizes")
    if micro is None or processes is None:
        return refuse("torchtitan wants the batch of all processes: state data.batch_size")
    models = processes // math.prod(native.get(f"mesh.{axis}") or 1 for axis in _AXES)
    return exact("as the batch of a step", training__global_batch_size=micro * value * models)


# -- gradients and precision ---------------------------------------------------------------------


@TABLE.rule("trainer.max_grad_norm")
def _clipping(native: Native, key: str, value: Any) -> Outcome:
    if value is None:
        return exact("said, since a missing key clips at 1.0", training__max_norm=math.inf)
    return exact("the same formula", training__max_norm=float(value))


TABLE.rule("trainer.max_grad_value")(off("torchtitan clips by the norm alone"))
TABLE.rule("trainer.ema_decay")(off("torchtitan keeps no moving average of the weights"))
TABLE.rule("trainer.sync_batchnorm")(off("torchtitan's models have no batch normalisation", False))


@TABLE.rule("trainer.on_nonfinite")
def _nonfinite(native: Native, key: str, value: Any) -> Outcome:
    if value == "skip":
        return refuse("torchtitan does not look at gradients that are not finite")
    return dead("torchtitan does not look at gradients that are not finite")


@TABLE.rule("precision")
def _precision(native: Native, key: str, value: Any) -> Outcome:
    low = native.computes
    if low == "fp16":
        return refuse("torchtitan has no fp16")
    name = {"fp32": "float32", "bf16": "bfloat16"}[low]
    written = {"training.dtype": "float32", "training.mixed_precision_param": name}
    sharded = native.kind("strategy") in SHARDED
    held = native.get("precision.params", "fp32") != "fp32"
    if low == "fp32" or sharded == held:
        return Outcome("exact", f"{native.by_auto}over fp32 masters", values=written)
    how = "casts the parameters" if sharded else "is autocast"
    return Outcome("approximate", f"{native.by_auto}bf16 {how} there, and not here", values=written)


@TABLE.rule("precision.reduce")
def _reduce(native: Native, key: str, value: Any) -> Outcome:
    if value == "fp32":
        return exact("the only one", training__mixed_precision_reduce="float32")
    return approximate("torchtitan reduces in fp32", training__mixed_precision_reduce="float32")


TABLE.fixed_rules("dead", "no loss is scaled", "precision.loss_scaling.*")


# -- optimizer and schedule ----------------------------------------------------------------------

_OPTIMIZERS = ("Adam", "AdamW")


@TABLE.rule("optimizer")
def _optimizer(native: Native, key: str, value: Any) -> Outcome:
    if value not in _OPTIMIZERS:
        return refuse(f"torchtitan has {' and '.join(_OPTIMIZERS)}, and no {value}")
    return exact("torch's own", optimizer__name=value)


@TABLE.rule("optimizer.lr", "optimizer.eps", "optimizer.weight_decay")
def _number(native: Native, key: str, value: Any) -> Outcome:
    if native.kind("optimizer") not in _OPTIMIZERS:
        return refuse("an option of an optimizer that torchtitan has not")
    return Outcome("exact", "the same", values={key: value})


@TABLE.rule("optimizer.betas")
def _betas(native: Native, key: str, value: Any) -> Outcome:
    if native.kind("optimizer") not in _OPTIMIZERS:
        return refuse("an option of an optimizer that torchtitan has not")
    return exact("the same", optimizer__beta1=value[0], optimizer__beta2=value[1])


@TABLE.rule("optimizer.fused", "optimizer.foreach")
def _kernel(native: Native, key: str, value: Any) -> Outcome:
    fused, foreach = native.get("optimizer.fused"), native.get("optimizer.foreach")
    kernel = "fused" if fused else "for-loop" if foreach is False else "foreach"
    return faster("kernels differ by a rounding", optimizer__implementation=kernel)


@TABLE.rule("optimizer.no_decay")
def _no_decay(native: Native, key: str, value: Any) -> Outcome:
    if not value or not native.get("optimizer.weight_decay"):
        return exact("all parameters decay alike")
    return approximate("norms and biases decay too")


TABLE.rule("optimizer.groups", "optimizer.others", "optimizer.others_match")(
    off("the file has no groups of parameters", [])
)
TABLE.rule("optimizer.lr_scaling")(off("state the scaled rate in optimizer.lr", "none"))
TABLE.rule("optimizer.*")(off("torchtitan's file has no such option", False))

_DECAYS = {"Linear": "linear", "Cosine": "cosine", "WarmupStableDecay": ""}


@TABLE.rule("schedule")
def _schedule(native: Native, key: str, value: Any) -> Outcome:
    steps = native.get("schedule.warmup_steps", 0)
    if value in ("None", "Constant"):
        if steps or native.get("schedule.warmup_ratio"):
            return refuse("torchtitan's rate falls after a warm-up, and never stays")
        written: dict[str, Any] = {"warmup_steps": 0, "decay_ratio": 0.0}
        return Outcome("exact", "the rate stays", values=_lr(written))
    if value not in _DECAYS:
        return refuse(f"torchtitan's file has no {value}")
    if native.get("schedule.warmup_ratio"):
        return refuse("state schedule.warmup_steps instead of a share")
    written = {"warmup_steps": steps, "decay_type": _DECAYS[value] or native.get("schedule.decay")}
    written["min_lr_factor"] = native.get("schedule.final", 0.0)
    if native.get("schedule.total_steps"):
        written["total_steps"] = native.get("schedule.total_steps")
    if value == "WarmupStableDecay":
        if native.get("schedule.decay_steps"):
            return refuse("state schedule.decay_ratio instead of decay_steps")
        written["decay_ratio"] = native.get("schedule.decay_ratio")
    why = "torchtitan's first update has a share of the rate already, and its last is a step off"
    return Outcome("approximate", why, values=_lr(written))


def _lr(written: Mapping[str, Any]) -> dict[str, Any]:
    return {f"lr_scheduler.{name}": value for name, value in written.items()}


@TABLE.rule("schedule.*")
def _schedule_knob(native: Native, key: str, value: Any) -> Outcome:
    found = _schedule(native, "schedule", native.kind("schedule"))
    if found.verdict != "refused" or key not in native.given:
        return exact("says the schedule")
    return refuse(found.why)
