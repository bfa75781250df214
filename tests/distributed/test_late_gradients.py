"""A backward that adds to one parameter several times, under every engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import Unsupported
from torsh_trainer.strategies.base import Clip, Strategy
from torsh_trainer.strategies.builtin import Gloo
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.single import Single
from torsh_trainer.testing import cases, reference
from torsh_trainer.testing.compare import FP32, same_tensors
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.reference import Scenario, TrainingOutcome
from torsh_trainer.testing.tiny import VOCABULARY, WIDTH, TinyData, TinyTask

SMALL = 1e-5
"""So many MiB that every parameter is a bucket of its own."""


class Shared(nn.Module):
    """A layer that is used twice, once of them in a reentrant checkpoint, from some call on."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        has_first = kind in ("within", "apart")
        width = WIDTH if has_first else VOCABULARY
        self.first = nn.Linear(VOCABULARY, width) if has_first else nn.Identity()
        self.layer = nn.Linear(width, width)
        self.head = nn.Linear(width, VOCABULARY)
        self.kind, self.calls = kind, 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        hidden = functional.one_hot(tokens, VOCABULARY).to(self.head.weight.dtype)
        hidden = self.first(hidden)
        if self.kind != "apart":
            hidden = torch.tanh(self.layer(hidden))
        if self.kind != "later" or self.calls > 2:
            hidden = torch.tanh(checkpoint(self.layer, hidden, use_reentrant=True))
        logits: Tensor = self.head(hidden)
        return logits


class SharedTask(TinyTask):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def build_model(self) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Shared(self.kind)


def train(
    comm: Communicator, strategy: Strategy, scenario: Scenario, kind: str
) -> TrainingOutcome | str:
    """The outcome, or the words of what refused it before the update."""
    driver = cases.Driver(comm, strategy, scenario, task=SharedTask(kind))
    outcome = TrainingOutcome()
    try:
        for number in range(scenario.data.steps):
            driver.step(number, outcome)
    except Unsupported as error:
        return str(error)
    return driver.finish(outcome)


@pytest.mark.parametrize("kind", ["first", "within"])
@pytest.mark.parametrize(
    "strategy",
    [
        Single(),
        Gloo(),
        Gloo(bucket_cap_mb=SMALL),
        Gloo(overlap=False),
        DDP(overlap=False),
    ],
    ids=str,
)
def test_a_shared_layer_in_a_reentrant_checkpoint_trains_as_in_plain_pytorch(
    strategy: Strategy, kind: str
) -> None:
    ranks = 1 if isinstance(strategy, Single) else 2
    scenario = Scenario(data=TinyData(accumulate=2), clip=Clip())
    expected = reference.train(scenario, ranks, task=SharedTask(kind))
    for outcome in shared_pool(ranks).run(train, strategy, scenario, kind):
        assert isinstance(outcome, TrainingOutcome), outcome
        same_tensors(outcome.parameters, expected.parameters, FP32.parameters, "parameters")


@pytest.mark.parametrize("kind", ["first", "within"])
@pytest.mark.parametrize("strategy", [DDP(), DDP(bucket_cap_mb=SMALL)], ids=str)
def test_torchs_wrapper_refuses_it_in_the_first_step(strategy: Strategy, kind: str) -> None:
    scenario = Scenario(data=TinyData(accumulate=2), clip=Clip())
    for words in shared_pool(2).run(train, strategy, scenario, kind):
        assert isinstance(words, str)
        assert "'layer." in words
        assert "strategy.overlap=false" in words


@pytest.mark.parametrize(
    "strategy",
    [
        DDP(),
        DDP(bucket_cap_mb=SMALL),
        DDP(find_unused_parameters=True),
        DDP(static_graph=True),
        DDP(gradient_as_bucket_view=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_torchs_wrapper_refuses_it_where_it_begins_in_a_later_step(
    strategy: Strategy, accumulate: int
) -> None:
    scenario = Scenario(data=TinyData(accumulate=accumulate), clip=Clip())
    for words in shared_pool(2).run(train, strategy, scenario, "later"):
        assert isinstance(words, str)
        assert "use_reentrant=True" in words
        assert "strategy.overlap=false" in words


@pytest.mark.parametrize("strategy", [DDP(), DDP(bucket_cap_mb=SMALL)], ids=str)
def test_a_layer_of_its_own_in_a_reentrant_checkpoint_trains(strategy: Strategy) -> None:
    scenario = Scenario(data=TinyData(accumulate=2), clip=Clip())
    expected = reference.train(scenario, 2, task=SharedTask("apart"))
    for outcome in shared_pool(2).run(train, strategy, scenario, "apart"):
        assert isinstance(outcome, TrainingOutcome), outcome
        same_tensors(outcome.parameters, expected.parameters, FP32.parameters, "parameters")


def test_a_layer_that_is_shared_in_some_steps_alone_is_refused_there() -> None:
    scenario = Scenario(data=TinyData(accumulate=1), clip=Clip())
    for words in shared_pool(2).run(train, Gloo(bucket_cap_mb=SMALL), scenario, "later"):
        assert isinstance(words, str)
        assert "added again" in words
        assert "strategy.overlap=false" in words
