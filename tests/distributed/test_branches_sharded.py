"""Forwards that go other ways on other processes, under FSDP without the knob: one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import TorshError
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.units import CommonOrder
from torsh_trainer.testing import reference
from torsh_trainer.testing.cases import Driver
from torsh_trainer.testing.compare import FP32, same_tensors
from torsh_trainer.testing.ranks import OPTIONS, RankPool, shared_pool
from torsh_trainer.testing.reference import Scenario, TrainingOutcome
from torsh_trainer.testing.tiny import VOCABULARY, WIDTH, TinyData, TinyTask


class Branching(nn.Module):
    """Takes one of two branches of ``widths``; which, ``choose`` says at every forward."""

    def __init__(self, widths: tuple[int, int], choose: Callable[[], int]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)) for width in widths
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.choose = choose

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.branches[self.choose()](self.embedding(tokens)))
        return logits


class BranchingTask(TinyTask):
    def __init__(self, widths: tuple[int, int], choose: Callable[[], int]) -> None:
        super().__init__()
        self.widths, self.choose = widths, choose

    def build_model(self) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Branching(self.widths, self.choose)


def words(
    comm: Communicator, strategy: FSDP, widths: tuple[int, int], differs_at: int
) -> tuple[int, str]:
    """The step that raised a ConfigError, and its words."""
    step = 0
    task = BranchingTask(widths, lambda: comm.world.rank if step >= differs_at else 0)
    driver = Driver(comm, strategy, Scenario(data=TinyData(steps=4)), task=task)
    for step in range(4):
        try:
            driver.step(step, TrainingOutcome())
        except TorshError as error:
            return step, str(error)
    return 4, ""


@pytest.fixture
def impatient() -> Iterator[RankPool]:
    """Two ranks whose collectives wait for 4 seconds."""
    with RankPool(2, options=replace(OPTIONS, timeout_s=4.0)) as pool:
        yield pool


@pytest.mark.parametrize("widths", [(WIDTH, WIDTH), (WIDTH, 3 * WIDTH)], ids=["same", "other"])
@pytest.mark.parametrize(
    "strategy",
    [
        FSDP(wrap_min_bytes=0),
        FSDP(),
        FSDP(wrap_modules=("Linear",)),
        FSDP(wrap_modules=("Embedding",)),
    ],
    ids=["branches", "merged", "layers", "root"],
)
def test_processes_that_branch_apart_say_so_on_every_rank(
    strategy: FSDP, widths: tuple[int, int]
) -> None:
    for step, said in shared_pool(2).run(words, strategy, widths, 0):
        assert step == 0
        assert "different parts of the model" in said
        for named in ("rank 0", "rank 1", "branches.0", "branches.1"):
            assert named in said
        assert "strategy.find_unused_parameters=true" in said


def one_leaves(comm: Communicator, differs_at: int) -> tuple[int, str]:
    """As ``words``, where rank 0 goes on alone until its collective gives it up."""
    try:
        return words(comm, FSDP(wrap_min_bytes=0), (WIDTH, WIDTH), differs_at)
    except RuntimeError as error:
        return -1, str(error)


def test_a_process_that_leaves_the_common_order_later_stops_before_its_collective(
    impatient: RankPool,
) -> None:
    step, said = impatient.run(one_leaves, 2)[1]
    assert step == 2
    assert "this process runs branches.1" in said
    assert "strategy.find_unused_parameters=true" in said


def alternating(comm: Communicator) -> dict[str, Tensor]:
    """Every rank takes the other branch in every other step."""
    step = 0
    scenario = Scenario(data=TinyData(steps=5, accumulate=2))
    driver = Driver(
        comm, FSDP(wrap_min_bytes=0), scenario, task=BranchingTask((WIDTH, WIDTH), lambda: step % 2)
    )
    outcome = TrainingOutcome()
    for step in range(5):
        driver.step(step, outcome)
    return driver.finish(outcome).parameters


def test_processes_that_change_branches_together_equal_plain_pytorch() -> None:
    calls = iter(range(100))
    scenario = Scenario(data=TinyData(steps=5, accumulate=2))
    task = BranchingTask((WIDTH, WIDTH), lambda: (next(calls) // 4) % 2)
    expected = reference.train(scenario, 2, task=task).parameters
    for parameters in shared_pool(2).run(alternating):
        same_tensors(parameters, expected, FP32.parameters, "parameters")


def count_agreements(comm: Communicator, strategy: FSDP, accumulate: int) -> int:
    """How often the processes ask one another in three steps, after two of the same model."""
    scenario = Scenario(data=TinyData(steps=5, accumulate=accumulate))
    driver = Driver(comm, strategy, scenario)
    asked = 0

    def agree(self: Any, what: Any, unit: Any) -> None:
        nonlocal asked
        asked += 1

    own = CommonOrder._agree
    for number in range(5):
        if number == 2:
            CommonOrder._agree = agree  # type: ignore[method-assign]
        driver.step(number, TrainingOutcome())
    CommonOrder._agree = own  # type: ignore[method-assign]
    return asked


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("strategy", [FSDP(wrap_min_bytes=0), FSDP()], ids=["blocks", "merged"])
def test_processes_that_go_the_same_way_ask_nothing_after_the_first_steps(
    strategy: FSDP, accumulate: int
) -> None:
    """Also where the blocks are one unit: a backward then gathers what its forward has gathered."""
    assert shared_pool(2).run(count_agreements, strategy, accumulate) == [0, 0]


def count_groups(comm: Communicator, strategy: FSDP) -> tuple[int, int]:
    """Process groups that stay in the process after one run and after three."""
    counts = []
    for _ in range(3):
        driver = Driver(comm, strategy, Scenario(data=TinyData(steps=1)))
        outcome = TrainingOutcome()
        driver.step(0, outcome)
        driver.finish(outcome)
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts[0], counts[2]


def test_runs_one_after_another_leave_no_process_groups() -> None:
    """A group keeps threads and connections for as long as the process lives."""
    for first, third in shared_pool(2).run(count_groups, FSDP()):
        assert third == first
