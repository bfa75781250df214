"""What DeepSpeed is told: the user's file and knobs, completed by the recipe, or an error."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer, lr_scheduler

from torsh_trainer.errors import ConfigError, Unsupported, nearest
from torsh_trainer.optim.precision import LossScaling, Precision
from torsh_trainer.optim.schedule.base import RunningSchedule
from torsh_trainer.optim.schedule.torch_scheduler import TorchSchedule
from torsh_trainer.strategies.base import Job
from torsh_trainer_deepspeed.config import DeepSpeedConfig, Key

log = logging.getLogger(__name__)

AUTO = "auto"


@dataclass(frozen=True)
class ConfigPlan:
    """``values`` go to deepspeed.initialize; the rest of a file is ours to do.

    ``half`` says that DeepSpeed holds the parameters in ``precision.compute`` itself, ``swaps``
    which blocks of ``zero_optimization`` have it keep something in files. ``max_norm`` is the bound
    of a file, which the run does not set.
    """

    values: dict[str, Any]
    stage: int
    precision: Precision
    half: bool
    offloads: bool
    swaps: tuple[str, ...]
    max_norm: float | None


def plan_config(config: DeepSpeedConfig, job: Job, model: nn.Module, *, device: str) -> ConfigPlan:
    """The configuration for ``job``: what it leaves out or calls "auto" comes from the recipe.

    Raises:
        ConfigError: the file and the recipe say two things; both are shown.
        Unsupported: the file asks for what would give another result, or cannot run here.
    """
    values = _normal(config.values)
    config = replace(config, values=values)
    _refuse(config, device)
    _batch(config, values, job)
    max_norm = _clipping(config, values, job)
    precision, half = _precision(config, values, job)
    _automatic(config, values, model)
    zero = values["zero_optimization"]
    _own_settings(values, precision, stage=config.stage, half=half)
    _reduction(config, values)
    left = replace(config, values=values).autos()
    if left:
        raise ConfigError(
            f'{config.place(*left[0])} is "auto", which nothing here gives a value',
            fix="write the value into the file",
        )
    offload = zero.get("offload_optimizer") or {}
    return ConfigPlan(
        values,
        config.stage,
        precision,
        half,
        offloads=offload.get("device", "none") != "none",
        swaps=_swaps(config, precision, half=half),
        max_norm=max_norm,
    )


def contradiction(
    config: DeepSpeedConfig, key: Key, there: Any, knob: str, here: Any
) -> ConfigError:
    """The error for a file and a recipe that differ: both, and either way out."""
    return ConfigError(
        f"{config.place(*key)} is {_as_typed(there)}, and {knob}={_as_typed(here)}",
        fix=f"set {knob}={_as_typed(there)}, or change the file, or take the key out of it",
    )


def _as_typed(value: Any) -> str:
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def _normal(values: Mapping[str, Any]) -> dict[str, Any]:
    """Today's spelling of what DeepSpeed also knows by an older one."""
    normal = copy.deepcopy(dict(values))
    if "bfloat16" in normal:
        normal.setdefault("bf16", normal.pop("bfloat16"))
    zero = normal.get("zero_optimization", {})
    if isinstance(zero, bool):
        zero = {"stage": int(zero)}
    if "stage" in zero and zero["stage"] != AUTO:
        zero["stage"] = int(zero["stage"])
    normal["zero_optimization"] = zero
    return normal


# -- what cannot be honoured ---------------------------------------------------------------------


def _is_enabled(value: Any) -> bool:
    return bool(value.get("enabled")) if isinstance(value, Mapping) else bool(value)


_REFUSED: tuple[tuple[Key, Callable[[Any], bool], str], ...] = (
    (("torch_autocast",), _is_enabled, "set precision=bf16_mixed or precision=fp16_mixed instead"),
    (
        ("gradient_allreduce_op",),
        lambda v: v != "mean",
        "a gradient is a mean here: scale the loss",
    ),
    (("managed_gradient_accumulation",), lambda v: v is False, "trainer.accumulate manages it"),
    (("data_efficiency",), _is_enabled, "samples are chosen by data=...: take the block out"),
    (("tensor_parallel",), bool, "use deepspeed itself for tensor parallelism"),
    (("expert_parallel",), _is_enabled, "use deepspeed itself for expert parallelism"),
    (("sequence_parallel_size",), lambda v: v != 1, "use deepspeed itself for it"),
    (("data_parallel_size",), bool, "it is the number of processes: take it out"),
    (("hybrid_engine",), _is_enabled, "it is for generation while training: take the block out"),
    (("autotuning",), _is_enabled, "run DeepSpeed's own launcher with --autotuning"),
    (("weight_quantization",), bool, "it is for inference: take the block out"),
    (("compile", "deepcompile"), bool, "set trainer.compile=true with strategy.stage=2"),
    (("bf16", "bf16_master_weights_and_grads"), bool, "a checkpoint holds fp32 masters"),
    (("bf16", "bf16_optimizer_states"), bool, "a checkpoint holds fp32 optimizer state"),
    (("fp16", "fp16_master_weights_and_grads"), bool, "a checkpoint holds fp32 masters"),
    (("aio", "use_gds"), bool, "leave it out: files are read by way of host memory"),
    (("zero_optimization", "zenflow"), bool, "it changes the algorithm: take the block out"),
    (("zero_optimization", "compute_grad_norm"), lambda v: v is False, "the norm is reported"),
    (("zero_optimization", "offload_optimizer", "super_offload"), bool, "leave it out"),
    (
        ("zero_optimization", "offload_optimizer", "ratio"),
        lambda v: float(v) != 1.0,
        "leave it out",
    ),
)
"""Keys, the values that are refused, and what to do instead."""

_QUANTISED = (
    "zero_quantized_weights",
    "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights",
)


def _refuse(config: DeepSpeedConfig, device: str) -> None:
    for key, refused, use in _REFUSED:
        value = config.get(*key)
        if value not in (None, AUTO) and refused(value):
            raise Unsupported(
                f"strategy=deepspeed cannot honour {config.place(*key)}",
                fix=use,
                strategy="deepspeed",
            )
    for name in _QUANTISED:
        if device == "cpu" and config.get("zero_optimization", name):
            raise Unsupported(
                f"{config.place('zero_optimization', name)} needs a GPU: DeepSpeed has no kernels "
                "for quantised ZeRO++ on a CPU",
                fix="leave it out, or run on GPUs",
                strategy="deepspeed",
            )


OPTIMIZER, PARAMETERS = "offload_optimizer", "offload_param"
"""The blocks of zero_optimization that may say ``device: nvme``."""


def in_files(config: DeepSpeedConfig) -> tuple[str, ...]:
    """The blocks that do."""
    blocks = (OPTIMIZER, PARAMETERS)
    return tuple(b for b in blocks if config.get("zero_optimization", b, "device") == "nvme")


def _swaps(config: DeepSpeedConfig, precision: Precision, *, half: bool) -> tuple[str, ...]:
    """The same, held against the stage and what is computed in.

    Raises:
        Unsupported: DeepSpeed has no files there.
        ConfigError: nothing says where they are to lie.
    """
    found = in_files(config)
    for block in found:
        place = config.place("zero_optimization", block, "device")
        if config.stage != 3:
            raise Unsupported(
                f"{place} is nvme at stage {config.stage}, and DeepSpeed keeps files at stage 3",
                fix="set the stage to 3, or the device to cpu",
                strategy="deepspeed",
            )
        if block == PARAMETERS and not half:
            raise Unsupported(
                f"{place} is nvme, where DeepSpeed has buffers of a low precision, and the run's "
                f"parameters are {precision.params}",
                fix=f"set precision=bf16_true, or the device to cpu; {OPTIMIZER} can be nvme",
                strategy="deepspeed",
            )
        if not config.get("zero_optimization", block, "nvme_path"):
            raise ConfigError(
                f"{place} is nvme, and nothing says where the files are to lie",
                fix="name a folder of a local disk: nvme_path (strategy.nvme_path)",
            )
    return found


# -- what the recipe says ------------------------------------------------------------------------


def _batch(config: DeepSpeedConfig, values: dict[str, Any], job: Job) -> None:
    plan = job.batch
    sizes = {
        "train_batch_size": ("data.batch_size", plan.batch_size),
        "train_micro_batch_size_per_gpu": ("data.micro_batch_size", plan.micro_batch_size),
        "gradient_accumulation_steps": ("trainer.accumulate", plan.accumulate),
    }
    said = {name: values[name] for name in sizes if values.get(name) not in (None, AUTO)}
    for name, value in said.items():
        _positive(config, name, value)
    if len(said) == 3:
        whole, micro, accumulate = (int(said[name]) for name in sizes)
        if whole != micro * accumulate * plan.dp_size:
            raise ConfigError(
                f"{config.place('train_batch_size')} is {whole}, which is not "
                f"train_micro_batch_size_per_gpu={micro} x gradient_accumulation_steps="
                f"{accumulate} x {plan.dp_size} processes",
                fix="take one of the three out: it follows from the others",
            )
    for name, (knob, here) in sizes.items():
        if name in said and int(said[name]) != here:
            raise contradiction(config, (name,), said[name], knob, here)
        values[name] = here


_SIZES = {
    "train_batch_size": "batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "accumulate",
}


def read_run_values(config: DeepSpeedConfig, *, schedule: str | None) -> dict[str, Any]:
    """What the file says of the run: sizes, precision, and a scheduler of DeepSpeed's or torch's.

    Raises:
        ConfigError: the run has a ``schedule``; or the scheduler is none that DeepSpeed knows.
    """
    values = _normal(config.values)
    found: dict[str, Any] = {
        ours: _positive(config, theirs, values[theirs])
        for theirs, ours in _SIZES.items()
        if values.get(theirs) not in (None, AUTO)
    }
    block = values.get("scheduler")
    if block:
        found["schedule"] = _scheduler(config, block, schedule)
    low = [values.get(name) or {} for name in ("fp16", "bf16")]
    asked = [block.get("enabled", False) for block in low if isinstance(block, Mapping)]
    if asked == [False, False]:  # silence is DeepSpeed's fp32
        found["precision"] = Precision()
    elif asked == [False, True]:
        found["precision"] = Precision(params="bf16", compute="bf16")
    elif asked == [True, False]:
        scaling = _scaling(config, low[0], LossScaling())
        found["precision"] = Precision(compute="fp16", loss_scaling=scaling)
    return found


def _positive(config: DeepSpeedConfig, name: str, value: Any) -> int:
    if not isinstance(value, int | float) or value != int(value) or value < 1:
        raise ConfigError(
            f"{config.place(name)} is {value!r}, not a positive number",
            fix='give a number, or "auto" to take the recipe\'s',
        )
    return int(value)


_SCHEDULERS = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_MEANT_BY_DEFAULT = {
    ("WarmupLR", "warmup_max_lr"),
    ("WarmupLR", "warmup_min_lr"),
    ("WarmupDecayLR", "warmup_min_lr"),
}
"""Settings whose "auto" is what the scheduler does without them: the optimizer's rate, and 0."""
_RATE, _TOTAL = "warmup_max_lr", "total_num_steps"
_FILLED = {
    ("WarmupDecayLR", _RATE),
    ("WarmupDecayLR", _TOTAL),
    ("WarmupCosineLR", _TOTAL),
}
"""Those whose "auto" is known when the run begins: the optimizer's rate, and its updates."""


@dataclass(frozen=True, kw_only=True)
class FileSchedule(TorchSchedule):
    """That of a file, which errors then name; ``fills`` are options that stand there as "auto"."""

    fills: tuple[str, ...] = ()

    def start(
        self, optimizers: Mapping[str, Optimizer], *, total: int | None = None
    ) -> RunningSchedule:
        if _TOTAL in self.fills and total is None:
            raise ConfigError(
                f'{_TOTAL} in the file of strategy.config is "auto", and nobody knows how many '
                "updates the run makes",
                fix="set trainer.max_steps, or write the value into the file",
            )
        (optimizer,) = optimizers.values()
        known = {_RATE: [float(g["lr"]) for g in optimizer.param_groups], _TOTAL: total}
        filled = {name: known[name] for name in self.fills}
        schedule = TorchSchedule(scheduler=self.scheduler, options={**self.options, **filled})
        try:
            return schedule.start(optimizers, total=total)
        except ConfigError as error:
            raise ConfigError(
                f"the scheduler in the file of strategy.config: {error.sentence}", fix=error.fix
            ) from error


def _scheduler(
    config: DeepSpeedConfig, block: Mapping[str, Any], schedule: str | None
) -> FileSchedule:
    kind = str(block.get("type"))
    place = config.place("scheduler", "type")
    if schedule is not None:
        raise ConfigError(
            f"{place} is {kind}, and schedule={schedule}",
            fix="set schedule=constant schedule.warmup_steps=0 schedule.warmup_ratio=null, or take "
            "the block out of the file",
        )
    known = (*_SCHEDULERS, *lr_scheduler.__all__)
    if kind not in known:
        raise ConfigError(f"{place} is {kind}, which is no scheduler", fix=nearest(kind, known))
    options: dict[str, Any] = dict(block.get("params") or {})
    fills: tuple[str, ...] = ()
    for name in [name for name, value in options.items() if value == AUTO]:
        if (kind, name) not in _MEANT_BY_DEFAULT | _FILLED:
            raise ConfigError(
                f'{config.place("scheduler", "params", name)} is "auto", which nothing here gives '
                "a value",
                fix="write the value into the file",
            )
        del options[name]
        if (kind, name) in _FILLED:
            fills = (*fills, name)
    theirs = f"deepspeed.runtime.lr_schedules.{kind}" if kind in _SCHEDULERS else kind
    return FileSchedule(scheduler=theirs, options=options, fills=fills)


def _clipping(config: DeepSpeedConfig, values: dict[str, Any], job: Job) -> float | None:
    there, here = values.get("gradient_clipping"), job.clip.norm
    if there in (None, AUTO):
        return None
    bound = float(there) or None
    if here is not None and here != bound:
        raise contradiction(config, ("gradient_clipping",), there, "trainer.max_grad_norm", here)
    return bound


def _precision(config: DeepSpeedConfig, values: dict[str, Any], job: Job) -> tuple[Precision, bool]:
    """The precision of the run, and whether DeepSpeed itself holds the parameters in it."""
    recipe = job.precision
    asked = {name: values.get(name, {}).get("enabled", False) for name in ("fp16", "bf16")}
    for name in asked:
        if asked[name] == AUTO:
            asked[name] = recipe.compute == name
            values[name]["enabled"] = asked[name]
    if asked["fp16"] and asked["bf16"]:
        raise ConfigError(
            f"{config.place('fp16', 'enabled')} and bf16.enabled exclude each other",
            fix="keep one of them",
        )
    low = next((name for name, on in asked.items() if on), None)
    if low is None:
        off = [name for name in asked if name in values and recipe.params == name]
        if off:
            raise contradiction(
                config, (off[0], "enabled"), False, "precision.params", recipe.params
            )
        return recipe, recipe.params == "bf16"
    if recipe.compute not in ("fp32", low):
        raise contradiction(config, (low, "enabled"), True, "precision.compute", recipe.compute)
    if recipe.compute == "fp32":
        log.warning("%s decides: parameters are computed in %s", config.place(low, "enabled"), low)
    if low == "bf16":
        return Precision(params="bf16", compute="bf16", reduce=recipe.reduce), True
    scaling = _scaling(config, values["fp16"], recipe.loss_scaling)
    return Precision(compute="fp16", reduce=recipe.reduce, loss_scaling=scaling), True


def _scaling(config: DeepSpeedConfig, fp16: Mapping[str, Any], recipe: LossScaling) -> LossScaling:
    """DeepSpeed's words for loss scaling, with its defaults, as ours."""

    def read_number(name: str, default: float) -> float:
        value = fp16.get(name, default)
        return default if value == AUTO else float(value)

    there = LossScaling(
        scale=read_number("loss_scale", 0) or None,
        initial_scale=2.0 ** read_number("initial_scale_power", 16),
        growth_interval=int(read_number("loss_scale_window", 1000)),
        hysteresis=int(read_number("hysteresis", 2)),
        min_scale=read_number("min_loss_scale", 1),
    )
    if recipe not in (LossScaling(), there):
        raise contradiction(config, ("fp16",), there, "precision.loss_scaling", recipe)
    return there


def _own_settings(values: dict[str, Any], precision: Precision, *, stage: int, half: bool) -> None:
    """What is done here and so taken from DeepSpeed, or given it because the run says so."""
    # Bounds are set before each step; at stage 0 they are ours.
    values["gradient_clipping"] = 0.0
    values.pop("optimizer", None)
    values.pop("scheduler", None)
    values.setdefault("zero_allow_untested_optimizer", True)
    values.setdefault("zero_force_ds_cpu_optimizer", False)
    if stage == 0 or not half:
        values.pop("fp16", None)
        values.pop("bf16", None)
    elif precision.compute == "bf16" and "bf16" in values:
        values.pop("fp16", None)
    elif precision.compute == "bf16":
        values["bf16"] = {"enabled": True}
        # Gradients add up in fp32, whatever their own dtype is.
        values.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
        values.setdefault("communication_data_type", precision.reduce)
    elif precision.compute == "fp16":
        # The scale is ours: growth does not halve an update, and the floor stops nothing.
        casts = {key: v for key, v in values["fp16"].items() if key == "auto_cast" and v != AUTO}
        values["fp16"] = {**casts, "enabled": True, "loss_scale": 1.0}
        values.pop("bf16", None)
    if precision.reduce != "fp32":
        values.setdefault("communication_data_type", precision.reduce)


def _reduction(config: DeepSpeedConfig, values: dict[str, Any]) -> None:
    """Sums instead of means where DeepSpeed has them: what hooks see does not follow the ranks.

    Not where a file says how the mean is divided.
    """
    factor = values.get("gradient_predivide_factor", 1.0)
    divides = values.get("prescale_gradients") or factor not in (1.0, AUTO)
    if config.stage < 3 and not divides:
        values["gradient_allreduce_op"] = "sum"


# -- "auto", as Hugging Face defines it ------------------------------------------------------------


def _automatic(config: DeepSpeedConfig, values: dict[str, Any], model: nn.Module) -> None:
    """Sizes by the model's width h: buckets of h * h, prefetch 0.9 h * h, persistence 10 h."""
    zero = values["zero_optimization"]
    rules: dict[str, Callable[[int], int]] = {
        "reduce_bucket_size": lambda h: h * h,
        "stage3_prefetch_bucket_size": lambda h: int(0.9 * h * h),
        "stage3_param_persistence_threshold": lambda h: 10 * h,
    }
    wanted = [name for name in rules if zero.get(name) == AUTO]
    if not wanted:
        return
    width = _hidden_size(model)
    if width is None:
        raise ConfigError(
            f'{config.place("zero_optimization", wanted[0])} is "auto", which is computed from '
            "model.config.hidden_size, and the model has none",
            fix="write the value into the file",
        )
    for name in wanted:
        zero[name] = rules[name](width)


def _hidden_size(model: nn.Module) -> int | None:
    described: Any = getattr(model, "config", None)
    for source in (described, getattr(described, "text_config", None)):
        size = getattr(source, "hidden_size", None)
        sizes: Any = getattr(source, "hidden_sizes", None)
        if size is None and sizes:
            size = max(sizes)
        if size is not None:
            return int(size)
    return None


# -- the optimizer ---------------------------------------------------------------------------------


def check_optimizer(config: DeepSpeedConfig, optimizer: Optimizer) -> None:
    """Holds the file's optimizer against the recipe's, setting by setting.

    Raises:
        ConfigError: they differ; both are shown.
    """
    kind = config.get("optimizer", "type")
    if kind is None:
        return
    params = dict(config.get("optimizer", "params", default={}))
    here = type(optimizer).__name__
    reason = _NOT_HERE.get(str(kind).lower().replace("_", ""))
    if reason is not None:
        raise Unsupported(
            f"strategy=deepspeed cannot honour {config.place('optimizer', 'type')}: "
            f"{kind} {reason}",
            fix=f"take the block out of the file, and the recipe's {here} trains",
            strategy="deepspeed",
        )
    there = _kind(str(kind), params)
    if there.lower() != here.lower():
        raise ConfigError(
            f"{config.place('optimizer', 'type')} is {kind}"
            + (f", which is {there} to DeepSpeed" if there != kind else "")
            + f", and the recipe's optimizer is {here}",
            fix=f"set optimizer={there.lower()}, or take the block out of the file",
        )
    for name, value in params.items():
        if name in _ABOUT_KERNELS or value == AUTO:
            continue
        if name not in optimizer.defaults:
            raise ConfigError(
                f"{config.place('optimizer', 'params', name)}: {here} has no such setting",
                fix="take it out of the file"
                + (": it is trainer.max_grad_norm" if name == "max_grad_norm" else ""),
            )
        ours = optimizer.defaults[name]
        if _comparable(ours) != _comparable(value):
            raise contradiction(
                config, ("optimizer", "params", name), value, f"optimizer.{name}", ours
            )


_NOT_HERE = {
    "lamb": "takes norms of whole parameters, which ZeRO cuts, and DeepSpeed has it for CUDA alone",
    "lion": "has no twin in torch, with which another strategy could go on from its checkpoint",
    "muadam": "needs the package mup, and a model built with it",
    "muadamw": "needs the package mup, and a model built with it",
    "musgd": "needs the package mup, and a model built with it",
    "muon": "looks at whole matrices, which ZeRO cuts (optimizer=muon strategy=fsdp does that)",
    "onebitadam": "is gone from DeepSpeed 0.19.8",
    "onebitlamb": "is gone from DeepSpeed 0.19.8",
    "zerooneadam": "is gone from DeepSpeed 0.19.8",
}
"""Optimizers of DeepSpeed's, and why they do not train here."""

_ABOUT_KERNELS = ("torch_adam", "adam_w_mode", "fused", "foreach", "fp32_optimizer_states")


def _kind(kind: str, params: Mapping[str, Any]) -> str:
    """DeepSpeed's Adam is AdamW unless ``adam_w_mode`` is false."""
    if kind.lower() == "adam" and params.get("adam_w_mode", True):
        return "AdamW"
    return {"adam": "Adam", "adamw": "AdamW", "adagrad": "Adagrad"}.get(kind.lower(), kind)


def _comparable(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(float(one) for one in value)
    return float(value) if isinstance(value, int | float) else value
