"""Gradients: how they are averaged, in which dtype they travel, and where they are clipped."""

from __future__ import annotations

from typing import Any

from torsh_trainer.translate.deepspeed import job
from torsh_trainer.translate.deepspeed.rules import (
    Outcome,
    approximate,
    dead,
    exact,
    refuse,
    rule,
    switch_rule,
)
from torsh_trainer.translate.deepspeed.source import Leaf, Source
from torsh_trainer.translate.deepspeed.versions import CLIPS_BY_DEFAULT

_HALF = {"bf16": "bf16", "fp16": "fp16"}


@rule(
    "gradients.clipping",
    "Clipping by the global L2 norm; 1.0 where the file says nothing.",
    since=CLIPS_BY_DEFAULT,
)
def _clipping(source: Source, leaf: Leaf) -> Outcome:
    return _judge_clip(source, leaf, default=1.0)


@rule(
    "gradients.clipping-old",
    "Clipping by the global L2 norm; none where the file says nothing.",
    until=(0, 19, 2),
)
def _clipping_before(source: Source, leaf: Leaf) -> Outcome:
    return _judge_clip(source, leaf, default=0.0)


def _judge_clip(source: Source, leaf: Leaf, *, default: float) -> Outcome:
    if leaf.value is not None:
        return _norm(leaf.value, "the same formula: min(1, clip / (norm + 1e-6))")
    if "optimizer.params.max_grad_norm" in {".".join(path) for path in source.found}:
        value = source.get("optimizer.params.max_grad_norm")
        return _norm(value, "optimizer.params.max_grad_norm says so")
    if source.options.context == "lightning":
        return approximate(
            "Lightning sets it from Trainer(gradient_clip_val=...), which this file does not hold; "
            "taken as not set: none",
            trainer__max_grad_norm=None,
        )
    if default and source.removed:
        return approximate(
            f"missing: this version clips at {default:g}, but the file holds keys that the version "
            "has removed, so it was written for an older one, which does not clip: state "
            "--source-version",
            trainer__max_grad_norm=default,
        )
    return _norm(default, "missing: the default of this version of DeepSpeed")


def _norm(value: Any, why: str) -> Outcome:
    return exact(
        why if value else "0 switches it off",
        trainer__max_grad_norm=float(value) if value else None,
    )


@rule("gradients.dtype", "Gradients cross processes in the communication dtype.")
def _dtype(source: Source, leaf: Leaf) -> Outcome:
    if job.compresses(source):
        return approximate(
            "compression says in what form gradients travel: 1 bit, and fp32 until then",
            precision__reduce="fp32",
        )
    precision = job.precision(source)
    own = _HALF.get(precision, "fp32")
    dtype = (leaf.value or own).lower()
    if dtype == "fp32" and precision in ("fp32", "autocast"):
        return exact("gradients are fp32 and travel so", precision__reduce="fp32")
    if dtype == "fp32":
        return approximate(
            f"summed in fp32; DeepSpeed rounds the sum back to {own}, here it stays fp32",
            precision__reduce="fp32",
        )
    if dtype == own:
        return exact(f"gradients travel in {own}, as DeepSpeed's do", precision__reduce=own)
    return approximate(
        f"gradients are rounded to {dtype} to travel; where the rounding happens differs "
        "(about 2e-5 of the loss was measured for bf16 under fp32)",
        precision__reduce=dtype,
    )


@rule("gradients.prescale", "Dividing before the sum instead of after it.")
def _prescale(source: Source, leaf: Leaf) -> Outcome:
    if not leaf.value:
        return exact("gradients are averaged")
    stage, scatters = job.stage(source), source.get("zero_optimization.reduce_scatter")
    if stage == 1 and scatters:
        return dead("has no effect in stage 1 with reduce_scatter")
    if stage >= 2 and scatters:
        return dead(
            f"DeepSpeed stops with an assertion in stage {stage} with reduce_scatter",
            engine_takes=False,
        )
    if job.precision(source) == "fp16":
        return approximate("the mean is the same; fp16 rounds before the sum instead of after it")
    return exact("the mean of the gradients is the same")


@rule("gradients.predivide", "Dividing by a factor before the sum, and by the rest after it.")
def _predivide(source: Source, leaf: Leaf) -> Outcome:
    if leaf.value == 1.0:
        return exact("gradients are averaged")
    stage, scatters = job.stage(source), source.get("zero_optimization.reduce_scatter")
    if stage >= 2 and scatters:
        return dead(
            f"DeepSpeed stops with an assertion in stage {stage} with reduce_scatter",
            engine_takes=False,
        )
    if source.get("prescale_gradients"):
        return dead("is read without prescale_gradients alone")
    if stage == 1 and scatters:
        return dead("has no effect in stage 1 with reduce_scatter")
    if stage == 3:
        return refuse(
            "without reduce_scatter, stage 3 leaves gradients divided too often where the factor "
            "is the number of processes: remove the key to get the mean"
        )
    return approximate("the mean is the same; it is rounded at another place")


@rule("gradients.op", "The mean of the gradients; a sum has no knob.")
def _op(source: Source, leaf: Leaf) -> Outcome:
    if leaf.value == "MEAN":
        return exact("gradients are averaged")
    return refuse(
        "not in this release: a sum over processes; multiply optimizer.lr where it is SGD"
    )


switch_rule(
    "gradients.sparse",
    "Gradients of embeddings travel dense.",
    on=approximate("embedding gradients travel dense: the same sums, rounded elsewhere"),
    off=dead("switched off"),
)
