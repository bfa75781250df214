"""What (e) saves, and the ways of saving and loading it: this product's and those of its peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.checkpoint.plain import dotted_name
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.strategies.state import optimizer_state

MODELS = {"200M": (1024, 16), "20M": (512, 6), "3M": (256, 4)}
"""Width and number of blocks."""


class Block(nn.Module):
    """The matrices of a transformer's block, without its attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_in, self.norm_mid = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm_in(x)).chunk(3, dim=-1)
        x = x + self.out(query * key.sigmoid() * value)
        return x + self.down(F.gelu(self.up(self.norm_mid(x))))


def build_model(size: str) -> nn.Module:
    """A seeded model of that many parameters."""
    torch.manual_seed(0)
    width, blocks = MODELS[size]
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


class Training:
    """A model and AdamW, to be trained on one sample."""

    def __init__(self, size: str) -> None:
        self.model = build_model(size)
        self.x = torch.randn(1, MODELS[size][0])
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self) -> None:
        """With so few samples a step is all memory traffic: no kinder company for a save."""
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def tensors(self) -> list[Tensor]:
        """All that a checkpoint of it holds."""
        slots = [slot for slots in self.optimizer.state.values() for slot in slots.values()]
        return [*self.model.parameters(), *slots]


class Way:
    """One way of saving; ``syncs`` says what it forces onto the disk by itself.

    ``is_async`` when the save goes on after ``save`` has returned.
    """

    syncs = "nothing"
    is_async = False

    def __init__(self, training: Training, folder: Path) -> None:
        self.training = training
        self.folder = folder

    def prepare(self) -> None:
        """What its loop does once, after the first step."""

    def save(self, number: int) -> None:
        """What the loop waits for."""
        raise NotImplementedError

    def wait(self) -> None:
        """Returns once the save is complete."""

    def load(self) -> None:
        """Fills model and optimizer from the last save."""
        raise NotImplementedError

    def path(self, number: int) -> Path:
        """The file or folder of a save."""
        return self.folder / f"save-{number}"

    def close(self) -> None:
        """Ends what is still open."""

    @property
    def newest(self) -> Path:
        """The file or folder of the last save."""
        return max(self.folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)


class TorchSave(Way):
    """torch.save of the two state dicts."""

    def save(self, number: int) -> None:
        torch.save(self._state(), self.path(number))

    def load(self) -> None:
        state = torch.load(self.newest, weights_only=True)
        self.training.model.load_state_dict(state["model"])
        self.training.optimizer.load_state_dict(state["optimizer"])

    def _state(self) -> dict[str, Any]:
        training = self.training
        return {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}


class Dcp(TorchSave):
    """torch.distributed.checkpoint.save."""

    syncs = "files"

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        import torch.distributed.checkpoint as dcp  # not before a contender of its own process

        self.dcp = dcp

    def save(self, number: int) -> None:
        self.dcp.save(self._state(), checkpoint_id=self.path(number), no_dist=True)

    def load(self) -> None:
        self.dcp.load(self._state(), checkpoint_id=self.newest, no_dist=True)


class DcpAsync(Dcp):
    """torch.distributed.checkpoint.async_save with one stager for all saves, as it is fastest."""

    is_async = True

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,  # there is no accelerator
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )

    def save(self, number: int) -> None:
        self.pending = self.dcp.async_save(
            self._state(), checkpoint_id=self.path(number), async_stager=self.stager
        )

    def wait(self) -> None:
        self.pending.result()

    def close(self) -> None:
        self.stager.close()
        dist.destroy_process_group()


class Torsh(Way):
    """checkpoint.mode=sync."""

    syncs = "files and folder"
    options = CheckpointOptions(mode="sync")

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        self.saver = self._saver()
        self.names = {id(p): name for name, p in training.model.named_parameters()}

    def prepare(self) -> None:
        self.saver.prepare(self._state)

    def save(self, number: int) -> None:
        self.saver.save(number, self._state(), {})

    def wait(self) -> None:
        self.saver.wait()

    def load(self) -> None:
        saver, state = self._saver(), self._state()
        saver.load(state)  # a new one: it verifies the files anew
        if self.options.check_loaded:
            self._check(saver, state)

    def _check(self, saver: DcpCheckpointer, state: dict[str, Any]) -> None:
        """As a run that resumes compares what it then holds with what was saved."""
        saved = {dotted_name(path): one for path, one in (saver.hashes(self.newest) or {}).items()}
        held = saver.sum_held(state, sorted(saved))
        assert all(held[name].covers(one.sum) for name, one in saved.items())

    def path(self, number: int) -> Path:
        return self.folder / f"step-{number:08d}"

    def close(self) -> None:
        self.saver.close()

    def _saver(self) -> DcpCheckpointer:
        return DcpCheckpointer(self.folder, LocalCommunicator(), self.options)

    def _state(self) -> dict[str, Any]:
        model, optimizer = self.training.model, self.training.optimizer
        slots = {"main": optimizer_state(optimizer, self.names)}
        return {"engine": {"model": dict(model.state_dict()), "optimizer": slots}}


class TorshUnchecked(Torsh):
    """checkpoint.mode=sync, without hashes."""

    options = CheckpointOptions(mode="sync", check_loaded=False)


class TorshAsync(Torsh):
    """checkpoint.mode=async."""

    is_async = True
    options = CheckpointOptions(mode="async")


class Lightning(Way):
    """Trainer.save_checkpoint, called where a callback would."""

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        self.trainer: Any = None

    def save(self, number: int) -> None:
        self.trainer.save_checkpoint(self.path(number))

    def load(self) -> None:
        strategy = self.trainer.strategy
        state = strategy.load_checkpoint(self.newest, weights_only=True)
        strategy.load_model_state_dict(state)
        strategy.load_optimizer_state_dict(state)


SYNC = "ToRSh Trainer, mode=sync"
UNCHECKED = "ToRSh Trainer, mode=sync, check_loaded=false"
ASYNC = "ToRSh Trainer, mode=async"
DCP = "DCP save"
WAYS: dict[str, type[Way]] = {
    SYNC: Torsh,
    UNCHECKED: TorshUnchecked,
    ASYNC: TorshAsync,
    "torch.save": TorchSave,
    DCP: Dcp,
    "DCP async_save, stager kept": DcpAsync,
    "Lightning Trainer.save_checkpoint": Lightning,
}
