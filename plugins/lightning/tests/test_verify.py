"""``verify`` with a LightningModule: engines that agree, wrong ones found out, and whose order."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from loops import as_alone, as_torchrun, quiet

from torsh_trainer.assemble import launch
from torsh_trainer.assemble.verifying import verify
from torsh_trainer.config.command_line import parse
from torsh_trainer.config.verifying import verification
from torsh_trainer.config.wording import as_failure
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, Unsupported

PROJECT = '''
"""Modules with what may differ between runs, and strategies with one mistake each."""

from dataclasses import dataclass

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.single import Single


class Rows(L.LightningDataModule):
    """Three steps an epoch on two processes, the last of them on one accumulated batch."""

    def train_dataloader(self):
        rows = torch.randn(18, 4, generator=torch.Generator().manual_seed(1))
        return DataLoader(rows, batch_size=2, shuffle=True)


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean() * (1 + torch.rand(()))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Manual(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        self.lr_schedulers().step()


@dataclass(frozen=True)
class NeverCommunicates(DDP):
    name = "never_communicates"

    def prepare(self, job, comm):
        return Single.prepare(Single(), job, comm)


@dataclass(frozen=True)
class Halves(DDP):
    name = "halves"

    def prepare(self, job, comm):
        engine = super().prepare(job, comm)
        right = engine.backward

        def wrong(loss, *, sync=True, **options):
            right(loss, sync=sync, **options)
            for parameter in engine.model.parameters() if sync else ():
                parameter.grad.mul_(0.5)

        engine.backward = wrong
        return engine
'''
WRONG = {"never_communicates": "NeverCommunicates", "halves": "Halves"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "verified_modules.py").write_text(PROJECT)
    options = folder / "conf" / "strategy"
    options.mkdir(parents=True)
    for name, cls in WRONG.items():
        node = {"_target_": f"verified_modules.{cls}"}
        (options / f"{name}.yaml").write_text(f"# Wrong.\n{yaml.safe_dump(node)}")
    return folder


def started(
    world: World, port: int, folder: Path, entry: Callable[..., Any], order: Any
) -> Exception | None:
    """A run of verify on these ranks, or on the first alone; what it failed with."""
    quiet()
    alone = order.config["launcher"]["num_processes"] == 1
    if alone:
        as_alone(folder)
        if world.rank:
            return None
    else:
        as_torchrun(world, port, folder)
    try:
        entry(World(), order) if alone else launch(entry, order, dict(os.environ))
    except Exception as error:  # noqa: BLE001 - verify puts it into words
        return error
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return None


@pytest.fixture
def verified(on_ranks: Any, project: Path, tmp_path: Path, monkeypatch: Any) -> Any:
    """``verified(strategies, *overrides, module="Net")``: the exit code, and verify.json."""
    monkeypatch.syspath_prepend(project)
    monkeypatch.chdir(project)

    def launch(entry: Callable[..., Any], order: Any, env: Any) -> None:
        for failed in on_ranks(started, project, entry, order):
            if failed is not None:
                raise failed

    def run(strategies: str, *overrides: str, module: str = "Net") -> tuple[int, dict[str, Any]]:
        words = [
            "task=lightning",
            f"task.module._target_=verified_modules.{module}",
            "task.datamodule._target_=verified_modules.Rows",
            f"strategies={strategies}",
            "launcher.num_processes=2",
            "verify.steps=4",
            f"verify.dir={tmp_path}/verified",
            *overrides,
        ]
        asked = verification(parse([*words, "--config-dir", "conf"]))
        code = verify(
            asked.node,
            asked.config,
            recipe=asked.recipe,
            env={},
            import_paths=(str(project),),
            in_words=as_failure,
            launch=launch,
        )
        return code, json.loads((tmp_path / "verified" / "verify.json").read_text())

    return run


def outcomes(content: dict[str, Any], rung: str) -> dict[str, dict[str, Any]]:
    (found,) = [one for one in content["rungs"] if one["rung"] == rung]
    return {outcome["label"]: outcome for outcome in found["strategies"]}


def test_one_process_takes_the_batches_of_two_and_every_engine_agrees_with_it(verified, capsys):
    code, content = verified("[single,ddp,fsdp]", "trainer.accumulate=2", "verify.ladder=[recipe]")
    assert code == 0, capsys.readouterr().out
    assert (content["batch_size"], content["micro_batch_size"]) == (8, 2)
    assert "that of 2 processes" in content["order"]
    assert content["order"] in capsys.readouterr().out
    found = outcomes(content, "recipe")
    assert [one["status"] for one in found.values()] == ["reference", "agrees", "agrees"]
    assert [one["processes"] for one in found.values()] == [1, 2, 2]
    assert found["single"]["facts"]["optimizers"] == ["AdamW"]
    rows = found["ddp"]["rows"][1:]
    assert [row["samples"] for row in rows] == [8, 16, 18, 26], "over the end of an epoch"
    assert all(row["grad_norm"] > 0 for row in rows)
    assert len({row["loss"] for row in rows}) == 4, "it trained"
    rates = [row["lr"] for row in found["fsdp"]["rows"][1:]]
    assert rates == [0.01, 0.005, 0.0025, 0.00125], "the rate of each step, not of the next"


@pytest.mark.matrix(3)
def test_a_wrong_strategy_is_found_out_and_the_right_rule_suspected(verified):
    code, content = verified("[single,halves,never_communicates]", "verify.ladder=[sgd]")
    assert code == content["exit_code"] == 12
    found = outcomes(content, "sgd")
    assert found["single"]["facts"]["optimizers"] == ["SGD"]
    suspects = {name: found[name]["suspect"] for name in WRONG}
    assert suspects["halves"]["quantity"] == "grad_norm"
    assert suspects["halves"]["rule"] == "averaging"
    assert "0.5 times" in suspects["halves"]["because"]
    assert suspects["never_communicates"]["rule"] == "replicas"
    assert {one["step"] for one in suspects.values()} == {1}


def test_under_manual_optimization_as_many_processes_are_compared(verified):
    code, content = verified("[ddp,gloo]", "verify.steps=2", module="Manual")
    assert code == 0, content
    assert content["order"].endswith("2 processes")
    with pytest.raises(Unsupported, match="steps after each") as refused:
        verified("[single,ddp]", "verify.steps=2", f"verify.dir={Path.cwd()}/m", module="Manual")
    assert "single" in refused.value.fix


def test_batches_that_cannot_be_dealt_out_are_refused_before_anything_runs(verified):
    three = "{ddp:{launcher.num_processes:3}}"
    with pytest.raises(ConfigError, match="2 processes, which cannot share the batches of 3"):
        verified(f"[{three},fsdp]")
