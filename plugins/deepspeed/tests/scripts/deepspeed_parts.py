"""What the idioms of scripts for DeepSpeed are made of: a model, batches, a loop, what is left."""

from __future__ import annotations

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

SGD = {"type": "SGD", "params": {"lr": 0.2}}
ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}}
STEPS = 6


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))

    def answer(self):
        return 42


class Samples(torch.utils.data.Dataset):
    def __init__(self, count=48):
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(count, 8, generator=generator)
        self.y = torch.randint(4, (count,), generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def net():
    torch.manual_seed(0)
    return Net()


def config(**more):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "optimizer": SGD,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **more,
    }


def batch(step, rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(4, 8, generator=generator)
    return x.to(dtype), torch.randint(4, (4,), generator=generator)


def whole(engine):
    found = {}
    for name, p in engine.module.named_parameters():
        value = p
        if engine.zero_optimization_stage() > 0:
            value = safe_get_full_fp32_param(p)
        if value is None:  # it is frozen
            continue
        found[name] = value.detach().float().flatten().tolist()
    return found


def train(
    engine, steps=STEPS, batches=None, dtype=torch.float32, first=0, widens=True, plainly=False
):
    rows, rank = [], dist.get_rank()
    given = iter(batches) if batches is not None else None
    for step in range(first, first + steps):
        x, y = next(given) if given is not None else batch(step, rank, dtype)
        x, y = x.to(engine.device), y.to(engine.device)
        boundary = engine.is_gradient_accumulation_boundary()
        outputs = engine(x)
        loss = nn.functional.cross_entropy(outputs.float() if widens else outputs, y)
        if plainly:  # the gradients are the engine's all the same
            loss.backward()
            returned = loss / engine.gradient_accumulation_steps()
        else:
            returned = engine.backward(loss)
        engine.step()
        norm = engine.get_global_grad_norm()
        rows.append(
            {
                "loss": float(loss),
                "returned": float(returned),
                "dtypes": [str(outputs.dtype), str(loss.dtype), str(returned.dtype)],
                "boundary": boundary,
                "steps": engine.global_steps,
                "lr": list(map(float, engine.get_lr())),
                "norm": None if norm is None else float(norm),
            }
        )
    return rows


def finish(engine, rows, **more):
    return {"rows": rows, "state": whole(engine), **more}


def start(model=None, **given):
    model = model or net()
    given.setdefault("model_parameters", model.parameters())
    return deepspeed.initialize(model=model, **given)
