"""Idioms of scripts for DeepSpeed: each trains, and leaves what it found for every rank.

``deepspeed_idioms.py OUT NAME ...`` runs them one after the other, under whatever is ``deepspeed``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import deepspeed
import deepspeed_example_idioms
import deepspeed_offload_idioms
import deepspeed_saving_idioms
import deepspeed_scaled_idioms
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed_parts import (
    ADAMW,
    SGD,
    STEPS,
    Samples,
    batch,
    config,
    finish,
    net,
    start,
    train,
    whole,
)
from torch import nn


def plain(stage=0, accumulate=1, clip=0.0, optimizer=SGD, plainly=False, **more):
    engine, *_ = start(
        config=config(
            gradient_accumulation_steps=accumulate,
            gradient_clipping=clip,
            optimizer=optimizer,
            zero_optimization={"stage": stage},
            **more,
        )
    )
    return finish(engine, train(engine, STEPS * accumulate, plainly=plainly))


def by_arguments():
    """The file is named by the arguments, as DeepSpeed's parser has them."""
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump(config(train_batch_size=16, gradient_accumulation_steps=2), file)
    parser = argparse.ArgumentParser()
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", file.name])
    args.local_rank = int(os.environ["LOCAL_RANK"])
    model = net()
    wanted = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=wanted)
    sizes = [
        engine.train_batch_size(),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
        engine.local_rank,
        engine.answer(),
        engine.zero_optimization_stage(),
        engine.bfloat16_enabled(),
        str(engine.device),
        get_accelerator().device_name(),
    ]
    return finish(engine, train(engine, 8), sizes=sizes)


def scheduled(kind, params, stage=0):
    engine, _, _, scheduler = start(
        config=config(
            scheduler={"type": kind, "params": params}, zero_optimization={"stage": stage}
        )
    )
    return finish(engine, train(engine), last=list(map(float, scheduler.get_last_lr())))


def client(stage=0):
    """An optimizer and a scheduler of torch's that the script makes, with two groups."""
    model = net()
    optimizer = torch.optim.SGD(
        [
            {"params": model.body.parameters(), "lr": 0.1},
            {"params": model.head.parameters(), "lr": 0.3, "weight_decay": 0.01},
        ],
        lr=0.2,
        momentum=0.9,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    settings = config(zero_optimization={"stage": stage})
    del settings["optimizer"]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=settings
    )
    return finish(engine, train(engine), named=[engine.optimizer_name(), engine.get_mom()])


def grouped():
    """Groups of parameters for the optimizer of the configuration."""
    model = net()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    settings = config(optimizer=ADAMW, zero_optimization={"stage": 1})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=settings)
    return finish(engine, train(engine))


def with_init(stage=3):
    with deepspeed.zero.Init(config_dict_or_path=config(zero_optimization={"stage": stage})):
        model = net()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        sizes = [list(p.shape) for p in model.parameters()]
        if dist.get_rank() == 0:
            for parameter in model.parameters():
                parameter.data.mul_(0.5)
    engine, *_ = start(model, config=config(zero_optimization={"stage": stage}))
    return finish(engine, train(engine), sizes=sizes)


def low(stage=1, accumulate=1, widens=True):
    # With widens False the loss is computed and rounded in bf16, as scripts do that cast nothing.
    engine, *_ = start(
        config=config(
            bf16={"enabled": True},
            gradient_accumulation_steps=accumulate,
            zero_optimization={"stage": stage},
        )
    )
    rows = train(engine, STEPS * accumulate, dtype=torch.bfloat16, widens=widens)
    return {"rows": rows, "state": {} if stage == 0 else whole(engine)}


def loader():
    engine, _, batches, _ = start(config=config(), training_data=Samples())
    return finish(engine, train(engine, len(batches), batches), length=len(batches))


def resumed(stage=1):
    """Saves in the middle, goes on in a new engine, with a state of the script's own."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    settings = config(optimizer=ADAMW, zero_optimization={"stage": stage})
    settings["scheduler"] = {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"},
    }
    engine, *_ = start(config=settings)
    train(engine, 3)
    engine.save_checkpoint(folder[0], tag="middle", client_state={"epoch": 7})
    latest = (Path(folder[0]) / "latest").read_text()
    other, *_ = start(config=settings)
    path, state = other.load_checkpoint(folder[0])
    nothing, _ = other.load_checkpoint(folder[0] + "/none")
    rows = train(other, 3, first=3)
    more = [Path(path).name != "", state["epoch"], latest, nothing, other.global_steps]
    return finish(other, rows, found=more)


def collectives():
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.arange(3.0) + rank
    dist.all_reduce(tensor)
    least = torch.tensor([float(rank)])
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    told = torch.tensor([float(rank)])
    dist.broadcast(told, src=1)
    parts = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(parts, torch.tensor([float(rank)]))
    dist.barrier()
    gathered = [float(part) for part in parts]
    return {
        "rows": [],
        "state": {},
        "found": [rank, size, tensor.tolist(), float(least), float(told), gathered],
        "again": [dist.is_initialized(), dist.get_local_rank(), get_accelerator().device_count()],
    }


def by_hand():
    """The script says where a step ends, and keeps gradients apart until then."""
    engine, *_ = start(config=config(gradient_accumulation_steps=3))
    losses = []
    for step in range(6):
        ends = step % 3 == 2
        engine.set_gradient_accumulation_boundary(ends)
        x, y = batch(step, dist.get_rank())
        loss = nn.functional.cross_entropy(engine(x), y)
        engine.backward(loss)
        losses.append({"loss": float(loss), "steps": engine.global_steps})
        if ends:
            engine.step()
    return finish(engine, losses)


WARMUP = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.3, "warmup_num_steps": 4}
IDIOMS = {
    "sgd": plain,
    "accumulated": lambda: plain(accumulate=2),
    "clipped": lambda: plain(clip=0.05),
    "stage_1": lambda: plain(1, accumulate=2),
    "stage_2": lambda: plain(2, accumulate=2, clip=0.05),
    "stage_3": lambda: plain(3, accumulate=2, clip=0.05),
    "adamw_1": lambda: plain(1, optimizer=ADAMW),
    "adamw_2": lambda: plain(2, optimizer=ADAMW),
    "adamw_3": lambda: plain(3, optimizer=ADAMW),
    "by_arguments": by_arguments,
    "warmup": lambda: scheduled("WarmupLR", WARMUP),
    "decay": lambda: scheduled("WarmupDecayLR", {**WARMUP, "total_num_steps": 8}, 2),
    "client": client,
    "client_1": lambda: client(1),
    "client_2": lambda: client(2),
    "grouped": grouped,
    "with_init": with_init,
    "bf16_0": lambda: low(0),
    "bf16_1": lambda: low(1),
    "bf16_2": lambda: low(2, accumulate=2),
    "bf16_3": lambda: low(3),
    "bf16_loss_0": lambda: low(0, widens=False),
    "bf16_loss_1": lambda: low(1, accumulate=2, widens=False),
    "bf16_loss_3": lambda: low(3, widens=False),
    "loader": loader,
    "resumed_0": lambda: resumed(0),
    "resumed_1": resumed,
    "resumed_3": lambda: resumed(3),
    "collectives": collectives,
    "by_hand": by_hand,
    **{f"plain_{n}": lambda n=n: plain(n, 3, clip=0.05, plainly=True) for n in (1, 2, 3)},
    "wrong_rate": lambda: plain(optimizer={"type": "SGD", "params": {"lr": 0.21}}),
}


def main():
    idioms = {
        **IDIOMS,
        **deepspeed_example_idioms.IDIOMS,
        **{f"scaled_{name}": one for name, one in deepspeed_scaled_idioms.IDIOMS.items()},
        **{f"saving_{name}": one for name, one in deepspeed_saving_idioms.IDIOMS.items()},
        **{f"offload_{name}": one for name, one in deepspeed_offload_idioms.IDIOMS.items()},
    }
    out, *names = sys.argv[1:]
    deepspeed.init_distributed("gloo")
    for name in names:
        found = idioms[name]()
        Path(f"{out}.{name}.{dist.get_rank()}").write_text(json.dumps(found))
        dist.barrier()


if __name__ == "__main__":
    main()
