"""A script under the real Horovod and as ``translate --task`` writes it train the same steps."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from torsh_trainer.__main__ import main
from torsh_trainer.testing.translated_scripts import (
    measure_difference,
    record_script,
    train_translation,
)

pytestmark = pytest.mark.usefixtures("warm_interpreters")

PYTHON = sys.executable
"""What is recorded has to import torch itself."""

SCRIPT = """
import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, rows):
        return F.log_softmax(self.layers(rows), dim=1)


def make_data(count):
    drawn = torch.Generator().manual_seed(5)
    rows = torch.randn(count, 12, generator=drawn)
    return TensorDataset(rows, (rows[:, 0] > 0).long() + (rows[:, 1] > 1).long())


def train_epoch(args, model, loader, optimizer):
    for index, (rows, target) in enumerate(loader):
        loss = F.nll_loss(model(rows), target) / args.accumulate
        loss.backward()
        if (index + 1) % args.accumulate == 0:
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()


def main(args):
    hvd.init()
    torch.manual_seed(3)
    model = Net(args.width)
    data = make_data(96)
    sampler = DistributedSampler(
        data, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False
    )
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        backward_passes_per_step=args.accumulate,
    )
    for epoch in range(2):
        train_epoch(args, model, loader, optimizer)
        scheduler.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=0.01)
    main(parser.parse_args())
"""
BOUND = 1e-6
"""After one step, relative, in fp32; k times as much after k."""


def test_its_losses_are_the_engines_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("train.py").write_text(SCRIPT)
    line = f"horovodrun -np 2 --gloo {PYTHON} train.py --accumulate 2 --clip 0.3 --lr 0.05"
    task = ["--task", "my_task.py", "--output", "job.yaml"]
    assert main(["translate", "--command", line, *task]) in (0, 10)
    told = capsys.readouterr().out
    assert "nothing is missing" in told
    path = os.pathsep.join([str(Path(PYTHON).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path}
    seen = record_script(line.split(), folder=tmp_path, env=env)
    # The script divides each loss; its own clipping comes before the norm that is recorded.
    original = [replace(step, loss=step.loss * 2, grad_norm=None) for step in seen]
    assert len(original) == 12
    assert all(abs(step.grad_norm - 0.3) < 1e-4 for step in seen)  # every step is clipped
    assert [step.lr for step in original] == [0.1] * 6 + [0.05] * 6
    ours = train_translation(told, folder=tmp_path, env=os.environ)
    assert measure_difference(ours, original) < len(original) * BOUND
    other = train_translation(told, "trainer.max_grad_norm=0.31", folder=tmp_path, env=os.environ)
    assert measure_difference(other, original) > 1e-4
