"""What is measured: small models, their data and the bare loop; and tables of what was found."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
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


def table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])
