"""The end of a report: dtypes and memory, before and after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torsh_trainer.translate.deepspeed import job
from torsh_trainer.translate.deepspeed.rules_batch import Batch
from torsh_trainer.translate.deepspeed.source import Source
from torsh_trainer.translate.plan import DTypes, Memory

_ADAM_OPTIONS = ("adam", "adamw")


def dtypes_of(
    source: Source, choices: Mapping[str, str], values: Mapping[str, Any]
) -> tuple[DTypes, ...]:
    """What holds which dtype in DeepSpeed and here."""
    precision = job.precision(source)
    own = precision if precision in ("bf16", "fp16") else "fp32"
    low = "fp16" if choices.get("precision", "").startswith("fp16") else "bf16"
    computes = f"{low} by autocast" if precision == "autocast" else own
    sent = (source.get("communication_data_type") or own).lower()
    adds = source.get("data_types.grad_accum_dtype") or own
    buffers = source.get("data_types.buffer_dtype") or "as the model has them"
    mine = choices.get("precision", "fp32")
    native = {
        "fp32": ("fp32", "fp32"),
        "bf16_true": ("bf16", "bf16"),
        "bf16_mixed": ("fp32", "bf16 by autocast"),
        "fp16_true": ("fp16", "fp16"),
        "fp16_mixed": ("fp32", "fp16 by autocast"),
    }[mine]
    reduce = values.get("precision.reduce", "fp32")
    return (
        DTypes("parameters", own, native[0]),
        DTypes("compute", computes, native[1]),
        DTypes("outputs", *_outputs_of(precision, own, values)),
        DTypes("gradient communication", sent, reduce),
        DTypes("accumulation", adds, values.get("precision.gradients", "fp32")),
        DTypes("master", "fp32", "fp32"),
        DTypes("optimizer state", "fp32", "fp32"),
        DTypes("buffers", buffers, "as the model has them"),
    )


def _outputs_of(precision: str, own: str, values: Mapping[str, Any]) -> tuple[str, str]:
    """What the model's outputs are in, from which a task computes its loss."""
    if precision == "autocast":
        return "as autocast leaves them", "as autocast leaves them"
    if own == "fp32" or values.get("precision.low_outputs"):
        return own, own
    return own, f"fp32; {own} by precision.low_outputs=true"


def memory_of(
    source: Source, batch: Batch, choices: Mapping[str, str], values: Mapping[str, Any]
) -> Memory | None:
    """Bytes per parameter and rank for an Adam; None where the world or the optimizer is unknown.

    ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054): parameters, gradients and optimizer state
    take 2 + 2 + 12 bytes in half precision, 4 + 4 + 8 in fp32; stage 1 shards the last, 2 the last
    two, 3 all of them. Nothing is counted for what is offloaded.
    """
    world = source.world_size
    if world is None or choices.get("optimizer") not in _ADAM_OPTIONS or job.offloads(source):
        return None
    half = job.precision(source) in ("bf16", "fp16")
    parts = (2.0, 2.0, 12.0) if half else (4.0, 4.0, 8.0)
    stage = job.stage(source)
    sharded = {0: (), 1: (2,), 2: (1, 2), 3: (0, 1, 2)}[stage]
    before = sum(part / (world if i in sharded else 1) for i, part in enumerate(parts))
    if choices.get("strategy") == "ddp":
        after = 8.0 + 8.0 / (world if values.get("strategy.zero1") else 1)
    else:
        after = 16.0 / (values.get("strategy.shard_size") or world)
        if not values.get("strategy.reshard_after_forward", True):
            after += 2.0 if choices.get("precision") in ("bf16_true", "fp16_true") else 4.0
    return Memory(
        before,
        after,
        f"bytes a parameter and rank of {world}, Adam, without activations and what is gathered",
    )
