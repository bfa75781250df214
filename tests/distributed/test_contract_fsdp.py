"""FSDP equals plain PyTorch, however the model is cut."""

from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.testing.strategy import StrategyContract


class TestFSDP(StrategyContract):
    strategy = FSDP()
    world_sizes = (1, 2, 4)
    for_branches = FSDP(find_unused_parameters=True)


class TestFSDPOfBlocks(StrategyContract):
    variant = True
    strategy = FSDP(wrap_min_bytes=0)
    world_sizes = (2, 4)
    for_branches = FSDP(wrap_min_bytes=0, find_unused_parameters=True)


class TestFSDPOfPairs(StrategyContract):
    variant = True
    strategy = FSDP(wrap_min_bytes=700)
    world_sizes = (2,)
    for_branches = FSDP(wrap_min_bytes=700, find_unused_parameters=True)


class TestFSDPWithoutReshard(StrategyContract):
    variant = True
    strategy = FSDP(reshard_after_forward=False, prefetch_depth=1, wrap_min_bytes=0)
    world_sizes = (2,)
    for_branches = FSDP(prefetch_depth=1, wrap_min_bytes=0, find_unused_parameters=True)


class TestFSDPThatReducesEveryMicroBatch(StrategyContract):
    variant = True
    strategy = FSDP(reduce_every_micro_batch=True, wrap_modules=("Block",))
    world_sizes = (2,)
    for_branches = FSDP(
        reduce_every_micro_batch=True, wrap_modules=("Block",), find_unused_parameters=True
    )


class TestHybridFSDP(StrategyContract):
    variant = True
    strategy = FSDP(shard_size=2, wrap_min_parameters=60)
    world_sizes = (4,)
    for_branches = FSDP(shard_size=2, wrap_min_parameters=60, find_unused_parameters=True)


class TestFSDPOnHostMemory(StrategyContract):
    variant = True
    strategy = FSDP(cpu_offload=True)
    world_sizes = (2,)
    for_branches = FSDP(cpu_offload=True, find_unused_parameters=True)


class TestFSDPThatFindsUnusedParameters(StrategyContract):
    variant = True
    strategy = FSDP(find_unused_parameters=True)
    world_sizes = (2,)
