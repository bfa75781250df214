"""The whole loop on a fake accelerator: feed, steps, reports, evaluation, prediction."""

import itertools
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from torsh_trainer import Trainer
from torsh_trainer.callbacks.base import Callback
from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.data.loading import Loading
from torsh_trainer.optim.optimizers import OptimizerSpec
from torsh_trainer.strategies.builtin import NCCL
from torsh_trainer.strategies.single import Single
from torsh_trainer.tasks.base import Mean, Task
from torsh_trainer.testing.counting import watch
from torsh_trainer.testing.fake_accelerator import FakeAccelerator, run_on_fake_accelerator
from torsh_trainer.training.rank_run import RankRun
from torsh_trainer.training.run_parts import RunParts


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"x": torch.full((4,), float(index)), "y": torch.tensor(index % 3)}


class Data:
    train = eval = predict = Numbers()
    test = collate = None


class Classes(Task):
    sample_weight = 1.0
    data = Data()
    optimizer = OptimizerSpec("AdamW", lr=1e-3)

    def build_model(self):
        return nn.Linear(4, 3)

    def forward(self, model, batch):
        return model(batch["x"])

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs, batch["y"])

    def evaluate(self, model, batch):
        loss, count = self.loss(self.forward(model, batch), batch), float(len(batch["y"]))
        return {"loss": Mean(loss * count, count)}

    def predict(self, model, batch):
        return self.forward(model, batch)


class Noting(Callback):
    """Waits for the device so far, after each step, and whether the step was reported."""

    def __init__(self):
        self.steps = []

    def on_step(self, report):
        self.steps.append((report.metrics is not None, watch.counts.synchronisations.total()))


def run_loop(accelerator: FakeAccelerator, stages, run_dir):
    strategy = NCCL() if accelerator.comm.world.is_distributed else Single()
    noting = Noting()
    trainer = Trainer(
        task=Classes(),
        strategy=strategy,
        stages=stages,
        max_steps=6,
        log_every=3,
        max_grad_norm=1.0,
        ema_decay=0.9,
        loading=Loading(batch_size=4 * accelerator.comm.world.size),
        checkpoint=CheckpointOptions(at_end=False),
        callbacks=[noting],
    )
    world, comm = accelerator.comm.world, accelerator.comm
    mesh = strategy.mesh(world)
    parts = RunParts(trainer, world, comm, mesh, strategy, Path(run_dir))
    run = RankRun(parts, began=time.perf_counter())
    with accelerator.count() as counts:
        run.run()
    run.close()
    return noting.steps, counts


def test_steps_without_a_report_never_wait_for_the_device(tmp_path):
    def case(accelerator, run_dir):
        return run_loop(accelerator, ("fit",), run_dir)[0]

    steps = run_on_fake_accelerator(case, str(tmp_path))
    assert len(steps) == 6
    quiet = [
        later[1] - before[1]
        for before, later in itertools.pairwise(steps)
        if not before[0] and not later[0]
    ]
    assert quiet, "no two steps without a report follow each other"
    assert set(quiet) == {0}


def test_four_processes_wait_where_they_agree_to_go_on_and_where_they_report(tmp_path):
    def case(accelerator, run_dir):
        steps, counts = run_loop(accelerator, ("fit",), run_dir)
        return len(steps), list(counts.synchronisations)

    taken, places = run_on_fake_accelerator(case, str(tmp_path), world_size=4)
    assert taken == 6
    for part in ("native", "clipping", "backward", "trained", "buffers"):
        assert not [place for place in places if f"torsh_trainer.strategies.{part}" in place]
    assert not [place for place in places if "torsh_trainer.data" in place]


def test_evaluation_and_prediction_end_on_the_host(tmp_path):
    def case(accelerator, run_dir):
        run_loop(accelerator, ("fit", "evaluate", "predict"), run_dir)

    run_on_fake_accelerator(case, str(tmp_path))
    predictions = torch.load(tmp_path / "predictions.pt")
    assert predictions.shape == (64, 3)
    assert predictions.device.type == "cpu"
