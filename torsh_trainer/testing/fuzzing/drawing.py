"""What is drawn: a combination is a function of its number alone."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Input = Literal["vectors", "tokens"]
Loss = Literal["mse", "classes", "tokens"]

PIECES = (
    "linear",
    "residual",
    "shared",
    "tied",
    "scalar",
    "complex",
    "double",
    "empty",
    "unused",
    "frozen",
    "batch_norm",
    "transposed",
    "copies",
    "weight_norm",
    "lstm",
    "attention",
    "convolution",
    "experts",
    "constants",
    "reads",
    "hook",
    "recomputed",
    "prelu",
    "twice",
    "extra_state",
    "clamped",
    "watched",
    "slopes",
)
"""Blocks of a model, by what is odd about them: see ``models``."""

RARE = (
    *("complex", "hook", "experts", "double", "scalar", "reads", "empty"),
    *("clamped", "watched", "slopes"),
)
"""Those that an engine may refuse: drawn less often, so that most combinations train."""

OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "SGD": {"lr": 0.05},
    "SGD momentum": {"lr": 0.03, "momentum": 0.9},
    "SGD nesterov": {"lr": 0.03, "momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "RMSprop": {"lr": 0.005, "momentum": 0.5},
    "Adagrad": {"lr": 0.03},
    "NAdam": {"lr": 0.01},
    "Adamax": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
}


@dataclass(frozen=True)
class EngineChoice:
    """A strategy by name, its knobs, on how many processes it trains, and on which mesh."""

    strategy: str
    processes: int
    knobs: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        sizes = {f"mesh.{axis}": size for axis, size in self.mesh.items()}
        knobs = ", ".join(f"{name}={value}" for name, value in {**self.knobs, **sizes}.items())
        return f"{self.strategy}({knobs}) x {self.processes}"


@dataclass(frozen=True)
class Combination:
    """One run: ``engines`` train in turn, the i-th up to step ``stops[i]``."""

    number: int
    inputs: Input
    pieces: Sequence[str]
    width: int
    double: bool
    loss: Loss
    weighted_sampling: bool
    optimizer: str
    groups: bool
    two_optimizers: bool
    samples: int
    micro_batch: int
    rounds: int
    shuffle: bool
    drop_last: bool
    max_norm: float | None
    max_value: float | None
    ema: float | None
    recompute: bool
    sparse: bool
    tied_head: bool
    engines: Sequence[EngineChoice]
    stops: Sequence[int]

    @property
    def batch_size(self) -> int:
        """Of all processes: every engine's number of them divides it."""
        return self.micro_batch * self.rounds * max(engine.processes for engine in self.engines)

    def __str__(self) -> str:
        words = [f"#{self.number}", self.inputs, "+".join(self.pieces), self.loss, self.optimizer]
        flags = ["double", "weighted_sampling", "groups", "two_optimizers", "drop_last"]
        flags += ["recompute", "sparse", "tied_head"]
        words += [name for name in flags if getattr(self, name)]
        bounds = {"norm": self.max_norm, "value": self.max_value, "ema": self.ema}
        words += [f"{name}={bound}" for name, bound in bounds.items() if bound is not None]
        words.append(f"{self.samples} samples in {self.batch_size} of {self.micro_batch}")
        steps = zip(self.engines, self.stops, strict=True)
        words.append(" -> ".join(f"{engine} to {stop}" for engine, stop in steps))
        return " ".join(words)


NATIVE = ("ddp", "ddp", "fsdp", "fsdp", "gloo", "single")


def draw(
    number: int, *, processes: Sequence[int] = (1, 2), strategies: Sequence[str] = NATIVE
) -> Combination:
    """The combination of that number, trained by some of ``strategies``."""
    dice = random.Random(number)
    inputs: Input = dice.choice(("vectors", "tokens"))
    pieces = _pieces(dice, inputs)
    losses: tuple[Loss, ...] = ("mse", "classes", "tokens")
    loss: Loss = dice.choice(losses if inputs == "tokens" else losses[:2])
    optimizer = dice.choice(list(OPTIMIZERS))
    segments = dice.choices((1, 2, 3), (5, 4, 1))[0]
    several = dice.random() < 0.9
    clip = dice.choices((None, "norm", "value"), (4, 3, 1))[0]
    counts = processes if several else (1,)
    engines = [_engine(dice, counts, strategies, pieces) for _ in range(segments)]
    lengths = [dice.randint(1, 4) for _ in engines]
    micro, rounds = dice.randint(2, 4), dice.randint(1, 2)
    batch = micro * rounds * max(engine.processes for engine in engines)
    return Combination(
        number=number,
        inputs=inputs,
        pieces=pieces,
        width=dice.choice((3, 4, 5, 8)),
        # In fp32 Adam and its like divide by gradients that may be nothing but rounding.
        # A norm over two samples makes much of rounding, too.
        double=dice.random() < 0.4 or not optimizer.startswith("SGD") or "batch_norm" in pieces,
        loss=loss,
        weighted_sampling=dice.random() < 0.15,
        optimizer=optimizer,
        groups=dice.random() < 0.3,
        two_optimizers=dice.random() < 0.2,
        samples=batch * dice.randint(1, 2) + dice.choice((0, dice.randint(1, batch - 1))),
        micro_batch=micro,
        rounds=rounds,
        shuffle=dice.random() < 0.8,
        drop_last=dice.random() < 0.2,
        max_norm=dice.choice((0.05, 0.5)) if clip == "norm" else None,
        max_value=0.02 if clip == "value" else None,
        ema=dice.choice((None, None, 0.8)),
        recompute=dice.random() < 0.15,
        sparse=inputs == "tokens" and dice.random() < 0.08,
        tied_head=inputs == "tokens" and dice.random() < 0.3,
        engines=engines,
        stops=[sum(lengths[: i + 1]) for i in range(len(lengths))],
    )


def _pieces(dice: random.Random, inputs: Input) -> list[str]:
    usual = [piece for piece in PIECES if piece not in RARE]
    pieces = [dice.choice(usual) for _ in range(dice.randint(1, 3))]
    if dice.random() < 0.3:
        pieces.insert(dice.randrange(len(pieces) + 1), dice.choice(RARE))
    return pieces


def _engine(
    dice: random.Random,
    processes: Sequence[int],
    strategies: Sequence[str],
    pieces: Sequence[str],
) -> EngineChoice:
    count = dice.choice(processes)
    name = dice.choice(strategies)
    if name == "single" or (count == 1 and name == "gloo"):
        return EngineChoice("single", 1)
    if name == "parallel":
        return EngineChoice("single", 1) if count == 1 else _cut(dice, count, len(pieces))
    uneven = bool({"unused", "experts"} & set(pieces))
    knobs: dict[str, Any] = {}
    if uneven and dice.random() < 0.9 and name != "deepspeed":  # which has no such knob
        knobs["find_unused_parameters"] = True
    if name == "deepspeed":
        knobs["stage"] = dice.choice((0, 1, 2, 3))
    choices: dict[str, Sequence[Any]] = {
        "ddp": ("overlap", "gradient_as_bucket_view", "bucket_cap_mb", "zero1", "static_graph"),
        "fsdp": (
            "reshard_after_forward",
            "reduce_every_micro_batch",
            "prefetch_depth",
            "cpu_offload",
        ),
        "gloo": ("overlap", "bucket_cap_mb", "zero1"),
        "mpi": ("overlap", "bucket_cap_mb", "zero1"),
    }
    values: dict[str, Any] = {
        "overlap": False,
        "gradient_as_bucket_view": False,
        "bucket_cap_mb": 0.0002,
        "zero1": True,
        "static_graph": True,
        "reshard_after_forward": False,
        "reduce_every_micro_batch": True,
        "prefetch_depth": 1,
        "cpu_offload": True,
    }
    for knob in choices.get(name, ()):
        if dice.random() < 0.2 and not (knob == "static_graph" and uneven):
            knobs[knob] = values[knob]
    return EngineChoice(name, count, knobs)


_MESHES: Mapping[int, Sequence[Mapping[str, int]]] = {
    2: ({"pp": 2}, {"tp": 2}),
    4: ({"pp": 2}, {"tp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "dp_replicate": 2, "dp_shard": 1}),
}


def _cut(dice: random.Random, count: int, blocks: int) -> EngineChoice:
    """A model in parts: stages by any schedule, layers by a plan of its linears."""
    mesh = dice.choice(_MESHES[count])
    knobs: dict[str, Any] = {}
    if "pp" in mesh:
        knobs["schedule"] = dice.choice(("gpipe", "1f1b"))
        if blocks >= 4 or dice.random() < 0.1:
            knobs["schedule"] = dice.choice(("interleaved_1f1b", "looped_bfs"))
            knobs["stages_per_rank"] = 2
    if "tp" in mesh:
        layers = [f"blocks.{block}.linear" for block in range(blocks)]
        plan = {
            layer: dice.choice(("colwise_gather", "rowwise"))
            for layer in layers
            if dice.random() < 0.6
        }
        if not plan or dice.random() < 0.5:
            plan["stem"] = dice.choice(("colwise_gather", "rowwise"))
        knobs["plan"] = plan
    return EngineChoice("parallel", count, knobs, mesh)
