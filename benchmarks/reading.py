"""(i) What it costs to read samples: the first batch of many, and batches of small ones."""

from __future__ import annotations

import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks.work import BATCH, CLASSES, FEATURES, table
from torsh_trainer.data.feed import in_order_of
from torsh_trainer.data.loading import Loading
from torsh_trainer.data.sampler import BatchPartition, GlobalSampler

TITLE = "reading samples"
MANY = 100_000_000
SMALL = 20_000
BLOCK = 25


class Rows(Dataset[Any]):
    """Small samples of one's own, asked for one at a time, to which ``draw`` adds something."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self.x = torch.randn(SMALL, FEATURES)
        self.y = torch.randint(CLASSES, (SMALL,))
        self.draw = draw

    def __len__(self) -> int:
        return SMALL

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + self.draw(), self.y[index]


DRAWS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: 1.0,
    "torch": lambda: torch.randn(FEATURES),
    "NumPy": lambda: torch.from_numpy(np.random.rand(FEATURES)),  # noqa: NPY002
    "random": random.random,
}


SEEDS: dict[str, Callable[[int], Any]] = {
    "nothing": lambda key: None,
    "torch": torch.default_generator.manual_seed,
    "NumPy": lambda key: np.random.seed(key & 0xFFFFFFFF),  # noqa: NPY002
    "random": random.seed,
}


class SeededRows(Rows):
    """Those of ``Rows``, which seed the generator they draw from: what no loader can do without."""

    def __init__(self, draw: Callable[[], Any], seed: Callable[[int], Any]) -> None:
        super().__init__(draw)
        self.seed = seed

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.seed(index * 0x9E3779B1)
        return self.x[index] + self.draw(), self.y[index]


class Numbers:
    """As many samples as there are numbers, in no memory."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        return index


def measure(*, quick: bool, device: str) -> dict[str, Any]:
    """Ratios of a batch by what samples draw; and for many samples seconds and MiB by loader."""
    size = MANY // 100 if quick else MANY
    batches = {name: _ratio(name, 8 if quick else 80) for name in DRAWS}
    return {"size": size, "first": {name: _apart(name, size) for name in FIRST}, "batch": batches}


def _ratio(name: str, blocks: int) -> dict[str, float]:
    """The median over blocks of a batch's time over DataLoader's, taken in turns."""
    data = Rows(DRAWS[name])
    theirs, floor = _epochs(data), _epochs(SeededRows(DRAWS[name], SEEDS[name]))
    ours = in_order_of(data, Loading(batch_size=BATCH), seed=0, collate=default_collate)
    turns = [(_block(theirs), _block(floor), _block(ours)) for _ in range(blocks + 1)][1:]
    bare, _, _ = shortest = [min(times) for times in zip(*turns, strict=True)]
    return {
        "us": statistics.median(their for their, _, _ in turns),
        "ratio": statistics.median(our / their for their, _, our in turns),
        "least": shortest[2] / bare,
        "floor": statistics.median(seeded / their for their, seeded, _ in turns),
        "floor_least": shortest[1] / bare,
    }


def _epochs(data: Dataset[Any]) -> Iterator[Any]:
    loaders = (DataLoader(data, batch_size=BATCH, shuffle=True) for _ in itertools.count())
    return itertools.chain.from_iterable(loaders)


def _block(batches: Iterator[Any]) -> float:
    begun = time.process_time()
    for _ in range(BLOCK):
        next(batches)
    return (time.process_time() - begun) / BLOCK * 1e6


# -- the first batch of many, in a process of its own ---------------------------------------------


def _read_shuffled(size: int) -> Any:
    return iter(DataLoader(Numbers(size), batch_size=BATCH, shuffle=True))


def _in_order(size: int) -> Any:
    return iter(DataLoader(Numbers(size), batch_size=BATCH))


def _ours(size: int, consumed: int = 0, **knobs: Any) -> Any:
    return GlobalSampler(size, BatchPartition(BATCH, BATCH, 1, 0), 0, **knobs).plans(consumed)


FIRST: dict[str, Callable[[int], Any]] = {
    "DataLoader, shuffle=True (RandomSampler)": _read_shuffled,
    "ToRSh Trainer": _ours,
    "ToRSh Trainer, from 90% of an epoch": lambda size: _ours(size, size // 10 * 9),
    "ToRSh Trainer, the next epoch": lambda size: _ours(size, size),
    "ToRSh Trainer, as a list": lambda size: _ours(size, listed=True),
    "DataLoader, shuffle=False": _in_order,
    "ToRSh Trainer, data.shuffle=false": lambda size: _ours(size, shuffle=False),
}


def _apart(name: str, size: int) -> dict[str, float]:
    words = [sys.executable, "-m", "benchmarks.reading", name, str(size)]
    run = subprocess.run(words, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(run.stdout)
    return found


def _first(name: str, size: int) -> dict[str, float]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from here on
    before, begun = _peak_mib(), time.perf_counter()
    next(FIRST[name](size))
    return {"s": time.perf_counter() - begun, "mib": _peak_mib() - before}


def _peak_mib() -> float:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def text(found: dict[str, Any]) -> str:
    """Two tables, in Markdown."""
    first = [(name, f"{one['s']:.4f}", f"{one['mib']:.0f}") for name, one in found["first"].items()]
    batch = [
        (
            name,
            *(f"{one[key]:.2f}" for key in ("ratio", "least", "floor", "floor_least")),
            f"{one['us']:.0f}",
        )
        for name, one in found["batch"].items()
    ]
    many = (f"the first batch of {found['size']:,} samples", "s", "MiB")
    small = (
        "a sample draws from",
        "of DataLoader's time",
        "of its shortest",
        "DataLoader, samples that seed themselves",
        "of its shortest",
        "DataLoader (us)",
    )
    return f"### (i) Reading samples\n\n{table(many, first)}\n\n{table(small, batch)}"


if __name__ == "__main__":
    print(json.dumps(_first(sys.argv[1], int(sys.argv[2]))))
