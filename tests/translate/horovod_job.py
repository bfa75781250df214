"""One job of Horovod, and what tests make of it: (name, text) of a file to translate."""

from __future__ import annotations

from typing import Any

Case = tuple[str, tuple[str, str], str, str, dict[str, Any]]
"""Rule, (name, text) of a file, key, verdict, the values that it becomes."""

SCRIPT = """\
import argparse

import torch
import torch.nn.functional as F
import torch.optim as optim
import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--fp16-allreduce", action="store_true", default=False)
args = parser.parse_args()


def train(epoch):
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()


hvd.init()
train_sampler = torch.utils.data.distributed.DistributedSampler(
    train_dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False
)
train_loader = torch.utils.data.DataLoader(
    train_dataset, batch_size=args.batch_size, sampler=train_sampler
)
optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=compression
)
for epoch in range(1, 4):
    train(epoch)
"""


def changed(*pairs: tuple[str, str]) -> str:
    """The script with each first text replaced by the second, which has to stand there."""
    text = SCRIPT
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    return text


def wrapped(arguments: str) -> str:
    """The script with more arguments for ``DistributedOptimizer``."""
    return changed(("compression=compression", f"compression=compression, {arguments}"))


def stepped(before: str = "", after: str = "") -> str:
    """The script with lines around the optimizer's step."""
    pad = "        "
    lines = [*(before.splitlines()), "optimizer.step()", *(after.splitlines())]
    return changed((f"{pad}optimizer.step()\n", "".join(f"{pad}{line}\n" for line in lines)))


def made(optimizer: str) -> str:
    """The script with another optimizer."""
    return changed(
        ("optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)", optimizer)
    )


RUN = "horovodrun -np 4 {} python train.py"
SCHEDULED = (
    "hvd.broadcast_parameters",
    "scheduler = optim.lr_scheduler.{}\nhvd.broadcast_parameters",
)


def run(options: str) -> tuple[str, str]:
    return "run.sh", RUN.format(options)


def scheduled(scheduler: str, step: str = "scheduler.step()") -> tuple[str, str]:
    text = stepped(after=step)
    return "train.py", text.replace(SCHEDULED[0], SCHEDULED[1].format(scheduler))


def scheduled_by_transformers() -> tuple[str, str]:
    text = stepped(after="scheduler.step()")
    maker = "transformers.get_linear_schedule_with_warmup(optimizer, 10, len(train_loader))"
    return "train.py", text.replace("for epoch in", f"scheduler = {maker}\nfor epoch in")


def script(text: str) -> tuple[str, str]:
    return "train.py", text


def config(text: str) -> tuple[str, str]:
    return "config.yaml", text


def wrapper(text: str) -> tuple[str, str]:
    return "wrapper.yaml", text


def environment(text: str) -> tuple[str, str]:
    return "job.env", f"HOROVOD_CYCLE_TIME=1\n{text}"


DECAY = ("momentum=0.9", "momentum=0.9, weight_decay=0.1")
LATER = changed(
    ("hvd.broadcast_optimizer_state(optimizer, root_rank=0)\n", ""),
    ("for epoch", "hvd.broadcast_optimizer_state(optimizer, root_rank=0)\nfor epoch"),
)
SLICED = changed(
    ("        loss = F", "        for i in range(0, len(data), 8):\n          loss = F"),
    ("        loss.backward()", "          loss.backward()"),
    ("compression=compression", "compression=compression, backward_passes_per_step=4"),
)
AMP = changed(
    ("        loss = F", "        with torch.autocast('cpu', dtype=torch.{}):\n          loss = F")
)


BY_HAND = """\
import torch
import horovod.torch as hvd

hvd.init()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for x in range(3):
    optimizer.zero_grad()
    model(torch.rand(3, 4)).sum().backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            hvd.allreduce_(parameter.grad)
    optimizer.step()
"""
"""Gradients that the script reduces itself."""
