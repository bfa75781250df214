"""States that tests save and load, on one process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.comm.local import LocalCommunicator


def checkpointer(folder: Path, **options) -> DcpCheckpointer:
    return DcpCheckpointer(folder, LocalCommunicator(), CheckpointOptions(**options))


def trained(seed: int = 0, steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> dict:
    names = {id(p): name for name, p in model.named_parameters()}
    slots = {names[id(p)]: dict(s) for p, s in optimizer.state.items()}
    groups = [
        {**group, "params": [names[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {
        "engine": {
            "model": dict(model.state_dict()),
            "optimizer": {"main": {"state": slots, "groups": groups}},
        },
        "position": {"step": step, "samples": step * 16},
        "rng": {"rank_0": torch.get_rng_state()},
        "callbacks": {},
    }


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_same(found[key], value)
        elif isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype
            assert torch.equal(found[key], value), key
        else:
            assert found[key] == value, key


def flip_a_bit(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
