"""What plain PyTorch trains trains under the native engines alike, or is refused by name."""

from __future__ import annotations

import pytest

from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.builtin import Gloo
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.single import Single
from torsh_trainer.testing.odd import (
    GRADIENTS,
    HOOKS,
    MEMORY,
    OVERLAPS,
    Kind,
    check_plain,
    check_refused,
)
from torsh_trainer.testing.ranks import shared
from torsh_trainer.testing.reference import Scenario
from torsh_trainer.testing.tiny import TinyData

TWICE = Scenario(data=TinyData(accumulate=2))


@pytest.mark.parametrize("kind", [*HOOKS, *MEMORY, *OVERLAPS, *GRADIENTS])
def test_it_trains_as_in_plain_pytorch(kind: Kind) -> None:
    check_plain(shared(2), Gloo(), kind, TWICE)


@pytest.mark.parametrize("kind", [*MEMORY, *OVERLAPS])
@pytest.mark.parametrize("strategy", [DDP(), DDP(overlap=False)], ids=str)
def test_torchs_wrapper_keeps_parameters_where_they_lie(strategy: Strategy, kind: Kind) -> None:
    check_plain(shared(2), strategy, kind, TWICE)


@pytest.mark.parametrize("kind", MEMORY)
@pytest.mark.parametrize("strategy", [DDP(zero1=True), Gloo(zero1=True), FSDP()], ids=str)
def test_parameters_of_one_storage_train_where_they_are_cut(strategy: Strategy, kind: Kind) -> None:
    check_plain(shared(2), strategy, kind)


@pytest.mark.parametrize("kind", OVERLAPS)
@pytest.mark.parametrize("strategy", [DDP(zero1=True), Gloo(zero1=True), FSDP()], ids=str)
def test_parameters_in_the_same_memory_are_refused_there(strategy: Strategy, kind: Kind) -> None:
    check_refused(shared(2), strategy, kind, "'blocks.0.linear.bias' and 'blocks.1.linear.bias'")


def test_a_hook_on_an_accumulated_gradient_is_refused_on_several_processes() -> None:
    check_refused(shared(2), Gloo(), "accumulated", "'head.weight'", "register_hook")
    check_plain(shared(1), Single(), "accumulated", TWICE)
