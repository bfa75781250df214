"""(e) What a checkpoint costs: the wait of the training loop, time, memory, bytes, and loading.

Each way of saving runs in a process of its own, so that its memory can be told from the others':
``python -m benchmarks.checkpoint_save WAY MODEL SAVES FOLDER`` prints one object of JSON.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.strategies.state import optimizer_state

ROOT = Path(__file__).parent.parent
MODELS = {"200M": (1024, 16), "3M": (256, 4)}
"""Width and number of blocks."""

HEAD = (
    "way of saving",
    "first save: loop waits (ms)",
    "later saves: loop waits (ms)",
    "later saves: until on disk (s)",
    "syncs itself",
    "memory over before (MiB)",
    "bytes over the state's own",
    "load (s)",
)


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


class Training:
    """A model and AdamW after one real step."""

    def __init__(self, size: str) -> None:
        torch.manual_seed(0)
        width, blocks = MODELS[size]
        self.x = torch.randn(1, width)
        self.model = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self) -> None:
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def tensors(self) -> list[Tensor]:
        slots = [slot for slots in self.optimizer.state.values() for slot in slots.values()]
        return [*self.model.parameters(), *slots]


class Way:
    """One way of saving; ``syncs`` says what it forces onto the disk by itself."""

    syncs = "no"

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
    """torch.distributed.checkpoint.async_save as it comes."""

    stager: Any = None

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def save(self, number: int) -> None:
        self.pending = self.dcp.async_save(
            self._state(), checkpoint_id=self.path(number), async_stager=self.stager
        )

    def wait(self) -> None:
        self.pending.result()

    def close(self) -> None:
        dist.destroy_process_group()


class DcpAsyncKept(DcpAsync):
    """The same with one stager for all saves, which keeps its memory."""

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,  # there is no accelerator
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )

    def close(self) -> None:
        self.stager.close()
        super().close()


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
        self._saver().load(self._state())  # a new one: it verifies the files anew

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


class TorshAsync(Torsh):
    """checkpoint.mode=async."""

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


OURS = "ToRSh Trainer, mode=sync"
WAYS: dict[str, type[Way]] = {
    OURS: Torsh,
    "ToRSh Trainer, mode=async": TorshAsync,
    "torch.save": TorchSave,
    "DCP save": Dcp,
    "DCP async_save": DcpAsync,
    "DCP async_save, stager kept": DcpAsyncKept,
    "Lightning Trainer.save_checkpoint": Lightning,
}


# -- one way, in a process of its own --------------------------------------------------------------


def run(name: str, size: str, saves: int, folder: Path) -> dict[str, Any]:
    """Trains a step, saves, loads, and tells what that took."""
    training = Training(size)
    way = WAYS[name](training, folder / "checkpoints")
    way.folder.mkdir(parents=True)
    found: dict[str, Any] = {}

    def measure() -> None:
        found.update(_measured(way, saves))

    if isinstance(way, Lightning):
        _within_lightning(way, measure)
    else:
        training.step()
        measure()
    return {"contender": name, "syncs": way.syncs, **found}


def _measured(way: Way, saves: int) -> dict[str, Any]:
    tensors = way.training.tensors
    own = sum(tensor.nbytes for tensor in tensors)
    gc.collect()
    before = _memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts from here
    began = time.perf_counter()
    way.prepare()
    ready_s = time.perf_counter() - began
    waits, totals = [], []
    for number in range(1, saves + 1):
        time.sleep(0.2 + own / 2**30)  # steps of training, with the other core free
        torch._foreach_mul_([t.detach() for t in tensors if t.is_floating_point()], 0.999)
        began = time.perf_counter()
        way.save(number)
        waits.append(time.perf_counter() - began)
        way.wait()
        if way.syncs == "no":
            _sync(way.path(number))
        totals.append(time.perf_counter() - began)
        if number > 1:
            _remove(way.path(number - 1))
    peak = _memory_bytes("VmHWM")
    written = _size_bytes(way.path(saves))
    del tensors  # some ways of loading put new ones in their place
    loads = [_load_s(way) for _ in range(3)]
    way.close()
    return {
        "own_bytes": own,
        "written_bytes": written,
        "ready_s": ready_s,
        "first_wait_s": waits[0],
        "wait_s": statistics.median(waits[1:]),
        "waits_s": waits,
        "first_total_s": totals[0],
        "total_s": statistics.median(totals[1:]),
        "extra_memory_bytes": peak - before,
        "load_s": statistics.median(loads),
    }


def _load_s(way: Way) -> float:
    tensors = way.training.tensors
    expected = [tensor.detach().flatten()[-1:].clone() for tensor in tensors]
    for tensor in tensors:
        tensor.detach().zero_()
    began = time.perf_counter()
    way.load()
    took = time.perf_counter() - began
    for tensor, last in zip(way.training.tensors, expected, strict=True):
        assert torch.equal(tensor.detach().flatten()[-1:], last), "loaded something else"
    return took


def _within_lightning(way: Lightning, measure: Callable[[], None]) -> None:
    import lightning as L

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    training = way.training

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = training.model

        def training_step(self, batch: Any, index: int) -> Tensor:
            return self.model(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return training.optimizer

    class Here(L.Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            training.optimizer.zero_grad()
            way.trainer = trainer
            measure()

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(training.x))
    L.Trainer(
        max_steps=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        callbacks=[Here()],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        default_root_dir=way.folder.parent,
    ).fit(Module(), data)


def _memory_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def _files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]


def _size_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in _files(path))


def _sync(path: Path) -> None:
    for file in _files(path):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


# -- all of them -----------------------------------------------------------------------------------


def measure(*, size: str = "200M", saves: int = 4) -> list[dict[str, Any]]:
    """One row for each way of saving; the first save, and medians of the later ones.

    Raises:
        RuntimeError: there is too little room on the disk, or a way of saving failed.
    """
    rows = []
    for name in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            _check_room(Path(folder), size)
            row = _run_apart(name, size, saves, Path(folder))
        rows.append(row)
        print(
            f"  {name}: the loop waits {1e3 * row['wait_s']:.0f} ms (first save "
            f"{1e3 * row['first_wait_s']:.0f}), {row['total_s']:.2f} s until on disk, "
            f"load {row['load_s']:.2f} s",
            flush=True,
        )
    return rows


def cells(row: dict[str, Any]) -> tuple[Any, ...]:
    """A row of the table, as ``HEAD`` names it."""
    return (
        row["contender"],
        f"{1e3 * row['first_wait_s']:.0f}",
        f"{1e3 * row['wait_s']:.0f}",
        f"{row['total_s']:.2f}",
        row["syncs"],
        f"{row['extra_memory_bytes'] / 2**20:.0f}",
        f"{row['written_bytes'] / row['own_bytes']:.4f}",
        f"{row['load_s']:.2f}",
    )


def note(rows: list[dict[str, Any]]) -> str:
    """What the table is of, and what mode=async does once before its first save."""
    row = next(r for r in rows if r["contender"] == "ToRSh Trainer, mode=async")
    return (
        f"The state is {row['own_bytes'] / 2**20:.0f} MiB. mode=async gets ready once, after the "
        f"first step: that takes {1e3 * row['ready_s']:.0f} ms, most of it importing "
        "torch.distributed.checkpoint, and the memory is made ready on a thread."
    )


def _run_apart(name: str, size: str, saves: int, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.checkpoint_save", name, size, str(saves)]
    done = subprocess.run(
        [*command, str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-2000:]}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def _check_room(folder: Path, size: str) -> None:
    width, blocks = MODELS[size]
    needed = 2 * 12 * 12 * width**2 * blocks  # two saves of 12 matrices a block, 12 bytes a number
    free = shutil.disk_usage(folder).free
    if free < 1.5 * needed:
        raise RuntimeError(
            f"{folder} has {free / 2**30:.1f} GiB free, and two checkpoints need "
            f"{needed / 2**30:.1f}: set TMPDIR to a folder on a larger disk"
        )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    way, model, count, where = sys.argv[1:]
    with contextlib.redirect_stdout(sys.stderr):
        outcome = run(way, model, int(count), Path(where))
    print(json.dumps(outcome))
