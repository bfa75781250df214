"""Several models under one Fabric, and losses that come through some of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from loops import as_torchrun, quiet
from torch import Tensor, nn
from torsh_trainer_lightning import TorshFabricStrategy

from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError

STEPS = 4


def net(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def batches(world: World) -> list[Tensor]:
    """This rank's."""
    generator = torch.Generator().manual_seed(3)
    return list(torch.randn(STEPS * 2, 4, 6, generator=generator))[world.rank :: 2]


def rivals(fabric: L.Fabric, found: list[Tensor]) -> list[nn.Module]:
    """A GAN: the generator's loss comes through both models, the other through one."""
    makes, one = set_up(fabric, net(6, 6), 0.3)
    judges, other = set_up(fabric, net(6, 1), 0.2)
    wanted = nn.functional.binary_cross_entropy_with_logits
    for x in found:
        one.zero_grad()
        fabric.backward(wanted(judges(makes(x)), torch.ones(4, 1)))
        one.step()
        other.zero_grad()
        both = judges(torch.cat([x, makes(x).detach()]))
        fabric.backward(wanted(both, torch.cat([torch.ones(4, 1), torch.zeros(4, 1)])))
        other.step()
    return [makes, judges]


def actor_and_critic(fabric: L.Fabric, found: list[Tensor]) -> list[nn.Module]:
    """One loss of two models, which both step by it; the actor returns a distribution."""
    actor, one = set_up(fabric, Policy(), 0.3)
    critic, other = set_up(fabric, net(6, 1), 0.2)
    for x in found:
        gain = x.sum(1, keepdim=True)
        value = critic(x)
        taken = (x[:, 0] > 0).long()
        lost = -(actor(x).log_prob(taken) * (gain - value.detach()).squeeze(1)).mean()
        fabric.backward(lost + (gain - value).square().mean())
        for optimizer in (one, other):
            optimizer.step()
            optimizer.zero_grad()
    return [actor, critic]


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logits = net(6, 2)

    def forward(self, x):
        return torch.distributions.Categorical(logits=self.logits(x))


def set_up(fabric: L.Fabric, module: nn.Module, lr: float) -> Any:
    return fabric.setup(module, torch.optim.SGD(module.parameters(), lr=lr))


def trained(world: World, port: int, folder: Path, strategy: Any, script: Any) -> list[Any]:
    """The weights that the script ends with, as rank 0 saves them."""
    as_torchrun(world, port, folder)
    quiet()
    torch.manual_seed(5)
    fabric = L.Fabric(strategy=strategy, devices=world.size, accelerator="cpu")
    fabric.launch()
    models = script(fabric, batches(world))
    path = folder / "end.ckpt"
    fabric.save(path, dict(enumerate(models)))
    fabric.barrier()
    saved = torch.load(path, weights_only=True)
    dist.destroy_process_group()
    return [saved[number] for number in range(len(models))]


@pytest.mark.parametrize("script", [rivals, actor_and_critic])
def test_a_loss_averages_the_gradients_of_the_models_it_has_come_through(
    on_ranks, tmp_path, script
):
    theirs = on_ranks(trained, tmp_path, "ddp", script)[0]
    for strategy in ("torsh_ddp", "torsh_gloo", "torsh_fsdp"):
        ours = on_ranks(trained, tmp_path, strategy, script)[0]
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=strategy)


def test_a_loss_of_no_model_is_refused():
    quiet()
    fabric = L.Fabric(strategy=TorshFabricStrategy("single"), devices=1, accelerator="cpu")
    fabric.launch()
    for _ in range(2):
        set_up(fabric, net(6, 1), 0.1)
    with pytest.raises(ConfigError, match="2 models are set up, and the loss has come through no"):
        fabric.backward(torch.ones(1, requires_grad=True).sum())
