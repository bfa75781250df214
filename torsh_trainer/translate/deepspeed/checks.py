"""Keys that contradict one another: what the engine itself refuses when it reads a file.

Source: ``DeepSpeedConfig._do_error_check`` and the validators of its models, 0.19.8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torsh_trainer.translate.deepspeed import job
from torsh_trainer.translate.deepspeed.source import Source

Contradiction = tuple[str, str, str]
"""(dotted key that the message points at, what is wrong, what to do)."""

SCALE_SINCE = (0, 19, 6)
"""The oldest version known to refuse a floor or a window of 0 for the loss scale."""


def contradictions(source: Source) -> Iterator[Contradiction]:
    """All of them."""
    stage = job.stage(source)
    for check in (_modes, _scale, _masters):
        yield from check(source.get, source, stage)
    yield from _zero(source.get, source, stage)
    yield from _sums(source.get, source, stage)


Get = Callable[[str], Any]


def _modes(get: Get, source: Source, stage: int) -> Iterator[Contradiction]:
    if get("fp16.enabled") is True and get("bf16.enabled") is True:
        yield "fp16.enabled", "fp16 and bf16 are both on", "switch one of them off"
    for name in ("results_dir", "exps_dir"):
        if source.is_given_or_auto(f"autotuning.{name}") and not get(f"autotuning.{name}"):
            yield f"autotuning.{name}", f"autotuning.{name} is empty", "name a folder, or remove it"


def _scale(get: Get, source: Source, stage: int) -> Iterator[Contradiction]:
    dynamic = get("fp16.enabled") is True and get("fp16.loss_scale") == 0
    if not dynamic or source.options.version < SCALE_SINCE:
        return
    for name in ("loss_scale_window", "min_loss_scale"):
        if get(f"fp16.{name}") <= 0:
            yield (
                f"fp16.{name}",
                f"fp16.{name} should be more than 0 where the loss scale is dynamic",
                "set it to 1, or state the older --source-version that took it",
            )


def _masters(get: Get, source: Source, stage: int) -> Iterator[Contradiction]:
    for key in (
        "fp16.fp16_master_weights_and_grads",
        "bf16.bf16_master_weights_and_grads",
        "bf16.bf16_optimizer_states",
    ):
        if get(key) and stage == 0:
            yield key, f"{key} wants a ZeRO stage of 1 or more", "remove it, or set the stage"
    if get("bf16.bf16_optimizer_states") and not get("bf16.bf16_master_weights_and_grads"):
        yield (
            "bf16.bf16_optimizer_states",
            "bf16.bf16_optimizer_states wants bf16_master_weights_and_grads",
            "set both, or remove it",
        )


def _zero(get: Get, source: Source, stage: int) -> Iterator[Contradiction]:
    if not get("zero_optimization.compute_grad_norm") and stage not in (1, 2):
        key = "zero_optimization.compute_grad_norm"
        yield key, f"{key} may be false in stages 1 and 2 alone", "remove it"
    ratio = "zero_optimization.offload_optimizer.ratio"
    if get(ratio) < 1.0 and stage != 3:
        yield ratio, f"{ratio} below 1 is for stage 3 alone", "remove it"
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        given = any(path[:2] == ("zero_optimization", new) for path in source.found)
        if given and source.is_given_or_auto(f"zero_optimization.{old}"):
            key = f"zero_optimization.{old}"
            yield key, f"{key} is the older name of {new}, which is given too", "remove it"


def _sums(get: Get, source: Source, stage: int) -> Iterator[Contradiction]:
    if get("gradient_allreduce_op") != "SUM":
        return
    zenflow = any(path[:2] == ("zero_optimization", "zenflow") for path in source.found)
    for holds, other in (
        (stage == 3, "ZeRO stage 3"),
        (zenflow, "ZenFlow"),
        (get("compile.deepcompile"), "DeepCompile"),
    ):
        if holds:
            yield (
                "gradient_allreduce_op",
                f"a sum of gradients does not go with {other}",
                "use mean",
            )
