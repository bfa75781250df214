"""Sequences that are cut over two processes equal plain PyTorch, alone and beside other axes."""

from __future__ import annotations

import pytest

from torsh_trainer.strategies.parallel import Parallel
from torsh_trainer.testing.compare import OF_CUT_LAYERS
from torsh_trainer.testing.strategy import StrategyContract
from torsh_trainer.testing.tiny import TinyModelOptions

OF_ALL_TOKENS = "a norm of batches is over tokens that other processes have"
REFUSES = {"buffers": OF_ALL_TOKENS, "sync_batchnorm": OF_ALL_TOKENS}


class OverTwo(StrategyContract):
    context_parallel = 2
    length = 8
    tolerances = OF_CUT_LAYERS
    refuses = REFUSES
    world_sizes = (1,)
    model = TinyModelOptions(attention=True)
    for_branches = Parallel(find_unused_parameters=True)
    rules_of_a_variant = frozenset(["test_adamw_with_clipping_and_a_schedule_equals_plain_pytorch"])


class TestContextParallel(OverTwo):
    strategy = Parallel()


class TestContextParallelInARing(OverTwo):
    variant = True
    strategy = Parallel(wrap_min_bytes=0, context_exchange="ring")


class TestContextParallelByHeads(OverTwo):
    variant = True
    strategy = Parallel(context_exchange="alltoall")


class TestContextParallelOfShards(OverTwo):
    variant = True
    strategy = Parallel(wrap_min_bytes=0)
    world_sizes = (2,)


class TestContextParallelOfReplicas(OverTwo):
    variant = True
    strategy = Parallel(shard_size=1)
    world_sizes = (2,)


class TestContextParallelOfCutLayers(OverTwo):
    variant = True
    strategy = Parallel()
    tensor_parallel = 2


@pytest.mark.exhaustive
def test_four_parts_of_cut_layers_equal_plain_pytorch_on_eight_processes() -> None:
    class Suite(OverTwo):
        strategy = Parallel(wrap_min_bytes=0)
        tensor_parallel = 2
        context_parallel = 4
        length = 16

    Suite().test_adamw_with_clipping_and_a_schedule_equals_plain_pytorch(1)
    Suite().test_three_steps_of_sgd_equal_plain_pytorch(1)
