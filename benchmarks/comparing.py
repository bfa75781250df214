"""How things are compared: contenders take turns, and what is told is a median with its spread."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.work import FEATURES, Samples
from torsh_trainer.launchers.base import LaunchContext
from torsh_trainer.launchers.local import Local

Contender = TypeVar("Contender")
Found = TypeVar("Found")


def in_turns(
    contenders: Iterable[Contender],
    measured: Callable[[Contender], Found],
    *,
    rounds: int = 1,
    said: Callable[[Found], str] | None = None,
) -> dict[Contender, list[Found]]:
    """What ``measured`` finds of each, round by round, printed as ``said`` has it.

    Every second round goes in the opposite order: who comes first or last wins nothing by it.
    """
    order = list(contenders)
    seen: dict[Contender, list[Found]] = {one: [] for one in order}
    for number in range(rounds):
        for one in order if number % 2 == 0 else reversed(order):
            found = measured(one)
            seen[one].append(found)
            if said is not None:
                print(f"  {said(found)}", flush=True)
    return seen


def one_by_one(
    contenders: Iterable[Contender],
    measured: Callable[[Contender], Found],
    said: Callable[[Found], str],
) -> list[Found]:
    """The same for what is compared to something beside it, as ``Between`` does: once each."""
    return [found for (found,) in in_turns(contenders, measured, said=said).values()]


@dataclass(frozen=True)
class Spread:
    """A median, and an interval around it."""

    value: float
    low: float
    high: float

    @classmethod
    def extremes(cls, values: Iterable[float]) -> Spread:
        """From the least to the greatest of at least one value."""
        ordered = sorted(values)
        return cls(statistics.median(ordered), ordered[0], ordered[-1])

    @classmethod
    def confident(cls, values: Iterable[float]) -> Spread:
        """What holds the median with 95% confidence.

        From the order statistics at n/2 -/+ 0.98 sqrt(n): the binomial's normal limit.
        """
        ordered = sorted(values)
        count = len(ordered)
        reach = 0.98 * math.sqrt(count)
        low = max(0, math.floor(count / 2 - reach))
        high = min(count - 1, math.ceil(count / 2 + reach))
        return cls(statistics.median(ordered), ordered[low], ordered[high])

    def cells(self, form: str) -> tuple[str, str]:
        """The median, and the interval: two cells of a table."""
        return f"{self.value:{form}}", f"{self.low:{form}} to {self.high:{form}}"

    def percent(self) -> str:
        """Both in one cell."""
        return f"{self.value:.1%} ({100 * self.low:.1f} to {100 * self.high:.1f})"

    def ratio(self, digits: int = 2) -> str:
        """Both in one cell."""
        value, interval = self.cells(f".{digits}f")
        return f"{value} ({interval})"


# -- blocks that alternate within one process ------------------------------------------------------


@dataclass
class Blocks:
    """Seconds a step of a contender and of the bare loop, in blocks that alternate.

    A contender's block is set against the mean of the bare blocks before and after it, so that a
    machine that slowly speeds up or slows down favours neither.
    """

    contender: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)

    @property
    def extra_us(self) -> Spread:
        """Microseconds a step over the bare blocks beside it."""
        return Spread.confident(1e6 * (mine - bare) for mine, bare in self._pairs())

    @property
    def ratio(self) -> Spread:
        """Ratio to the bare blocks beside it."""
        return Spread.confident(mine / bare for mine, bare in self._pairs())

    @property
    def bare_us(self) -> float:
        return 1e6 * statistics.median(self.bare)

    def _pairs(self) -> Iterator[tuple[float, float]]:
        # The list of bare blocks begins with the one before the contender's first.
        around = itertools.pairwise(self.bare)
        for mine, (before, after) in zip(self.contender, around, strict=True):
            yield mine, (before + after) / 2


class Between(Samples):
    """The contender's dataset: between its blocks of steps it lets the bare loop run a block.

    Called once a step by the contender's loader, it is where both can be timed in turn in one
    process. The first blocks of both are warm-up.
    """

    def __init__(
        self,
        bare: Callable[[int], None],
        *,
        block: int,
        warm_up: int = 3,
        device: str = "cpu",
        features: int = FEATURES,
    ) -> None:
        super().__init__(device, features=features)
        self.blocks = Blocks()
        self._bare = bare
        self._block = block
        self._skip = warm_up
        self._calls = 0
        self._began = 0.0
        self._wait = _waiter(device)

    def __getitems__(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        if self._calls % self._block == 0:
            self._turn()
        self._calls += 1
        return super().__getitems__(ids)

    def steps(self, blocks: int) -> int:
        """How many steps the contender takes for so many blocks that count, and the warm-up."""
        return self._block * (blocks + self._skip + 1)

    def _turn(self) -> None:
        self._wait()
        ended = time.perf_counter()
        mine = (ended - self._began) / self._block
        self._bare(self._block)
        self._wait()
        bare = (time.perf_counter() - ended) / self._block
        if self._skip:
            self._skip -= 1
        else:
            if self.blocks.bare:
                self.blocks.contender.append(mine)
            self.blocks.bare.append(bare)
        self._began = time.perf_counter()


def _waiter(device: str) -> Callable[[], None]:
    return torch.cuda.synchronize if device.startswith("cuda") else lambda: None


# -- processes of their own ------------------------------------------------------------------------


def in_new_process(name: str, words: Sequence[str], *, folder: Path, env: Mapping[str, str]) -> str:
    """What Python, called with ``words`` in ``folder``, prints.

    Raises:
        RuntimeError: it failed.
    """
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def on_ranks(processes: int, entry: Callable[..., Found], *args: Any) -> Found:
    """Rank 0's answer to ``entry(world, *args, folder)``, one thread a process.

    The folder is of this call alone, and goes with it.
    """
    launcher = Local(num_processes=processes, threads_per_process=1)
    with tempfile.TemporaryDirectory() as folder:
        context = LaunchContext(env=dict(os.environ))
        found: Found = launcher.launch(entry, *args, Path(folder), context=context)
    return found
