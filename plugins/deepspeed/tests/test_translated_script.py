"""A script under the real DeepSpeed and as ``translate --task`` writes it train the same steps."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from torsh_trainer_deepspeed.operators import extensions_dir

from torsh_trainer.__main__ import main
from torsh_trainer.testing.translated_scripts import (
    measure_difference,
    record_script,
    train_translation,
)

pytestmark = pytest.mark.usefixtures("warm_interpreters")

SCRIPT = """
import argparse

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.words = nn.Embedding(11, width)
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)
        self.out = nn.Linear(width, 11, bias=False)
        self.out.weight = self.words.weight

    def forward(self, tokens):
        return self.out(torch.tanh(self.inner(self.norm(self.words(tokens).mean(1)))))


def make_data(count):
    drawn = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 11, (count, 6), generator=drawn)
    return TensorDataset(tokens, tokens.sum(1) % 11)


def configure(args):
    return {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": args.accumulate,
        "gradient_clipping": args.clip,
        "zero_optimization": {"stage": args.stage},
        "bf16": {"enabled": args.bf16},
        "zero_allow_untested_optimizer": True,
    }


def main(args):
    deepspeed.init_distributed()
    torch.manual_seed(3)
    model = Net(8)
    data = make_data(96)
    loader = DataLoader(data, args.batch, sampler=DistributedSampler(data, shuffle=False))
    if args.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=configure(args)
    )
    for epoch in range(2):
        for tokens, target in loader:
            tokens, target = tokens.to(engine.device), target.to(engine.device)
            loss = F.cross_entropy(engine(tokens), target)
            engine.backward(loss)
            engine.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--lr", type=float, default=0.01)
    main(parser.parse_args())
"""
BOUND = 1e-6
"""After one step, relative; k times as much after k. In bf16 losses are the same numbers."""
EXHAUSTIVE = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("stage", "optimizer", "changes"),
    [
        # The script computes its loss from what the engine returns, in bf16.
        (1, "sgd --bf16", ["precision.low_outputs=false"]),
        # Adam does not see a clipping that is another in every step alike.
        pytest.param(
            1, "sgd", ["trainer.max_grad_norm=0.21", "optimizer.lr=0.0202"], marks=EXHAUSTIVE
        ),
        pytest.param(0, "sgd", ["trainer.accumulate=1"], marks=EXHAUSTIVE),
        pytest.param(2, "adamw", ["optimizer.weight_decay=0.2"], marks=EXHAUSTIVE),
        pytest.param(3, "adamw --bf16", ["precision.low_outputs=false"], marks=EXHAUSTIVE),
    ],
)
def test_its_losses_and_norms_are_the_engines_own(
    stage, optimizer, changes, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("train.py").write_text(SCRIPT)
    words = f"train.py --accumulate 2 --clip 0.2 --stage {stage} --optimizer {optimizer} --lr 0.02"
    # Rounding shows which samples a micro-batch has, and another sampler deals them out otherwise.
    processes = 1 if "bf16" in optimizer else 2
    line = f"torchrun --nproc_per_node {processes} {words}"
    task = ["--task", "my_task.py", "--output", "job.yaml"]
    assert main(["translate", "--command", line, *task]) == 0
    told = capsys.readouterr().out
    assert "nothing is missing" in told
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR", str(extensions_dir()))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    own = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": extensions, "PATH": path}
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    original = record_script(
        [*start, f"--nproc-per-node={processes}", *words.split()],
        folder=tmp_path,
        env={**os.environ, **own},
    )
    assert len(original) == 24 // processes
    norms = [step.grad_norm for step in original]
    # Every step is clipped; in fp32 DeepSpeed tells no norm at stage 0.
    assert all(norm is None if not stage else norm > 0.2 for norm in norms)
    assert len({step.lr for step in original}) >= 4  # the schedule moves
    ours = train_translation(told, folder=tmp_path, env=os.environ)
    assert measure_difference(ours, original) < len(original) * BOUND
    for changed in changes:
        other = train_translation(told, changed, folder=tmp_path, env=os.environ)
        assert measure_difference(other[: len(original)], original) > 1e-4
