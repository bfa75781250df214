"""Idioms of scripts for DeepSpeed that save a model of which ZeRO has cut parameters.

They have the settings of ``deepspeed_idioms.py``, which runs them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed_parts import ADAMW, config, finish, start, train
from torch import nn

STEPS = 3
DTYPES = {False: torch.float32, True: torch.bfloat16}


class Tied(nn.Module):
    """An output layer that is the input's, two buffers, of which one is saved, and something
    frozen."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight
        self.fixed = nn.Linear(8, 4)
        self.fixed.requires_grad_(False)
        self.register_buffer("seen", torch.tensor([0.1, 3.0]))
        self.register_buffer("passing", torch.ones(1), persistent=False)

    def forward(self, x):
        return self.fixed(self.last(self.norm(self.first(x))))


def make(stage, low, gathers=True):
    torch.manual_seed(0)
    block = {"stage": stage, "stage3_param_persistence_threshold": 0}
    block["stage3_gather_16bit_weights_on_model_save"] = gathers
    more = {"bf16": {"enabled": True}} if low else {}
    engine, *_ = start(Tied(), config=config(optimizer=ADAMW, zero_optimization=block, **more))
    train(engine, STEPS, dtype=DTYPES[low])
    return engine


def folder():
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made, src=0)
    return made[0]


def describe(state):
    """What a dictionary of tensors holds; nothing for None."""
    rows = [] if state is None else list(state.items())
    return [[k, str(v.dtype), list(v.shape), v.float().flatten().tolist()] for k, v in rows]


def goes_on(engine, low, **found):
    """Nothing of what saving does is left in the model."""
    return finish(engine, train(engine, STEPS, first=STEPS, dtype=DTYPES[low]), **found)


def choose_cut(params):
    return [
        p for p in params if hasattr(p, "ds_id") and p.ds_status == ZeroParamStatus.NOT_AVAILABLE
    ]


def by_parameter(low):
    """Rank 0 saves what it has of the model; then all gather one after the other, as in
    DeepSpeed-Chat, and the file is written anew."""
    engine = make(3, low)
    path = Path(folder(), "model.bin")
    if dist.get_rank() == 0:
        torch.save(engine.module.state_dict(), path)
    output = {}
    for name, parameter in engine.module.named_parameters():
        if hasattr(parameter, "ds_id"):
            with deepspeed.zero.GatheredParameters(choose_cut([parameter]), enabled=True):
                value = parameter.data.cpu()
        else:
            value = parameter.cpu()
        if dist.get_rank() == 0 and "norm" not in name:
            output[name] = value
    if dist.get_rank() == 0:
        torch.save(output, path)
    dist.barrier()
    return goes_on(engine, low, saved=describe(torch.load(path)))


def all_at_once(low):
    """``state_dict`` within, read and counted as plain tensors are."""
    engine = make(3, low)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        state = {k: v.detach().cpu().clone() for k, v in engine.module.state_dict().items()}
        first = engine.module.first.weight
        seen = [list(first.shape), first.numel(), str(first.dtype), float(first.float().sum())]
        seen.append([float(first.data[0, 0]), float((first.detach() * 2).max())])
        seen.append(type(first.detach()).__name__)
    if dist.get_rank() == 0:
        return goes_on(engine, low, saved=describe(state), seen=seen)
    return goes_on(engine, low, saved=[], seen=[])


def consolidate(low, trained=False):
    engine = make(3, low)
    state = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=trained)
    shared = (
        state is not None and state["first.weight"].data_ptr() == state["last.weight"].data_ptr()
    )
    return goes_on(engine, low, saved=describe(state), shared=shared)


def in_one_file(stage, low, gathers=True):
    engine = make(stage, low, gathers)
    place = folder()
    done = engine.save_16bit_model(place, "model.bin")
    dist.barrier()
    path = Path(place, "model.bin")
    there = path.exists()
    saved = describe(torch.load(path)) if there else []
    return goes_on(engine, low, saved=saved, done=done, there=there)


IDIOMS = {
    **{f"by_parameter{'_low' * low}": lambda low=low: by_parameter(low) for low in (False, True)},
    **{f"all_at_once{'_low' * low}": lambda low=low: all_at_once(low) for low in (False, True)},
    "consolidated": lambda: consolidate(True),
    "trained": lambda: consolidate(True, trained=True),
    **{f"in_one_file_{n}": lambda n=n: in_one_file(n, True) for n in range(4)},
    "in_no_file": lambda: in_one_file(3, True, gathers=False),
}
