"""Models and tasks of a combination, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from torsh_trainer.tasks.base import DataSource, Task
from torsh_trainer.testing.fuzzing.drawing import OPTIMIZERS, Combination

VOCABULARY, LENGTH, CLASSES = 7, 3, 5
PADDING = -100


class Block(nn.Module):
    """``forward`` keeps the shape (..., width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """A plain layer."""
        return torch.tanh(self.linear(x))


class ResidualBlock(Block):
    """Normalised, beside what it adds to."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


class Shared(Block):
    """One layer, twice."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(torch.tanh(self.linear(x))))


class Tied(Block):
    """Two layers of one weight."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.other = nn.Linear(width, width)
        self.other.weight = self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.tanh(self.linear(x)))


class Scalar(Block):
    """A parameter without dimensions."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale


class Complex(nn.Module):
    """A complex parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.randn(width, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.factor).abs() + (x * self.factor).real


class Double(nn.Module):
    """Of another dtype than the rest, where that is fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x.double())).to(x.dtype)


class Empty(Block):
    """A parameter without elements."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.nothing = nn.Parameter(torch.empty(0, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + self.nothing.sum()


class Unused(Block):
    """A layer that no forward reaches."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.unused = nn.Linear(width, 2)


class Frozen(Block):
    """A layer that does not train."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.frozen(x)))


class BatchNorm(Block):
    """Buffers that forwards change."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.linear = nn.Linear(width, width, bias=False)  # which has a gradient of rounding
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(torch.tanh(x)).flatten(0, -2))).view(x.shape)


class Transposed(nn.Module):
    """A parameter that is not contiguous."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(width, width) / width).t())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


class Copies(Block):
    """Its state is copies."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_state_dict_post_hook(_clone)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) + self.bias)


def _clone(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in list(state):
        if name.startswith(prefix) and isinstance(state[name], Tensor):
            state[name] = state[name].clone()


class WeightNorm(Block):
    """A weight that is computed from parameters."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.linear = parametrizations.weight_norm(self.linear)


class Recurrent(nn.Module):
    """Two layers of an LSTM."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        whole = x if x.dim() == 3 else x.unsqueeze(1)
        return self.lstm(whole)[0].view(x.shape)


class Attention(nn.Module):
    """Attention over a sample's tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        whole = x if x.dim() == 3 else x.unsqueeze(1)
        return x + self.attention(whole, whole, whole, need_weights=False)[0].view(x.shape)


class Convolution(nn.Module):
    """Odd shapes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.convolution(x.reshape(-1, 1, x.shape[-1]))).view(x.shape)


class Experts(nn.Module):
    """The batch chooses which one of two runs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.experts[int(x.detach().sum() > 0)](x))


class Constants(Block):
    """Buffers that no forward changes, one of them in no state."""

    mask: Tensor
    scale: Tensor

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("mask", torch.ones(width), persistent=False)
        self.register_buffer("scale", torch.full((width,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.mask * self.scale


class Reads(Block):
    """Reads what its forwards change: the number of processes shows, and is told."""

    seen: Tensor

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("seen", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.lerp_(x.detach().flatten(0, -2).mean(0).to(self.seen.dtype), 0.5)
        return torch.tanh(self.linear(x - self.seen))


class Hook(Block):
    """A hook on a parameter."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.linear.weight.register_hook(lambda gradient: gradient * 0.5)


class Recomputed(Block):
    """Activation checkpointing by the user."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class PReLU(Block):
    """A parameter of one element."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.slope = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.slope(self.linear(x))


class ExtraState(Block):
    """State of its own that is no buffer, and that a forward in evaluation needs."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.shift = 0.25

    def get_extra_state(self) -> Any:
        return {"shift": self.shift}

    def set_extra_state(self, state: Any) -> None:
        self.shift = float(state["shift"])

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) + self.shift)


class Clamped(Block):
    """A hook on a parameter that is not linear: it sees how gradients are scaled."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.linear.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


class Watched(Block):
    """A hook on an activation that is not linear."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return hidden


class Slopes(Block):
    """A gradient is part of what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        trains = torch.is_grad_enabled()
        with torch.enable_grad():
            given = x if x.requires_grad else x.detach().requires_grad_()
            hidden = super().forward(given)
            (slope,) = torch.autograd.grad(hidden.sum(), given, create_graph=True)
        outputs = hidden + slope
        return outputs if trains else outputs.detach()


BLOCKS: Mapping[str, Callable[[int], nn.Module]] = {
    "linear": Block,
    "residual": ResidualBlock,
    "shared": Shared,
    "tied": Tied,
    "scalar": Scalar,
    "complex": Complex,
    "double": Double,
    "empty": Empty,
    "unused": Unused,
    "frozen": Frozen,
    "batch_norm": BatchNorm,
    "transposed": Transposed,
    "copies": Copies,
    "weight_norm": WeightNorm,
    "lstm": Recurrent,
    "attention": Attention,
    "convolution": Convolution,
    "experts": Experts,
    "constants": Constants,
    "reads": Reads,
    "hook": Hook,
    "recomputed": Recomputed,
    "prelu": PReLU,
    "twice": ResidualBlock,
    "extra_state": ExtraState,
    "clamped": Clamped,
    "watched": Watched,
    "slopes": Slopes,
}


class GeneratedModel(nn.Module):
    """A stem, the blocks of a combination, and a head."""

    def __init__(self, drawn: Combination) -> None:
        super().__init__()
        width, tokens = drawn.width, drawn.inputs == "tokens"
        self.stem: nn.Module
        if tokens:
            self.stem = nn.Embedding(VOCABULARY, width, sparse=drawn.sparse)
        else:
            self.stem = nn.Linear(4, width)
        self.blocks = nn.ModuleList(BLOCKS[name](width) for name in drawn.pieces)
        outputs = {"mse": 1, "classes": CLASSES, "tokens": VOCABULARY}[drawn.loss]
        self.head = nn.Linear(width, outputs)
        if drawn.tied_head and drawn.loss == "tokens" and not drawn.sparse:
            self.head.weight = self.stem.weight
        self.pools = tokens and drawn.loss != "tokens"
        self.twice = "twice" in drawn.pieces

    def forward(self, x: Tensor) -> Tensor:
        """Samples -> outputs, one for each, or for each of its tokens."""
        hidden = self.stem(x)
        for block in self.blocks:
            hidden = block(hidden)
        outputs: Tensor = self.head(hidden.mean(1) if self.pools else hidden)
        return outputs


class DrawingSource(DataSource):
    """Samples by a generator of their own."""

    def __init__(self, drawn: Combination) -> None:
        generator = torch.Generator().manual_seed(drawn.number)
        self.drawn = drawn
        self.train = self._split(generator, drawn.samples)
        self.eval = self._split(generator, 5)
        self.weights = torch.rand(drawn.samples, generator=generator) + 0.1

    def _split(self, generator: torch.Generator, samples: int) -> TensorDataset:
        drawn, dtype = self.drawn, torch.float64 if self.drawn.double else torch.float32
        if drawn.inputs == "tokens":
            x = torch.randint(VOCABULARY, (samples, LENGTH), generator=generator)
        else:
            x = torch.randn(samples, 4, generator=generator, dtype=dtype)
        if drawn.loss == "classes":
            y = torch.randint(CLASSES, (samples,), generator=generator)
        elif drawn.loss == "tokens":
            y = (x * 3 + 1) % VOCABULARY
            kept = torch.randint(1, LENGTH + 1, (samples, 1), generator=generator)
            y = y.masked_fill(torch.arange(LENGTH) >= kept, PADDING)
        else:
            y = torch.randn(samples, 1, generator=generator, dtype=dtype)
        return TensorDataset(x, y)

    def sample_weights(self) -> Tensor | None:
        return self.weights if self.drawn.weighted_sampling else None


class DrawnTask(Task):
    """The task of a combination; plain enough that the reference calls its methods too."""

    def __init__(self, drawn: Combination) -> None:
        self.drawn = drawn
        self.data = DrawingSource(drawn)
        self.sample_weight = None if drawn.loss == "tokens" else 1.0

    def build_model(self) -> nn.Module:
        torch.manual_seed(self.drawn.number)
        model = GeneratedModel(self.drawn)
        return model.double() if self.drawn.double and "complex" not in self.drawn.pieces else model

    def build_optimizers(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> Mapping[str, Optimizer]:
        named = list(named_parameters)
        kind = getattr(torch.optim, self.drawn.optimizer.split()[0])
        settings = OPTIMIZERS[self.drawn.optimizer]
        heads = [p for name, p in named if name.startswith("head")]
        body = [p for name, p in named if not name.startswith("head")]
        if self.drawn.two_optimizers and heads and body:
            return {"body": kind(body, **settings), "head": torch.optim.SGD(heads, lr=0.02)}
        if self.drawn.groups and heads and body:
            groups = [{"params": heads, "lr": 0.02}, {"params": body}]
            return {"main": kind(groups, **settings)}
        return {"main": kind([p for _, p in named], **settings)}

    def forward(self, model: nn.Module, batch: Any) -> Any:
        x = batch[0].to(self.dtype) if batch[0].is_floating_point() else batch[0]
        outputs = model(x)
        return outputs + model(x.flip(-1)) if "twice" in self.drawn.pieces else outputs

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        wide = self.drawn.double and "complex" not in self.drawn.pieces
        return torch.float64 if wide else torch.float32

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        if self.drawn.loss == "mse":
            return F.mse_loss(outputs, batch[1].to(outputs.dtype))
        return F.cross_entropy(outputs.flatten(0, -2), batch[1].flatten(), ignore_index=PADDING)

    def weight(self, batch: Any) -> float:
        if self.drawn.loss != "tokens":
            return float(len(batch[1]))
        return float((batch[1] != PADDING).sum())
