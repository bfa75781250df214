"""What plain PyTorch trains trains under the native engines alike, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torsh_trainer.optim.precision import Precision
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.builtin import Gloo
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.single import Single
from torsh_trainer.testing import reference
from torsh_trainer.testing.compare import FP32, same_tensors
from torsh_trainer.testing.odd import (
    GRADIENTS,
    HOOKS,
    MEMORY,
    OVERLAPS,
    WRITES,
    Kind,
    OddTask,
    check_plain,
    check_refused,
    train_odd,
)
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.reference import Scenario, TrainingOutcome
from torsh_trainer.testing.tiny import TinyData

TWICE = Scenario(data=TinyData(accumulate=2))
CUT = [FSDP(), FSDP(reshard_after_forward=False), FSDP(find_unused_parameters=True)]


@pytest.mark.parametrize("kind", [*HOOKS, *MEMORY, *OVERLAPS, *GRADIENTS])
def test_it_trains_as_in_plain_pytorch(kind: Kind) -> None:
    check_plain(shared_pool(2), Gloo(), kind, TWICE)


@pytest.mark.parametrize("kind", [*MEMORY, *OVERLAPS])
@pytest.mark.parametrize("strategy", [DDP(), DDP(overlap=False)], ids=str)
def test_torchs_wrapper_keeps_parameters_where_they_lie(strategy: Strategy, kind: Kind) -> None:
    check_plain(shared_pool(2), strategy, kind, TWICE)


@pytest.mark.parametrize("kind", MEMORY)
@pytest.mark.parametrize("strategy", [DDP(zero1=True), Gloo(zero1=True), FSDP()], ids=str)
def test_parameters_of_one_storage_train_where_they_are_cut(strategy: Strategy, kind: Kind) -> None:
    check_plain(shared_pool(2), strategy, kind)


@pytest.mark.parametrize("kind", OVERLAPS)
@pytest.mark.parametrize("strategy", [DDP(zero1=True), Gloo(zero1=True), FSDP()], ids=str)
def test_parameters_in_the_same_memory_are_refused_there(strategy: Strategy, kind: Kind) -> None:
    check_refused(
        shared_pool(2), strategy, kind, "'blocks.0.linear.bias' and 'blocks.1.linear.bias'"
    )


@pytest.mark.parametrize("strategy", [Gloo(), DDP(), DDP(overlap=False), FSDP()], ids=str)
def test_a_hook_on_an_accumulated_gradient_is_refused_on_several_processes(
    strategy: Strategy,
) -> None:
    check_refused(shared_pool(2), strategy, "accumulated", "'head.weight'")


def test_a_hook_on_an_accumulated_gradient_is_called_on_one_process() -> None:
    check_plain(shared_pool(1), Single(), "accumulated", TWICE)
    check_plain(shared_pool(1), DDP(), "accumulated", TWICE)


@pytest.mark.parametrize("kind", WRITES)
@pytest.mark.parametrize("strategy", [DDP(), DDP(zero1=True), Gloo()], ids=str)
def test_a_forward_that_bounds_its_weights_trains_as_in_plain_pytorch(
    strategy: Strategy, kind: Kind
) -> None:
    check_plain(shared_pool(2), strategy, kind, TWICE)


@pytest.mark.parametrize("kind", WRITES)
@pytest.mark.parametrize("strategy", CUT, ids=str)
def test_such_a_forward_is_refused_where_it_sees_copies(strategy: Strategy, kind: Kind) -> None:
    check_refused(
        shared_pool(2), strategy, kind, "strategy=fsdp", "'blocks.0.linear.weight'", "a copy"
    )


def test_it_is_refused_under_true_bf16_on_one_process() -> None:
    scenario = Scenario(precision=Precision(params="bf16", compute="bf16"))
    for kind in WRITES:
        words = "precision=bf16_true", "'blocks.0.linear.weight'", "a copy"
        check_refused(shared_pool(1), Single(), kind, *words, scenario=scenario)


@pytest.mark.parametrize("strategy", [DDP(), Gloo(), DDP(zero1=True)], ids=str)
def test_parameters_that_follow_the_samples_of_a_process_are_refused(strategy: Strategy) -> None:
    check_refused(shared_pool(2), strategy, "moved", "'norm.bias'", "otherwise", "make it a buffer")
    check_plain(shared_pool(1), Single(), "moved", TWICE)


class Shortened(OddTask):
    """Its embedding shortens the rows that it gives."""

    def build_model(self) -> Any:
        model = super().build_model()
        model.embedding.max_norm = 0.5
        return model


@pytest.mark.parametrize("strategy", [DDP(), Gloo(), FSDP()], ids=str)
def test_an_embedding_that_shortens_the_rows_it_gives_is_refused(strategy: Strategy) -> None:
    for found in shared_pool(2).run(train_odd, strategy, TWICE, Shortened("clamp")):
        assert isinstance(found, str)
        assert found.startswith("step 0: the embedding 'embedding' was built with max_norm=0.5")


def test_on_one_process_it_trains_as_in_plain_pytorch() -> None:
    expected = reference.train(TWICE, 1, task=Shortened("clamp"))
    (found,) = shared_pool(1).run(train_odd, Single(), TWICE, Shortened("clamp"))
    assert isinstance(found, TrainingOutcome)
    for outcome in (found, expected):  # an evaluation shortens rows too
        table = outcome.parameters["embedding.weight"]
        outcome.parameters["embedding.weight"] = torch.renorm(table, 2, 0, 0.5)
    same_tensors(found.parameters, expected.parameters, FP32.parameters, "parameters")
