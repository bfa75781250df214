"""Parameters that some micro-batches of a step leave out, or all of them from a later step on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError
from torsh_trainer.strategies.base import Clip, Strategy
from torsh_trainer.strategies.builtin import Gloo
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.testing import cases, reference
from torsh_trainer.testing.compare import FP32, same_tensors
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.reference import Scenario, TrainingOutcome
from torsh_trainer.testing.tiny import VOCABULARY, WIDTH, TinyData, TinyTask

ACCUMULATE = 3


class Optional(nn.Module):
    """Leaves ``maybe`` out where ``uses`` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(VOCABULARY, WIDTH)
        self.maybe = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, VOCABULARY)
        self.uses = True

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(F.one_hot(tokens, VOCABULARY).float()))
        if self.uses:
            hidden = hidden + torch.tanh(self.maybe(hidden))
        logits: Tensor = self.last(hidden)
        return logits


class OptionalTask(TinyTask):
    """``ranks`` are those whose micro-batches this process runs, one after another."""

    def __init__(self, kind: str, ranks: int) -> None:
        super().__init__()
        self.kind, self.ranks, self.calls = kind, ranks, 0

    def build_model(self) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Optional()

    def forward(self, model: nn.Module, batch: Any) -> Any:
        part = next((m for m in model.modules() if isinstance(m, Optional)), None)
        if part is not None and torch.is_grad_enabled():
            step, place = divmod(self.calls, ACCUMULATE * self.ranks)
            is_last = place % ACCUMULATE == ACCUMULATE - 1
            part.uses = {
                "the last": not is_last,
                "all but the last": is_last,
                "the last of the second step": not is_last or step != 1,
                "all from the second step on": step < 1,
            }[self.kind]
            self.calls += 1
        return model(batch["tokens"])


def train(
    comm: Communicator, strategy: Strategy, scenario: Scenario, kind: str
) -> TrainingOutcome | str:
    """The outcome, or the words of what refused it before the update."""
    driver = cases.Driver(comm, strategy, scenario, task=OptionalTask(kind, 1))
    outcome = TrainingOutcome()
    for number in range(scenario.data.steps):
        try:
            driver.step(number, outcome)
        except ConfigError as error:
            return f"step {number}: {error}"
    return driver.finish(outcome)


KINDS = [
    "the last",
    "all but the last",
    "the last of the second step",
    "all from the second step on",
]


@pytest.mark.matrix(10)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "strategy",
    [
        DDP(find_unused_parameters=True),
        DDP(find_unused_parameters=True, overlap=False),
        Gloo(find_unused_parameters=True),
        FSDP(wrap_min_bytes=0),
        FSDP(find_unused_parameters=True),
    ],
    ids=str,
)
def test_they_train_as_in_plain_pytorch(strategy: Strategy, kind: str) -> None:
    scenario = Scenario(data=TinyData(accumulate=ACCUMULATE), clip=Clip())
    expected = reference.train(scenario, 2, task=OptionalTask(kind, 2))
    for outcome in shared_pool(2).run(train, strategy, scenario, kind):
        assert isinstance(outcome, TrainingOutcome), outcome
        same_tensors(outcome.parameters, expected.parameters, FP32.parameters, "parameters")


@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("strategy", [DDP(overlap=False), Gloo(), Gloo(overlap=False)], ids=str)
def test_only_torchs_wrapper_needs_the_knob_for_it(strategy: Strategy, kind: str) -> None:
    test_they_train_as_in_plain_pytorch(strategy, kind)


@pytest.mark.parametrize(
    ("kind", "step"), [("the last", 0), ("the last of the second step", 1), (KINDS[3], 1)]
)
def test_torchs_wrapper_names_them_and_the_knob_before_the_update(kind: str, step: int) -> None:
    scenario = Scenario(data=TinyData(accumulate=ACCUMULATE), clip=Clip())
    for words in shared_pool(2).run(train, DDP(), scenario, kind):
        assert isinstance(words, str)
        assert words.startswith(f"step {step}: 2 parameters got no gradient")
        assert "maybe.weight, maybe.bias" in words
        assert "strategy.find_unused_parameters=true" in words
