"""What scripts for Lightning's Trainer do: trained as under its strategies, or refused first."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any, Generic, TypeVar

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from loops import as_torchrun
from test_strategy import Leaves, Net, Saves, fitted
from torch import nn
from torsh_trainer_lightning import TorshFabricStrategy, TorshStrategy
from torsh_trainer_lightning.names import NAMES
from torsh_trainer_lightning.words import reword_text

from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, Unsupported
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.utils import registry

T = TypeVar("T")


class MadeEarly(Net):
    """Its optimizer is made in the constructor, over whole parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.made = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> Any:
        return self.made


class Beside(Net):
    """Its optimizer has a tensor that the module does not know."""

    def configure_optimizers(self) -> Any:
        beside = torch.ones(7, requires_grad=True)
        return torch.optim.SGD([*self.parameters(), beside], lr=0.1)


class NoOptimizer(Net):
    """Goes through its batches and steps nothing."""

    def configure_optimizers(self) -> Any:
        return None


class Unused(Net):
    """A part of it is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)


class Typed(Generic[T], Net):
    """Has Generic before its module."""


class Counts(Net):
    """Notes each mode that it is put into."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[bool] = []

    def train(self, mode: bool = True) -> Any:
        self.asked.append(mode)
        return super().train(mode)


class TwoOptimizers(Net):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.body, self.head)]


class Forgetful(Net):
    """Never calls the closure that computes its step."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        """Steps nothing."""


class Brought(Net):
    """A part of it comes from outside, and is a hyperparameter too, as in the Hydra template."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = net

    def forward(self, x):
        return self.net(super().forward(x))


def seeded(kind: type[Net]) -> Net:
    """The same module whenever it is asked for."""
    L.seed_everything(11, verbose=False)
    return kind()


def test_an_optimizer_made_early_trains_where_parameters_are_whole_else_is_refused(tmp_path):
    theirs = seeded(MadeEarly)
    fitted("ddp", theirs, tmp_path)
    torch.distributed.destroy_process_group()
    ours = seeded(MadeEarly)
    fitted("torsh_ddp", ours, tmp_path)
    assert ours.losses == theirs.losses
    torch.distributed.destroy_process_group()
    sharded = seeded(MadeEarly)
    with pytest.raises(ConfigError, match=r"7 of the 7 parameters.*build it in configure_optimiz"):
        fitted("torsh_fsdp", sharded, tmp_path)
    assert not sharded.losses


@pytest.mark.parametrize("name", ["torsh_single", "torsh_fsdp"])
def test_a_tensor_that_is_no_parameter_of_the_module_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match=r"shape \(7,\) which is no parameter of the module"):
        fitted(name, seeded(Beside), tmp_path)


def test_a_module_without_an_optimizer_goes_through_its_batches(tmp_path):
    theirs, ours = seeded(NoOptimizer), seeded(NoOptimizer)
    fitted("ddp", theirs, tmp_path)
    torch.distributed.destroy_process_group()
    fitted("torsh_fsdp", ours, tmp_path)
    torch.testing.assert_close(ours.losses, theirs.losses)


@pytest.mark.parametrize(
    "made",
    [EMAWeightAveraging, WeightAveraging, lambda: StochasticWeightAveraging(1e-2, 1)],
    ids=["ema", "average", "swa"],
)
def test_weights_are_averaged_where_they_are_whole(tmp_path, made):
    flags = {"max_steps": -1, "max_epochs": 3, "limit_val_batches": 2}
    theirs, ours = seeded(Net), seeded(Net)
    one = fitted("ddp", theirs, tmp_path, callbacks=[made()], **flags)
    torch.distributed.destroy_process_group()
    other = fitted("torsh_ddp", ours, tmp_path, callbacks=[made()], **flags)
    assert ours.losses == theirs.losses
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        assert a.equal(b)
    assert one.callback_metrics["val"] == other.callback_metrics["val"]
    torch.distributed.destroy_process_group()
    refused, callback = seeded(Net), made()
    words = rf"{type(callback).__name__} averages whole weights.*use TorshStrategy..ddp"
    with pytest.raises(Unsupported, match=words):
        fitted("torsh_fsdp", refused, tmp_path, callbacks=[callback], **flags)
    assert not refused.losses


def brought() -> Brought:
    L.seed_everything(11, verbose=False)
    return Brought(nn.Linear(3, 3))


def test_hyperparameters_that_are_cut_are_refused_where_a_checkpoint_would_hold_them(tmp_path):
    words = r"'net' is a part of the module.*save_hyperparameters\(ignore=\[\"net\"\]\)"
    refused, saves = brought(), {"enable_checkpointing": True}
    with pytest.raises(Unsupported, match=words):
        fitted("torsh_fsdp", refused, tmp_path, callbacks=[ModelCheckpoint(tmp_path)], **saves)
    assert not refused.losses
    torch.distributed.destroy_process_group()
    with pytest.raises(Unsupported, match=words):  # said where it is saved, too
        fitted("torsh_fsdp", brought(), tmp_path, callbacks=[Saves(tmp_path / "never.ckpt")])
    torch.distributed.destroy_process_group()
    after = fitted("torsh_fsdp", brought(), tmp_path)
    after.save_checkpoint(tmp_path / "after.ckpt")  # the module is whole again
    torch.distributed.destroy_process_group()
    fitted("torsh_ddp", brought(), tmp_path, callbacks=[ModelCheckpoint(tmp_path)], **saves)
    assert len(list(tmp_path.glob("*.ckpt"))) == 2


@pytest.mark.parametrize("name", ["ddp", "gloo", "mpi", "fsdp"])
def test_parameters_that_no_step_reaches_are_no_fault_of_one_process(tmp_path, name):
    theirs, ours = seeded(Unused), seeded(Unused)
    fitted("ddp_find_unused_parameters_true", theirs, tmp_path)
    torch.distributed.destroy_process_group()
    fitted(f"torsh_{name}", ours, tmp_path)
    torch.testing.assert_close(ours.losses, theirs.losses)


def unused(world: World, port: int, folder: Path, strategy: str) -> Any:
    """One rank's losses, or what it is told."""
    as_torchrun(world, port, folder)
    module = seeded(Unused)
    with Leaves():
        try:
            fitted(strategy, module, folder, devices=world.size)
        except ConfigError as error:
            return str(error)
    return module.losses


def test_a_registered_name_finds_unused_parameters(on_ranks, tmp_path):
    theirs = on_ranks(unused, tmp_path, "ddp_find_unused_parameters_true")
    assert on_ranks(unused, tmp_path, "torsh_ddp_find_unused_parameters_true") == theirs
    for name in ("torsh_ddp", "torsh_ddp_find_unused_parameters_false"):
        said = on_ranks(unused, tmp_path, name)[0]
        assert "2 parameters got no gradient: spare.weight, spare.bias" in said
        assert 'give TorshStrategy("ddp", find_unused_parameters=True), or freeze them' in said


def test_a_command_line_of_signatures_knows_every_knob_and_leaves_what_is_not_said():
    parameters = inspect.signature(TorshStrategy).parameters
    assert parameters["name"].default == "ddp"
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in NAMES:
        kind = registry.strategy_class(name)
        # Horovod's own knob of this name is the strategy's argument for all.
        fields = [field for field in dataclasses.fields(kind) if field.name != "compression"]
        for field in fields:
            assert parameters[field.name].default is None
            if field.default is None:
                continue
            assert "None" not in str(field.type), "leaving it and giving null would be two things"
        said_nothing = {field.name: None for field in fields}
        assert TorshStrategy(name, **said_nothing).chosen == kind()
    # As LightningCLI calls it: with all that the signature has.
    all_of_them = {n: p.default for n, p in parameters.items()}
    said = {"name": "fsdp", "wrap_modules": ["Linear"], "reshard_after_forward": False}
    made = TorshStrategy(**{**all_of_them, **said}).chosen
    assert made == FSDP(wrap_modules=("Linear",), reshard_after_forward=False)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("use strategy=ddp", 'use TorshStrategy("ddp")'),
        ("or set strategy.zero1=false", 'or give TorshStrategy("fsdp", zero1=False)'),
        ("set strategy.op=sum, and", 'give TorshStrategy("fsdp", op="sum"), and'),
        ("use strategy=ddp strategy.overlap=false.", 'use TorshStrategy("ddp", overlap=False).'),
        ("strategy.bucket_cap_mb=-1.5 is", 'TorshStrategy("fsdp", bucket_cap_mb=-1.5) is'),
        ("strategy.groups does", "TorshStrategy's groups does"),
        ("freeze them (trainer.frozen)", "freeze them"),
        ("or precision.gradients=fp32", 'or precision=Precision(gradients="fp32")'),
        ("trainer.accumulate=2", "accumulate_grad_batches=2"),
        ("a model's own strategy", "a model's own strategy"),
    ],
)
def test_an_error_speaks_as_the_script_does(said, words):
    assert reword_text(said, kind="TorshStrategy", name="fsdp") == words


def test_fabric_speaks_so_too(tmp_path):
    with pytest.raises(ConfigError, match=r"TorshFabricStrategy..ddp., bucket_cap_mb=-1. is not"):
        TorshFabricStrategy("ddp", bucket_cap_mb=-1)
    fabric = L.Fabric(strategy="torsh_fsdp", devices=1, accelerator="cpu")
    fabric.launch()
    odd = nn.Linear(2, 2)
    odd.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(Unsupported, match=r"use TorshFabricStrategy..ddp.."):
        fabric.setup(odd, torch.optim.SGD(odd.parameters(), lr=0.1))


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp"])
def test_a_module_is_put_into_modes_as_often_as_lightning_does(tmp_path, name):
    flags = {"max_steps": -1, "max_epochs": 1, "limit_val_batches": 1}
    theirs, ours = seeded(Counts), seeded(Counts)
    fitted("auto", theirs, tmp_path, **flags)
    fitted(f"torsh_{name}", ours, tmp_path, **flags)
    assert ours.asked == theirs.asked


def test_a_class_that_fsdp_cannot_change_is_refused(tmp_path):
    theirs, ours = seeded(Typed), seeded(Typed)
    fitted("ddp", theirs, tmp_path)
    torch.distributed.destroy_process_group()
    fitted("torsh_ddp", ours, tmp_path)
    assert ours.losses == theirs.losses
    torch.distributed.destroy_process_group()
    with pytest.raises(Unsupported, match=r"the class Typed.*inherit from its module first"):
        fitted("torsh_fsdp", seeded(Typed), tmp_path)


@pytest.mark.parametrize("name", ["torsh_single", "torsh_ddp", "torsh_fsdp"])
def test_a_checkpoint_of_another_number_of_optimizers_is_refused(tmp_path, name):
    file = tmp_path / "two.ckpt"
    fitted("torsh_single", seeded(TwoOptimizers), tmp_path).save_checkpoint(file)
    module = seeded(Net)
    with pytest.raises(ConfigError, match="has 2 optimizers, and this run 1; resume with the opt"):
        fitted(name, module, tmp_path, ckpt_path=file)
    assert not module.losses


@pytest.mark.parametrize("name", ["auto", "torsh_single", "torsh_ddp"])
def test_a_closure_that_is_never_run_is_told(tmp_path, name):
    with pytest.raises(MisconfigurationException, match="closure hasn't been executed"):
        fitted(name, seeded(Forgetful), tmp_path)


@pytest.mark.parametrize("name", ["torsh_single", "torsh_ddp", "torsh_fsdp"])
def test_a_module_that_was_compiled_outside_is_refused_by_lightning_itself(tmp_path, name):
    module = seeded(Net)
    with pytest.raises(RuntimeError, match="compiled model is incompatible"):
        fitted(name, torch.compile(module, backend="eager"), tmp_path)
    assert not module.losses
