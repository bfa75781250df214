"""Ranks with unequal numbers of batches to evaluate: what two come to is what one comes to.

Three batches are dealt out to two ranks. Where the model is cut over them, a rank that waits for
the other in a forward that this never makes would wait for ever.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case
from loops import as_torchrun, under_lightning, under_our_loop
from modules.uneven import Collects, Dealt
from recorder import Recording
from torsh_trainer_lightning.processes import choose_strategy

from torsh_trainer.environments.world import World

FLAGS = {"max_epochs": 1, "num_sanity_val_steps": 1, "use_distributed_sampler": False}
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("fsdp", {}),
    "deepspeed, stage 3": ("deepspeed", {"stage": 3}),
    "ddp": ("ddp", {}),
}


def evaluated(
    world: World, port: int, folder: Path, loop: str, strategy: Any, knobs: dict[str, Any]
) -> tuple[list[Any], list[float]] | str:
    """(what was logged, what was predicted) on this rank, or what it refused."""
    as_torchrun(world, port, folder)
    run: Any = {"ours": under_our_loop, "theirs": under_lightning}[loop]
    try:
        found: Recording = run(
            Case(Collects, partial(Dealt, **knobs), flags=FLAGS, stages=STAGES),
            folder,
            strategy=choose_strategy(*strategy) if loop == "ours" else strategy,
            devices=world.size,
            watched="nothing",
        )
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        return f"{type(error).__name__}: {error}"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return found.logged, found.predictions


STAGES = ("fit", "validate", "test", "predict")


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Recording:
    """What Lightning does on one process."""
    case = Case(Collects, Dealt, flags=FLAGS, stages=STAGES)
    return under_lightning(case, tmp_path_factory.mktemp("alone"), watched="nothing")


@pytest.mark.parametrize("streams", [False, True], ids=["lengths", "streams"])
@pytest.mark.parametrize("name", ENGINES)
def test_metrics_and_predictions_are_those_of_one_process(on_ranks, alone, tmp_path, name, streams):
    found = on_ranks(evaluated, tmp_path, "ours", ENGINES[name], {"streams": streams})
    assert not isinstance(found[0], str), found
    logged, predictions = found[0]
    torch.testing.assert_close(predictions, alone.predictions, rtol=1e-4, atol=1e-5)
    for (numbers, step), (expected, at) in zip(logged, alone.logged, strict=True):
        assert step == at
        assert numbers == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", ["fsdp", "deepspeed, stage 3"])
def test_so_they_are_under_lightnings_own_loop(on_ranks, alone, tmp_path, name):
    ranks = on_ranks(evaluated, tmp_path, "theirs", ENGINES[name], {})
    assert not any(isinstance(rank, str) for rank in ranks), ranks
    logged, _ = ranks[0]
    for (numbers, _), (expected, _) in zip(logged, alone.logged, strict=True):
        assert numbers == pytest.approx(expected, rel=1e-4, abs=1e-6)
    (_, first), (_, second) = ranks  # of which the first has two of the three batches
    both = [*first[:12], *second, *first[12:]]
    torch.testing.assert_close(both, alone.predictions, rtol=1e-4, atol=1e-5)


def test_a_rank_without_a_batch_is_refused_before_anybody_waits_for_it(on_ranks, tmp_path):
    knobs = {"samples": 4, "streams": True}
    for rank in on_ranks(evaluated, tmp_path, "ours", ENGINES["fsdp"], knobs):
        assert "rank 1 has no batch to evaluate, and the model is cut over the ranks" in rank
