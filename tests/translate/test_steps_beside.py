"""What changes gradients or parameters beside the optimizer has a row, under either engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from torsh_trainer.translate.base import TranslationRequest
from torsh_trainer.translate.engines import work_of

HOROVOD = """\
import torch
import horovod.torch as hvd
IMPORT

hvd.init()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
MADE
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for x, y in torch.utils.data.DataLoader(data, batch_size=2):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.synchronize()
    DONE
    with optimizer.skip_synchronize():
        optimizer.step()
"""
DEEPSPEED = """\
import deepspeed
import torch
IMPORT

model = torch.nn.Linear(4, 2)
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
MADE
engine, optimizer, _, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=config
)
for x, y in data:
    engine.backward(engine(x).sum())
    DONE
    engine.step()
"""
KFAC = """\
class KFAC:
    def __init__(self, model):
        self.model = model

    def step(self):
        for p in self.model.parameters():
            p.grad.data.WRITE
"""
CHANGED = {
    "of a library": ("import kfac", "pre = kfac.KFAC(model)", "pre.step(0.1)", "pre.step"),
    "of nobody": ("", "", "preconditioner.step()", "preconditioner.step"),
    "in two halves": ("import sam", "s = sam.SAM(model)", "s.first_step()", "s.first_step"),
    "of the project": ("from own import KFAC", "k = KFAC(model)", "k.step()", "p.grad.data"),
    "multiplied": ("", "", "for p in model.parameters():\n        p.grad.mul_(0.5)", "p.grad"),
    "divided": ("", "", "for p in model.parameters():\n        p.grad /= 2", "p.grad"),
    "assigned": ("", "", "for p in model.parameters():\n        p.grad = 2 * p.grad", "p.grad"),
    "by a name": (
        "",
        "",
        "for p in model.parameters():\n        g = p.grad.data\n        g.add_(1)",
        "p.grad.data",
    ),
}
HARMLESS = {
    "a profiler": ("", "prof = torch.profiler.profile()", "prof.step()"),
    "a bar": ("import tqdm", "bar = tqdm.std.tqdm_gui()", "bar.step()"),
    "an environment": ("import gym", "env = gym.make('a')", "env.step(0)"),
    "emptied": ("", "", "for p in model.parameters():\n        p.grad = None"),
    "zeroed": ("", "", "for p in model.parameters():\n        p.grad.zero_()"),
    "read": ("", "", "for p in model.parameters():\n        total = p.grad.norm()"),
}


def findings_of(text: str, imported: str, made: str, done: str, folder: Path):
    text = text.replace("IMPORT", imported).replace("MADE", made).replace("DONE", done)
    folder.joinpath("own.py").write_text(KFAC.replace("WRITE", "copy_(p.grad * 2)"))
    path = folder / "train.py"
    path.write_text(text)
    plan = work_of(path, TranslationRequest(world_size=2)).translate()
    return {finding.key: finding for finding in plan.findings}


@pytest.mark.parametrize("text", [HOROVOD, DEEPSPEED], ids=["horovod", "deepspeed"])
@pytest.mark.parametrize("case", CHANGED)
def test_what_does_is_refused_with_its_line(tmp_path, case, text):
    imported, made, done, key = CHANGED[case]
    found = findings_of(text, imported, made, done, tmp_path)
    assert found[key].verdict == "refused"
    assert "gradients" in found[key].why
    if case == "of the project":
        assert found[key].where == "own.py:7"
    else:
        lines = (tmp_path / "train.py").read_text().splitlines()
        assert any(part in lines[found[key].line - 1] for part in ("step", "p.grad", "g.add_"))


@pytest.mark.parametrize("text", [HOROVOD, DEEPSPEED], ids=["horovod", "deepspeed"])
@pytest.mark.parametrize("case", HARMLESS)
def test_what_does_not_has_no_such_row(tmp_path, case, text):
    found = findings_of(text, *HARMLESS[case], tmp_path)
    assert not [f for f in found.values() if f.verdict == "refused"]
