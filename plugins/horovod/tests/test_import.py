"""What a script of plain Horovod has saved is a checkpoint, and a native run goes on from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torsh_trainer_horovod import runtime

from torsh_trainer.checkpoint.cli.importing import Import, import_file
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.testing import cases
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.reference import Scenario
from torsh_trainer.testing.tiny import TinyData

BEFORE = 3
SCENARIO = Scenario(optimizer="adamw", data=TinyData(steps=6))


def script(comm: Any, file: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Saves amid training as Horovod's examples do; its losses afterwards, and its end."""
    with runtime.start(comm, {}) as hvd:
        return trained(hvd, file)


def trained(hvd: Any, file: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    task = SCENARIO.task
    model = task.build_model()
    (optimizer,) = task.build_optimizers(list(model.named_parameters())).values()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    losses = []
    for number in range(SCENARIO.data.steps):
        if number == BEFORE and hvd.rank() == 0:
            content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**content, "epoch": 1}, file)
        optimizer.zero_grad()
        (micro,) = SCENARIO.data.step(number, hvd.size())[hvd.rank()]
        loss = task.loss(model(micro.batch["tokens"]), micro.batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[BEFORE:], {name: p.detach() for name, p in model.state_dict().items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, list[Any]]:
    file = tmp_path_factory.mktemp("script") / "checkpoint-1.pt"
    return file, shared_pool(2).run(script, file)


@pytest.fixture
def order(tmp_path) -> Path:
    task = SCENARIO.task
    model = task.build_model()
    names = {id(p): name for name, p in model.named_parameters()}
    (optimizer,) = task.build_optimizers(list(model.named_parameters())).values()
    path = tmp_path / "order.txt"
    path.write_text("\n".join(names[id(p)] for g in optimizer.param_groups for p in g["params"]))
    return path


@pytest.mark.parametrize("strategy", [DDP(), FSDP()], ids=["ddp", "fsdp"])
def test_a_native_run_goes_on_as_the_script_does(strategy, saved, order, tmp_path):
    file, told = saved
    wanted = Import(file, tmp_path / "out", parameters=order, format="horovod")
    path, notes = import_file(wanted)
    assert path.name == f"step-{BEFORE:08d}"
    assert notes[0].startswith("torch: ")
    outcomes = shared_pool(2).run(cases.go_on, strategy, SCENARIO, path, BEFORE)
    for rank, (outcome, (losses, ended)) in enumerate(zip(outcomes, told, strict=True)):
        assert [step[rank][0] for step in outcome.losses] == pytest.approx(losses, rel=1e-6)
        for name, expected in ended.items():
            torch.testing.assert_close(outcome.parameters[name], expected, rtol=1e-5, atol=1e-7)
