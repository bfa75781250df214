"""A run goes from ZeRO to FSDP2, to DDP and back, on other numbers of ranks: one curve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torsh_trainer_deepspeed import DeepSpeed

from torsh_trainer.comm.base import Communicator
from torsh_trainer.data.loading import Loading
from torsh_trainer.rank import Rank
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.single import Single
from torsh_trainer.testing.ranks import shared
from torsh_trainer.testing.resuming import Leg, SentenceTask, live, saving
from torsh_trainer.testing.tiny import TinyModelOptions
from torsh_trainer.trainer import Trainer

STEPS = 8
"""Two epochs of 8, 8 and a tail of 6 samples, and two steps more."""

# Adam divides a gradient by its own size: where the terms of one cancel, the rounding of another
# order of summation grows as much. The bound of the native strategies' own matrix.
BOUND = 256 * 2.0**-24

Curve = dict[int, tuple[dict[tuple[int, ...], float], float]]
"""By step: the loss of every micro-batch by its samples, and the gradient's norm."""

Journey = Sequence[tuple[Strategy, int, int]]
"""Under such a strategy, on so many ranks, up to such a step, and on."""


def one_leg(
    comm: Communicator,
    strategy: Strategy,
    folder: Path,
    until: int,
    change: Callable[[Rank], None] | None = None,
) -> Leg:
    """A life of the run in which an optimizer with two groups trains tied weights with dropout."""
    trainer = Trainer(
        task=SentenceTask(TinyModelOptions(dropout=0.2, tied=True), optimizers="adamw"),
        strategy=strategy,
        loading=Loading(batch_size=8, micro_batch_size=2),
        checkpoint=saving(folder, keep_last=1),
        log_every=1,
        eval_every_epochs=None,
        max_steps=STEPS,
        deterministic=True,
        device="cpu",
        log_level="error",
    )
    return live(comm, trainer, folder, until=until, change=change)


def travelled(folder: Path, journey: Journey, change: Any = None) -> Curve:
    curve: Curve = {}
    for leg, (strategy, size, until) in enumerate(journey):
        ranks = shared(size).run(one_leg, strategy, folder, until, change if leg else None)
        for step in ranks[0].losses:
            losses = {
                tuple(ids): loss
                for rank in ranks
                for ids, loss in zip(rank.consumed[step], rank.losses[step], strict=True)
            }
            curve[step] = losses, ranks[0].norms[step]
    assert sorted(curve) == list(range(1, STEPS + 1))
    return curve


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Curve:
    """The same run in one process, never interrupted."""
    return travelled(tmp_path_factory.mktemp("whole"), [(Single(), 1, STEPS)])


def furthest(curve: Curve, whole: Curve) -> float:
    """The largest relative difference of a loss or a norm."""
    found = 0.0
    for step, (losses, norm) in whole.items():
        ours, our_norm = curve[step]
        assert ours.keys() == losses.keys(), f"other samples at step {step}"
        found = max(found, abs(our_norm - norm) / norm)
        found = max(found, *(abs(ours[ids] - loss) / loss for ids, loss in losses.items()))
    return found


@cache
def zero(stage: int, **knobs: Any) -> DeepSpeed:
    return DeepSpeed(stage=stage, reduce_bucket_size=200, allgather_bucket_size=200, **knobs)


JOURNEYS: dict[str, Journey] = {
    "ZeRO-3 on 2, FSDP2 on 4, DDP on 2, ZeRO-3 on 4": [
        (zero(3), 2, 2),
        (FSDP(), 4, 4),
        (DDP(), 2, 6),
        (zero(3), 4, STEPS),
    ],
    "ZeRO-1 on 4, one process, ZeRO-2 on 2, FSDP2 on 2": [
        (zero(1), 4, 2),
        (Single(), 1, 4),
        (zero(2), 2, 6),
        (FSDP(), 2, STEPS),
    ],
    "FSDP2 on 4, ZeRO-0 on 2, ZeRO-1 on 2, DDP on 2": [
        (FSDP(), 4, 2),
        (zero(0), 2, 4),
        (zero(1), 2, 6),
        (DDP(), 2, STEPS),
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


@pytest.mark.parametrize("name", JOURNEYS)
def test_the_curve_is_that_of_one_process_that_was_never_interrupted(name, whole, tmp_path):
    assert furthest(travelled(tmp_path, JOURNEYS[name]), whole) <= BOUND


def forgets(what: str) -> Callable[[Rank], None]:
    """Loses a part of what the checkpoint gave before the engine takes it."""

    def change(rank: Rank) -> None:
        load = rank.engine.load_state_dict

        def lossy(state: Any) -> None:
            (name,) = state["optimizer"]
            entry = state["optimizer"][name]
            if what == "slots":
                load({**state, "optimizer": {name: {**entry, "state": {}}}})
                return
            for slots in entry["state"].values():
                slots["step"] = slots["step"] + 1
            load(state)

        engine: Any = rank.engine
        engine.load_state_dict = lossy

    return change


@pytest.mark.parametrize("what", ["slots", "steps"])
def test_an_optimizer_state_that_is_lost_on_the_way_shows(what, whole, tmp_path):
    journey = [(zero(3), 2, 4), (zero(3), 2, STEPS)]
    assert furthest(travelled(tmp_path, journey, forgets(what)), whole) > BOUND
