"""Trainable parameters that no optimizer has are refused from stage 1 on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD, Optimizer
from torsh_trainer_deepspeed import DeepSpeed

from torsh_trainer.errors import Unsupported
from torsh_trainer.testing import cases
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.reference import Scenario
from torsh_trainer.testing.tiny import TinyTask


class HeadTask(TinyTask):
    def build_optimizers(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> Mapping[str, Optimizer]:
        return {"main": SGD([p for n, p in named_parameters if n.startswith("head")], lr=0.1)}


@dataclass(frozen=True)
class HeadScenario(Scenario):
    @property
    def task(self) -> TinyTask:
        return HeadTask(self.model)


def refuse(comm: Any, strategy: DeepSpeed, scenario: Scenario) -> str:
    with pytest.raises(Unsupported) as caught:
        cases.train(comm, strategy, scenario)
    return str(caught.value)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_that_no_optimizer_has_are_refused_by_name_before_the_first_step(
    stage: int,
) -> None:
    for sentence in shared_pool(2).run(refuse, DeepSpeed(stage=stage), HeadScenario()):
        assert "embedding.weight" in sentence
        assert "strategy.stage=0" in sentence
