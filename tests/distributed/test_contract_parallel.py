"""Layers that are cut over two processes equal plain PyTorch, alone and beside other axes."""

from __future__ import annotations

from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.parallel import Parallel
from torsh_trainer.testing.compare import OF_CUT_LAYERS
from torsh_trainer.testing.strategy import StrategyContract
from torsh_trainer.testing.tiny import TinyModelOptions

NORM = "a norm of batches is over tokens that other processes have"
OF_ALL_TOKENS = {"buffers": NORM, "sync_batchnorm": NORM}


class OverTwo(StrategyContract):
    tensor_parallel = 2
    tolerances = OF_CUT_LAYERS
    for_branches = Parallel(find_unused_parameters=True)
    rules_of_a_variant = frozenset(["test_adamw_with_clipping_and_a_schedule_equals_plain_pytorch"])


class TestTensorParallel(OverTwo):
    strategy = Parallel()
    world_sizes = (1,)
    model = TinyModelOptions(attention=True)


class TestTensorParallelOfSingleLayers(OverTwo):
    variant = True
    strategy = Parallel(wrap_min_bytes=0)
    world_sizes = (1,)


class TestTensorParallelOfShards(OverTwo):
    variant = True
    strategy = Parallel(wrap_min_bytes=0)
    world_sizes = (2,)
    model = TinyModelOptions(attention=True)


class TestSequenceParallel(OverTwo):
    variant = True
    strategy = Parallel(sequence_parallel=True)
    for_branches = Parallel(sequence_parallel=True, find_unused_parameters=True)
    refuses = OF_ALL_TOKENS
    length = 8
    world_sizes = (1,)
    model = TinyModelOptions(attention=True)


class TestTensorParallelOfReplicas(OverTwo):
    variant = True
    strategy = FSDP(shard_size=1)
    world_sizes = (2,)
    model = TinyModelOptions(attention=True)
