"""What is measured: small models, the data, and bare PyTorch in blocks between a contender's."""

from __future__ import annotations

import itertools
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

    def __init__(self, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(SAMPLES, FEATURES, generator=generator).to(device)
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
    """Seconds a step of a contender and of the bare loop, in blocks that alternate."""

    contender: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)

    @property
    def extra_us(self) -> float:
        """Median microseconds a step over the bare loop's neighbouring block."""
        pairs = zip(self.contender, self.bare, strict=True)
        return statistics.median(1e6 * (mine - bare) for mine, bare in pairs)

    @property
    def ratio(self) -> float:
        """Median ratio to the bare loop's neighbouring block."""
        return statistics.median(a / b for a, b in zip(self.contender, self.bare, strict=True))

    @property
    def spread(self) -> tuple[float, float]:
        """The quartiles of that ratio."""
        ratios = sorted(a / b for a, b in zip(self.contender, self.bare, strict=True))
        return ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]

    @property
    def bare_us(self) -> float:
        return 1e6 * statistics.median(self.bare)


class Between(Samples):
    """The contender's dataset: between its blocks of steps it lets the bare loop run a block.

    Called once a step by the contender's loader, it is where both can be timed in turn in one
    process. The first blocks of both are warm-up.
    """

    def __init__(
        self, bare: Callable[[int], None], *, block: int, warm_up: int = 3, device: str = "cpu"
    ) -> None:
        super().__init__(device)
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
        if self._calls:
            if self._skip:
                self._skip -= 1
            else:
                self.blocks.contender.append(mine)
                self.blocks.bare.append(bare)
        self._began = time.perf_counter()


def _waiter(device: str) -> Callable[[], None]:
    return torch.cuda.synchronize if device.startswith("cuda") else lambda: None
