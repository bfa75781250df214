"""What modules do beside the plain step while FSDP has their parameters cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from loops import as_torchrun
from test_strategy import Leaves, fitted, told
from torch import Tensor, nn
from torsh_trainer_lightning import TorshStrategy

from torsh_trainer.environments.world import World
from torsh_trainer.errors import Unsupported


class Policy(nn.Module):
    """Returns a distribution, in which nobody sees a tensor from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return torch.distributions.Categorical(logits=self.outer(self.inner(x).tanh()))


class Counts(Policy):
    """Returns what cannot be looked into: the gradient's way is known to an iterator alone."""

    def forward(self, x):
        return iter([super().forward(x)])


class Base(L.LightningModule):
    """``losses`` are those of every backward."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def keep(self, loss: Tensor) -> Tensor:
        self.losses.append(float(loss.detach()))
        return loss


class ByPolicy(Base):
    """Manual optimization through distributions, two of its steps in a batch."""

    def __init__(self, kind: type[Policy] = Policy) -> None:
        super().__init__()
        self.policy = kind()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        with torch.no_grad():
            before = self.act(x).log_prob(y)
        for _ in range(2):
            gains = self.act(x).log_prob(y) - before
            loss = self.keep(-gains.exp().mean())
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()

    def act(self, x):
        found = self.policy(x)
        return found if isinstance(found, torch.distributions.Distribution) else next(found)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class LooksAgain(Base):
    """A forward without gradients just before the optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def training_step(self, batch, batch_idx):
        self.x, y = batch
        return self.keep(nn.functional.cross_entropy(self(self.x), y))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def on_before_optimizer_step(self, optimizer):
        with torch.no_grad():
            self.layers[0](self.x)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class LooksBefore(LooksAgain):
    """A part of it is called before any step is."""

    def on_train_epoch_start(self):
        with torch.no_grad():
            self.layers[0](torch.ones(2, 6))


class Rivals(Base):
    """A GAN: each optimizer in its turn, with the other's parameters frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.makes = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.judges = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        one, other = self.optimizers()
        wanted = nn.functional.binary_cross_entropy_with_logits
        self.toggle_optimizer(one)
        self._turn(one, wanted(self.judges(self.makes(x)), torch.ones(len(x), 1)))
        self.untoggle_optimizer(one)
        self.toggle_optimizer(other)
        made = self.makes(x).detach()
        true = wanted(self.judges(x), torch.ones(len(x), 1))
        self._turn(other, true + wanted(self.judges(made), torch.zeros(len(x), 1)))
        self.untoggle_optimizer(other)

    def _turn(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(self.keep(loss))
        optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(m.parameters(), lr=0.5) for m in (self.makes, self.judges)]


WAYS: dict[str, Callable[[], Base]] = {
    "a distribution as output": ByPolicy,
    "a forward before the optimizer steps": LooksAgain,
    "a part called before any step": LooksBefore,
    "two optimizers in turn": Rivals,
}


def run(world: World, port: int, folder: Path, way: Any, knobs: Any) -> dict[str, Any] | str:
    """One rank's training under Lightning's DDP (``knobs`` None), or under our FSDP."""
    as_torchrun(world, port, folder)
    strategy: Any = "ddp" if way != "two optimizers in turn" else "ddp_find_unused_parameters_true"
    if knobs is not None:
        strategy = TorshStrategy("fsdp", **knobs)
    L.seed_everything(11, verbose=False)
    module = WAYS[way]() if way in WAYS else ByPolicy(Counts)
    with Leaves():
        try:
            trainer = fitted(strategy, module, folder, devices=world.size, num_sanity_val_steps=0)
        except Unsupported as error:
            return str(error)
        return told(trainer, module, folder)


@pytest.mark.parametrize("keeps", [False, True], ids=["zero3", "zero2"])
@pytest.mark.parametrize("way", WAYS)
def test_it_trains_as_under_lightnings_ddp(on_ranks, tmp_path, way, keeps):
    theirs = on_ranks(run, tmp_path, way, None)
    ours = on_ranks(run, tmp_path, way, {"reshard_after_forward": not keeps})
    for expected, found in zip(theirs, ours, strict=True):
        torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-5, atol=1e-6)
    for name, value in theirs[0]["saved"]["state_dict"].items():
        torch.testing.assert_close(ours[0]["saved"]["state_dict"][name], value)


def test_an_output_that_nobody_can_look_into_is_refused_before_the_first_step(on_ranks, tmp_path):
    for said in on_ranks(run, tmp_path, "an iterator", {}):
        assert "cannot look into what 'Counts' returns: a list_iterator" in said
        assert "return tensors" in said


class ShrinksWhileValidating(Base):
    """Writes to a weight in a forward of its validation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def training_step(self, batch, batch_idx):
        return self.keep(nn.functional.cross_entropy(self.layer(batch[0]), batch[1]))

    def validation_step(self, batch, batch_idx):
        with torch.no_grad():
            self.layer.weight.mul_(0.5)
        self.layer(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def refuse_in_validation(world: World, port: int, folder: Path) -> str:
    as_torchrun(world, port, folder)
    flags = {"devices": world.size, "num_sanity_val_steps": 0, "limit_val_batches": 1}
    with Leaves():
        try:
            fitted(TorshStrategy("fsdp"), ShrinksWhileValidating(), folder, **flags)
        except Unsupported as error:
            return str(error)
    return "nothing was refused"


def test_a_validation_that_writes_to_what_is_cut_is_refused(on_ranks, tmp_path):
    for said in on_ranks(refuse_in_validation, tmp_path):
        assert "cannot honour a forward that writes to the parameter 'layer.weight'" in said
