"""Cases on two processes: nothing differs under DDP, and rounding alone under other engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from cases import CASES, DEMOS, LOGGING, MODULES
from loops import recorded
from recorder import THE_SAME_BITS, Recording, Within, differences
from torsh_trainer_lightning.processes import choose_strategy

from torsh_trainer import DDP
from torsh_trainer.strategies.base import Strategy

FREES = "fine-tuning"
"""Lightning's DDP leaves each rank its own gradients for what is freed later (test_thawing)."""

TWO = [
    *DEMOS,
    *(name for name in MODULES if name != FREES),
    *LOGGING,
    "optimizers: plateau, every epoch",
    "by hand: two dictionaries",
    "flags: accumulation",
    "flags: clipping by norm",
    "flags: clipping by value",
    "flags: parts of the batches",
    "flags: validation at parts of an epoch",
    "flags: overfitting",
    "flags: a stream",
    "flags: bf16-mixed",
    "hooks: SkipsBatches",
    "hooks: Stops",
    "hooks: EverySecond",
    "hooks: OwnBackward",
    "hooks: BringsCallbacks",
    "hooks: DrawsAtRandom",
    "callbacks: checkpoints",
]
"""What several processes have a part in."""

FREED = "frozen at the start and train now: backbone.3.weight"

ENGINES = ("fsdp", "gloo", "deepspeed", "horovod")

UNFIT: dict[str, dict[str, str]] = {
    "deepspeed": {"gan": "2 optimizers", "fine-tuning": FREED},
}
"""Which modules an engine refuses, and in which words: what is not here trains on all of them."""


def engine(name: str, *, unused: bool) -> Strategy:
    """The strategy, told where a backward does not reach all parameters, if it asks."""
    asks = unused and name in ("gloo", "horovod")
    return choose_strategy(name, {"find_unused_parameters": True} if asks else {})


Said = list[dict[str, Recording | str]]


def by_need(names: list[str]) -> dict[bool, list[str]]:
    """Names by whether a backward may leave parameters out."""
    return {need: [n for n in names if CASES[n].unused is need] for need in (False, True)}


@pytest.fixture(scope="module")
def run(on_ranks, tmp_path_factory) -> Callable[..., Said]:
    """``run(loop, names, options)``: for each rank what it recorded, by name."""

    def under(loop: str, names: list[str], options: dict[str, Any]) -> Said:
        folder = tmp_path_factory.mktemp(loop)
        return on_ranks(recorded, folder, names, loop, options, timeout_s=800)

    return under


@pytest.fixture(scope="module")
def lightnings(run) -> Said:
    """Lightning's own DDP."""
    return _both(
        run(
            "under_lightning",
            names,
            {"strategy": "ddp_find_unused_parameters_true" if unused else "ddp"},
        )
        for unused, names in by_need(TWO).items()
    )


@pytest.mark.matrix(1)
@pytest.mark.parametrize("watched", ["hooks", "nothing"])
def test_our_loop_on_two_processes_does_what_lightning_does(run, lightnings, watched):
    found = _both(
        run(
            "under_our_loop",
            names,
            {"strategy": DDP(find_unused_parameters=unused), "watched": watched},
        )
        for unused, names in by_need(TWO).items()
    )
    kinds = ("logged", "parameters") if watched == "nothing" else ()
    assert not _apart(_gathered(lightnings)[:1], _gathered(found[:1]), *kinds)
    assert not _apart(lightnings[1:], found[1:], *(kinds or ("events", "metrics", "parameters")))


@pytest.mark.matrix(1)
@pytest.mark.parametrize("strategy", ENGINES)
def test_every_engine_trains_a_module_within_rounding(run, lightnings, strategy):
    found: Said = [{}, {}]
    taught = [*DEMOS, *(name for name in MODULES if name != FREES)]
    for unused, names in by_need(taught).items():
        taken = [name for name in names if name not in UNFIT.get(strategy, {})]
        options = {"strategy": engine(strategy, unused=unused), "watched": "nothing"}
        for rank, told in enumerate(run("under_our_loop", taken, options)):
            found[rank].update(told)
    assert found[0]
    # The rank that writes has the parameters whole; what is logged is that rank's too.
    assert not _apart(lightnings[:1], found[:1], "logged", "parameters", within=Within(1e-4, 1e-5))


@pytest.mark.parametrize(
    ("strategy", "name"), [(one, name) for one, names in UNFIT.items() for name in names]
)
def test_what_an_engine_cannot_take_is_refused_by_name(run, strategy, name):
    options = {"strategy": engine(strategy, unused=True), "watched": "nothing"}
    for rank in run("under_our_loop", [name], options):
        assert UNFIT[strategy][name] in rank[name]


def test_our_strategy_on_two_processes_does_what_lightnings_does(run, lightnings):
    found = _both(
        run(
            "under_lightning",
            names,
            {"strategy": ("ddp", {"find_unused_parameters": unused})},
        )
        for unused, names in by_need(TWO).items()
    )
    assert not _apart(lightnings, found)


def _gathered(ranks: Said) -> Said:
    """With the predictions of all ranks on each, in no order: ours lie in one file."""
    told = [dict(rank) for rank in ranks]
    for name in ranks[0]:
        found = [rank[name] for rank in ranks]
        every = sorted(p for one in found if isinstance(one, Recording) for p in one.predictions)
        for rank, one in zip(told, found, strict=True):
            if isinstance(one, Recording):
                rank[name] = replace(one, predictions=every)
    return told


def _both(parts: Any) -> Said:
    """By rank, of several calls."""
    return [
        {name: told for part in ranks for name, told in part.items()}
        for ranks in zip(*parts, strict=True)
    ]


def _apart(
    expected: Said, found: Said, *kinds: str, within: Within = THE_SAME_BITS
) -> dict[str, Any]:
    """Where ranks differ, by case; of ``kinds`` alone where some are given."""
    told: dict[str, Any] = {}
    for rank, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
        for name, other in ours.items():
            one = theirs[name]
            if isinstance(one, str) or isinstance(other, str):
                refused = CASES[name].refused
                if not (refused and isinstance(one, str) and isinstance(other, str)):
                    told[f"{name} on rank {rank}"] = f"{str(one)[:300]} | {str(other)[:300]}"
                continue
            parts = differences(one, other, within)
            parts = {kind: text for kind, text in parts.items() if not kinds or kind in kinds}
            if parts:
                told[f"{name} on rank {rank}"] = parts
    return told
