"""``verify --command``: a line under the real engine and by drop-in, told equal or apart."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from torsh_trainer.__main__ import main

SCRIPT = """
import sys
import torch
import torch.nn.functional as F
import horovod.torch as hvd

hvd.init()
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
sampler = torch.utils.data.DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
scale = 1.0001 if "wrong" in sys.argv and "torsh_trainer" in hvd.__file__ else 1.0
for epoch in range(3):
    sampler.set_epoch(epoch)
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) * (scale if epoch else 1.0)).backward()
        optimizer.step()
"""


# What is wrong from a later step on agrees until then; the whole agreement takes as long again.
@pytest.mark.parametrize("word", [pytest.param("", marks=pytest.mark.exhaustive), "wrong"])
def test_a_line_agrees_with_itself_and_a_script_that_differs_does_not(
    word, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    monkeypatch.setenv("PATH", path)
    Path("train.py").write_text(SCRIPT)
    line = f"horovodrun -np 2 --gloo --gloo-timeout-seconds 600 {sys.executable} train.py {word}"
    code = main(["verify", "--command", line.strip(), "--steps", "6", "--dir", "kept"])
    out = capsys.readouterr().out
    for run in ("engine", "drop-in"):
        for rank in range(2):
            text = Path("kept", run, f"rank-{rank}.jsonl").read_text()
            rows = [json.loads(line) for line in text.splitlines()]
            assert [row["step"] for row in rows] == list(range(7))
    assert "train.py: 6 steps of 2 processes, by drop-in beside the engine" in out
    if not word:
        assert code == 0
        assert len(re.findall(r" agrees", out)) == 4
    else:  # from the second epoch on, which begins with step 5
        assert code == 12
        assert "APART: loss parts first, at step 5" in out
        assert re.search(r"learning rate +0 +agrees", out)
