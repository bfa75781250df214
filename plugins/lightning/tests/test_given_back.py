"""After a fit under FSDP the module is whole: to be saved, called, and trained again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from loops import as_torchrun
from test_strategy import Leaves, Net, fitted, loader
from torch import nn
from torsh_trainer_lightning import TorshStrategy, given_back

from torsh_trainer.environments.world import World
from torsh_trainer.errors import Unsupported


class Blocks(Net):
    """Has units of its own under FSDP, two of them with one weight, and a hook of its own."""

    def __init__(self) -> None:
        super().__init__(norm=False)  # whose statistics are each rank's own under DDP
        parts = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
        self.more = nn.ModuleList(parts)
        parts[1][0].weight = parts[0][0].weight
        self.calls = 0
        self.register_forward_hook(self.count)

    @staticmethod
    def count(module: Any, *_: Any) -> None:
        module.calls += 1

    def forward(self, x):
        x = self.body(x)
        for part in self.more:
            x = part(x)
        return self.head(x)


def blocks() -> Blocks:
    """The same module whenever it is asked for."""
    L.seed_everything(11, verbose=False)
    return Blocks()


def made(knobs: Any) -> Any:
    """Our FSDP, or Lightning's DDP where there are no knobs."""
    return "ddp" if knobs is None else TorshStrategy("fsdp", **knobs)


def used(world: World, port: int, folder: Path, knobs: Any) -> dict[str, Any]:
    """What a script sees of its module in one fit, a validation, a checkpoint and another fit."""
    as_torchrun(world, port, folder)
    found: dict[str, Any] = {}
    with Leaves():
        module = blocks()
        trainer = fitted(made(knobs), module, folder, devices=world.size, limit_val_batches=2)
        found["after the fit"] = copy.deepcopy(module.state_dict())
        if world.is_rank_zero:  # alone: nobody else is asked for anything
            with torch.no_grad():
                found["called"] = copy.deepcopy(module).eval()(torch.ones(2, 6))
        trainer.save_checkpoint(folder / "after.ckpt")
        with torch.no_grad():
            module.head.bias.add_(1.0)
        (found["validated"],) = trainer.validate(module, loader(16), verbose=False)
        again = fitted(made(knobs), module, folder, devices=world.size)
        found["after another"] = dict(module.state_dict())
        again.save_checkpoint(folder / "again.ckpt")
        again.strategy.barrier()
        for name in ("after", "again"):
            saved = torch.load(folder / f"{name}.ckpt", weights_only=True)
            found[name] = [saved["state_dict"], saved["optimizer_states"][0]["state"]]
        found |= {"losses": module.losses, "class": type(module).__name__}
        found["hooks"] = len(module._forward_hooks)
        found["tied"] = module.more[0][0].weight is module.more[1][0].weight
        again.strategy.barrier()
    return found


@pytest.mark.parametrize("knobs", [{}, {"find_unused_parameters": True}], ids=["plain", "unused"])
def test_it_is_what_lightnings_ddp_leaves(on_ranks, tmp_path, knobs):
    theirs = on_ranks(used, tmp_path, None)
    ours = on_ranks(used, tmp_path, knobs)
    for expected, found in zip(theirs, ours, strict=True):
        for name in ("hooks", "class", "tied"):
            assert found.pop(name) == expected.pop(name)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for state in (ours[0]["after the fit"], ours[1]["after another"]):
        assert {type(value) for value in state.values()} == {torch.Tensor}


class Fails(Callback):
    """Breaks a fit off."""

    def on_train_batch_end(self, *_):
        raise KeyError("broken off")


def test_a_module_of_a_fit_that_was_broken_off_is_refused(tmp_path):
    module = blocks()
    with pytest.raises(KeyError, match="broken off"):
        fitted("torsh_fsdp", module, tmp_path, callbacks=[Fails()])
    with pytest.raises(Unsupported, match=r"cut over the processes already.*make the module anew"):
        fitted("torsh_fsdp", module, tmp_path)
    assert len(module.losses) == 1


def test_a_module_that_no_host_can_hold_stays_cut_and_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(given_back, "_available_bytes", lambda: 100)
    monkeypatch.setattr("test_strategy.quiet", lambda: None)  # which hushes warnings
    module = blocks()
    with pytest.warns(UserWarning, match=r"stays cut.*trainer.save_checkpoint\(path\) writes it"):
        trainer = fitted("torsh_fsdp", module, tmp_path)
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    saved = torch.load(tmp_path / "whole.ckpt", weights_only=True)["state_dict"]
    assert saved["head.weight"].shape == (3, 8)
