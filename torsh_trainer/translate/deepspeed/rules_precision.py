"""Dtypes and loss scaling."""

from __future__ import annotations

from torsh_trainer.translate.deepspeed import job
from torsh_trainer.translate.deepspeed.rules import (
    Outcome,
    approximate,
    dead,
    exact,
    faster,
    fixed,
    refused,
    rule,
)
from torsh_trainer.translate.deepspeed.source import Leaf, Source

_START = "DeepSpeed's fp32 masters start from rounded weights, ours from the weights themselves"


@rule("precision.bf16", "The module in bf16 over fp32 masters.")
def _bf16(source: Source, leaf: Leaf) -> Outcome:
    if not leaf.value:
        return exact("off")
    why = f"bf16 forward and backward over fp32 masters; {_START} (7e-4 of the loss was measured)"
    if job.stage(source) == 0:
        why += "; and stage 0 takes a phantom step of the optimizer at the start, which is left out"
    return Outcome("approximate", why, choices={"precision": "bf16_true"})


@rule("precision.fp16", "Computing in fp16 with loss scaling.")
def _fp16(source: Source, leaf: Leaf) -> Outcome:
    if not leaf.value:
        return exact("off")
    why = f"fp16 by autocast over fp32 parameters instead of a module in fp16; {_START}"
    if job.stage(source) == 0:
        why += (
            "; DeepSpeed 0.19.6 to 0.19.8 divide by a scale in stage 0 by which they have not "
            "multiplied: this translates what was meant"
        )
    return Outcome("approximate", why, choices={"precision": "fp16_mixed"})


@rule("precision.autocast", "torch.autocast over fp32 parameters.")
def _autocast(source: Source, leaf: Leaf) -> Outcome:
    if not leaf.value:
        return exact("off")
    dtype = source.get("torch_autocast.dtype")
    option = "fp16_mixed" if dtype in _FP16 else "bf16_mixed"
    if job.precision(source) != "autocast":
        return refused("bf16 or fp16 is on as well: keep one of them")
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
        return exact("chosen with torch_autocast.enabled")
    return refused(f"autocast in {leaf.value} is not in this release")


@rule("precision.autocast-modules", "Modules whose gradients travel in the low dtype.")
def _autocast_modules(source: Source, leaf: Leaf) -> Outcome:
    return approximate("all gradients travel in precision.reduce, whatever their module")


@rule("precision.bf16-overflow", "Skipping a step whose gradients are not finite.")
def _overflow(source: Source, leaf: Leaf) -> Outcome:
    if source.options.version < (0, 19, 6) and not leaf.place.line:
        return approximate(
            "the default of versions before 0.19.6 is not known for certain: taken as true",
            trainer__on_nonfinite="skip",
        )
    if job.stage(source) == 3 or not leaf.value:
        return approximate(
            "DeepSpeed goes on with gradients that are not finite; here, too",
            trainer__on_nonfinite="continue",
        )
    return exact(
        "a step with gradients that are not finite is skipped", trainer__on_nonfinite="skip"
    )


@rule("precision.half-masters", "Masters, gradients or moments in half precision.")
def _half_masters(source: Source, leaf: Leaf) -> Outcome:
    if not leaf.value:
        return exact("masters and moments are fp32")
    return refused("not in this release: masters or moments in half precision; leave them fp32")


@rule("precision.inputs", "Casting the inputs of the model.")
def _inputs(source: Source, leaf: Leaf) -> Outcome:
    if leaf.value:
        return exact("autocast takes inputs of any dtype")
    return approximate("autocast casts inputs by itself; DeepSpeed leaves that to the script")


@rule("precision.accumulation", "The dtype in which micro-batches add up.")
def _accumulation(source: Source, leaf: Leaf) -> Outcome:
    precision = job.precision(source)
    own = precision if precision in ("bf16", "fp16") else "fp32"
    dtype = leaf.value or own
    if dtype == "fp32":
        return exact("micro-batches add up in fp32")
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
    return refused(f"parameters in {leaf.value} while the mode is {own}")


@rule("precision.buffers", "The dtype of buffers.")
def _buffers(source: Source, leaf: Leaf) -> Outcome:
    if leaf.value in (None, "fp32"):
        return exact("buffers stay fp32")
    return refused("not in this release: buffers in a lower dtype")


@rule("precision.kept", "Modules that stay fp32.")
def _kept(source: Source, leaf: Leaf) -> Outcome:
    if leaf.value == "auto":
        return approximate("the modules that Hugging Face's models keep in fp32 are cast here, too")
    return approximate("these modules are cast here, too") if leaf.value else exact("none is kept")


fixed(
    "precision.bf16-update",
    "performance-only",
    "adding into the fp32 buffer early or late gives the same sum",
)
fixed("precision.apex", "refused", "not in this release: NVIDIA Apex; take fp16 or bf16")


@rule("scale.fixed", "A fixed loss scale, or 0 for a dynamic one.")
def _fixed(source: Source, leaf: Leaf) -> Outcome:
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
        return refused("2 to this power is beyond the range of fp32")
    return exact("2 to this power", precision__loss_scaling__initial_scale=2.0**leaf.value)


@rule("scale.window", "Steps without overflow before the scale doubles.")
def _window(source: Source, leaf: Leaf) -> Outcome:
    if _static(source):
        return dead("the scale is fixed")
    return approximate(
        "DeepSpeed's first growth after the start or an overflow comes one step later, and it "
        "halves the update of a step at which the scale grows",
        precision__loss_scaling__growth_interval=leaf.value,
        precision__loss_scaling__growth_factor=2.0,
        precision__loss_scaling__backoff_factor=0.5,
    )


@rule("scale.hysteresis", "Overflows that are borne before the scale falls.")
def _hysteresis(source: Source, leaf: Leaf) -> Outcome:
    if _static(source):
        return dead("the scale is fixed")
    if job.stage(source) == 0:
        return exact("stage 0 ignores it", precision__loss_scaling__hysteresis=1)
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
