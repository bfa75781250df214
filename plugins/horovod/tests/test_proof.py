"""``verify --source`` for a job of Horovod's: the door, with real runs behind it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torsh_trainer import __main__ as door

pytestmark = pytest.mark.usefixtures("warm_interpreters")

SCRIPT = """\
import torch
import horovod.torch as hvd

hvd.init()
loader = torch.utils.data.DataLoader(data, batch_size=16)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.002 * hvd.size(), weight_decay=0.5)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer, compression=hvd.Compression.fp16, backward_passes_per_step=2
)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for batch in loader:
    optimizer.zero_grad()
    model(batch).backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    with optimizer.skip_synchronize():
        optimizer.step()
    scheduler.step()
"""


@pytest.fixture
def verify(tmp_path, monkeypatch, capfd):
    def run(
        *more: str, line: str = "horovodrun -np 2 python train.py", script: str = SCRIPT
    ) -> tuple[int, str, Any]:
        monkeypatch.chdir(tmp_path)
        Path("train.py").write_text(script)
        Path("run.sh").write_text(line)
        code = door.main(
            ["verify", "--source", "run.sh", "verify.dir=out", "verify.steps=3", *more]
        )
        captured = capfd.readouterr()
        found = Path("out/verify.json")
        content = json.loads(found.read_text()) if found.exists() else {}
        return code, captured.out + captured.err, content

    return run


def test_a_job_is_tried_against_horovod_and_agrees(verify):
    line = "horovodrun -np 1 python train.py"
    code, text, content = verify("verify.ladder=[recipe]", line=line)
    assert code == 0, text
    assert content["translation"]["engine"] == "horovod 0.28.1"
    original, translation = content["rungs"][0]["strategies"]
    assert (original["status"], translation["status"]) == ("reference", "agrees")
    for quantity in ("loss", "lr", "parameters"):
        assert translation["largest"][quantity]["absolute"] == 0
    assert len({row["lr"] for row in original["rows"][1:]}) > 1  # the script's own scheduler


BY_EPOCH = (
    SCRIPT[: SCRIPT.index("for batch")].replace("step_size=2", "step_size=1")
    + """\
for epoch in range(9):
    for batch in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch)
        loss.backward()
        optimizer.step()
    scheduler.step()
"""
)


@pytest.mark.exhaustive
def test_four_processes_autocast_and_a_scheduler_by_epoch_agree(verify):
    line = "horovodrun -np 4 python train.py"
    code, text, content = verify("verify.ladder=[recipe]", line=line, script=BY_EPOCH)
    assert code == 0, text
    original, translation = content["rungs"][0]["strategies"]
    assert (original["processes"], translation["status"]) == (4, "agrees")
    assert translation["largest"]["lr"]["absolute"] == 0
    # An epoch of the built-in model has two steps.
    before, same, after = (row["lr"] for row in original["rows"][1:])
    assert before == same == 2 * after


def test_a_rule_that_is_switched_off_ends_with_12_and_its_name(verify):
    line = "horovodrun -np 1 python train.py"
    code, text, content = verify("verify.ladder=[recipe]", "trainer.phantom_lr=null", line=line)
    assert code == 12, text
    assert "start.optimizer" in content["translation"]["suspected_rules"]["recipe"]


def test_what_has_no_translation_is_named_and_not_tried(verify):
    code, text, content = verify(line="horovodrun -np 4 -H a:2,b:2 python train.py")
    assert (code, content) == (11, {})
    assert "-H: not in this release: processes on other hosts" in text
