"""Modules whose state_dict gives copies, or more than tensors: their own loading is what counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from torsh_trainer import DDP, FSDP, CheckpointOptions, Single
from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.comm.base import Communicator
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.builtin import Gloo
from torsh_trainer.tasks.weights import load_pretrained
from torsh_trainer.testing.cases import Driver
from torsh_trainer.testing.own_state import KINDS, OwnScenario
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.reference import TrainingOutcome
from torsh_trainer.testing.state import whole_state
from torsh_trainer.testing.tiny import TinyModel, TinyModelOptions


def save_and_load(
    comm: Communicator, strategy: Strategy, kind: type[TinyModel], folder: Path
) -> tuple[dict[str, Any], dict[str, float]]:
    """The state of the model that was saved, and the metrics of another that has loaded it."""
    saving = Driver(comm, strategy, OwnScenario(kind=kind, optimizer="adamw", ema_decay=0.5))
    outcome = TrainingOutcome()
    for number in range(2):
        saving.step(number, outcome)
    state = saving.engine.state_dict()
    checkpointer = DcpCheckpointer(folder, comm, CheckpointOptions())
    path = checkpointer.save(2, {"engine": state}, {})
    whole = whole_state(state, comm)
    other = OwnScenario(TinyModelOptions(seed=7), kind=kind, optimizer="adamw", ema_decay=0.5)
    loading = Driver(comm, strategy, other)
    template = {"engine": loading.engine.state_template()}
    loading.engine.load_state_dict(checkpointer.load(template, path=path)["engine"])
    checkpointer.close()
    return whole["model"], loading.finish(TrainingOutcome()).metrics


def plain_metrics(kind: type[TinyModel], state: dict[str, Any], ranks: int) -> dict[str, float]:
    scenario = OwnScenario(TinyModelOptions(seed=9), kind=kind)
    task, model = scenario.task, scenario.task.build_model()
    model.load_state_dict(state)
    sums: dict[str, list[float]] = {}
    with torch.no_grad():
        for rank in scenario.data.evaluation(ranks):
            for item in rank:
                batch, counts = item[0], item[1]
                if counts:
                    for name, mean in task.evaluate(model.eval(), batch).items():
                        total = sums.setdefault(name, [0.0, 0.0])
                        total[0] += float(mean.total)
                        total[1] += float(mean.weight)
    return {name: total / weight for name, (total, weight) in sums.items()}


@pytest.mark.matrix(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "strategy", [Single(), DDP(), DDP(zero1=True), FSDP(), Gloo()], ids=lambda one: one.name
)
def test_a_checkpoint_reaches_a_model_by_its_own_loading(
    strategy: Strategy, kind: type[TinyModel], tmp_path: Path
) -> None:
    ranks = 1 if isinstance(strategy, Single) else 2
    for state, metrics in shared_pool(ranks).run(save_and_load, strategy, kind, tmp_path):
        assert metrics == pytest.approx(plain_metrics(kind, state, ranks), rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_pretrained_weights_reach_a_model_by_its_own_loading(
    kind: type[TinyModel], tmp_path: Path
) -> None:
    first = kind(TinyModelOptions())
    torch.save(first.state_dict(), tmp_path / "weights.pt")
    torch.manual_seed(3)
    plain, ours = kind(TinyModelOptions()), kind(TinyModelOptions())
    plain.load_state_dict(first.state_dict())
    report = load_pretrained(ours, tmp_path / "weights.pt")
    assert report.complete
    tokens = torch.arange(10).view(2, 5)
    assert torch.equal(ours(tokens), plain(tokens))
