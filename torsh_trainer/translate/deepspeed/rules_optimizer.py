"""Optimizers by their names and parameters, schedulers as closed forms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torsh_trainer.translate.deepspeed import job
from torsh_trainer.translate.deepspeed.rules import Outcome, approximate, dead, exact, refuse, rule
from torsh_trainer.translate.deepspeed.source import Leaf, Source

ADAM = ("adam", "adamw")
ONE_BIT = "onebitadam"
_WANTING = {
    "lamb": "LAMB",
    "lion": "Lion",
    "muon": "DeepSpeed's Muon (torch.optim.Muon scales its updates differently)",
    "muadam": "mup",
    "muadamw": "mup",
    "musgd": "mup",
    "onebitlamb": "1-bit LAMB",
    "zerooneadam": "0/1 Adam",
}
_OPTIONS = {
    "adagrad": {"lr_decay", "initial_accumulator_value"},
    "Adadelta": {"rho"},
    "Adafactor": {"beta2_decay", "d"},
    "ASGD": {"lambd", "alpha", "t0"},
    "NAdam": {"momentum_decay", "decoupled_weight_decay"},
    "RAdam": {"decoupled_weight_decay"},
    "RMSprop": {"alpha", "momentum", "centered"},
    "Rprop": {"etas", "step_sizes"},
    "SGD": {"momentum", "dampening", "nesterov"},
}
_ANY = {"maximize", "foreach", "fused"}
_DEFAULT_LR = {
    "adam": 1e-3,
    "adamw": 1e-3,
    "adagrad": 1e-2,
    ONE_BIT: 1e-3,
}


@rule("optimizer.type", "DeepSpeed's Adam is AdamW unless adam_w_mode is false.")
def _type(source: Source, leaf: Leaf) -> Outcome:
    name = job.optimizer_name(source)
    if leaf.value is None:
        return approximate("missing: the script builds its optimizer; choose the same here")
    no_decay: dict[str, Any] = {"optimizer.no_decay": False}
    torchs = name not in ADAM or source.get("optimizer.params.torch_adam")
    if source.reproduces and torchs and ("optimizer", "params", "fused") not in source.found:
        no_decay["optimizer.fused"] = False  # torch's fused kernels round otherwise
    unfit = _unfit(source, name)
    if unfit is not None:
        return unfit
    if name == "adam":
        option = "adamw" if source.get("optimizer.params.adam_w_mode") else "adam"
        why = (
            "DeepSpeed's Adam decays weights as AdamW does" if option == "adamw" else "Adam with L2"
        )
        return Outcome("exact", why, choices={"optimizer": option}, values=no_decay)
    if name in job.TORCH_OPTIMIZERS:
        option = job.TORCH_OPTIMIZERS[name]
        return Outcome(
            "exact", "the same optimizer", choices={"optimizer": option}, values=no_decay
        )
    if name == ONE_BIT:
        return _one_bit(source)
    if name in _WANTING:
        return refuse(f"not in this release: {_WANTING[name]}")
    return refuse(f"torch.optim.{leaf.value}: not in this release, or no optimizer of torch")


def _unfit(source: Source, name: str) -> Outcome | None:
    """Optimizers of torch that are something else over cut or flattened parameters."""
    if name == "SparseAdam":
        return refuse("takes sparse gradients alone, which DeepSpeed 0.19.8 has no more")
    if name in ("Adafactor", "Rprop") and job.strategy(source) == "fsdp":
        return refuse(f"not in this release: {name} over sharded parameters")
    if name == "Adafactor" and job.stage(source) == 1:
        return Outcome(
            "approximate",
            "steps whole parameters; DeepSpeed's are cut and flat, and nothing is factored there",
            choices={"optimizer": "adafactor"},
            values={"optimizer.no_decay": False},
        )
    return None


def _one_bit(source: Source) -> Outcome:
    choices = {"optimizer": "adamw"}
    if job.compresses(source):
        choices["compression"] = "onebit"
    return Outcome(
        "approximate",
        "1-bit Adam compresses momentum and freezes the variance in the end; ours compresses "
        "gradients, with the same error feedback, and freezes nothing",
        choices=choices,
        values={"optimizer.no_decay": False},
        engine_takes=False,
    )


@rule("optimizer.lr", "The learning rate, unless a scheduler overwrites it.")
def _lr(source: Source, leaf: Leaf) -> Outcome:
    if _is_overwritten(source):
        return dead("the scheduler overwrites it")
    name = job.optimizer_name(source)
    value = leaf.value if leaf.value is not None else _DEFAULT_LR.get(name)
    if value is None:
        return exact("missing: the optimizer's own default is the same here")
    return exact("the base rate" if leaf.value is not None else "the default", optimizer__lr=value)


@rule("optimizer.betas", "Smoothing of the gradient and of its square.")
def _betas(source: Source, leaf: Leaf) -> Outcome:
    if _scheduler(source) == CYCLE and _cycles_momentum(source):
        return dead("the scheduler sets them")
    value = leaf.value if leaf.value is not None else [0.9, 0.999]
    return exact("the same" if leaf.value is not None else "the default", optimizer__betas=value)


@rule("optimizer.eps", "What is added to the denominator.")
def _eps(source: Source, leaf: Leaf) -> Outcome:
    if leaf.value is None:
        return exact("the default", optimizer__eps=1e-8)
    return exact("the same", optimizer__eps=leaf.value)


@rule("optimizer.weight-decay", "Weight decay; 0 where it is missing, with torch_adam torch's own.")
def _weight_decay(source: Source, leaf: Leaf) -> Outcome:
    if leaf.value is not None:
        return exact(
            "over all parameters, norms and biases too", optimizer__weight_decay=leaf.value
        )
    if source.get("optimizer.params.torch_adam") and job.optimizer_name(source) in ADAM:
        value = 0.01 if _is_decoupled(source) else 0.0
        return exact("missing: torch's own default", optimizer__weight_decay=value)
    return exact("missing: DeepSpeed's default is 0", optimizer__weight_decay=0.0)


def _is_decoupled(source: Source) -> bool:
    return job.optimizer_name(source) == "adamw" or bool(source.get("optimizer.params.adam_w_mode"))


@rule("optimizer.decoupled", "AdamW or Adam with an L2 penalty.")
def _judge_decoupled(source: Source, leaf: Leaf) -> Outcome:
    name = job.optimizer_name(source)
    if name not in ADAM:
        return dead(f"is read for Adam alone, not for {source.get('optimizer.type')}")
    if name == "adamw" and not leaf.value:
        return dead("is ignored for the type AdamW")
    return exact("chooses between adamw and adam")


@rule("optimizer.kernel", "DeepSpeed's fused Adam, or torch's.")
def _kernel(source: Source, leaf: Leaf) -> Outcome:
    if leaf.value:
        return exact("torch's own optimizer")
    if job.offloads_optimizer(source):
        return dead("the optimizer is offloaded, and its kernel with it")
    return approximate(
        "DeepSpeed's FusedAdam and torch's round an update differently, by about 1 ulp"
    )


@rule("optimizer.bias-correction", "Adam's bias correction.")
def _bias_correction(source: Source, leaf: Leaf) -> Outcome:
    if source.get("optimizer.params.torch_adam"):
        why = "torch always corrects, and takes no such option: DeepSpeed stops"
        return dead(why, engine_takes=False)
    if leaf.value:
        return exact("torch always corrects")
    return refuse("not in this release: Adam without bias correction")


@rule("optimizer.amsgrad", "AMSGrad.")
def _amsgrad(source: Source, leaf: Leaf) -> Outcome:
    if not leaf.value:
        return exact("off")
    if source.get("optimizer.params.torch_adam"):
        return exact("torch's own", optimizer__amsgrad=True)
    if job.offloads_optimizer(source):
        return dead("DeepSpeed's CPUAdam takes it and does not do it")
    return refuse("DeepSpeed's FusedAdam raises on it; torch_adam: true does it")


@rule("optimizer.max-grad-norm", "The older place of gradient_clipping.")
def _max_grad_norm(source: Source, leaf: Leaf) -> Outcome:
    if source.is_given("gradient_clipping"):
        return dead("gradient_clipping says it; DeepSpeed refuses this key", engine_takes=False)
    return approximate(
        "taken for gradient_clipping, which it once was with fp16; DeepSpeed refuses this key "
        "today, so nothing proves it",
        engine_takes=False,
        trainer__max_grad_norm=float(leaf.value) if leaf.value else None,
    )


@rule("optimizer.freeze", "Steps before 1-bit Adam compresses.")
def _freeze(source: Source, leaf: Leaf) -> Outcome:
    if job.optimizer_name(source) != ONE_BIT:
        return _other(source, leaf)
    if job.compresses(source):
        return approximate(
            "gradients travel whole until then", compression__warmup_steps=leaf.value
        )
    return refuse("1-bit compression is not in this release beside a sharded optimizer")


@rule("optimizer.transport", "How 1-bit optimizers communicate.")
def _transport(source: Source, leaf: Leaf) -> Outcome:
    if "bit" not in job.optimizer_name(source) and job.optimizer_name(source) != "zerooneadam":
        return _other(source, leaf)
    return dead("communication is chosen by the group comm")


@rule("optimizer.other", "Options of an optimizer of torch, as they are.")
def _other(source: Source, leaf: Leaf) -> Outcome:
    name = job.optimizer_name(source)
    option = leaf.path[-1]
    if name in ADAM and option == "fp32_optimizer_states":
        if leaf.value or not job.own_kernel(source):
            return dead("moments are fp32")
        return refuse("not in this release: moments in a lower dtype")
    if name in ADAM and option in _ANY and not source.get("optimizer.params.torch_adam"):
        return dead(f"DeepSpeed's own Adam takes no {option}: it stops", engine_takes=False)
    if name in job.TORCH_OPTIMIZERS and option in _OPTIONS.get(name, set()) | _ANY:
        return exact("the same option", **{f"optimizer__{option}": leaf.value})
    if name in _WANTING:
        return refuse(f"not in this release: {_WANTING[name]}")
    return refuse(f"{source.get('optimizer.type')} takes no {option}: remove it")


CYCLE, RANGE = "OneCycle", "LRRangeTest"
_LOWEST = 1e-3
"""Where LRRangeTest begins when it is not told."""
WARMUP = {"WarmupLR": "none", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
TORCH = {
    "LambdaLR",
    "MultiplicativeLR",
    "StepLR",
    "MultiStepLR",
    "ConstantLR",
    "LinearLR",
    "ExponentialLR",
    "PolynomialLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "OneCycleLR",
}


def _scheduler(source: Source) -> str:
    name = source.get("scheduler.type")
    return name if isinstance(name, str) else ""


def maximum(source: Source) -> Any:
    """The base rate that the scheduler sets; None: the optimizer's own."""
    if _scheduler(source) in (CYCLE, RANGE):
        return _base_rate(source)
    if _scheduler(source) == "WarmupCosineLR" or _scheduler(source) not in WARMUP:
        return None
    value = source.get("scheduler.params.warmup_max_lr")
    if value is None and _scheduler(source) == "WarmupDecayLR":
        return 0.001
    return value


def _is_overwritten(source: Source) -> bool:
    return maximum(source) is not None


def _base(source: Source) -> float | None:
    value = maximum(source)
    if value is None:
        value = source.get("optimizer.params.lr")
    return _DEFAULT_LR.get(job.optimizer_name(source)) if value is None else value


@rule("schedule.type", "DeepSpeed's warm-ups, update by update; torch's schedulers as they are.")
def _schedule(source: Source, leaf: Leaf) -> Outcome:
    name = _scheduler(source)
    if leaf.value is None:
        why = "missing: the rate stays, unless the script steps a scheduler of its own"
        return Outcome("exact", why, choices={"schedule": "constant"})
    if name in WARMUP:
        return Outcome(
            "emulated",
            "the second update has the rate of the first, as in DeepSpeed",
            choices={"schedule": "deepspeed_warmup"},
            values={"schedule.decay": WARMUP[name]},
        )
    if name in (CYCLE, RANGE):
        return _with_own_rate(source, name)
    if name in TORCH and (job.stage(source) > 0 or job.precision(source) in ("bf16", "fp16")):
        return Outcome(
            "approximate",
            "torch's own, stepped after every update; DeepSpeed stops: torch's schedulers take no "
            "optimizer of ZeRO or of half precision",
            choices={"schedule": "torch"},
            values={"schedule.scheduler": name},
            engine_takes=False,
        )
    if name in TORCH:
        return Outcome(
            "exact",
            "torch's own, stepped after every update",
            choices={"schedule": "torch"},
            values={"schedule.scheduler": name},
        )
    return refuse(f"not in this release: the scheduler {leaf.value}")


def _option(source: Source, name: str) -> Any:
    leaf = source.found.get(("scheduler", "params", name))
    value = None if leaf is None else leaf.value
    # A list has a value for each group of the optimizer, and a file makes one group.
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _base_rate(source: Source) -> Any:
    """The base rate of OneCycle and LRRangeTest."""
    if _scheduler(source) == CYCLE:
        return _option(source, "cycle_max_lr")
    value = _option(source, "lr_range_test_min_lr")
    return _LOWEST if value is None else value


def _cycles_momentum(source: Source) -> bool:
    return _option(source, "cycle_momentum") is not False


def _with_own_rate(source: Source, name: str) -> Outcome:
    rates = ("cycle_min_lr", "cycle_max_lr") if name == CYCLE else ("lr_range_test_min_lr",)
    for rate in rates:
        value = _option(source, rate)
        if value is None and name == CYCLE:
            return refuse(f"OneCycle wants {rate}: DeepSpeed stops without it")
        if value is not None and not _is_number(value):
            return refuse(f"{rate} is {value!r}, not a number")
    base = _base_rate(source)
    if not base:
        return refuse("its base rate is 0: every rate is")
    values = {"optimizer.lr": base}
    if name == CYCLE:
        values["schedule.low"] = _option(source, "cycle_min_lr") / base
    return Outcome(
        "emulated",
        "the same rates, update by update",
        choices={"schedule": "deepspeed_one_cycle" if name == CYCLE else "deepspeed_range_test"},
        values=values,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_KNOBS: Mapping[str, Mapping[str, tuple[str, type, float]]] = {
    CYCLE: {
        "cycle_first_step_size": ("first_steps", float, 1e-9),
        "cycle_second_step_size": ("second_steps", float, 0),
        "cycle_first_stair_count": ("first_stairs", int, 0),
        "cycle_second_stair_count": ("second_stairs", int, 0),
        "decay_step_size": ("decay_steps", float, 0),
        "decay_lr_rate": ("decay_rate", float, -math.inf),
        "cycle_momentum": ("momentum", bool, 0),
        "cycle_min_mom": ("low_momentum", float, 0),
        "cycle_max_mom": ("high_momentum", float, 0),
        "decay_mom_rate": ("momentum_decay_rate", float, -math.inf),
    },
    RANGE: {
        "lr_range_test_step_size": ("step_size", int, 1),
        "lr_range_test_step_rate": ("step_rate", float, -math.inf),
        "lr_range_test_staircase": ("staircase", bool, 0),
    },
}
"""DeepSpeed's word -> ours, its type, and the least value."""
_RATES = ("cycle_min_lr", "cycle_max_lr", "lr_range_test_min_lr")


def _own_option(source: Source, name: str, option: str) -> Outcome:
    """An option of OneCycle or LRRangeTest."""
    if option in _RATES and (option.startswith("cycle")) == (name == CYCLE):
        return Outcome("emulated", "said by schedule.type: the base rate, and a share of it")
    if option not in _KNOBS[name]:
        return refuse(f"{name} takes no {option}: remove it")
    knob, kind, least = _KNOBS[name][option]
    value = _option(source, option)
    if value is None and option.startswith("cycle_second"):
        return Outcome("emulated", "as the first half", values={f"schedule.{knob}": None})
    fits = isinstance(value, bool) if kind is bool else _is_number(value) and value >= least
    if not fits or (kind is int and value != int(value)):
        return refuse(f"{option} is {value!r}, which DeepSpeed does not take or stumbles over")
    return Outcome("emulated", "the same", values={f"schedule.{knob}": value})


@rule("schedule.warmup-range", "Where the warm-up begins and ends.")
def _range(source: Source, leaf: Leaf) -> Outcome:
    name = _scheduler(source)
    if name not in ("WarmupLR", "WarmupDecayLR"):
        return _schedule_option(source, leaf)
    if leaf.path[-1] == "warmup_max_lr":
        value = maximum(source)
        if value is None:
            return exact("missing: the optimizer's rate")
        return Outcome("emulated", "the base rate of the schedule", values={"optimizer.lr": value})
    low, base = leaf.value or 0.0, _base(source)
    if low and not base:
        return refuse("its share of the base rate cannot be said: give optimizer.params.lr")
    start = low / base if base else 0.0
    return Outcome("emulated", "as a share of the base rate", values={"schedule.start": start})


@rule("schedule.warmup-steps", "Updates of the warm-up; fewer than 2 count as 2.")
def _steps(source: Source, leaf: Leaf) -> Outcome:
    if _scheduler(source) not in WARMUP:
        return _schedule_option(source, leaf)
    value = 1000 if leaf.value is None else leaf.value
    return Outcome(
        "emulated",
        "DeepSpeed refuses 0 since 0.19.6, and took it for 2 before" if value <= 0 else "the same",
        values={"schedule.warmup_steps": max(0, value)},
        engine_takes=value > 0,
    )


@rule("schedule.warmup-type", "The shape of the rise: a logarithm unless it says linear.")
def _shape(source: Source, leaf: Leaf) -> Outcome:
    if _scheduler(source) not in WARMUP:
        return _schedule_option(source, leaf)
    if leaf.value == "linear":
        return Outcome("emulated", "the same", values={"schedule.warmup": "linear"})
    why = "the logarithm is DeepSpeed's default"
    if leaf.value not in (None, "log"):
        why = f"DeepSpeed knows no {leaf.value!r}: it warns and rises by the logarithm"
    return Outcome("emulated", why, values={"schedule.warmup": "log"})


@rule("schedule.total", "Updates that the schedule spans.")
def _total(source: Source, leaf: Leaf) -> Outcome:
    if _scheduler(source) not in ("WarmupDecayLR", "WarmupCosineLR"):
        return _schedule_option(source, leaf)
    if leaf.value is None:
        return Outcome(
            "emulated", "follows the length of the run", values={"schedule.total_steps": None}
        )
    if leaf.value < 1:
        return refuse(f"a schedule of {leaf.value} updates")
    return Outcome("emulated", "the same", values={"schedule.total_steps": leaf.value})


@rule("schedule.position", "The update at which the scheduler begins.")
def _position(source: Source, leaf: Leaf) -> Outcome:
    if leaf.value == -1:
        return dead("begins at the first update")
    return refuse("not in this release: a schedule that begins elsewhere; a checkpoint resumes it")


@rule("schedule.other", "Options of torch's schedulers, and of the cosine.")
def _schedule_option(source: Source, leaf: Leaf) -> Outcome:
    name, option = _scheduler(source), leaf.path[-1]
    if name == "WarmupCosineLR" and option in ("warmup_min_ratio", "cos_min_ratio"):
        knob = "start" if option == "warmup_min_ratio" else "final"
        if isinstance(leaf.value, int | float) and 0 <= leaf.value <= 1:
            return Outcome("emulated", "the same", values={f"schedule.{knob}": leaf.value})
        return refuse(f"{option} should lie between 0 and 1")
    if name in (CYCLE, RANGE):
        return _own_option(source, name, option)
    if name in TORCH:
        return exact("the same option", **{f"schedule__options__{option}": leaf.value})
    if name in WARMUP:
        return refuse(f"{name} takes no {option}: remove it")
    return refuse(f"not in this release: the scheduler {name or 'without a type'}")
