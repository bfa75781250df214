"""What a translation is tried on where no recipe is named: a tiny model that holds what can differ.

Embeddings tied to the head and not, LayerNorm, BatchNorm with its buffers, and a parameter that no
forward reaches; predicting tokens that are drawn from a fixed seed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torsh_trainer.optim.optimizers import OptimizerSpec
from torsh_trainer.tasks.base import DataSource, Task

VOCABULARY, WIDTH, LENGTH, SAMPLES = 17, 8, 6, 512


class Block(nn.Module):
    """LayerNorm, Linear, GELU, and what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, length, width) -> the same shape."""
        return hidden + F.gelu(self.linear(self.norm(hidden)))


class SubjectModel(nn.Module):
    """(batch, length) of int64 -> logits (batch * length, vocabulary)."""

    def __init__(self, *, batch_norm: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.batch_norm = nn.BatchNorm1d(WIDTH) if batch_norm else None
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.tokens.weight
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        hidden = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            hidden = block(hidden)
        hidden = hidden.flatten(0, 1)
        if self.batch_norm is not None:
            hidden = self.batch_norm(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class _Tokens(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (samples, LENGTH)
        self.inputs = torch.randint(VOCABULARY, shape, generator=generator)
        self.targets = torch.randint(VOCABULARY, shape, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class SubjectData(DataSource):
    """Samples of random tokens, the same everywhere."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.train = _Tokens(samples)


class Subject(Task):
    """Cross-entropy of every token. ``samples`` make an epoch; ``batch_norm`` False leaves that
    layer out: DeepSpeed keeps buffers in fp32 beside parameters in bf16, which torch's BatchNorm
    cannot take on a CPU.
    """

    def __init__(
        self,
        optimizer: OptimizerSpec = OptimizerSpec(),
        *,
        batch_norm: bool = True,
        samples: int = SAMPLES,
    ) -> None:
        self.optimizer = optimizer
        self.batch_norm = batch_norm
        self.data = SubjectData(samples)

    def build_model(self) -> nn.Module:
        return SubjectModel(batch_norm=self.batch_norm)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return F.cross_entropy(outputs.float(), batch[1].flatten())
