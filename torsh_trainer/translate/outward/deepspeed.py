"""Native to DeepSpeed: what each knob becomes in a ds_config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from torsh_trainer.translate.deepspeed import job
from torsh_trainer.translate.deepspeed.rules_optimizer import TORCH, WARMUP
from torsh_trainer.translate.deepspeed.versions import REMOVALS, format_version
from torsh_trainer.translate.outward.native import (
    Native,
    Outcome,
    RuleTable,
    approximate,
    dead,
    enter_scripts,
    exact,
    faster,
    off,
    refuse,
)
from torsh_trainer.translate.plan import Plan
from torsh_trainer.translate.recipe import nest

TABLE = RuleTable("deepspeed")
REPLICATED = ("DDP", "Single", "Auto", "Gloo", "NCCL", "MPI")
"""Strategies that hold the whole model in every process."""

_NAMES = {option.lower(): name for name, option in job.TORCH_OPTIMIZERS.items()} | {
    "adamw": "AdamW",
    "adam": "Adam",
    "adagrad": "Adagrad",
}
"""Class in lower case -> ``optimizer.type`` as the engine looks it up."""

enter_scripts(TABLE)


def to_deepspeed(native: Native) -> Plan:
    """The translation of ``native``; its ``values`` are the content of the file."""
    return TABLE.plan(native, target_version=format_version(native.version))


def text_of(plan: Plan) -> str:
    """The file."""
    return json.dumps(nest(plan.values), indent=2) + "\n"


def stage(native: Native) -> int:
    """The ZeRO stage of a recipe."""
    if native.kind("strategy") == "FSDP":
        return 3 if native.get("strategy.reshard_after_forward") else 2
    return int(bool(native.get("strategy.zero1")))


def half(native: Native) -> str:
    """``bf16`` or ``fp16`` where the module itself is held so; else empty."""
    held = native.get("precision.params", "fp32")
    return held if held != "fp32" else ""


# -- batch ---------------------------------------------------------------------------------------


@TABLE.rule("data.batch_size")
def _total(native: Native, key: str, value: Any) -> Outcome:
    if value is None:
        return dead("follows from the other sizes")
    if native.get("data.micro_batch_size") and native.get("trainer.accumulate"):
        return exact("follows from the two others and the number of processes")
    return exact("samples of one step, over all processes", train_batch_size=value)


@TABLE.rule("data.micro_batch_size")
def _micro(native: Native, key: str, value: Any) -> Outcome:
    if value is None:
        return dead("follows from the other sizes")
    return exact("samples of one forward of one process", train_micro_batch_size_per_gpu=value)


@TABLE.rule("trainer.accumulate")
def _accumulate(native: Native, key: str, value: Any) -> Outcome:
    if value is None:
        return dead("follows from the other sizes")
    return exact("micro-batches of a step", gradient_accumulation_steps=value)


@TABLE.rule("data.drop_last")
def _drop_last(native: Native, key: str, value: Any) -> Outcome:
    if not value:
        return dead("off")
    return approximate(
        "DeepSpeed heeds it only where it builds the loader (training_data=)",
        dataloader_drop_last=True,
    )


# -- gradients -----------------------------------------------------------------------------------


@TABLE.rule("trainer.max_grad_norm")
def _clipping(native: Native, key: str, value: Any) -> Outcome:
    if value is None:
        return exact("said, since a missing key clips at 1.0", gradient_clipping=0.0)
    return exact("the same formula", gradient_clipping=float(value))


TABLE.rule("trainer.max_grad_value")(off("DeepSpeed clips by the norm alone"))
TABLE.rule("trainer.ema_decay")(off("DeepSpeed keeps no moving average of the weights"))
TABLE.rule("trainer.sync_batchnorm")(
    off("convert the model in the script: nn.SyncBatchNorm.convert_sync_batchnorm", False)
)


@TABLE.rule("trainer.on_nonfinite")
def _nonfinite(native: Native, key: str, value: Any) -> Outcome:
    if half(native) == "fp16":
        return exact("the loss scaling skips such a step in both")
    if half(native) != "bf16":
        if value == "skip":
            return refuse("DeepSpeed looks for overflows in half precision alone")
        return dead("DeepSpeed looks for overflows in half precision alone")
    if value == "stop":
        return approximate(
            "DeepSpeed skips a step whose gradients are not finite, and goes on",
            bf16__check_grad_overflow=True,
        )
    values = {"bf16.check_grad_overflow": value == "skip"}
    if value == "continue" and stage(native) in (0, 3):
        why = "DeepSpeed's stages 0 and 3 skip such a step, whatever is said"
        return Outcome("approximate", why, values=values)
    return Outcome("exact", "as it says of gradients that are not finite", values=values)


@TABLE.rule("trainer.phantom_lr")
def _phantom(native: Native, key: str, value: Any) -> Outcome:
    if value is None:
        if _takes_phantom(native):
            return approximate("DeepSpeed's stage 0 takes a step with gradients of zero first")
        return exact("off")
    if not _takes_phantom(native):
        return refuse("DeepSpeed takes such a step at stage 0 in half precision alone")
    if value != _rate(native):
        return approximate("DeepSpeed takes it at the optimizer's rate")
    return exact("DeepSpeed's stage 0 takes it by itself")


@TABLE.rule("trainer.phantom_state")
def _phantom_state(native: Native, key: str, value: Any) -> Outcome:
    if value or native.get("trainer.phantom_lr") is None:
        return exact("the optimizer counts that step")
    return approximate("DeepSpeed's optimizer counts that step, and keeps its state")


def _takes_phantom(native: Native) -> bool:
    return bool(half(native)) and stage(native) == 0


def _rate(native: Native) -> Any:
    """``optimizer.params.lr``: where the scheduler sets the base rate, the first step alone's."""
    phantom, kind = native.get("trainer.phantom_lr"), native.kind("schedule")
    warms = kind == "DeepSpeedWarmup" and native.get("schedule.decay") != "cosine"
    if phantom is not None and _takes_phantom(native) and (warms or kind in _OWN):
        return phantom
    return native.get("optimizer.lr")


@TABLE.rule("compression", "compression.*")
def _compression(native: Native, key: str, value: Any) -> Outcome:
    if native.kind("compression") in ("NoCompression", "None"):
        return exact("gradients travel as they are")
    return refuse("DeepSpeed's file has no such compression: its 1-bit optimizers are others")


# -- strategy ------------------------------------------------------------------------------------


@TABLE.rule("strategy")
def _strategy(native: Native, key: str, value: Any) -> Outcome:
    written = {"zero_optimization.stage": stage(native)}
    if value == "FSDP":
        return Outcome("exact", "sharded over all processes", values=written)
    if value == "Auto":
        return Outcome(
            "approximate", "auto chooses as it starts; stage 0 is its ddp", values=written
        )
    if value in REPLICATED:
        return Outcome("exact", "every process holds the whole model", values=written)
    if value == "None":
        return Outcome("exact", "one process", values=written)
    return refuse(f"strategy {value} has no translation: choose ddp or fsdp")


@TABLE.rule("strategy.zero1", "strategy.reshard_after_forward")
def _judge_stage(native: Native, key: str, value: Any) -> Outcome:
    if key.endswith("zero1") and native.kind("strategy") not in REPLICATED:
        return dead("no knob of this strategy")
    return exact("says the stage", zero_optimization__stage=stage(native))


@TABLE.rule("strategy.shard_size")
def _groups(native: Native, key: str, value: Any) -> Outcome:
    if value is None:
        return exact("shards lie over all processes")
    if native.version >= REMOVALS:
        return refuse(
            f"DeepSpeed {format_version(native.version)} has removed MiCS: name an older version"
        )
    if stage(native) != 3:
        return refuse("MiCS is for stage 3 alone")
    return exact("shards within groups of so many", zero_optimization__mics_shard_size=value)


@TABLE.rule("strategy.cpu_offload")
def _offload(native: Native, key: str, value: Any) -> Outcome:
    if not value:
        return exact("off")
    written = {"zero_optimization.offload_optimizer.device": "cpu"}
    if stage(native) == 3:
        written["zero_optimization.offload_param.device"] = "cpu"
    return Outcome(
        "approximate", "DeepSpeed's CPUAdam and torch's Adam round differently", values=written
    )


@TABLE.rule("strategy.reduce_every_micro_batch")
def _every(native: Native, key: str, value: Any) -> Outcome:
    if value or not native.accumulates:
        return exact("DeepSpeed reduces every micro-batch")
    if half(native):
        return approximate("DeepSpeed reduces every micro-batch, and rounds each of them")
    return faster("DeepSpeed reduces every micro-batch: more communication, less memory")


@TABLE.rule("strategy.*")
def _of_another(native: Native, key: str, value: Any) -> Outcome:
    if key not in native.given:
        return dead("no knob of a strategy that is translated")
    return refuse("a knob of a strategy that has no translation")


@TABLE.rule("strategy.bucket_cap_mb")
def _bucket(native: Native, key: str, value: Any) -> Outcome:
    if value is None:
        return dead("off")
    elements = max(1, round(value * 2**20 / (2 if half(native) else 4)))
    return faster("in elements", zero_optimization__reduce_bucket_size=elements)


@TABLE.rule("strategy.overlap")
def _overlap(native: Native, key: str, value: Any) -> Outcome:
    return faster("during backward, or after it", zero_optimization__overlap_comm=bool(value))


@TABLE.rule("strategy.gradient_as_bucket_view")
def _view(native: Native, key: str, value: Any) -> Outcome:
    return faster("gradients lie together", zero_optimization__contiguous_gradients=bool(value))


@TABLE.rule("strategy.backward_passes_per_step")
def _passes(native: Native, key: str, value: Any) -> Outcome:
    return exact("off") if value == 1 else refuse("a sum of backward passes has no key")


@TABLE.rule("strategy.op")
def _op(native: Native, key: str, value: Any) -> Outcome:
    if value == "average":
        return exact("the mean over processes")
    return exact("a sum over processes", gradient_allreduce_op="sum")


@TABLE.rule("strategy.find_unused_parameters")
def _judge_unused(native: Native, key: str, value: Any) -> Outcome:
    return exact("DeepSpeed takes parameters without a gradient")


@TABLE.rule("strategy.zero_unused")
def _zero_unused(native: Native, key: str, value: Any) -> Outcome:
    if value or key not in native.given:
        return exact("DeepSpeed steps them as if their gradient were zero")
    return approximate("DeepSpeed steps parameters without a gradient as if it were zero")


TABLE.fixed_rules(
    "performance-only",
    "DeepSpeed gathers and communicates in its own manner",
    "strategy.static_graph",
    "strategy.broadcast_buffers",
    "strategy.wrap_modules",
    "strategy.wrap_min_parameters",
    "strategy.wrap_min_bytes",
    "strategy.prefetch_depth",
    "strategy.gather_in_compute_dtype",
    "strategy.memory_fraction",
)
TABLE.fixed_rules(
    "performance-only", "the model's code recomputes, or not", "trainer.checkpoint_modules"
)
TABLE.fixed_rules("performance-only", "engine.compile() in the script", "trainer.compile_options")


@TABLE.rule("trainer.compile")
def _compile(native: Native, key: str, value: Any) -> Outcome:
    if value == "auto":
        return faster("engine.compile() in the script, where it was seen to pay")
    return faster("engine.compile() in the script" if value else "off")


@TABLE.rule("trainer.activation_checkpointing")
def _recompute(native: Native, key: str, value: Any) -> Outcome:
    return faster("the model's code recomputes: torch.utils.checkpoint" if value else "off")


@TABLE.rule("trainer.log_every")
def _log_every(native: Native, key: str, value: Any) -> Outcome:
    return faster("steps between reports", steps_per_print=value)


# -- precision -----------------------------------------------------------------------------------


@TABLE.rule("precision")
def _precision(native: Native, key: str, value: Any) -> Outcome:
    low, computes = half(native), native.computes
    if low:
        return Outcome("exact", f"{low} over fp32 masters", values={f"{low}.enabled": True})
    if computes == "fp32":
        return exact("fp32")
    dtype = {"bf16": "bfloat16", "fp16": "float16"}[computes]
    return approximate(
        f"{native.by_auto}autocast; DeepSpeed sends the gradients of some modules in the low dtype",
        torch_autocast__enabled=True,
        torch_autocast__dtype=dtype,
    )


@TABLE.rule("precision.reduce")
def _reduce(native: Native, key: str, value: Any) -> Outcome:
    own = half(native) or "fp32"
    written = {"communication_data_type": value}
    if value == own:
        return Outcome("exact", "gradients travel in it", values=written)
    return Outcome("approximate", f"DeepSpeed rounds the sum back to {own}", values=written)


@TABLE.rule("precision.gradients")
def _sums(native: Native, key: str, value: Any) -> Outcome:
    low = half(native)
    if not low:
        if value != "fp32":
            return refuse("DeepSpeed holds gradients of fp32 parameters in fp32")
        return exact("micro-batches add up in fp32")
    if value == "fp32" and stage(native) == 0:
        return approximate(f"DeepSpeed's stage 0 adds up in {low}, and refuses to do otherwise")
    return exact("micro-batches add up in it", data_types__grad_accum_dtype=value)


@TABLE.rule("precision.rounded_start")
def _start(native: Native, key: str, value: Any) -> Outcome:
    if value or not half(native):
        return exact("DeepSpeed's masters begin as the rounded weights")
    return approximate("DeepSpeed's masters begin as the rounded weights, not as these")


@TABLE.rule("precision.low_outputs")
def _outputs(native: Native, key: str, value: Any) -> Outcome:
    if value or not half(native):
        return exact("DeepSpeed leaves outputs as the model returns them")
    low = half(native)
    return exact(f"DeepSpeed leaves outputs in {low}: your loop casts them to fp32 for its loss")


@TABLE.rule("precision.rounded_products")
def _products(native: Native, key: str, value: Any) -> Outcome:
    low, third = half(native), stage(native) == 3
    if low and third:
        written = {"zero_optimization.memory_efficient_linear": bool(value)}
        return Outcome("exact", "linear layers of stage 3", values=written)
    if value and low:
        return refuse("DeepSpeed rounds products at stage 3 alone")
    return exact("torch's own linear layers")


def _scaling(name: str, value: Any, why: str = "the same") -> Outcome:
    return Outcome("exact", why, values={f"fp16.{name}": value})


def _scales(native: Native) -> bool:
    return half(native) == "fp16"


def _dynamic(native: Native) -> bool:
    return _scales(native) and native.get("precision.loss_scaling.scale") is None


@TABLE.rule("precision.loss_scaling.scale")
def _judge_fixed_scale(native: Native, key: str, value: Any) -> Outcome:
    if not _scales(native):
        return dead("no loss is scaled by the file")
    return _scaling("loss_scale", 0 if value is None else float(value), "0 is a dynamic scale")


@TABLE.rule("precision.loss_scaling.initial_scale")
def _initial(native: Native, key: str, value: Any) -> Outcome:
    if not _dynamic(native):
        return dead("no dynamic scale of the file's")
    power = math.log2(value)
    if power != int(power):
        written = {"fp16.initial_scale_power": round(power)}
        return Outcome("approximate", "DeepSpeed begins at a power of two", values=written)
    return _scaling("initial_scale_power", int(power), "as a power of two")


@TABLE.rule("precision.loss_scaling.growth_interval")
def _window(native: Native, key: str, value: Any) -> Outcome:
    if not _dynamic(native):
        return dead("no dynamic scale of the file's")
    return _scaling("loss_scale_window", value)


@TABLE.rule("precision.loss_scaling.hysteresis")
def _hysteresis(native: Native, key: str, value: Any) -> Outcome:
    if not _dynamic(native):
        return dead("no dynamic scale of the file's")
    if stage(native) == 0 and value > 1:
        return approximate("DeepSpeed's stage 0 has no patience", fp16__hysteresis=value)
    return _scaling("hysteresis", value)


@TABLE.rule("precision.loss_scaling.min_scale")
def _floor(native: Native, key: str, value: Any) -> Outcome:
    if not _dynamic(native):
        return dead("no dynamic scale of the file's")
    return approximate(
        "a whole number; an overflow at the floor raises in DeepSpeed",
        fp16__min_loss_scale=max(1, round(value)),
    )


@TABLE.rule("precision.loss_scaling.growth_factor", "precision.loss_scaling.backoff_factor")
def _factors(native: Native, key: str, value: Any) -> Outcome:
    if not _dynamic(native) or value == (2.0 if "growth" in key else 0.5):
        return exact("DeepSpeed doubles and halves")
    return refuse("DeepSpeed doubles and halves")


@TABLE.rule("precision.loss_scaling.growth_delay", "precision.loss_scaling.divide_by_grown")
def _quirks(native: Native, key: str, value: Any) -> Outcome:
    if not _dynamic(native) or value in (1, True):
        return exact("as DeepSpeed does")
    return approximate("DeepSpeed's first growth comes a step later, and halves an update")


# -- optimizer -----------------------------------------------------------------------------------


@TABLE.rule("optimizer")
def _optimizer(native: Native, key: str, value: Any) -> Outcome:
    name = _NAMES.get(str(value).lower())
    if name is None:
        return refuse(f"DeepSpeed does not look for {value}", script="build it and hand it over")
    written: dict[str, Any] = {"optimizer.type": name}
    if name in ("Adam", "AdamW"):
        written["optimizer.params.torch_adam"] = True
    if name == "Adam":
        written["optimizer.params.adam_w_mode"] = False
    return Outcome("exact", "torch's own", values=written)


_SAID = ("lr", "betas", "eps", "weight_decay")
"""Options that are written wherever the optimizer has them: defaults of the two differ."""

_OFF = ("capturable", "differentiable")
"""Options that matter only where they are on."""


def _is_known(native: Native) -> bool:
    return native.kind("optimizer").lower() in _NAMES


@TABLE.rule("optimizer.lr", "optimizer.*")
def _option(native: Native, key: str, value: Any) -> Outcome:
    if not _is_known(native):
        return refuse("an option of an optimizer that DeepSpeed does not look for")
    name = key.partition(".")[2]
    if value is None or (name not in _SAID and key not in native.given):
        return exact("torch's default")
    if name in _OFF and not value:
        return exact("off")
    if name == "lr":
        value = _rate(native)
    return Outcome("exact", "the same option", values={f"optimizer.params.{name}": value})


@TABLE.rule("optimizer.no_decay")
def _no_decay(native: Native, key: str, value: Any) -> Outcome:
    if not value or not native.get("optimizer.weight_decay"):
        return exact("all parameters decay alike")
    return approximate("norms and biases decay too: the file has no groups of parameters")


TABLE.rule("optimizer.groups", "optimizer.others", "optimizer.others_match")(
    off("the file has no groups of parameters: build the optimizer in the script", [])
)
TABLE.rule("optimizer.lr_scaling")(off("state the scaled rate in optimizer.lr", "none"))


# -- schedule ------------------------------------------------------------------------------------

_WARMUP_OF = {decay: name for name, decay in WARMUP.items()}


def _constant(native: Native) -> bool:
    steps = native.get("schedule.warmup_steps", 0) or native.get("schedule.warmup_ratio", 0)
    return native.kind("schedule") == "None" or (
        native.kind("schedule") == "Constant" and not steps
    )


@TABLE.rule("schedule")
def _schedule(native: Native, key: str, value: Any) -> Outcome:
    if _constant(native):
        return exact("the rate stays")
    if value == "DeepSpeedWarmup" or value in _OWN:
        if not isinstance(native.get("optimizer.lr"), int | float):
            return refuse("DeepSpeed's schedulers set the base rate: state optimizer.lr")
        return _warmup(native) if value == "DeepSpeedWarmup" else _own(native, value)
    if value == "TorchSchedule":
        return _torchs(native)
    return refuse(f"DeepSpeed's file has no {value}", script=_STEPPED)


_STEPPED = "step a scheduler after engine.step()"


def _torchs(native: Native) -> Outcome:
    name = native.get("schedule.scheduler")
    if name not in TORCH or native.get("schedule.interval") != "step":
        return refuse(f"DeepSpeed's file has no {name}, or not so", script=_STEPPED)
    if stage(native) > 0 or half(native):
        return refuse("torch's schedulers do not take an optimizer of ZeRO's", script=_STEPPED)
    options = native.get("schedule.options") or {}
    written = {f"scheduler.params.{option}": value for option, value in options.items()}
    return Outcome("exact", "torch's own", values={"scheduler.type": name, **written})


_OWN: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "DeepSpeedOneCycle": (
        "OneCycle",
        {
            "first_steps": "cycle_first_step_size",
            "second_steps": "cycle_second_step_size",
            "first_stairs": "cycle_first_stair_count",
            "second_stairs": "cycle_second_stair_count",
            "decay_steps": "decay_step_size",
            "decay_rate": "decay_lr_rate",
            "momentum": "cycle_momentum",
            "low_momentum": "cycle_min_mom",
            "high_momentum": "cycle_max_mom",
            "momentum_decay_rate": "decay_mom_rate",
        },
    ),
    "DeepSpeedRangeTest": (
        "LRRangeTest",
        {
            "step_size": "lr_range_test_step_size",
            "step_rate": "lr_range_test_step_rate",
            "staircase": "lr_range_test_staircase",
        },
    ),
}
"""Class -> DeepSpeed's name, and its words for the knobs."""


def _own(native: Native, kind: str) -> Outcome:
    name, words = _OWN[kind]
    lr = native.get("optimizer.lr")
    written: dict[str, Any] = {"type": name}
    if name == "OneCycle":
        written["params.cycle_min_lr"] = _product(native.get("schedule.low"), lr)
        written["params.cycle_max_lr"] = lr
    else:
        written["params.lr_range_test_min_lr"] = lr
    for knob, word in words.items():
        value = native.get(f"schedule.{knob}")
        if value is not None:
            written[f"params.{word}"] = value
    values = {f"scheduler.{key}": value for key, value in written.items()}
    return Outcome("exact", "DeepSpeed's own", values=values)


def _product(share: float, rate: float) -> float:
    """Without the last digit, which the division that ``share`` came from has left."""
    return float(f"{share * rate:.15g}")


def _warmup(native: Native) -> Outcome:
    decay = native.get("schedule.decay")
    written: dict[str, Any] = {
        "type": _WARMUP_OF[decay],
        "params.warmup_num_steps": native.get("schedule.warmup_steps"),
        "params.warmup_type": native.get("schedule.warmup"),
    }
    start, lr = native.get("schedule.start", 0.0), native.get("optimizer.lr")
    if decay == "cosine":
        written["params.warmup_min_ratio"] = start
        written["params.cos_min_ratio"] = native.get("schedule.final")
    else:
        written["params.warmup_min_lr"] = _product(start, lr)
        written["params.warmup_max_lr"] = lr
    if decay != "none":
        total = native.get("schedule.total_steps") or native.get("trainer.max_steps")
        if total is None:
            return refuse("DeepSpeed wants its length: state schedule.total_steps")
        written["params.total_num_steps"] = total
    if written["params.warmup_num_steps"] < 1:
        written["params.warmup_num_steps"] = 2  # what fewer count as, and what it takes
    values = {f"scheduler.{name}": value for name, value in written.items()}
    return Outcome("exact", "DeepSpeed's own", values=values)


@TABLE.rule("schedule.*")
def _schedule_knob(native: Native, key: str, value: Any) -> Outcome:
    found = _schedule(native, "schedule", native.kind("schedule"))
    if found.verdict != "refused" or key not in native.given:
        return exact("says the schedule")
    return refuse(found.why)


# -- logs ----------------------------------------------------------------------------------------

_LOGGERS = {"tensorboard": "tensorboard", "csv": "csv_monitor", "wandb": "wandb"}


@TABLE.rule(*(f"logger.{name}.enabled" for name in _LOGGERS))
def _logger(native: Native, key: str, value: Any) -> Outcome:
    block = _LOGGERS[key.split(".")[1]]
    if value is not True:
        return dead("off, or wherever its library is installed")
    return Outcome(
        "approximate", "samples on the x axis, and other names", values={f"{block}.enabled": True}
    )


@TABLE.rule(*(f"logger.wandb.{name}" for name in ("project", "group", "entity")))
def _wandb(native: Native, key: str, value: Any) -> Outcome:
    name = key.rpartition(".")[2]
    if native.get("logger.wandb.enabled") is not True or value is None:
        return dead("off")
    return Outcome(
        "exact", "the same", values={f"wandb.{'team' if name == 'entity' else name}": value}
    )


def content_of(plan: Plan) -> Mapping[str, Any]:
    """The content of the file."""
    return nest(plan.values)
