"""Checkpoints of a model on a device: what a save holds a run up for, beside torch.save."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.comparing import Spread, in_turns
from benchmarks.gpu.size import BareSteps, size_for, waiting
from benchmarks.gpu.steps import one_batch
from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.comm.local import LocalCommunicator


def measure(device: str) -> dict[str, Any]:
    """Seconds that a save holds the loop up, by way; and those of a load."""
    size = size_for(device)
    place = torch.device(device)
    bare = BareSteps(size, device, itertools.repeat(one_batch(size, place)), compiles=False)
    bare(2)
    model, optimizer = bare.model, bare.optimizer
    names = [name for name, _ in model.named_parameters()]
    slots = optimizer.state_dict()["state"]
    state = {
        "model": dict(model.state_dict()),
        "optimizer": {name: dict(slots[place]) for place, name in enumerate(names)},
    }
    rounds = 5 if device == "cuda" else 3
    with tempfile.TemporaryDirectory() as folder:
        ways = _ways(Path(folder), place, state)

        def held_s(way: str) -> float:
            with waiting(device):
                pass
            began = time.perf_counter()
            ways[way].save()
            held = time.perf_counter() - began
            ways[way].finish()
            return held

        in_turns(ways, held_s)  # what the first save makes, the others find
        saved = in_turns(ways, held_s, rounds=rounds)
        loaded = in_turns(
            [name for name in ways if name != "async"], lambda way: ways[way].load(), rounds=rounds
        )
        for way in ways.values():
            way.close()
    size_bytes = sum(
        t.numel() * t.element_size() for t in _tensors(state) if isinstance(t, torch.Tensor)
    )
    return {
        "model": size.name,
        "gigabytes": size_bytes / 1e9,
        "saves": {name: statistics.median(seen) for name, seen in saved.items()},
        "loads": {name: statistics.median(seen) for name, seen in loaded.items()},
        "ratios": {
            name: asdict(
                Spread.extremes(a / b for a, b in zip(saved[name], saved[PEER], strict=True))
            )
            for name in ways
            if name != PEER
        },
        "rounds": rounds,
    }


PEER = "torch.save"


def _ways(folder: Path, device: torch.device, state: dict[str, Any]) -> dict[str, Any]:
    return {
        PEER: _TorchSave(folder / "plain.pt", state, device),
        "sync": _Checkpoints(folder / "sync", "sync", state, device),
        "async": _Checkpoints(folder / "async", "async", state, device),
    }


class _TorchSave:
    def __init__(self, path: Path, state: dict[str, Any], device: torch.device) -> None:
        self.path, self.state, self.device = path, state, device

    def save(self) -> None:
        torch.save(self.state, self.path)

    def finish(self) -> None:
        """It is there."""

    def load(self) -> float:
        return _time_call(
            lambda: torch.load(self.path, weights_only=True, map_location=self.device), self.device
        )

    def close(self) -> None:
        """Holds nothing."""


class _Checkpoints:
    def __init__(
        self, folder: Path, mode: Any, state: dict[str, Any], device: torch.device
    ) -> None:
        options = CheckpointOptions(mode=mode, keep_last=1)
        self.door = DcpCheckpointer(folder, LocalCommunicator(device), options)
        self.state, self.device = {"engine": state}, device
        self.step = 0

    def save(self) -> None:
        self.step += 1
        self.door.save(self.step, self.state, {})

    def finish(self) -> None:
        self.door.wait()

    def load(self) -> float:
        return _time_call(lambda: self.door.load(self.state), self.device)

    def close(self) -> None:
        self.door.close()


def _time_call(work: Callable[[], Any], device: torch.device) -> float:
    began = time.perf_counter()
    with waiting(device.type):
        work()
    return time.perf_counter() - began


def _tensors(state: Any) -> list[Any]:
    return (
        [leaf for value in state.values() for leaf in _tensors(value)]
        if isinstance(state, dict)
        else [state]
    )
