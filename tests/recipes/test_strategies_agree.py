"""The promise, through the door: the engine changes speed and memory, never the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("warm_interpreters")

STEPS = 6
RUN = [
    "+recipe=digits",
    "optimizer=sgd",
    "optimizer.lr=0.1",
    "schedule=constant",
    "trainer.stages=[fit]",
    f"trainer.max_steps={STEPS}",
    "trainer.max_epochs=null",
    "trainer.log_every=1",
    "checkpoint.at_end=false",
]


def curve(door: Any, folder: Path, *overrides: str, **options: Any) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step of a run through the command line; the last pair is the
    (loss, accuracy) of the evaluation at its end."""
    done = door([*RUN, f"hydra.run.dir={folder}", *overrides], timeout_s=1200, **options)
    assert done.returncode == 0, done.stderr
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    steps = [(row["loss"], row["grad_norm"]) for row in rows if row["split"] == "train"]
    (end,) = [(row["loss"], row["accuracy"]) for row in rows if row["split"] == "eval"]
    return [*steps, end]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, warm_command: Any) -> Any:
    """The curve of one process, which the others are held against."""
    folder = tmp_path_factory.mktemp("alone")
    return curve(warm_command, folder / "run", "strategy=single", cwd=folder)


def same(found: list[tuple[float, float]], alone: list[tuple[float, float]]) -> None:
    assert len(found) == len(alone) == STEPS + 1
    for mine, expected in zip(found, alone, strict=True):
        assert mine == pytest.approx(expected, rel=2e-5)


@pytest.mark.matrix(4)
@pytest.mark.parametrize(
    ("strategy", "processes"),
    [
        ("auto", 1),
        ("ddp", 1),
        ("fsdp", 1),
        ("ddp", 2),
        ("fsdp", 2),
        ("gloo", 2),
        ("mpi", 2),
        ("deepspeed", 2),
        ("horovod", 2),
        ("ddp", 4),
        ("fsdp", 4),
        ("gloo", 4),
        ("mpi", 4),
        ("deepspeed", 4),
        ("horovod", 4),
    ],
)
def test_every_strategy_draws_the_same_curve_with_dropout_on_any_number_of_processes(
    strategy: str, processes: int, alone: Any, warm_door: Any, tmp_path: Path
) -> None:
    words = [f"strategy={strategy}", f"launcher.num_processes={processes}"]
    same(curve(warm_door, tmp_path / "run", *words, processes=processes), alone)


def test_so_do_processes_that_the_command_line_starts(
    alone: Any, run_door: Any, tmp_path: Path
) -> None:
    same(curve(run_door, tmp_path / "run", "strategy=auto", "launcher.num_processes=2"), alone)


def test_another_seed_draws_another_curve(alone: Any, warm_door: Any, tmp_path: Path) -> None:
    other = curve(warm_door, tmp_path / "run", "strategy=single", "trainer.seed=1")
    assert other[0] != pytest.approx(alone[0], rel=1e-3)
