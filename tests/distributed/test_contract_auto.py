"""Whatever ``auto`` takes equals plain PyTorch: single, ddp, and fsdp for a model too large."""

from torsh_trainer.strategies.auto import Auto
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.testing.strategy import StrategyContract


class TestAuto(StrategyContract):
    variant = True
    strategy = Auto()
    world_sizes = (1, 2)
    for_unused = DDP(find_unused_parameters=True)


class TestAutoWithoutMemory(StrategyContract):
    """A fraction of memory in which not even the tiny model fits: auto shards it."""

    variant = True
    strategy = Auto(memory_fraction=1e-9)
    world_sizes = (2,)
    for_branches = FSDP(find_unused_parameters=True)
