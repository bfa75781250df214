"""A run goes from ZeRO to FSDP2, to DDP and back, on other numbers of ranks: one curve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torsh_trainer_deepspeed import DeepSpeed

from torsh_trainer.checkpoint.shards import FlatShard
from torsh_trainer.comm.base import Communicator
from torsh_trainer.data.loading import Loading
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.single import Single
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.resuming import Leg, SentenceTask, live, saving
from torsh_trainer.testing.tiny import TinyModelOptions
from torsh_trainer.training.run_parts import RunParts
from torsh_trainer.training.trainer import Trainer

STEPS = 8
"""Two epochs of 8, 8 and a tail of 6 samples, and two steps more."""

# Adam divides a gradient by its own size: where the terms of one cancel, the rounding of another
# order of summation grows as much. The bound of the native strategies' own matrix.
BOUND = 256 * 2.0**-24

Curve = dict[int, tuple[dict[tuple[int, ...], float], float]]
"""By step: the loss of every micro-batch by its samples, and the gradient's norm."""

Journey = Sequence[tuple[Strategy, int, int]]
"""Under such a strategy, on so many ranks, up to such a step, and on."""

Values = dict[str, dict[str, Tensor]]
"""Of each parameter: itself, and the slots of its optimizer."""


def one_leg(
    comm: Communicator,
    strategy: Strategy,
    folder: Path,
    until: int,
    change: Callable[[RunParts], None] | None = None,
    truth: Values | None = None,
    resume: str = "auto",
) -> tuple[Leg, Values, float]:
    """A life of the run in which an optimizer with two groups trains tied weights with dropout.

    With it, what this rank holds in the end, and how far that is from ``truth``.
    """
    trainer = Trainer(
        task=SentenceTask(TinyModelOptions(dropout=0.2, tied=True), optimizers="adamw"),
        strategy=strategy,
        loading=Loading(batch_size=8, micro_batch_size=2),
        # The check after a load would end a run whose state is spoilt before that shows.
        checkpoint=saving(folder, keep_last=1, resume=resume, check_loaded=change is None),
        log_every=1,
        eval_every_epochs=None,
        max_steps=STEPS,
        deterministic=True,
        device="cpu",
        log_level="error",
    )
    last: dict[str, Any] = {}

    def begin(parts: RunParts) -> None:
        engine: Any = parts.engine
        tell = engine.state_dict

        def told() -> Any:
            state = tell()
            last["values"] = values = held_of(state)
            last["apart"] = 0.0 if truth is None else apart(values, truth)
            return state

        engine.state_dict = told
        if change is not None:
            change(parts)

    leg = live(comm, trainer, folder, until=until, change=begin)
    whole = last["values"] if isinstance(strategy, Single) else {}
    copied = {n: {k: v.detach().clone() for k, v in kept.items()} for n, kept in whole.items()}
    return leg, copied, last["apart"]


def held_of(state: Any) -> Values:
    (entry,) = state["optimizer"].values()
    return {
        name: {"value": state["model"][name], **slots} for name, slots in entry["state"].items()
    }


def apart(values: Values, truth: Values) -> float:
    """The largest difference, relative to the largest element of the whole."""
    assert values.keys() == truth.keys()
    found = 0.0
    for name, kept in values.items():
        assert kept.keys() == truth[name].keys()
        for key, whole in truth[name].items():
            mine, part = kept[key], whole
            if isinstance(mine, FlatShard):
                part = whole.flatten().narrow(0, mine.offset, mine.tensor.numel())
                mine = mine.tensor
            elif isinstance(mine, DTensor):
                part = distribute_tensor(
                    whole, mine.device_mesh, mine.placements, src_data_rank=None
                ).to_local()
                mine = mine.to_local()
            if part.numel():
                found = max(found, float((mine - part).abs().max() / whole.abs().max()))
    return found


def travelled(folder: Path, journey: Journey, change: Any = None) -> Curve:
    curve: Curve = {}
    for leg, (strategy, size, until) in enumerate(journey):
        ranks = shared_pool(size).run(one_leg, strategy, folder, until, change if leg else None)
        curve.update(curve_of([leg for leg, *_ in ranks]))
    assert sorted(curve) == list(range(1, STEPS + 1))
    return curve


def curve_of(legs: Sequence[Leg]) -> Curve:
    curve: Curve = {}
    for step in legs[0].losses:
        losses = {
            tuple(ids): loss
            for leg in legs
            for ids, loss in zip(leg.consumed[step], leg.losses[step], strict=True)
        }
        curve[step] = losses, legs[0].norms[step]
    return curve


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[Curve, Values]:
    """The same run in one process, never interrupted, and what it held in the end."""
    folder = tmp_path_factory.mktemp("whole")
    ((leg, values, _),) = shared_pool(1).run(one_leg, Single(), folder, STEPS)
    return curve_of([leg]), values


@pytest.fixture(scope="module")
def whole(uninterrupted) -> Curve:
    return uninterrupted[0]


def furthest(curve: Curve, whole: Curve) -> float:
    """The largest relative difference of a loss or a norm."""
    found = 0.0
    for step, (losses, norm) in curve.items():
        theirs, their_norm = whole[step]
        assert losses.keys() == theirs.keys(), f"other samples at step {step}"
        found = max(found, abs(norm - their_norm) / their_norm)
        found = max(found, *(abs(loss - theirs[ids]) / theirs[ids] for ids, loss in losses.items()))
    return found


@cache
def zero(stage: int, **knobs: Any) -> DeepSpeed:
    return DeepSpeed(stage=stage, reduce_bucket_size=200, allgather_bucket_size=200, **knobs)


# -- each stage with each native strategy ---------------------------------------------------------

NATIVE: dict[str, tuple[Strategy, int]] = {
    "single": (Single(), 1),
    "ddp-4": (DDP(), 4),
    "fsdp-4": (FSDP(), 4),
}
ENGINES: dict[str, tuple[Strategy, int]] = {
    **NATIVE,
    **{f"zero{stage}-{size}": (zero(stage), size) for stage in range(4) for size in (2, 4)},
}
MOVES = [
    move
    for stage in range(4)
    for move in (
        *((f"zero{stage}-2", target) for target in (*NATIVE, f"zero{stage}-4")),
        *((source, f"zero{stage}-2") for source in NATIVE),
    )
]
SAVED_AT = 4
"""Amid the second epoch."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory, whole):
    """``saved(name)``: a checkpoint of step 4, each made once."""

    @cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        strategy, size = ENGINES[name]
        ranks = shared_pool(size).run(one_leg, strategy, folder, SAVED_AT)
        assert furthest(curve_of([leg for leg, *_ in ranks]), whole) <= BOUND
        return folder / f"step-{SAVED_AT:08d}"

    return make


@pytest.mark.matrix(4)
@pytest.mark.parametrize(("source", "target"), MOVES)
def test_a_run_goes_on_under_another_strategy_and_on_another_number_of_processes(
    source, target, saved, uninterrupted, tmp_path
):
    whole, values = uninterrupted
    strategy, size = ENGINES[target]
    ranks = shared_pool(size).run(
        one_leg, strategy, tmp_path, STEPS, None, values, str(saved(source))
    )
    curve = curve_of([leg for leg, *_ in ranks])
    assert sorted(curve) == list(range(SAVED_AT + 1, STEPS + 1))
    assert furthest(curve, whole) <= BOUND
    assert max(apart for *_, apart in ranks) <= BOUND


# -- several changes, and layouts of their own ----------------------------------------------------

JOURNEYS: dict[str, Journey] = {
    "ZeRO-3 on 2, FSDP2 on 4, DDP on 2, ZeRO-3 on 4": [
        (zero(3), 2, 2),
        (FSDP(), 4, 4),
        (DDP(), 2, 6),
        (zero(3), 4, STEPS),
    ],
    "ZeRO-3 on 2 in small parts, ZeRO-2 on 4": [
        (zero(3, sub_group_size=40), 2, 3),
        (zero(2, round_robin_gradients=True), 4, STEPS),
    ],
    "ZeRO-3 offloaded on 2, DDP on 2, ZeRO-2 offloaded on 2": [
        (zero(3, offload_optimizer="cpu", offload_param="cpu"), 2, 3),
        (DDP(), 2, 5),
        (zero(2, offload_optimizer="cpu"), 2, STEPS),
    ],
}


@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", JOURNEYS)
def test_the_curve_is_that_of_one_process_that_was_never_interrupted(name, whole, tmp_path):
    assert furthest(travelled(tmp_path, JOURNEYS[name]), whole) <= BOUND


def forgets(what: str) -> Callable[[RunParts], None]:
    """Loses a part of what the checkpoint gave before the engine takes it."""

    def change(parts: RunParts) -> None:
        load = parts.engine.load_state_dict

        def lossy(state: Any) -> None:
            (name,) = state["optimizer"]
            entry = state["optimizer"][name]
            if what == "slots":
                load({**state, "optimizer": {name: {**entry, "state": {}}}})
                return
            for slots in entry["state"].values():
                slots["step"] = slots["step"] + 1
            load(state)

        engine: Any = parts.engine
        engine.load_state_dict = lossy

    return change


@pytest.mark.parametrize("what", ["slots", "steps"])
def test_an_optimizer_state_that_is_lost_on_the_way_shows(what, whole, tmp_path):
    journey = [(zero(3), 2, 4), (zero(3), 2, STEPS)]
    assert furthest(travelled(tmp_path, journey, forgets(what)), whole) > BOUND
