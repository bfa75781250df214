"""A run saved under one strategy and number of processes goes on under every other.

The curve is that of plain PyTorch in one process, which was never interrupted: same global batch,
same micro-batches (so that dropout draws the same units), accumulation as the number of processes
wants it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import Dataset, default_collate

from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.comm.base import Communicator
from torsh_trainer.data.loading import Loading
from torsh_trainer.data.sampler import ForwardKeys, epoch_order, mix
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.single import Single
from torsh_trainer.tasks.base import DataSource, Task
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.resuming import live
from torsh_trainer.training.run_parts import RunParts
from torsh_trainer.training.trainer import Trainer

SEED = 3
BATCH, MICRO = 8, 2
SAMPLES = 22  # two global batches and a tail of three micro-batches, so that a fourth rank has none
SAVED_AT, STEPS = 4, 7  # saved amid the second epoch; then its rest, the tail, and a third epoch
ROWS = 7  # divides by neither two nor four

U32 = 2.0**-24
"""Unit roundoff of fp32."""

# The gradient is a sum over at most 4 micro-batches, added in another order wherever ranks add what
# one process adds in a row: that is 3 u of the sum of the terms' sizes, and about as much again for
# the factors by which they enter and for kernels that see shards. Seven steps and the momentum add
# such errors up, the network multiplies them by a factor of order 1. The largest seen is 5 u.
SGD_BOUND = 64 * U32
# Adam divides a gradient by its own size: where the terms of one cancel, its relative error grows
# as much, and an update carries it into the parameter.
ADAMW_BOUND = 256 * U32
BOUNDS = {"sgd": SGD_BOUND, "adamw": ADAMW_BOUND}


class Vectors(Dataset[dict[str, Tensor]]):
    """Vectors with noise that is drawn whenever one is fetched, and their classes."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(SAMPLES, ROWS, generator=generator)
        self.y = self.x.sum(1).sign().long() + 1

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        noise = 0.1 * torch.randn(ROWS)
        return {"id": torch.tensor(index), "x": self.x[index] + noise, "y": self.y[index]}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(ROWS, ROWS)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(F.gelu(self.linear(x)), 0.3, self.training)


class Classes(Task):
    """Two blocks and a head; the head's bias has three rows, fewer than four ranks."""

    def __init__(self, optimizer: str) -> None:
        self.name = optimizer
        self.data = DataSource()
        self.data.train = Vectors()

    def build_model(self) -> nn.Module:
        return nn.Sequential(Block(), Block(), nn.Linear(ROWS, 3))

    def build_optimizers(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> Mapping[str, Optimizer]:
        named = list(named_parameters)
        weights = [p for name, p in named if name.endswith("weight")]
        biases = [p for name, p in named if name.endswith("bias")]
        groups = [{"params": biases, "weight_decay": 0.0}, {"params": weights}]
        if self.name == "sgd":
            return {"main": SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)}
        return {"main": AdamW(groups, lr=0.01, weight_decay=0.1)}

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(batch["x"])

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch["y"])


# -- what it must equal ----------------------------------------------------------------------------


@dataclasses.dataclass
class Plain:
    """What plain PyTorch did, by step: (ids, loss) of each micro-batch, and the gradient's norm."""

    losses: dict[int, dict[tuple[int, ...], float]] = dataclasses.field(default_factory=dict)
    norms: dict[int, float] = dataclasses.field(default_factory=dict)
    parameters: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    slots: dict[str, dict[str, Tensor]] = dataclasses.field(default_factory=dict)


@cache
def plain(optimizer: str) -> Plain:
    """Seven steps of plain PyTorch in one process, never interrupted."""
    task, done = Classes(optimizer), Plain()
    torch.manual_seed(mix(SEED, -1))
    model = task.build_model().train()
    (chosen,) = task.build_optimizers(model.named_parameters()).values()
    keys = ForwardKeys(SEED)
    for step in range(STEPS):
        epoch, place = divmod(step, -(-SAMPLES // BATCH))
        order = epoch_order(SAMPLES, seed=SEED, epoch=epoch, shuffle=True)
        ids = order[place * BATCH : (place + 1) * BATCH]
        model.zero_grad()
        losses = {}
        for g, start in enumerate(range(0, len(ids), MICRO)):
            part = ids[start : start + MICRO]
            batch = default_collate([drawn(task.data.train, epoch, i) for i in part])
            torch.manual_seed(keys.of_micro_batch(keys.of_step(step), g))
            loss = task.loss(task.forward(model, batch), batch)
            (loss * len(part) / len(ids)).backward()
            losses[tuple(part)] = loss.item()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        chosen.step()
        done.losses[step + 1], done.norms[step + 1] = losses, norm.item()
    names = {id(p): name for name, p in model.named_parameters()}
    done.parameters = {name: p.detach() for name, p in model.named_parameters()}
    done.slots = {names[id(p)]: slots for p, slots in chosen.state.items()}
    return done


def drawn(dataset: Vectors, epoch: int, index: int) -> dict[str, Tensor]:
    torch.manual_seed(mix(SEED, epoch, index))
    return dataset[index]


# -- how far a run is from it ----------------------------------------------------------------------


def distances(comm: Communicator, trainer: Trainer, change: Any, expected: Plain) -> dict[str, Any]:
    """One life of a run on this rank, relative to plain PyTorch: the largest difference of each."""
    held: dict[str, Any] = {}

    def keep(parts: RunParts) -> None:
        held["engine"] = parts.engine
        if change is not None:
            change(parts)

    stop = SAVED_AT if trainer.checkpoint.at_end else None
    if change is not None:  # the check after a load would end the run before it shows
        unchecked = dataclasses.replace(trainer.checkpoint, check_loaded=False)
        trainer = dataclasses.replace(trainer, checkpoint=unchecked)
    leg = live(comm, trainer, Path(trainer.checkpoint.dir or ""), until=stop, change=keep)
    far: dict[str, Any] = {"steps": sorted(leg.losses), "loss": 0.0, "norm": 0.0}
    far["samples"] = {step: leg.consumed[step] for step in leg.consumed}
    for step, losses in leg.losses.items():
        truth = expected.losses[step]
        for ids, loss in zip(leg.consumed[step], losses, strict=True):
            there = truth.get(tuple(ids))
            far["loss"] = max(far["loss"], 1.0 if there is None else abs(loss - there) / there)
        norm = expected.norms[step]
        far["norm"] = max(far["norm"], abs(leg.norms[step] - norm) / norm)
    if stop is None:
        state = held["engine"].state_dict()
        far["parameters"] = furthest(state["model"], expected.parameters)
        slots = state["optimizer"]["main"]["state"]
        far["optimizer"] = max(
            (furthest(slots[name], expected.slots[name]) for name in slots), default=1.0
        )
    return far


def furthest(ours: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """The largest difference of two tensors, relative to the largest element of the whole."""
    assert set(ours) == set(truth)
    found = 0.0
    for name, whole in truth.items():
        mine, part = ours[name], whole
        if isinstance(mine, DTensor):
            # Without communication: every rank has the whole truth.
            part = distribute_tensor(
                whole, mine.device_mesh, mine.placements, src_data_rank=None
            ).to_local()
            mine = mine.to_local()
        if part.numel():
            apart = (mine - part).abs().max() / whole.abs().max()
            found = max(found, float(apart))
    return found


# -- the matrix ------------------------------------------------------------------------------------


def strategies(size: int) -> dict[str, Strategy]:
    """Those that exist on so many processes."""
    found: dict[str, Strategy] = {
        "ddp": DDP(bucket_cap_mb=0.0002),
        "zero1": DDP(bucket_cap_mb=0.0002, zero1=True),
        "fsdp": FSDP(),
        "no-reshard": FSDP(reshard_after_forward=False, wrap_min_bytes=0),
    }
    if size == 1:
        return {"single": Single(), **found}
    return {**found, "hybrid": FSDP(shard_size=size // 2)}


def trainer(strategy: Strategy, optimizer: str, options: CheckpointOptions) -> Trainer:
    return Trainer(
        task=Classes(optimizer),
        strategy=strategy,
        loading=Loading(batch_size=BATCH, micro_batch_size=MICRO),
        checkpoint=options,
        max_steps=STEPS,
        seed=SEED,
        randomness="by_micro_batch",  # as the loop of plain PyTorch draws
        log_every=1,
        eval_every_epochs=None,
        deterministic=True,
        device="cpu",
        log_level="error",
    )


class Sources:
    """Checkpoints of step 4, each saved once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.saved = cache(self._saved)

    def _saved(self, name: str, size: int, optimizer: str) -> Path:
        folder = self._folder / f"{name}-{size}-{optimizer}"
        made = trainer(strategies(size)[name], optimizer, CheckpointOptions(dir=str(folder)))
        for far in shared_pool(size).run(distances, made, None, plain(optimizer)):
            assert far["steps"] == list(range(1, SAVED_AT + 1))
            assert max(far["loss"], far["norm"]) <= BOUNDS[optimizer], far
        return folder / f"step-{SAVED_AT:08d}"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return Sources(tmp_path_factory.mktemp("sources"))


def resumed(
    checkpoint: Path,
    name: str,
    size: int,
    optimizer: str,
    change: Callable[[RunParts], None] | None = None,
) -> list[dict[str, Any]]:
    """Each rank's distances from plain PyTorch after going on from ``checkpoint``."""
    options = CheckpointOptions(
        dir=str(checkpoint.parent / "not-written"), resume=str(checkpoint), at_end=False
    )
    made = trainer(strategies(size)[name], optimizer, options)
    return shared_pool(size).run(distances, made, change, plain(optimizer))


MOVES = ((1, 1), (2, 2), (4, 4), (1, 2), (2, 4), (4, 2), (4, 1))


@pytest.mark.matrix(10)
@pytest.mark.parametrize(
    ("source", "target", "before", "after"),
    [
        (source, target, before, after)
        for before, after in MOVES
        for source in strategies(before)
        for target in strategies(after)
    ],
)
def test_a_run_goes_on_under_another_strategy_and_on_another_number_of_processes(
    source: str, target: str, before: int, after: int, sources: Sources
) -> None:
    # On as many ranks AdamW adds nothing that the tests of exact resume do not have.
    for optimizer in ("sgd", "adamw") if before != after else ("sgd",):
        bound = BOUNDS[optimizer]
        checkpoint = sources.saved(source, before, optimizer)
        ranks = resumed(checkpoint, target, after, optimizer)
        for far in ranks:
            assert far["steps"] == list(range(SAVED_AT + 1, STEPS + 1))
            for quantity in ("loss", "norm", "parameters", "optimizer"):
                assert far[quantity] <= bound, f"{optimizer}: {quantity} is {far[quantity]:.2g} off"
        consumed_all(ranks, optimizer)


def consumed_all(ranks: list[dict[str, Any]], optimizer: str) -> None:
    """Together, the ranks saw each micro-batch once."""
    for step in range(SAVED_AT + 1, STEPS + 1):
        seen = sorted(tuple(micro) for far in ranks for micro in far["samples"][step])
        assert seen == sorted(plain(optimizer).losses[step])


# -- what must not pass ----------------------------------------------------------------------------

State = dict[str, Any]


def between(parts: RunParts, meddle: Callable[[State], State]) -> None:
    """``meddle`` changes what the checkpoint gave before the engine takes it."""
    load = parts.engine.load_state_dict
    taking: Any = parts.engine
    taking.load_state_dict = lambda state: load(meddle(dict(state)))


def without_optimizer_state(parts: RunParts) -> None:
    def meddle(state: State) -> State:
        main = state["optimizer"]["main"]
        return {**state, "optimizer": {"main": {**main, "state": {}}}}

    between(parts, meddle)


def two_parameters_swapped(parts: RunParts) -> None:
    def meddle(state: State) -> State:
        first, second = (state["model"][f"{i}.linear.weight"] for i in (0, 1))
        kept = first.detach().clone()
        with torch.no_grad():
            first.copy_(second)
            second.copy_(kept)
        return state

    between(parts, meddle)


def two_optimizer_states_swapped(parts: RunParts) -> None:
    def meddle(state: State) -> State:
        main = state["optimizer"]["main"]
        slots = dict(main["state"])
        first, second = "0.linear.weight", "1.linear.weight"
        slots[first], slots[second] = slots[second], slots[first]
        return {**state, "optimizer": {"main": {**main, "state": slots}}}

    between(parts, meddle)


def settings_of_two_groups_swapped(parts: RunParts) -> None:
    def meddle(state: State) -> State:
        main = state["optimizer"]["main"]
        first, second = main["groups"]
        swapped = [
            {**first, "weight_decay": second["weight_decay"]},
            {**second, "weight_decay": first["weight_decay"]},
        ]
        return {**state, "optimizer": {"main": {**main, "groups": swapped}}}

    between(parts, meddle)


def position_off_by_a_sample(parts: RunParts) -> None:
    load, loop = parts.program.load, parts.program

    def changed(state: Mapping[str, Any]) -> None:
        load(state)
        loop.position.samples += 1

    taking: Any = loop
    taking.load = changed


def random_numbers_of_another_step(parts: RunParts) -> None:
    """The same samples, and other units dropped."""
    factory: Any = parts.factory
    feed = factory._feed

    def other(cut: Any, position: Any, state: Any) -> Any:
        return feed(cut, dataclasses.replace(position, step=position.step + 1), state)

    factory._feed = other


CONTROLS = (
    without_optimizer_state,
    two_parameters_swapped,
    two_optimizer_states_swapped,
    settings_of_two_groups_swapped,
    position_off_by_a_sample,
    random_numbers_of_another_step,
)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.__name__)
def test_what_is_lost_on_the_way_shows(
    control: Callable[[RunParts], None], sources: Sources
) -> None:
    for optimizer, bound in BOUNDS.items():
        checkpoint = sources.saved("ddp", 4, optimizer)
        for far in resumed(checkpoint, "fsdp", 2, optimizer, control):
            curve = max(far["loss"], far["norm"], far["parameters"])
            assert curve > 10 * bound, f"{optimizer}: {curve:.2g}, and {bound:.2g} is allowed"
