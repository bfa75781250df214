"""A tiny model and task that hold all that can go wrong between engines, and batches for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

from torsh_trainer.strategies.base import MicroBatch, MicroBatchPlace
from torsh_trainer.tasks.base import Mean, Task

VOCABULARY = 11
WIDTH = 8
HEADS = 2
LENGTH = 5
PADDING = -100
"""The target of a token that does not count; torch's ``ignore_index``."""

LEARNING_RATES = {"sgd": 0.5, "adamw": 0.01, "two": 0.5}


@dataclass(frozen=True)
class TinyModelOptions:
    """What the tiny model has, beside an embedding, blocks of LayerNorm and Linear, and a head."""

    tied: bool = False  # the head's weight is the embedding's
    unused: bool = False  # a layer that no forward reaches
    frozen: bool = False  # an embedding and a norm that do not train
    batch_norm: bool = False  # buffers
    experts: bool = False  # three layers, of which a batch takes the one that its tokens say
    attention: bool = False  # blocks of attention and a perceptron, with fused projections
    dropout: float = 0.0
    seed: int = 0


class Block(nn.Module):
    """LayerNorm, Linear, GELU, dropout; counts how often it ran with gradients."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout
        self.calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, length, width) -> the same shape."""
        self.calls += torch.is_grad_enabled()
        hidden = F.gelu(self.linear(self.norm(hidden)))
        return F.dropout(hidden, self.dropout, self.training) if self.dropout else hidden


class AttentionBlock(Block):
    """Causal attention with a fused query, key and value, then a perceptron; counts as ``Block``.

    Keys grow with their place: else a softmax would not see their bias, whose gradient would be
    nothing but rounding, which Adam makes large.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__(dropout)
        del self.linear
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor, scales: Tensor | None = None) -> Tensor:
        """(batch, length, width) -> the same shape, to be added to what came in.

        ``scales`` (length,) are what keys are multiplied by; None leaves them.
        """
        self.calls += torch.is_grad_enabled()
        projected = self.qkv(self.norm(hidden)).unflatten(-1, (3, -1, WIDTH // HEADS))
        query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)
        if scales is not None:
            key = key * scales.unsqueeze(-1).to(key.dtype)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        added = self.out(attended.transpose(1, 2).flatten(2))
        added = added + self.down(F.gelu(self.up(self.mlp_norm(hidden + added))))
        return F.dropout(added, self.dropout, self.training) if self.dropout else added


class TinyModel(nn.Module):
    """Predicts a token for every token: (batch, length) of int64 -> (batch, length, vocabulary).

    ``positions`` (length,) are where tokens stand, None: from 0 on. A batch takes the expert
    ``expert``.
    """

    def __init__(self, options: TinyModelOptions) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        block = AttentionBlock if options.attention else Block
        self.blocks = nn.ModuleList(block(options.dropout) for _ in range(2))
        self.batch_norm = nn.BatchNorm1d(WIDTH) if options.batch_norm else None
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        if options.tied:
            self.head.weight = self.embedding.weight
        if options.unused:
            self.unused = nn.Linear(WIDTH, WIDTH)
        self.experts = (
            nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)) if options.experts else None
        )
        if options.frozen:
            self.embedding.requires_grad_(False)
            self.norm.requires_grad_(False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, expert: int = 0) -> Tensor:
        """Logits."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        scales = 0.5 + positions / LENGTH
        hidden = self.embedding(tokens)
        for block in self.blocks:
            attends = isinstance(block, AttentionBlock)
            hidden = hidden + (block(hidden, scales) if attends else block(hidden))
        if self.experts is not None:
            hidden = hidden + self.experts[expert % len(self.experts)](hidden)
        if self.batch_norm is not None:
            hidden = self.batch_norm(hidden.flatten(0, 1)).view_as(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def parallel_plan(self) -> dict[str, Any]:
        """Every style of a cut layer; the vocabulary does not divide by 2, so its columns are."""
        plan: dict[str, Any] = {"embedding": "colwise_gather", "head": "rowwise"}
        if isinstance(self.blocks[0], AttentionBlock):
            plan |= {
                "blocks.*.qkv": {"style": "colwise", "parts": 3, "heads": HEADS},
                "blocks.*.out": "rowwise",
                "blocks.*.up": "colwise",
                "blocks.*.down": "rowwise",
            }
        else:
            plan |= {"blocks.0.linear": "colwise_gather", "blocks.1.linear": "rowwise"}
        if hasattr(self, "unused"):
            plan["unused"] = "colwise_gather"
        if self.experts is not None:
            plan |= {"experts.0": "colwise_gather", "experts.1": "rowwise"}
        return plan

    def sequence_plan(self) -> dict[str, Any]:
        """Where it is another one while each process has some of the tokens."""
        return {
            "embedding": "replicate_split",
            "head": "replicate",
            "blocks.*.linear": "replicate_sum",
            "experts.*": "replicate_sum",
            "unused": "replicate_sum",
        }


class TinyTask(Task):
    """Cross-entropy over the tokens that count; the optimizer is sgd, adamw, or two of sgd.

    A batch is ``{"tokens", "targets": (batch, length), "factor": (batch,)}``; the loss is
    multiplied by the mean of ``factor``, which is 1 unless a test spoils it.
    """

    sample_weight = None
    unit = "tokens"

    def __init__(
        self,
        options: TinyModelOptions = TinyModelOptions(),
        optimizer: Literal["sgd", "adamw", "two"] = "sgd",
    ) -> None:
        self.options = options
        self.optimizer_name = optimizer

    def build_model(self) -> TinyModel:
        """The model, the same for one seed whatever was drawn before."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.options.seed)
            return TinyModel(self.options)

    def build_optimizers(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> Mapping[str, Optimizer]:
        named = list(named_parameters)
        lr = LEARNING_RATES[self.optimizer_name]
        if self.optimizer_name == "sgd":
            return {"main": SGD([p for _, p in named], lr=lr)}
        if self.optimizer_name == "two":
            head = [p for name, p in named if name.startswith("head")]
            body = [p for name, p in named if not name.startswith("head")]
            return {"body": SGD(body, lr=lr), "head": SGD(head, lr=lr / 2, momentum=0.9)}
        # Two groups, so that names in a state cannot be mistaken for positions.
        norms = [p for name, p in named if "norm" in name]
        others = [p for name, p in named if "norm" not in name]
        groups = [{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
        return {"main": AdamW(groups, lr=lr)}

    def forward(self, model: nn.Module, batch: Any) -> Any:
        tokens = batch["tokens"]
        return model(tokens, expert=int(tokens.sum())) if self.options.experts else model(tokens)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        logits, targets = outputs.flatten(0, 1), batch["targets"].flatten()
        mean = F.cross_entropy(logits, targets, ignore_index=PADDING)
        return mean * batch["factor"].mean()

    def weight(self, batch: Any) -> float:
        return float((batch["targets"] != PADDING).sum())

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Mean]:
        logits = self.forward(model, batch)
        counts = batch["targets"] != PADDING
        right = (logits.argmax(-1) == batch["targets"]) & counts
        weight = self.weight(batch)
        loss = self.loss(logits, batch)
        return {"loss": Mean(loss * weight, weight), "accuracy": Mean(right.sum(), weight)}


@dataclass(frozen=True)
class TinyData:
    """The batches of some steps, cut over ranks and micro-batches; the same wherever it is asked.

    ``ragged`` makes the last step a tail: the first micro-batch lacks a sample, the second has one,
    and all others are fillers of weight 0. ``tokens`` gives micro-batches different weights, and in
    the first step the last rank nothing but padding, over which a mean loss is NaN. ``spoilt``
    names a step in which one micro-batch of the last rank has an infinite loss.
    """

    steps: int = 3
    accumulate: int = 1
    samples: int = 3  # of a micro-batch
    ragged: bool = False
    tokens: bool = False
    spoilt: int | None = None
    seed: int = 0
    length: int = LENGTH  # of a sample

    def step(self, number: int, world_size: int) -> list[list[MicroBatch]]:
        """The micro-batches of each rank in step ``number``, from 0."""
        generator = torch.Generator().manual_seed(1000 * self.seed + number)
        return [
            [self._micro(generator, number, rank, k, world_size) for k in range(self.accumulate)]
            for rank in range(world_size)
        ]

    def _micro(
        self, generator: torch.Generator, step: int, rank: int, k: int, world_size: int
    ) -> MicroBatch:
        place = rank * self.accumulate + k
        samples = self.samples
        in_tail = self.ragged and step == self.steps - 1
        if in_tail:
            samples = samples - 1 if place == 0 else 1
        batch = _random_batch(generator, samples, self.length, padded=self.tokens)
        last = rank == world_size - 1
        if self.tokens and step == 0 and last and place > 0:
            batch["targets"].fill_(PADDING)
        if step == self.spoilt and last and k == self.accumulate - 1:
            batch["factor"].fill_(float("inf"))
        filler = in_tail and place > 1
        weight = 0.0 if filler else float((batch["targets"] != PADDING).sum())
        count = world_size * self.accumulate
        known = MicroBatchPlace(place, 2 if in_tail else count)
        return MicroBatch(batch, weight, step * count + place, known)

    def evaluation(self, world_size: int) -> list[list[tuple[Any, bool]]]:
        """Two batches for each rank; the last one of the last rank does not count."""
        generator = torch.Generator().manual_seed(1000 * self.seed + 999)
        return [
            [
                (
                    _random_batch(generator, self.samples, self.length, padded=self.tokens),
                    not (k == 1 and rank == world_size - 1),
                )
                for k in range(2)
            ]
            for rank in range(world_size)
        ]


def total_weight(ranks: list[list[MicroBatch]]) -> float:
    """The weight of a global batch."""
    return sum(micro.weight for micros in ranks for micro in micros)


def _random_batch(
    generator: torch.Generator, samples: int, length: int, *, padded: bool
) -> dict[str, Tensor]:
    tokens = torch.randint(VOCABULARY, (samples, length), generator=generator)
    targets = (tokens * 3 + 1) % VOCABULARY
    if padded:
        kept = torch.randint(1, length + 1, (samples, 1), generator=generator)
        targets = targets.masked_fill(torch.arange(length) >= kept, PADDING)
    return {"tokens": tokens, "targets": targets, "factor": torch.ones(samples)}
