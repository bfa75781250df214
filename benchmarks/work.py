"""What is measured: small models, the data, and bare PyTorch in blocks between a contender's."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SAMPLES = 4096
BATCH = 32
FEATURES = 32
CLASSES = 10

MODELS: dict[str, tuple[int, ...]] = {
    "tiny MLP (32-64-10)": (FEATURES, 64, CLASSES),
    "small MLP (32-512-512-10)": (FEATURES, 512, 512, CLASSES),
}


def build_model(widths: tuple[int, ...]) -> nn.Module:
    """A seeded MLP."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Samples:
    """Random samples, fetched by the batch; the same dataset object serves every contender."""

    def __init__(self, device: str = "cpu", *, features: int = FEATURES) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(SAMPLES, features, generator=generator).to(device)
        self.y = torch.randint(0, CLASSES, (SAMPLES,), generator=generator).to(device)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]

    def __getitems__(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        return self.x[ids], self.y[ids]


def as_is(batch: Any) -> Any:
    """A collate for data that is already a batch."""
    return batch


class BareLoop:
    """The loop that everything is compared to, over an endless iterator of batches."""

    def __init__(
        self,
        module: nn.Module,
        batches: Iterator[tuple[Tensor, Tensor]],
        device: str = "cpu",
    ) -> None:
        self.module = module
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        self.batches = batches
        self.device = device

    def run(self, steps: int) -> None:
        """So many optimizer steps."""
        module, optimizer, batches, device = self.module, self.optimizer, self.batches, self.device
        for _ in range(steps):
            x, y = next(batches)
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(module(x), y)
            loss.backward()
            optimizer.step()


@dataclass
class Blocks:
    """Seconds a step of a contender and of the bare loop, in blocks that alternate.

    A contender's block is set against the mean of the bare blocks before and after it, so that a
    machine that slowly speeds up or slows down favours neither.
    """

    contender: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)

    @property
    def extra_us(self) -> Median:
        """Microseconds a step over the bare blocks beside it."""
        return Median.of([1e6 * (mine - bare) for mine, bare in self._pairs()])

    @property
    def ratio(self) -> Median:
        """Ratio to the bare blocks beside it."""
        return Median.of([mine / bare for mine, bare in self._pairs()])

    @property
    def bare_us(self) -> float:
        return 1e6 * statistics.median(self.bare)

    def _pairs(self) -> Iterator[tuple[float, float]]:
        # The list of bare blocks begins with the one before the contender's first.
        around = itertools.pairwise(self.bare)
        for mine, (before, after) in zip(self.contender, around, strict=True):
            yield mine, (before + after) / 2


@dataclass(frozen=True)
class Median:
    """A median, and the interval that holds it with 95% confidence."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Median:
        """From the order statistics at n/2 -/+ 0.98 sqrt(n): the binomial's normal limit."""
        ordered = sorted(values)
        count = len(ordered)
        reach = 0.98 * math.sqrt(count)
        low = max(0, math.floor(count / 2 - reach))
        high = min(count - 1, math.ceil(count / 2 + reach))
        return cls(statistics.median(ordered), ordered[low], ordered[high])


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


def table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])
