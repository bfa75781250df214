"""One process is plain PyTorch itself: it must not do anything more."""

from torsh_trainer.strategies.single import Single
from torsh_trainer.testing.strategy import StrategyContract


class TestSingle(StrategyContract):
    strategy = Single()
    world_sizes = (1,)
