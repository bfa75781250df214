"""Small real models: a perceptron, a convolutional network, a GPT."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torsh_trainer.errors import ConfigError
from torsh_trainer.tasks.base import parameter_count
from torsh_trainer.tasks.chunked_loss import sum_of_losses


class MLP(nn.Module):
    """A multilayer perceptron with ReLU: any input of ``in_features`` values a sample, flattened.

    (batch, ...) -> (batch, ``out_features``).
    """

    def __init__(
        self,
        *,
        in_features: int = 64,
        out_features: int = 10,
        hidden: Sequence[int] = (128, 128),
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        _positive(in_features=in_features, out_features=out_features, hidden=min(hidden, default=1))
        _check_dropout(dropout)
        self.in_features, self.out_features = in_features, out_features
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in zip((in_features, *hidden), hidden, strict=False):
            layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(dropout)]
        layers.append(nn.Linear((in_features, *hidden)[-1], out_features))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def parallel_plan(self) -> dict[str, Any]:
        """How its layers are cut over processes (``mesh.tp``): pairs by columns and by rows.

        Where something is dropped in between, every process needs all of it.
        """
        linear = [f"layers.{i}" for i, m in enumerate(self.layers) if isinstance(m, nn.Linear)]
        dropped = any(isinstance(m, nn.Dropout) and m.p > 0 for m in self.layers)
        plan = dict.fromkeys(linear[0:-1:2], "colwise_gather" if dropped else "colwise")
        return {**plan, **dict.fromkeys(linear[1::2], "rowwise")}


class SmallCNN(nn.Module):
    """A small convolutional classifier for square images.

    One stage for each entry of ``channels``: 3x3 convolution, ReLU, 2x2 max pooling; then a hidden
    layer of ``hidden`` units and the classes. There is no batch normalisation: its statistics
    depend on how a batch is cut over processes, and the result would too.

    (batch, ``in_channels``, ``image_size``, ``image_size``) -> (batch, ``num_classes``).

    Raises:
        ConfigError: the image is too small to be halved once a stage.
    """

    def __init__(
        self,
        *,
        in_channels: int = 1,
        image_size: int = 28,
        num_classes: int = 10,
        channels: Sequence[int] = (32, 64),
        hidden: int = 128,
        dropout: float = 0.25,
    ) -> None:
        super().__init__()
        _positive(in_channels=in_channels, num_classes=num_classes, hidden=hidden)
        _positive(channels=min(channels, default=0))
        _check_dropout(dropout)
        self.in_channels, self.image_size, self.num_classes = in_channels, image_size, num_classes
        side = image_size >> len(channels)
        if side < 1:
            raise ConfigError(
                f"an image of {image_size} x {image_size} cannot be halved {len(channels)} times",
                fix="give model.channels fewer entries",
            )
        stages = [
            nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
            for before, after in zip((in_channels, *channels), channels, strict=False)
        ]
        self.stages = nn.ModuleList(stages)
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(channels[-1] * side * side, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        for stage in self.stages:
            images = stage(images)
        return self.head(images)


class TokenEmbedding(nn.Embedding):
    """An embedding used at both ends: token numbers to vectors, and vectors to logits.

    All uses go through the module's call, so that an engine that shards it by itself gathers the
    weight for each. With ``targets`` vectors become the sum of their losses (see ``chunked_loss``).
    ``words`` are the rows that stand for one; the others, which ``pad`` adds, give no logit.
    """

    def __init__(self, words: int, width: int) -> None:
        super().__init__(words, width)
        self.words = words

    def pad(self, multiple: int) -> None:
        """Adds rows of 0 up to a ``multiple``; what has been drawn stays."""
        more = -self.num_embeddings % multiple
        if more:
            self.weight = nn.Parameter(F.pad(self.weight.detach(), (0, 0, 0, more)))
            self.num_embeddings += more

    def forward(self, input: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is not None:
            return sum_of_losses(input, self.weight, targets, words=self.words)
        if input.is_floating_point():
            logits = F.linear(input, self.weight)
            return logits if self.words == logits.shape[-1] else logits[..., : self.words]
        return super().forward(input)


class Block(nn.Module):
    """One pre-norm transformer layer: causal self-attention, then a perceptron 4 times as wide.

    (batch, tokens, ``width``) -> the same.
    """

    def __init__(self, *, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)
        self.activation = nn.GELU(approximate="tanh")
        self.residual_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.residual_dropout(self._attend(self.attention_norm(x)))
        hidden = self.activation(self.mlp_in(self.mlp_norm(x)))
        return x + self.residual_dropout(self.mlp_out(hidden))

    def _attend(self, x: Tensor) -> Tensor:
        projected, head = self.qkv(x), x.shape[-1] // self.heads
        batch, tokens, own = projected.shape  # x may have some of the tokens
        own //= 3  # all heads, or those of this process
        shape = (batch, tokens, 3, own // head, head)
        query, key, value = projected.view(shape).permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        return self.attention_out(attended.transpose(1, 2).reshape(batch, tokens, own))


class GPT(nn.Module):
    """A decoder-only transformer as GPT-2 (Radford et al. 2019): pre-norm, learned positions, tied
    embeddings, GELU, normal(0.02) initialisation with the projections into the residual stream
    divided by sqrt(2 ``layers``).

    ``vocab_multiple`` pads the embedding with rows of 0 up to such a multiple (64 makes 50,304 of
    50,257), for matrix products that are fast on a GPU. They stand for no word and stay 0: logits,
    losses and all other weights are those without them.

    GPT-2 124M is layers=12, heads=12, width=768, vocab_size=50257, context=1024. Sharding and
    activation checkpointing work by ``Block``.

    Token numbers (batch, tokens <= ``context``), int -> logits (batch, tokens, ``vocab_size``);
    with ``targets`` (batch, tokens) the sum of their losses, 0-dim, without those logits.
    ``positions`` (tokens,) are where the tokens stand in their sequence; None counts from 0.

    Raises:
        ConfigError: ``width`` does not divide into ``heads``.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 256,
        context: int = 128,
        layers: int = 5,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.0,
        vocab_multiple: int = 1,
    ) -> None:
        super().__init__()
        _positive(vocab_multiple=vocab_multiple)
        _positive(vocab_size=vocab_size, context=context, layers=layers, heads=heads, width=width)
        _check_dropout(dropout)
        if width % heads:
            raise ConfigError(
                f"model.width={width} does not divide into model.heads={heads}",
                fix=f"set model.width to a multiple of {heads}",
            )
        self.vocab_size, self.context, self.width = vocab_size, context, width
        self.heads = heads
        self.tokens = TokenEmbedding(vocab_size, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(width=width, heads=heads, dropout=dropout) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self._initialise()
        self.tokens.pad(vocab_multiple)

    sums_losses: ClassVar[bool] = True
    """``forward`` takes ``targets``, as ``LanguageModel`` asks."""

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        return self.tokens(self.norm(x), targets)

    def parallel_plan(self) -> dict[str, Any]:
        """How its layers are cut over processes (``mesh.tp``): as in Megatron-LM, with whole heads,
        and the words of the embedding."""
        return {
            "tokens": "rowwise",
            "blocks.*.qkv": {"style": "colwise", "parts": 3, "heads": self.heads},
            "blocks.*.attention_out": "rowwise",
            "blocks.*.mlp_in": "colwise",
            "blocks.*.mlp_out": "rowwise",
        }

    def sequence_plan(self) -> dict[str, Any]:
        """Where ``parallel_plan`` is another one while each process has some of the tokens
        (``strategy.sequence_parallel``): positions are looked up for all."""
        return {"positions": "replicate_split"}

    def pipeline_plan(self) -> dict[str, Any]:
        """What stages (``mesh.pp``) are to know: the first and the last one use the embedding."""
        return {"both_ends": ["tokens"]}

    @property
    def padded_rows(self) -> dict[str, int]:
        """How many rows of a padded parameter stand for a word, by its name."""
        tokens = self.tokens
        return {} if tokens.words == tokens.num_embeddings else {"tokens.weight": tokens.words}

    def flops_per_token(self, tokens: int) -> float:
        """Floating-point operations of forward and backward for one token of a sequence of
        ``tokens``: 6 N + 12 L d T (Chowdhery et al. 2022, PaLM, appendix B).

        N are the parameters that multiply: all but the positions, which are only added; the tied
        embedding counts once, as the output layer. The whole attention matrix is counted although
        half of it is masked, and recomputation under activation checkpointing is not, as in the
        paper, so that figures compare.
        """
        added = self.positions.weight.numel()
        multiplied = parameter_count(self)[0] - added
        return 6.0 * multiplied + 12.0 * len(self.blocks) * self.width * tokens

    def _initialise(self) -> None:
        into_residual = 0.02 / math.sqrt(2 * len(self.blocks))
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                narrow = name.endswith(("attention_out", "mlp_out"))
                nn.init.normal_(module.weight, std=into_residual if narrow else 0.02)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"model.{name}={size} is not a positive number", fix="give 1 or more")


def _check_dropout(dropout: float) -> None:
    if not 0 <= dropout < 1:
        raise ConfigError(
            f"model.dropout={dropout} is not a part of the units", fix="give 0 or more, below 1"
        )
