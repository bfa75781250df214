"""What both directions share: configured optimizers, calls through a wrapper, whole tensors."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn
from torsh_trainer_lightning import whole
from torsh_trainer_lightning.adapter import Configured, through
from torsh_trainer_lightning.environment import outside, world_of

from torsh_trainer.checkpoint.shards import FlatShard
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError


class Module(L.LightningModule):
    """It calls itself within a step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        return self(batch) + batch_idx

    def validation_step(self, batch, batch_idx):
        raise ValueError("no validation today")


class Wrapper(nn.Module):
    """Counts the forwards that go through it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.calls = 0

    def forward(self, *args, **kwargs):
        self.calls += 1
        return self.module(*args, **kwargs)


def test_a_step_runs_as_a_forward_of_the_wrapper_and_within_it_forward_is_the_modules_own():
    module = Module()
    wrapper, batch = Wrapper(module), torch.ones(1, 2)
    found = through(wrapper, module, "training_step", batch, 3)
    assert torch.equal(found, module.layer(batch) + 3)
    assert wrapper.calls == 1
    assert "forward" not in vars(module)


def test_after_an_error_forward_is_the_modules_own_again():
    module = Module()
    with pytest.raises(ValueError, match="no validation today"):
        through(Wrapper(module), module, "validation_step", torch.ones(1, 2), 0)
    assert torch.equal(module(torch.ones(1, 2)), module.layer(torch.ones(1, 2)))


def test_one_optimizer_is_main_and_several_are_numbered():
    one, other = (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0) for _ in range(2))
    assert Configured((one,)).by_name == {"main": one}
    both = Configured((one, other))
    assert both.by_name == {"optimizer_0": one, "optimizer_1": other}
    assert both.name_of(other) == "optimizer_1"
    with pytest.raises(ConfigError, match="configure_optimizers has not returned"):
        Configured((one,)).name_of(other)


def test_an_optimizers_state_by_name_and_by_number_is_the_same():
    layer = nn.Linear(3, 2)
    groups = [{"params": [layer.weight]}, {"params": [layer.bias], "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    held = [
        {**{k: v for k, v in group.items() if k != "params"}, "params": [name]}
        for group, name in zip(optimizer.param_groups, ["weight", "bias"], strict=True)
    ]
    named = whole.by_name(optimizer.state_dict(), held)
    assert set(named["state"]) == {"weight", "bias"}
    again = whole.as_torch(named["groups"], named["state"])
    assert again == optimizer.state_dict()
    with pytest.raises(ConfigError, match=r"groups of \[1, 1\] parameters, this run's of \[2\]"):
        whole.by_name(optimizer.state_dict(), [{"params": ["weight", "bias"]}])


def test_a_flat_shard_is_a_range_of_the_whole():
    values = torch.arange(6.0).view(2, 3)
    like = FlatShard("w", (2, 3), 2, torch.zeros(3, dtype=torch.float64))
    part = whole.cut(values, like)
    assert torch.equal(part.tensor, values.flatten()[2:5].double())


@pytest.mark.parametrize(
    "variables",
    [
        {
            "TORCHELASTIC_RUN_ID": "1",
            "RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
        },
        {
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        },
        {
            "SLURM_JOB_ID": "7",
            "SLURM_PROCID": "1",
            "SLURM_NTASKS": "2",
            "SLURM_LOCALID": "1",
            "SLURM_NODEID": "0",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_TASKS_PER_NODE": "2",
            "SLURM_STEP_NODELIST": "here",
            "SLURM_JOB_NODELIST": "here",
            "SLURM_STEP_ID": "0",
        },
    ],
    ids=["torchrun", "mpirun", "srun"],
)
def test_processes_that_something_else_has_started_are_found(variables):
    environment = outside(variables)
    assert environment is not None
    assert (environment.global_rank(), environment.world_size()) == (1, 2)
    assert (environment.local_rank(), environment.node_rank()) == (1, 0)
    assert environment.creates_processes_externally
    assert world_of(environment, processes=2, nodes=1) is environment.world
    environment.validate_settings(num_devices=2, num_nodes=1)
    with pytest.raises(ConfigError, match="has started 2 processes, and the Trainer has devices=4"):
        environment.validate_settings(num_devices=4, num_nodes=1)


def test_what_lightnings_own_launcher_sets_is_left_to_lightning():
    names = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_PORT")
    assert outside(dict.fromkeys(names, "1")) is None
    assert outside({}) is None
    assert outside({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}) is None
    assert World().size == 1
