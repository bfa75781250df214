"""Asked to stop at any point of a step, a run that goes on leaves the checkpoint that one leaves
which nobody stopped: the position, the schedule, and the plain settings of the optimizer."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from torsh_trainer import Callback, CheckpointOptions, DataSource, Loading, Task, Trainer
from torsh_trainer.checkpoint.state import read_state
from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import Interrupted
from torsh_trainer.optim.schedule.shapes import Cosine
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.training.trainer import run_in

STEPS = 2
X = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
POINTS = ("forward", "gradient", "update", "updated", "reported", "evaluating", "evaluated")
POINTS += ("saved",)


class Moments(Callback):
    """Counts the points that a run passes, and stops it at one of them."""

    def __init__(self, point: str, time: int) -> None:
        self.point, self.left = point, time

    def pass_by(self, point: str) -> None:
        trains = callable(signal.getsignal(signal.SIGTERM))  # an optimizer may be tried before
        if trains and point == self.point:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGTERM)

    def on_step(self, report: Any) -> None:
        self.pass_by("reported")

    def on_evaluate(self, report: Any) -> None:
        self.pass_by("evaluated")

    def on_save(self, report: Any) -> None:
        self.pass_by("saved")


class Line(Task):
    """Passes by the other points."""

    def __init__(self, moments: Moments) -> None:
        self.moments = moments
        self.data = DataSource()
        self.data.train = self.data.eval = TensorDataset(X, X.sum(1, keepdim=True))

    def build_model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def build_optimizers(self, named_parameters: Any) -> Any:
        optimizer = torch.optim.AdamW([p for _, p in named_parameters], lr=0.01)
        optimizer.register_step_pre_hook(lambda *_: self.moments.pass_by("update"))
        optimizer.register_step_post_hook(lambda *_: self.moments.pass_by("updated"))
        return {"main": optimizer}

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        if outputs.requires_grad:
            self.moments.pass_by("forward")
            outputs.register_hook(lambda _: self.moments.pass_by("gradient"))
        else:
            self.moments.pass_by("evaluating")
        return F.mse_loss(outputs, batch[1])


def trained(world: Any, strategy: Strategy, folder: Path, moments: Moments) -> bool:
    """Whether the run came to its end."""
    made = Trainer(
        task=Line(moments),
        strategy=strategy,
        loading=Loading(batch_size=8),
        schedule=Cosine(warmup_steps=1, final=0.1),
        max_steps=STEPS,
        log_every=1,
        eval_every=2,
        checkpoint=CheckpointOptions(every_steps=2, resume="auto"),
        callbacks=[moments],
        run_dir=folder,
        device="cpu",
    )
    with contextlib.suppress(Interrupted):
        run_in(world, made)
        return True
    return False


def last(folder: Path) -> dict[str, Any]:
    newest = max((folder / "checkpoints").glob("step-*"))
    assert newest.name == f"step-{STEPS:08}"
    state = dict(read_state(newest))
    return {name: state[name] for name in ("engine", "position", "schedule")}


def journeys(comm: Communicator, strategy: Strategy, folder: Path) -> list[str]:
    """Which points have left another last checkpoint."""
    assert trained(comm.world, strategy, folder / "undisturbed", Moments("", 0))
    expected: Mapping[str, Any] = last(folder / "undisturbed")
    wrong = []
    for point in POINTS:
        for time in range(1, 20):
            place = folder / f"{point}-{time}"
            moments = Moments(point, time)
            ended = trained(comm.world, strategy, place, moments)
            if moments.left > 0:
                break  # it does not come there so often
            if not ended:
                assert trained(comm.world, strategy, place, Moments("", 0))
            found = last(place)
            if found != expected:
                wrong.append(f"{point} {time}: {found['engine']} for {expected['engine']}")
    return wrong


@pytest.mark.matrix(1)
@pytest.mark.parametrize("strategy", [DDP(), FSDP()], ids=["ddp", "fsdp"])
def test_a_stop_at_any_point_of_a_step_leaves_the_settings_that_no_stop_leaves(
    strategy: Strategy, tmp_path: Path
) -> None:
    [wrong] = shared_pool(1).run(journeys, strategy, tmp_path)
    assert wrong == []
