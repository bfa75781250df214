"""strategy=horovod keeps the contract of strategies: what plain PyTorch computes, it computes."""

from torsh_trainer_horovod.strategy import Horovod

from torsh_trainer.testing import StrategyContract

NO_BF16 = {"reduce_bf16": "Horovod 0.28.1 cannot add bf16 numbers"}


class TestHorovod(StrategyContract):
    strategy = Horovod()
    for_unused = Horovod(find_unused_parameters=True)
    refuses = NO_BF16


class TestSummedPasses(StrategyContract):
    variant = True
    strategy = Horovod(backward_passes_per_step=2)
    for_unused = Horovod(backward_passes_per_step=2, find_unused_parameters=True)
    micro_batches = 2
    world_sizes = (2,)
    refuses = NO_BF16


class TestSummedRanks(StrategyContract):
    variant = True
    strategy = Horovod(op="sum")
    for_unused = Horovod(op="sum", find_unused_parameters=True)
    world_sizes = (2,)
    refuses = NO_BF16 | {"manual_optimization": "there a gradient is averaged over ranks"}


class TestGroups(StrategyContract):
    variant = True
    strategy = Horovod(groups=3, fusion_threshold_mb=0, cache_capacity=0)
    for_unused = Horovod(find_unused_parameters=True)
    world_sizes = (2,)
    refuses = NO_BF16


class TestPredivided(StrategyContract):
    variant = True
    strategy = Horovod(gradient_predivide_factor=2.0)
    for_unused = Horovod(gradient_predivide_factor=2.0, find_unused_parameters=True)
    world_sizes = (2,)
    refuses = NO_BF16


class TestAlone(StrategyContract):
    strategy = Horovod()
    for_unused = Horovod(find_unused_parameters=True)
    world_sizes = (1,)
    refuses = NO_BF16
