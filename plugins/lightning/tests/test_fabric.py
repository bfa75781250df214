"""Our engines in Fabric: a loop of one's own, with the numbers of plain PyTorch."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from loops import as_torchrun, quiet
from torch import nn
from torsh_trainer_lightning import TorshFabricStrategy

from torsh_trainer.errors import ConfigError, Unsupported

STEPS, PARTS, BOUND = 4, 2, 0.1


def model() -> nn.Module:
    """The same weights whenever it is asked for."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """Made over whole parameters."""
    return torch.optim.AdamW(module.parameters(), lr=0.05)


def batches() -> list[torch.Tensor]:
    """Micro-batches of all ranks."""
    generator = torch.Generator().manual_seed(3)
    return list(torch.randn(STEPS * PARTS * 2, 4, 6, generator=generator))


def plain() -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Plain PyTorch over the batches of both ranks: norms, weights and the optimizer's state."""
    module = model()
    optimizer = optimizer_of(module)
    norms, found = [], batches()
    for step in range(STEPS):
        for batch in found[step * PARTS * 2 : (step + 1) * PARTS * 2]:
            (module(batch).square().mean() / (PARTS * 2)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), BOUND)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, module.state_dict(), optimizer.state_dict()


def looped(world, port, folder, strategy: str) -> Any:
    """One rank's loop; halfway all goes through a checkpoint into a new model."""
    as_torchrun(world, port, folder)
    quiet()
    fabric = L.Fabric(strategy=f"torsh_{strategy}", devices=world.size, accelerator="cpu")
    fabric.launch()
    whole = model()
    module, optimizer = fabric.setup(whole, optimizer_of(whole))
    norms = []
    mine = batches()[world.rank :: 2]
    for step in range(STEPS):
        if step == STEPS // 2:
            fabric.save(folder / "half.ckpt", {"model": module, "optimizer": optimizer, "at": step})
            fabric.barrier()
            whole = model()
            module, optimizer = fabric.setup(whole, optimizer_of(whole))
            state = {"model": module, "optimizer": optimizer, "at": 0}
            fabric.load(folder / "half.ckpt", state)
            assert state["at"] == step
        for part in range(PARTS):
            with fabric.no_backward_sync(module, enabled=part + 1 < PARTS):
                loss = module(mine[step * PARTS + part]).square().mean() / PARTS
                fabric.backward(loss)  # another model was set up before
        norms.append(float(fabric.clip_gradients(module, optimizer, max_norm=BOUND)))
        optimizer.step()
        optimizer.zero_grad()
    fabric.save(folder / "end.ckpt", {"model": module, "optimizer": optimizer})
    fabric.barrier()
    dist.destroy_process_group()
    return norms, torch.load(folder / "end.ckpt", weights_only=True)


@pytest.mark.parametrize("strategy", ["ddp", "gloo", "fsdp", "horovod"])
def test_a_loop_of_fabrics_clips_accumulates_saves_and_goes_on(on_ranks, tmp_path, strategy):
    norms, weights, state = plain()
    found, saved = on_ranks(looped, tmp_path, strategy)[0]
    torch.testing.assert_close(found, norms, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(saved["model"], dict(weights), rtol=1e-4, atol=1e-6)
    moments = {n: slots["exp_avg"] for n, slots in state["state"].items()}
    ours = {n: slots["exp_avg"] for n, slots in saved["optimizer"]["state"].items()}
    torch.testing.assert_close(ours, moments, rtol=1e-4, atol=1e-6)


def alone() -> L.Fabric:
    """Fabric on one process."""
    quiet()
    fabric = L.Fabric(strategy=TorshFabricStrategy("single"), devices=1, accelerator="cpu")
    fabric.launch()
    return fabric


def test_a_model_and_its_optimizers_are_set_up_together():
    fabric = alone()
    module = model()
    with pytest.raises(Unsupported, match=r"model, optimizer = fabric.setup\(model, optimizer\)"):
        fabric.setup_optimizers(optimizer_of(module))
    with pytest.raises(ConfigError, match="before a model and its optimizers are set up"):
        fabric.backward(fabric.setup_module(module)(torch.ones(1, 6)).sum())
    with pytest.raises(ConfigError, match="holds a parameter of another model"):
        fabric.setup(module, optimizer_of(model()))


def test_a_norm_that_no_engine_bounds_is_refused():
    fabric = alone()
    whole = model()
    module, optimizer = fabric.setup(whole, optimizer_of(whole))
    fabric.backward(module(torch.ones(1, 6)).sum())
    with pytest.raises(Unsupported, match="norm_type=1"):
        fabric.clip_gradients(module, optimizer, max_norm=1.0, norm_type=1)
