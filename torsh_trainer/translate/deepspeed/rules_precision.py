"""Dtypes and loss scaling."""

from __future__ import annotations

from typing import Any

from torsh_trainer.translate.deepspeed import job, versions
from torsh_trainer.translate.deepspeed.rules import (
    Outcome,
    approximate,
    constant_rule,
    dead,
    exact,
    faster,
    fixed_rule,
    refuse,
    rule,
    switch_rule,
)
from torsh_trainer.translate.deepspeed.source import Leaf, Source

_START = "DeepSpeed's fp32 masters start from rounded weights"
_CLEAN = f"{_START}, ours from the weights themselves (7e-4 of the loss was measured)"
_BUG = (
    "DeepSpeed 0.19.6 to 0.19.8 divide by a scale in stage 0 by which they have not multiplied: "
    "this translates what was meant"
)


@rule("precision.bf16", "The module in bf16 over fp32 masters, which begin as rounded weights.")
def _bf16(source: Source, leaf: Leaf) -> Outcome:
    return _half(source, leaf, "bf16", share=2.0**-10)


@rule("precision.fp16", "The module in fp16 over fp32 masters, with loss scaling.")
def _fp16(source: Source, leaf: Leaf) -> Outcome:
    return _half(source, leaf, "fp16", share=2.0**-13)


def _half(source: Source, leaf: Leaf, dtype: str, *, share: float) -> Outcome:
    """``share`` of a weight that decays in the phantom step moves none to its next value."""
    if not leaf.value:
        return exact("off")
    why = f"{dtype} forward and backward over fp32 masters"
    choices = {"precision": f"{dtype}_true"}
    if not source.reproduces:
        why += f"; {_CLEAN}"
        if job.stage(source) == 0:
            why += "; its stage 0 takes a phantom step at the start, which is left out"
        return Outcome("approximate", why, choices=choices)
    values: dict[str, Any] = {"precision.rounded_start": True, "precision.low_outputs": True}
    why += ", and outputs stay in it"
    if job.stage(source) > 0:
        return Outcome("emulated", f"{why}; {_START}, and so do ours", choices, values)
    lr, doubt = job.phantom_lr(source, share=share)
    values["trainer.phantom_lr"] = lr
    why += f"; {_START}, and stage 0 takes a step with gradients of zero before the first"
    doubts = [doubt] if doubt else []
    doubts += [_BUG] if dtype == "fp16" else []
    return Outcome(
        "approximate" if doubts else "emulated", "; ".join([why, *doubts]), choices, values
    )


@rule("precision.autocast", "torch.autocast over fp32 parameters.")
def _autocast(source: Source, leaf: Leaf) -> Outcome:
    if not leaf.value:
        return exact("off")
    dtype = source.get("torch_autocast.dtype")
    option = "fp16_mixed" if dtype in _FP16 else "bf16_mixed"
    if job.precision(source) != "autocast":
        return refuse("bf16 or fp16 is on as well: keep one of them")
    return Outcome(
        "approximate",
        "autocast over fp32 parameters; DeepSpeed sends the gradients of some modules in the low "
        "dtype",
        choices={"precision": option},
    )


_FP16 = ("fp16", "float16", "torch.float16", "half")
_BF16 = ("bf16", "bfloat16", "torch.bfloat16")


@rule("precision.autocast-dtype", "The dtype of autocast.")
def _autocast_dtype(source: Source, leaf: Leaf) -> Outcome:
    if leaf.value in _FP16 + _BF16:
        return approximate("as torch_autocast.enabled")
    return refuse(f"autocast in {leaf.value} is not in this release")


constant_rule(
    "precision.autocast-modules",
    "Modules whose gradients travel in the low dtype.",
    approximate("all gradients travel in precision.reduce, whatever their module"),
)


@rule("precision.bf16-overflow", "Skipping a step whose gradients are not finite.")
def _overflow(source: Source, leaf: Leaf) -> Outcome:
    if source.options.version < (0, 19, 6) and leaf.path not in source.found:
        return approximate(
            "the default of versions before 0.19.6 is not known for certain: taken as true",
            trainer__on_nonfinite="skip",
        )
    stage = job.stage(source)
    if stage == 3 and source.options.version < versions.NEWEST:
        return approximate(
            "whether stage 3 of this version goes on is not known for certain: taken as that",
            trainer__on_nonfinite="continue",
        )
    if leaf.value or stage in (0, 3):
        why = "a step with gradients that are not finite is skipped"
        why += f", at stage {stage} whatever this says" if stage in (0, 3) else ""
        return exact(why, trainer__on_nonfinite="skip")
    return exact("steps with gradients that are not finite count", trainer__on_nonfinite="continue")


switch_rule(
    "precision.half-masters",
    "Masters, gradients or moments in half precision.",
    on=refuse("not in this release: masters or moments in half precision; leave them fp32"),
    off=exact("masters and moments are fp32"),
)
switch_rule(
    "precision.inputs",
    "Casting the inputs of the model.",
    on=approximate(
        "inputs of floating point are cast, as there; here those that are given by name, too"
    ),
    off=approximate("inputs are cast here; DeepSpeed leaves that to the script"),
)


@rule("precision.accumulation", "The dtype in which micro-batches add up.")
def _accumulation(source: Source, leaf: Leaf) -> Outcome:
    precision = job.precision(source)
    own = precision if precision in ("bf16", "fp16") else "fp32"
    dtype = leaf.value or own
    if own != "fp32" and dtype != own and job.stage(source) == 0:
        return approximate(
            f"DeepSpeed refuses to add up in {dtype} at stage 0, beside {own}; here it is done",
            engine_takes=False,
            precision__gradients=dtype,
        )
    if dtype == "fp32":
        return exact("micro-batches add up in fp32")
    sums_whole = job.strategy(source) == "fsdp" and job.stage(source) < 2
    if source.reproduces and dtype == own and not sums_whole:
        return Outcome(
            "emulated",
            f"gradients are held in {dtype}: rounded to it after every micro-batch",
            values={"precision.gradients": dtype},
        )
    if not job.accumulates(source):
        return exact("there is nothing to add up: one micro-batch a step")
    return approximate(
        f"DeepSpeed adds micro-batches up in {dtype}, here in fp32 (6e-4 of the loss was measured)"
    )


@rule("precision.parameters", "The dtype of parameters follows from the mode.")
def _parameters(source: Source, leaf: Leaf) -> Outcome:
    precision = job.precision(source)
    own = precision if precision in ("bf16", "fp16") else "fp32"
    if leaf.value in (None, own):
        return exact("agrees with the mode")
    return refuse(f"parameters in {leaf.value} while the mode is {own}")


@rule("precision.buffers", "The dtype of buffers.")
def _buffers(source: Source, leaf: Leaf) -> Outcome:
    if leaf.value in (None, "fp32"):
        return exact("buffers stay fp32")
    return refuse("not in this release: buffers in a lower dtype")


@rule("precision.kept", "Modules that stay fp32.")
def _judge_kept(source: Source, leaf: Leaf) -> Outcome:
    if leaf.value == "auto":
        return approximate("the modules that Hugging Face's models keep in fp32 are cast here, too")
    return approximate("these modules are cast here, too") if leaf.value else exact("none is kept")


fixed_rule(
    "precision.bf16-update",
    "performance-only",
    "adding into the fp32 buffer early or late gives the same sum",
)
fixed_rule("precision.apex", "refused", "not in this release: NVIDIA Apex; take fp16 or bf16")


@rule("scale.fixed", "A fixed loss scale, or 0 for a dynamic one.")
def _judge_fixed_scale(source: Source, leaf: Leaf) -> Outcome:
    if leaf.value > 0:
        return exact("a fixed scale", precision__loss_scaling__scale=leaf.value)
    return exact("a dynamic scale", precision__loss_scaling__scale=None)


def _static(source: Source) -> bool:
    return bool(source.get("fp16.loss_scale") > 0)


@rule("scale.initial", "The scale at the start: a power of two.")
def _initial(source: Source, leaf: Leaf) -> Outcome:
    if _static(source):
        return dead("the scale is fixed")
    if not -100 <= leaf.value <= 127:
        return refuse("2 to this power is beyond the range of fp32")
    return exact("2 to this power", precision__loss_scaling__initial_scale=2.0**leaf.value)


@rule("scale.window", "Steps without overflow before the scale doubles.")
def _window(source: Source, leaf: Leaf) -> Outcome:
    if _static(source):
        return dead("the scale is fixed")
    values: dict[str, Any] = {
        "precision.loss_scaling.growth_interval": leaf.value,
        "precision.loss_scaling.growth_factor": 2.0,
        "precision.loss_scaling.backoff_factor": 0.5,
    }
    if not source.reproduces:
        return Outcome(
            "approximate",
            "DeepSpeed's first growth after the start or an overflow comes one step later, and it "
            "halves the update of a step at which the scale grows",
            values=values,
        )
    values["precision.loss_scaling.growth_delay"] = 1
    values["precision.loss_scaling.divide_by_grown"] = True
    return Outcome(
        "emulated",
        "a first growth comes one step later, and halves the update of its step",
        values=values,
    )


@rule("scale.hysteresis", "Overflows that are borne before the scale falls.")
def _hysteresis(source: Source, leaf: Leaf) -> Outcome:
    if _static(source):
        return dead("the scale is fixed")
    if job.stage(source) == 0:
        return approximate(
            "stage 0 ignores it, and divides by a scale by which it has not multiplied",
            precision__loss_scaling__hysteresis=1,
        )
    return exact(
        "the first overflows leave the scale alone, a growth restores that patience",
        precision__loss_scaling__hysteresis=max(1, leaf.value),
    )


@rule("scale.refill", "Patience that every good step restores.")
def _refill(source: Source, leaf: Leaf) -> Outcome:
    if _static(source) or source.get("fp16.hysteresis") <= 1:
        return dead("without hysteresis there is no patience to restore")
    if not leaf.value:
        return exact("patience returns with a growth of the scale")
    return approximate("patience returns with a growth of the scale, not with every good step")


@rule("scale.floor", "The least scale.")
def _floor(source: Source, leaf: Leaf) -> Outcome:
    if _static(source):
        return dead("the scale is fixed")
    if leaf.value <= 0:
        return faster(
            "no floor; ours is the least that there can be",
            precision__loss_scaling__min_scale=2.0**-24,
        )
    return approximate(
        "an overflow at the floor raises in DeepSpeed; here trainer.on_nonfinite decides",
        precision__loss_scaling__min_scale=float(leaf.value),
    )
