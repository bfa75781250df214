"""Idioms of scripts for DeepSpeed that keep states, or states and parameters, on the host.

They have the model and batches of ``deepspeed_idioms.py``, which runs them. Those in fp16 have the
accelerator say that it is supported, as in ``deepspeed_scaled_idioms.py``.
"""

from __future__ import annotations

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed_parts import config, finish, net, start, train
from deepspeed_scaled_idioms import allow_fp16

KERNEL = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}
TORCHS = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}}
STEPS = 6
LOW = {"bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "loss_scale": 64}}}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def zero(stage, parameters=False):
    block = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    if parameters:
        block["offload_param"] = {"device": "cpu", "pin_memory": False}
    return block


def train_offloaded(
    stage, optimizer=KERNEL, dtype="fp32", accumulate=1, clip=0.0, parameters=False
):
    if dtype == "fp16":
        allow_fp16()
    engine, *_ = start(
        config=config(
            optimizer=optimizer,
            gradient_accumulation_steps=accumulate,
            gradient_clipping=clip,
            zero_optimization=zero(stage, parameters),
            **LOW.get(dtype, {}),
        )
    )
    return finish(engine, train(engine, STEPS * accumulate, dtype=DTYPES[dtype]))


def made_by_the_script(stage):
    """DeepSpeed's Adam for the host, over two groups."""
    model = net()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = DeepSpeedCPUAdam(groups, lr=0.01, betas=(0.9, 0.95))
    settings = config(zero_optimization=zero(stage))
    del settings["optimizer"]
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return finish(engine, train(engine))


IDIOMS = {
    **{f"kernel_{n}": lambda n=n: train_offloaded(n) for n in (1, 2, 3)},
    **{f"torch_{n}": lambda n=n: train_offloaded(n, TORCHS, clip=0.05) for n in (1, 2, 3)},
    **{f"accumulated_{n}": lambda n=n: train_offloaded(n, TORCHS, accumulate=2) for n in (1, 2, 3)},
    **{f"script_{n}": lambda n=n: made_by_the_script(n) for n in (1, 2, 3)},
    "parameters": lambda: train_offloaded(3, TORCHS, clip=0.05, parameters=True),
    **{
        f"{dtype}_{n}": lambda n=n, dtype=dtype: train_offloaded(n, TORCHS, dtype, accumulate=2)
        for n in (1, 2, 3)
        for dtype in ("bf16", "fp16")
    },
    "wrong_rate": lambda: train_offloaded(
        2, {**TORCHS, "params": {**TORCHS["params"], "lr": 0.0101}}
    ),
}
