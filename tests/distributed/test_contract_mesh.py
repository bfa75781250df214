"""Every strategy on four ranks, of which two and two have the same samples, equals plain PyTorch.

Before any engine divides a layer: who sees other samples, and who the same, is not the world.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from torsh_trainer.comm.base import Communicator
from torsh_trainer.strategies.base import Engine, Job
from torsh_trainer.strategies.builtin import Gloo
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.testing.strategy import StrategyContract


class TwoByTwo(StrategyContract):
    world_sizes = (2,)
    model_replicate = 2


class TestDDP(TwoByTwo):
    strategy = DDP()
    for_unused = DDP(find_unused_parameters=True)


class TestDDPWithoutOverlapAndWithZero1(TwoByTwo):
    variant = True
    strategy = DDP(overlap=False, zero1=True, find_unused_parameters=True, bucket_cap_mb=0.0005)


class TestFSDP(TwoByTwo):
    strategy = FSDP(wrap_min_bytes=0)
    for_unused = FSDP(find_unused_parameters=True)


class TestGloo(TwoByTwo):
    variant = True
    strategy = Gloo()
    for_unused = Gloo(find_unused_parameters=True)


class TestGlooWithZero1(TwoByTwo):
    variant = True
    strategy = Gloo(zero1=True, find_unused_parameters=True)


def test_replicas_of_shards_beside_the_same_samples_equal_plain_pytorch() -> None:
    class Suite(TwoByTwo):
        strategy = FSDP(wrap_min_bytes=0, shard_size=2)

    Suite().test_adamw_with_clipping_and_a_schedule_equals_plain_pytorch(4)


@dataclass(frozen=True)
class OverTheWorld(DDP):
    """Reduces over all processes, those with the same samples included."""

    def prepare(self, job: Job, comm: Communicator) -> Engine:
        assert job.groups is not None
        return super().prepare(job, job.groups.whole)


@dataclass(frozen=True)
class NormsOverTheWorld(FSDP):
    """Cuts parameters over those that see other samples, and adds up norms over all."""

    def prepare(self, job: Job, comm: Communicator) -> Engine:
        engine: Any = super().prepare(job, comm)
        assert job.groups is not None
        engine._gradients.norm_group = job.groups.whole.process_group
        return engine


@pytest.mark.parametrize(
    ("wrong", "rule", "words"),
    [
        (OverTheWorld(), "test_three_steps_of_sgd_equal_plain_pytorch", "gradient norm"),
        (
            OverTheWorld(),
            "test_running_statistics_are_those_of_one_process",
            "the shards of buffers/rows/batch_norm.running_mean leave a hole",
        ),
        (
            NormsOverTheWorld(wrap_min_bytes=0),
            "test_clipping_by_norm_uses_the_norm_of_the_global_gradient",
            "gradient norm",
        ),
    ],
)
def test_an_engine_that_takes_the_world_for_its_group_fails_the_contract(
    wrong: Any, rule: str, words: str
) -> None:
    class Suite(TwoByTwo):
        strategy = wrong

    with pytest.raises(AssertionError, match=words):
        getattr(Suite(), rule)(2)
