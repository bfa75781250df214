"""(e) What a checkpoint costs: the wait of the training loop, time, memory, bytes, and loading.

Each way of saving runs in processes of its own, so that its memory can be told from the others':
``python -m benchmarks.checkpoint_save save|load WAY MODEL SAVES FOLDER`` prints one object of JSON.
The ways take turns in rounds, and are compared with one another within a round.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.checkpoint_ways import (
    ASYNC,
    DCP,
    MODELS,
    SYNC,
    UNCHECKED,
    WAYS,
    Lightning,
    Training,
    Way,
)
from benchmarks.comparing import Spread, in_new_process, in_turns

ROOT = Path(__file__).parent.parent
HEAD = (
    "way of saving",
    "it syncs",
    "first save: loop waits (ms)",
    "later saves: loop waits (ms)",
    "of mode=sync's wait",
    "loop loses in all (ms)",
    "on disk after (s)",
    "memory over before (MiB)",
    "bytes over the state's own",
    "load (s)",
    "of DCP's load",
)

LOADED = (SYNC, UNCHECKED, DCP)
"""What is loaded too; their asynchronous saves write the same files."""


# -- one way, in a process of its own --------------------------------------------------------------


def run(what: str, name: str, size: str, saves: int, folder: Path) -> dict[str, Any]:
    """Trains a step and saves, or loads what another process has saved; tells what that took."""
    training = Training(size)
    way = WAYS[name](training, folder / "checkpoints")
    found: dict[str, Any] = {}

    def measure() -> None:
        found.update(_saved(way, saves) if what == "save" else _loaded(way))

    if isinstance(way, Lightning):
        _within_lightning(way, measure)
    else:
        training.step()
        measure()
    way.close()
    return found


def _saved(way: Way, saves: int) -> dict[str, Any]:
    way.folder.mkdir(parents=True)
    tensors = way.training.tensors
    own = sum(tensor.nbytes for tensor in tensors)
    gc.collect()
    before = _memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts from here
    began = time.perf_counter()
    way.prepare()
    ready_s = time.perf_counter() - began
    if way.is_async:
        time.sleep(own / 2**29)  # steps of training, in which memory is made ready
    waits, totals = [], []
    for number in range(1, saves + 1):
        torch._foreach_mul_([t.detach() for t in tensors if t.is_floating_point()], 0.999)
        # One at a time: the next one is written to memory and disk that this one gives back.
        _remove(way.path(number - 1))
        time.sleep(0.3)
        began = time.perf_counter()
        way.save(number)
        waits.append(time.perf_counter() - began)
        way.wait()
        if way.syncs == "nothing":
            _sync(way.path(number))
        totals.append(time.perf_counter() - began)
    peak = _memory_bytes("VmHWM")
    written = _size_bytes(way.path(saves))
    if not way.is_async:
        torch.save(_last(tensors), _expected(way))
    return {
        "own_bytes": own,
        "written_bytes": written,
        "ready_s": ready_s,
        "first_wait_s": waits[0],
        "waits_s": waits[1:],
        "totals_s": totals[1:],
        "extra_memory_bytes": peak - before,
        "lost_s": _lost_s(way, saves + 1, totals) if way.is_async else statistics.median(waits[1:]),
    }


def _lost_s(way: Way, number: int, totals_s: list[float]) -> float:
    """By how much a save delays a loop that trains on, its wait included."""

    def steps_s(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            way.training.step()
        return time.perf_counter() - began

    _remove(way.path(number - 1))
    alone_s = [steps_s(1) for _ in range(3)][1:]
    count = math.ceil(1.3 * max(totals_s[1:]) / min(alone_s))
    began = time.perf_counter()
    way.save(number)
    steps_s(count)
    way.wait()
    took = time.perf_counter() - began
    alone_s += [steps_s(1) for _ in range(2)]
    return took - count * statistics.median(alone_s)


def _loaded(way: Way) -> dict[str, Any]:
    # What starting costs is no part of loading: some ways have imported this already.
    importlib.import_module("torch.distributed.checkpoint")
    expected = torch.load(_expected(way), weights_only=True)
    took = []
    for _ in range(3):
        for tensor in way.training.tensors:
            tensor.detach().zero_()
        began = time.perf_counter()
        way.load()
        took.append(time.perf_counter() - began)
        for last, value in zip(_last(way.training.tensors), expected, strict=True):
            assert torch.equal(last, value), "loaded something else"
    return {"loads_s": took}


def _last(tensors: list[Tensor]) -> list[Tensor]:
    """The last element of each."""
    return [tensor.detach().flatten()[-1:].clone() for tensor in tensors]


def _expected(way: Way) -> Path:
    return way.folder.parent / "expected.pt"


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
        path.unlink(missing_ok=True)


# -- all of them -----------------------------------------------------------------------------------


def measure(*, size: str = "200M", rounds: int = 2, saves: int = 3) -> list[dict[str, Any]]:
    """One row for each way of saving: ``rounds`` processes, each with ``saves`` in a row.

    Raises:
        RuntimeError: there is too little room on the disk, or a way of saving failed.
    """
    seen = in_turns(
        WAYS,
        lambda name: _both(name, size, saves),
        rounds=rounds,
        said=lambda found: (
            f"{found['contender']}: the loop waits {_ms(found['waits_s'])} ms "
            f"(first save {_ms([found['first_wait_s']])})"
        ),
    )
    return [_row(name, seen) for name in WAYS]


def _both(name: str, size: str, saves: int) -> dict[str, Any]:
    """One way saves, and what it has saved is loaded."""
    with tempfile.TemporaryDirectory() as folder:
        _check_room(Path(folder), size)
        found = _run_apart("save", name, size, saves, Path(folder))
        if name in LOADED:
            found |= _run_apart("load", name, size, saves, Path(folder))
    return {"contender": name, **found}


def _row(name: str, seen: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians over all rounds; a ratio is to the median of the same round."""
    mine = seen[name]

    def over(other: str, key: str) -> dict[str, float]:
        pairs = zip(mine, seen[other], strict=True)
        ratios = [one / statistics.median(theirs[key]) for my, theirs in pairs for one in my[key]]
        return asdict(Spread.extremes(ratios))

    def median(key: str) -> float:
        return statistics.median(
            value
            for found in mine
            for value in (found[key] if isinstance(found[key], list) else [found[key]])
        )

    row = {
        "contender": name,
        "syncs": WAYS[name].syncs,
        "own_bytes": mine[0]["own_bytes"],
        "written_bytes": mine[0]["written_bytes"],
        "ready_s": median("ready_s"),
        "first_wait_s": median("first_wait_s"),
        "wait_s": median("waits_s"),
        "wait_over": {other: over(other, "waits_s") for other in WAYS if not WAYS[other].is_async},
        "lost_s": median("lost_s"),
        "total_s": median("totals_s"),
        "extra_memory_bytes": max(found["extra_memory_bytes"] for found in mine),
        "rounds": mine,
    }
    if name in LOADED:
        row |= {"load_s": median("loads_s"), "load_over": over(DCP, "loads_s")}
    return row


def cells(row: dict[str, Any]) -> tuple[Any, ...]:
    """A row of the table, as ``HEAD`` names it."""
    loading = ("", "")
    if "load_s" in row:
        loading = (f"{row['load_s']:.2f}", Spread(**row["load_over"]).ratio())
    return (
        row["contender"],
        row["syncs"],
        f"{1e3 * row['first_wait_s']:.0f}",
        f"{1e3 * row['wait_s']:.0f}",
        Spread(**row["wait_over"][SYNC]).percent(),
        f"{1e3 * row['lost_s']:.0f}",
        f"{row['total_s']:.2f}",
        f"{row['extra_memory_bytes'] / 2**20:.0f}",
        f"{row['written_bytes'] / row['own_bytes']:.4f}",
        *loading,
    )


def note(rows: list[dict[str, Any]]) -> str:
    """What the table is of, how mode=async stands to each peer, and what it does once."""
    row = next(r for r in rows if r["contender"] == ASYNC)
    others = [
        f"{Spread(**spread).percent()} of that of {name}"
        for name, spread in row["wait_over"].items()
        if name != SYNC
    ]
    return (
        f"The state is {row['own_bytes'] / 2**20:.0f} MiB; {len(row['rounds'])} rounds, each with "
        f"{len(row['rounds'][0]['waits_s'])} later saves and 3 loads; in brackets the extremes. "
        f"The wait of mode=async is {', '.join(others)}. Once, after the first step, it gets "
        f"ready: {1e3 * row['ready_s']:.0f} ms, most of it importing torch.distributed.checkpoint; "
        "the memory is made ready on a thread."
    )


def _ms(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.0f}"


def _run_apart(what: str, name: str, size: str, saves: int, folder: Path) -> dict[str, Any]:
    words = [what, name, size, str(saves), str(folder)]
    printed = in_new_process(
        name,
        ["-m", "benchmarks.checkpoint_save", *words],
        folder=ROOT,
        # As many threads as torch takes by itself, for every way alike.
        env={key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"},
    )
    row: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return row


def _check_room(folder: Path, size: str) -> None:
    width, blocks = MODELS[size]
    needed = 12 * 12 * width**2 * blocks  # 12 matrices a block, 12 bytes a number
    free = shutil.disk_usage(folder).free
    if free < 2 * needed:
        raise RuntimeError(
            f"{folder} has {free / 2**30:.1f} GiB free, and a checkpoint needs "
            f"{needed / 2**30:.1f}, better twice that: set TMPDIR to a folder on a larger disk"
        )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    verb, way, model, count, where = sys.argv[1:]
    with contextlib.redirect_stdout(sys.stderr):
        outcome = run(verb, way, model, int(count), Path(where))
    print(json.dumps(outcome))
