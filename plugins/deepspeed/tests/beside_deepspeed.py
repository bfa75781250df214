"""A translation and the real engine, which start alike and see the same samples."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from torsh_trainer_deepspeed.original import Original

from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.trial import (
    SAMPLES,
    RankTrace,
    TrialRun,
    run_of,
    train_curve,
)
from torsh_trainer.translate.deepspeed.source import Options
from torsh_trainer.translate.deepspeed.translator import fill, translate
from torsh_trainer.translate.plan import Plan
from torsh_trainer.verify.subject import Subject

CONF = Path(__file__).parents[3] / "conf"
START_S = 400.0  # importing DeepSpeed on a busy machine

LR = 0.5
SGD = {"type": "SGD", "params": {"lr": LR}}
ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}}


def config_of(stage: int, precision: str, accumulate: int, **more: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": accumulate,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
        "optimizer": SGD,
        **more,
    }
    if precision.startswith("bf16"):
        config["bf16"] = {"enabled": True}
    if precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
    if precision == "bf16, sums in fp32":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def plan_of(config: dict[str, Any], ranks: int) -> Plan:
    return translate(config, Options(world_size=ranks))


def native(config: dict[str, Any], ranks: int) -> TrialRun:
    """What the translation says; BatchNorm in fp32 alone."""
    run = run_of(plan_of(config, ranks), CONF, accumulate=config["gradient_accumulation_steps"])
    return replace(run, task=partial(Subject, batch_norm=run.precision.params == "fp32"))


@cache
def original(text: str, ranks: int) -> list[RankTrace]:
    """The real engine, once for every configuration."""
    run = original_run(json.loads(text))
    curves: list[RankTrace] = shared_pool(ranks).run(train_curve, run, timeout_s=START_S)
    return curves


def original_run(config: dict[str, Any]) -> TrialRun:
    config = dict(config)
    infinite_at = config.pop("infinite_at", None)
    low = any(config.get(low, {}).get("enabled") for low in ("bf16", "fp16"))
    return TrialRun(
        Original(config=fill(config), fp16_on_cpu=True),
        config["gradient_accumulation_steps"],
        task=partial(Subject, batch_norm=not low),
        infinite_at=infinite_at,
    )


def both(
    config: dict[str, Any], ranks: int, **other: Any
) -> tuple[list[RankTrace], list[RankTrace]]:
    """The translation, with ``other`` settings where a test spoils it, and the original."""
    run = native({key: v for key, v in config.items() if key != "infinite_at"}, ranks)
    run = replace(run, infinite_at=config.get("infinite_at"))
    precision = dict(other.pop("precision", {}))
    scaling = replace(run.precision.loss_scaling, **precision.pop("loss_scaling", {}))
    run = replace(run, precision=replace(run.precision, loss_scaling=scaling, **precision), **other)
    curves = shared_pool(ranks).run(train_curve, run, timeout_s=START_S)
    return curves, original(json.dumps(config), ranks)


HALF = ("bf16", "bf16, sums in fp32")
STAGES = (0, 1, 2, 3)
