"""Optimizers by their names and parameters, schedulers as closed forms."""

from __future__ import annotations

from typing import Any

from torsh_trainer.translate.deepspeed import job
from torsh_trainer.translate.deepspeed.rules import (
    Outcome,
    approximate,
    dead,
    exact,
    refused,
    rule,
)
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
        return refused(f"not in this release: {_WANTING[name]}")
    return refused(f"torch.optim.{leaf.value}: not in this release, or no optimizer of torch")


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
    if _overwritten(source):
        return dead("the scheduler overwrites it with warmup_max_lr")
    name = job.optimizer_name(source)
    value = leaf.value if leaf.value is not None else _DEFAULT_LR.get(name)
    if value is None:
        return exact("missing: the optimizer's own default is the same here")
    return exact("the base rate" if leaf.value is not None else "the default", optimizer__lr=value)


@rule("optimizer.betas", "Smoothing of the gradient and of its square.")
def _betas(source: Source, leaf: Leaf) -> Outcome:
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
        value = 0.01 if _decoupled(source) else 0.0
        return exact("missing: torch's own default", optimizer__weight_decay=value)
    return exact("missing: DeepSpeed's default is 0", optimizer__weight_decay=0.0)


def _decoupled(source: Source) -> bool:
    return job.optimizer_name(source) == "adamw" or bool(source.get("optimizer.params.adam_w_mode"))


@rule("optimizer.decoupled", "AdamW or Adam with an L2 penalty.")
def _decoupled_rule(source: Source, leaf: Leaf) -> Outcome:
    name = job.optimizer_name(source)
    if name not in ADAM:
        return dead(f"is read for Adam alone, not for {source.get('optimizer.type')}")
    if name == "adamw" and not leaf.value:
        return dead("is ignored for the type AdamW")
    return exact("chooses between adamw and adam")


@rule("optimizer.kernel", "DeepSpeed's fused Adam, or torch's.")
def _kernel(source: Source, leaf: Leaf) -> Outcome:
    if job.offloads_optimizer(source):
        return dead("the optimizer is offloaded, and its kernel with it")
    if leaf.value:
        return exact("torch's own optimizer")
    return approximate(
        "DeepSpeed's FusedAdam and torch's round an update differently, by about 1 ulp"
    )


@rule("optimizer.bias-correction", "Adam's bias correction.")
def _bias_correction(source: Source, leaf: Leaf) -> Outcome:
    if leaf.value:
        return exact("torch always corrects")
    return refused("not in this release: Adam without bias correction")


@rule("optimizer.amsgrad", "AMSGrad.")
def _amsgrad(source: Source, leaf: Leaf) -> Outcome:
    if not leaf.value:
        return exact("off")
    if source.get("optimizer.params.torch_adam"):
        return exact("torch's own", optimizer__amsgrad=True)
    if job.offloads_optimizer(source):
        return dead("DeepSpeed's CPUAdam takes it and does not do it")
    return refused("DeepSpeed's FusedAdam raises on it; torch_adam: true does it")


@rule("optimizer.max-grad-norm", "The older place of gradient_clipping.")
def _max_grad_norm(source: Source, leaf: Leaf) -> Outcome:
    if source.given("gradient_clipping"):
        return dead("gradient_clipping says it; DeepSpeed refuses this key", engine_takes=False)
    return Outcome(
        "exact",
        "clips the gradient, as gradient_clipping does; DeepSpeed refuses this key today",
        values={"trainer.max_grad_norm": float(leaf.value) if leaf.value else None},
        engine_takes=False,
    )


@rule("optimizer.freeze", "Steps before 1-bit Adam compresses.")
def _freeze(source: Source, leaf: Leaf) -> Outcome:
    if job.optimizer_name(source) != ONE_BIT:
        return _other(source, leaf)
    if job.compresses(source):
        return approximate(
            "gradients travel whole until then", compression__warmup_steps=leaf.value
        )
    return refused("1-bit compression is not in this release beside a sharded optimizer")


@rule("optimizer.transport", "How 1-bit optimizers communicate.")
def _transport(source: Source, leaf: Leaf) -> Outcome:
    if "bit" not in job.optimizer_name(source) and job.optimizer_name(source) != "zerooneadam":
        return _other(source, leaf)
    return dead("communication is chosen by the group comm")


@rule("optimizer.other", "Options of an optimizer of torch, as they are.")
def _other(source: Source, leaf: Leaf) -> Outcome:
    name = job.optimizer_name(source)
    option = leaf.path[-1]
    if name in job.TORCH_OPTIMIZERS and option in _OPTIONS.get(name, set()) | _ANY:
        return exact("the same option", **{f"optimizer__{option}": leaf.value})
    if name in _WANTING:
        return refused(f"not in this release: {_WANTING[name]}")
    return refused(f"{source.get('optimizer.type')} takes no {option}: remove it")


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
    """The rate that the warm-up ends at; None: the optimizer's own."""
    if _scheduler(source) == "WarmupCosineLR" or _scheduler(source) not in WARMUP:
        return None
    value = source.get("scheduler.params.warmup_max_lr")
    if value is None and _scheduler(source) == "WarmupDecayLR":
        return 0.001
    return value


def _overwritten(source: Source) -> bool:
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
    if name in TORCH:
        return Outcome(
            "exact",
            "torch's own, stepped after every update",
            choices={"schedule": "torch"},
            values={"schedule.scheduler": name},
        )
    return refused(f"not in this release: the scheduler {leaf.value}")


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
        return refused("its share of the base rate cannot be said: give optimizer.params.lr")
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
        return refused(f"a schedule of {leaf.value} updates")
    return Outcome("emulated", "the same", values={"schedule.total_steps": leaf.value})


@rule("schedule.position", "The update at which the scheduler begins.")
def _position(source: Source, leaf: Leaf) -> Outcome:
    if leaf.value == -1:
        return dead("begins at the first update")
    return refused("not in this release: a schedule that begins elsewhere; a checkpoint resumes it")


@rule("schedule.other", "Options of torch's schedulers, and of the cosine.")
def _schedule_option(source: Source, leaf: Leaf) -> Outcome:
    name, option = _scheduler(source), leaf.path[-1]
    if name == "WarmupCosineLR" and option in ("warmup_min_ratio", "cos_min_ratio"):
        knob = "start" if option == "warmup_min_ratio" else "final"
        if isinstance(leaf.value, int | float) and 0 <= leaf.value <= 1:
            return Outcome("emulated", "the same", values={f"schedule.{knob}": leaf.value})
        return refused(f"{option} should lie between 0 and 1")
    if name in TORCH:
        return exact("the same option", **{f"schedule__options__{option}": leaf.value})
    if name in WARMUP:
        return refused(f"{name} takes no {option}: remove it")
    return refused(f"not in this release: the scheduler {name or 'without a type'}")
