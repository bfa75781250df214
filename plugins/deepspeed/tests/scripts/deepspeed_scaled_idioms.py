"""Idioms of scripts for DeepSpeed that train in fp16, whose loss is scaled.

They have the model and batches of ``deepspeed_idioms.py``, which runs them.

DeepSpeed refuses fp16 on a CPU, where torch computes in it: these scripts have DeepSpeed's
accelerator say that it is supported. Nothing else of DeepSpeed is changed.
"""

from __future__ import annotations

import math

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed_parts import ADAMW, SGD, batch, config, finish, start
from torch import nn

OVERFLOWS = {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 3, "hysteresis": 2}
"""The first scales are too large, and it comes back to them."""
STEPS = 14
INFINITE_AT = 6


def allow_fp16():
    type(get_accelerator()).is_fp16_supported = lambda self: True


def number(value):
    if value is None:
        return None
    value = float(value)
    return value if math.isfinite(value) else "not finite" if math.isnan(value) else str(value)


def train_scaled(
    stage=1, fp16=OVERFLOWS, accumulate=1, clip=0.0, optimizer=SGD, widens=True, infinite_at=None
):
    """``infinite_at``: a step at which one process has an input that is not finite."""
    allow_fp16()
    engine, *_ = start(
        config=config(
            fp16=fp16,
            gradient_accumulation_steps=accumulate,
            gradient_clipping=clip,
            optimizer=optimizer,
            zero_optimization={"stage": stage},
        )
    )
    rows = []
    for step in range(STEPS * accumulate):
        x, y = batch(step, dist.get_rank(), torch.float16)
        if step == infinite_at and dist.get_rank() == 1:
            x[0, 0] = math.inf
        outputs = engine(x)
        loss = nn.functional.cross_entropy(outputs.float() if widens else outputs, y)
        scale = float(engine.optimizer.loss_scale)
        returned = engine.backward(loss)
        engine.step()
        rows.append(
            {
                "loss": number(loss),
                "returned": number(returned),
                "dtypes": [str(outputs.dtype), str(loss.dtype), str(returned.dtype)],
                "scale": scale,
                "norm": number(engine.get_global_grad_norm()),
                "overflow": bool(engine.optimizer.overflow),
                "applied": engine.was_step_applied(),
                "counts": [engine.global_steps, engine.skipped_steps],
            }
        )
    asked = [engine.fp16_enabled(), engine.dynamic_loss_scale(), engine.loss_scale()]
    return finish(engine, rows, asked=asked)


FIXED = {"enabled": True, "loss_scale": 64}
IDIOMS = {
    **{f"dynamic_{n}": lambda n=n: train_scaled(n) for n in range(4)},
    **{f"infinite_{n}": lambda n=n: train_scaled(n, infinite_at=INFINITE_AT) for n in (1, 2, 3)},
    **{f"fixed_{n}": lambda n=n: train_scaled(n, FIXED, 2, clip=0.05) for n in (1, 2, 3)},
    **{
        f"fixed_infinite_{n}": lambda n=n: train_scaled(n, FIXED, infinite_at=INFINITE_AT)
        for n in (1, 2, 3)
    },
    **{
        f"adamw_{n}": lambda n=n: train_scaled(n, accumulate=2, clip=0.05, optimizer=ADAMW)
        for n in (1, 2, 3)
    },
    **{f"low_loss_{n}": lambda n=n: train_scaled(n, widens=False) for n in (1, 2, 3)},
    # What stage 0, which knows no hysteresis, is meant to do.
    "meant_0": lambda: train_scaled(1, {**OVERFLOWS, "hysteresis": 1}),
    "wrong_window": lambda: train_scaled(fp16={**OVERFLOWS, "loss_scale_window": 4}),
}
