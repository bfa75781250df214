"""A plugin's own strategy on the fake accelerator, by what ships for tests alone."""

import sys

import torch
from torch import nn

from torsh_trainer import OptimizerSpec, Task
from torsh_trainer.strategies.base import BatchPlan, Clip, Job, MicroBatch
from torsh_trainer.testing import FakeAccelerator, count_step, run_on_fake_accelerator


class Squares(Task):
    optimizer = OptimizerSpec("SGD", lr=0.1)

    def build_model(self):
        return nn.Linear(4, 3)

    def forward(self, model, batch):
        return model(batch)

    def loss(self, outputs, batch):
        return outputs.square().mean()


def count(accelerator: FakeAccelerator, folder: str):
    sys.path.insert(0, folder)
    from torsh_example.strategy import Example

    task, world_size = Squares(), accelerator.comm.world.size
    batch = BatchPlan(2 * world_size, 2, 1, world_size)
    job = Job(task=task, build_model=task.build_model, batch=batch)
    engine = Example().prepare(job, accelerator.comm)
    micro = MicroBatch(torch.ones(2, 4, device=accelerator.device), 2.0, 7)
    counts = count_step(engine, task, [micro], clip=Clip(norm=1.0))
    return list(counts.synchronisations), counts.collectives["allreduce"], counts.collective_bytes


def test_a_plugins_step_is_counted_and_its_author_is_told_where_it_waits(repository):
    folder = str(repository / "tests" / "plugin_example")
    waits, reductions, nbytes = run_on_fake_accelerator(count, folder, world_size=4)
    assert reductions == 2, "which parameters were used, and their gradients"
    assert nbytes["allreduce"] == 4 * 2 + 4 * (4 * 3 + 3)
    (place,) = waits  # it asks the device which parameters any rank has used
    assert place.startswith("a blocking copy gpu to cpu at torsh_example.strategy:")
    assert place.endswith(" in _sum_gradients")
