"""Native to Accelerate: the YAML of `accelerate launch --config_file` for FSDP2.

Read from accelerate 1.15: ``FullyShardedDataParallelPlugin``, ``ClusterConfig``,
``utils/fsdp_utils.py``. Its file says how a model is cut and in which precision; optimizer, rates,
clipping and batches are its scripts'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

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

VERSION = "1.15"
"""The release of Accelerate that was read."""

TABLE = RuleTable("accelerate-fsdp")
_FIXED: Mapping[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "downcast_bf16": "no",
    "machine_rank": 0,
    "main_training_function": "main",
    "num_machines": 1,
    "rdzv_backend": "static",
    "same_network": True,
    "use_cpu": False,
    "fsdp_config.fsdp_cpu_ram_efficient_loading": False,
    "fsdp_config.fsdp_state_dict_type": "SHARDED_STATE_DICT",
}
_TORCH_SCALER = {
    "scale": None,
    "initial_scale": 65536.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "hysteresis": 1,
    "growth_delay": 0,
    "divide_by_grown": False,
}
"""What Accelerate's scaler is unless the script says otherwise; it has no floor."""

enter_scripts(TABLE)
enter_torchs(TABLE, "Accelerate")


def to_accelerate(native: Native) -> Plan:
    """The translation of ``native``; its ``values`` are the content of the file.

    Raises:
        ConfigError: the strategy is not fsdp.
    """
    kind = native.kind("strategy")
    if kind not in ("FSDP", "Parallel"):
        raise ConfigError(
            f"{native.name}: strategy {kind} is not cut by FSDP2, of which the file speaks",
            fix="add strategy=fsdp",
        )
    return TABLE.plan(native, target_version=VERSION)


def text_of(plan: Plan) -> str:
    """The file."""
    return yaml.safe_dump(nest({**_FIXED, **plan.values}), sort_keys=True)


# -- how the model is cut ------------------------------------------------------------------------


@TABLE.rule("strategy")
def _strategy(native: Native, key: str, value: Any) -> Outcome:
    written = {"distributed_type": "FSDP", "fsdp_config.fsdp_version": 2}
    return Outcome("exact", "FSDP2, as here", values=written)


@TABLE.rule("strategy.reshard_after_forward")
def _reshard(native: Native, key: str, value: Any) -> Outcome:
    return exact("the same", fsdp_config__fsdp_reshard_after_forward=bool(value))


@TABLE.rule("strategy.cpu_offload")
def _offload(native: Native, key: str, value: Any) -> Outcome:
    return exact("the same policy", fsdp_config__fsdp_offload_params=bool(value))


@TABLE.rule("strategy.shard_size")
def _groups(native: Native, key: str, value: Any) -> Outcome:
    if value is None:
        return exact("shards lie over all processes")
    if native.processes is None:
        return refuse("how many replicas there are depends on launcher.num_processes: state it")
    return Outcome("exact", "a mesh of replicas and shards", values=_copies(native, value))


_MESH = "parallelism_config.parallelism_config"


def _copies(native: Native, shard: int) -> dict[str, Any]:
    """Sizes of accelerate's mesh, which multiply to the number of processes."""
    assert native.processes is not None
    copies = native.processes // (shard * (native.get("mesh.tp") or 1))
    return {f"{_MESH}_dp_shard_size": shard, f"{_MESH}_dp_replicate_size": copies}


@TABLE.rule("mesh.tp")
def _layers(native: Native, key: str, value: Any) -> Outcome:
    if value in (None, 1):
        return exact("off")
    if native.processes is None:
        return refuse("its mesh counts all processes: state launcher.num_processes")
    shard = native.get("strategy.shard_size") or native.get("mesh.dp_shard")
    copies = native.get("mesh.dp_replicate") or 1
    if shard in (None, -1):
        shard = native.processes // (value * copies)
    written = {f"{_MESH}_tp_size": value, **_copies(native, shard)}
    return Outcome("exact", "layers are cut as the model's tp_plan says", values=written)


@TABLE.rule("mesh.dp_replicate", "mesh.dp_shard")
def _replicas(native: Native, key: str, value: Any) -> Outcome:
    if value in (None, -1):
        return dead("what remains")
    if native.processes is None:
        return refuse("its mesh counts all processes: state launcher.num_processes")
    cut = native.get("mesh.tp") or 1
    shard = value if key == "mesh.dp_shard" else native.processes // (value * cut)
    return Outcome("exact", "a mesh of replicas and shards", values=_copies(native, shard))


TABLE.rule("strategy.schedule", "strategy.stages_per_rank")(off("it has no pipeline", "1f1b", 1))
TABLE.rule("strategy.split", "strategy.both_ends")(off("it has no pipeline", []))


_POLICY = "fsdp_config.fsdp_auto_wrap_policy"


@TABLE.rule("strategy.wrap_modules")
def _wrap(native: Native, key: str, value: Any) -> Outcome:
    if native.get("strategy.wrap_min_parameters") is not None:
        return dead("units are chosen by their size")
    written = {_POLICY: "TRANSFORMER_BASED_WRAP"}
    if not value:
        why = "the blocks that a model of transformers names; here, the repeated ones"
        return Outcome("performance-only", why, values=written)
    written["fsdp_config.fsdp_transformer_layer_cls_to_wrap"] = ",".join(value)
    return Outcome("performance-only", "the same units", values=written)


@TABLE.rule("strategy.wrap_min_parameters")
def _by_size(native: Native, key: str, value: Any) -> Outcome:
    if value is None:
        return dead("off")
    written = {_POLICY: "SIZE_BASED_WRAP", "fsdp_config.fsdp_min_num_params": value}
    return Outcome("performance-only", "other modules are units, too", values=written)


@TABLE.rule("strategy.find_unused_parameters")
def _judge_unused(native: Native, key: str, value: Any) -> Outcome:
    if not value:
        return dead("off")
    if value == "auto":
        return dead("off: accelerate measures nothing, and dynamo_backend: INDUCTOR switches it on")
    return approximate("FSDP2 by itself wants the same forward on every process")


TABLE.fixed_rules(
    "performance-only",
    "FSDP2 and the script choose when to gather and to reduce",
    "strategy.wrap_min_bytes",
    "strategy.prefetch_depth",
    "strategy.gather_in_compute_dtype",
    "strategy.reduce_every_micro_batch",
    "trainer.checkpoint_modules",
    "trainer.compile_options",
)


@TABLE.rule("trainer.activation_checkpointing")
def _recompute(native: Native, key: str, value: Any) -> Outcome:
    return faster("of the units", fsdp_config__fsdp_activation_checkpointing=bool(value))


@TABLE.rule("trainer.compile")
def _compile(native: Native, key: str, value: Any) -> Outcome:
    if value == "auto":
        return faster("off: Accelerate measures nothing")
    if not value:
        return dead("off")
    return faster("torch.compile", dynamo_config__dynamo_backend="INDUCTOR")


@TABLE.rule("launcher.num_processes")
def _processes(native: Native, key: str, value: Any) -> Outcome:
    if type(value) is not int:
        return refuse(
            "Accelerate takes no file that does not count them: state launcher.num_processes, or "
            "give accelerate launch --num_processes"
        )
    return exact("processes", num_processes=value)


# -- precision -----------------------------------------------------------------------------------


def _low(native: Native) -> str:
    return native.computes


@TABLE.rule("precision")
def _precision(native: Native, key: str, value: Any) -> Outcome:
    low = _low(native)
    if low == "fp32":
        return exact("fp32", mixed_precision="no")
    if native.get("precision.params") == "fp32":
        why = f"{native.by_auto}{low} parameters and autocast beside them; here autocast alone"
    else:
        why = f"{low} over fp32 masters, as here, and autocast around the forward"
    return approximate(why, mixed_precision=low)


@TABLE.rule("precision.reduce")
def _reduce(native: Native, key: str, value: Any) -> Outcome:
    own = _low(native)
    if value == own:
        return exact("gradients travel in it")
    if own == "fp32":
        return refuse(f"gradients travel in fp32, not in {value}")
    return approximate(f"gradients travel in {own}")


@TABLE.rule("precision.loss_scaling.*")
def _scaling(native: Native, key: str, value: Any) -> Outcome:
    name = key.rpartition(".")[2]
    if _low(native) != "fp16" or value == _TORCH_SCALER.get(name):
        return exact("torch's own")
    if name == "min_scale":
        return approximate("torch's scaler has no floor")
    return refuse("torch's scaler is the script's", script="GradScalerKwargs(...)")


# -- what the script says ------------------------------------------------------------------------


@TABLE.rule("trainer.max_grad_norm")
def _clipping(native: Native, key: str, value: Any) -> Outcome:
    if value is None:
        return exact("off")
    call = f"accelerator.clip_grad_norm_(model.parameters(), {value})"
    return refuse("the script clips", script=call)


@TABLE.rule("trainer.accumulate")
def _accumulate(native: Native, key: str, value: Any) -> Outcome:
    if value in (None, 1):
        return exact("one micro-batch a step, or it follows from the sizes")
    return refuse(
        "the script accumulates", script=f"Accelerator(gradient_accumulation_steps={value})"
    )


@TABLE.rule("data.batch_size", "data.micro_batch_size")
def _sizes(native: Native, key: str, value: Any) -> Outcome:
    if value is None:
        return dead("follows from the other sizes")
    if key == "data.batch_size" and native.get("data.micro_batch_size"):
        return refuse("the script accumulates up to it", script="gradient_accumulation_steps")
    return refuse("the script's loader", script=f"DataLoader(batch_size={value})")


@TABLE.rule("optimizer")
def _optimizer(native: Native, key: str, value: Any) -> Outcome:
    return refuse(
        "the script builds it", script=f"torch.optim.{value}(lr={native.get('optimizer.lr')})"
    )


@TABLE.rule("optimizer.*")
def _option(native: Native, key: str, value: Any) -> Outcome:
    if key not in native.given:
        return dead("the script's")
    return refuse("the script builds the optimizer", script=f"{key.rpartition('.')[2]}={value}")


@TABLE.rule("schedule", "schedule.*")
def _schedule(native: Native, key: str, value: Any) -> Outcome:
    steps = native.get("schedule.warmup_steps", 0) or native.get("schedule.warmup_ratio", 0)
    if native.kind("schedule") in ("None", "Constant") and not steps:
        return exact("the rate stays")
    if key != "schedule" and key not in native.given:
        return dead("the script's")
    return refuse("the script steps it", script=f"{native.kind('schedule')}: docs/optimization.md")


TABLE.rule("trainer.max_grad_value")(off("the script clips: accelerator.clip_grad_value_"))
TABLE.rule("trainer.ema_decay")(off("the script keeps a moving average"))
TABLE.rule("trainer.sync_batchnorm")(off("the script converts the model", False))


@TABLE.rule("trainer.on_nonfinite")
def _nonfinite(native: Native, key: str, value: Any) -> Outcome:
    if _low(native) == "fp16":
        return exact("the scaler skips such a step in both")
    return dead("the script's")


@TABLE.rule("trainer.log_every")
def _log_every(native: Native, key: str, value: Any) -> Outcome:
    return dead("the script's")
