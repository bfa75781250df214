"""The built-in strategies equal plain PyTorch, however their gradients travel."""

from torsh_trainer.strategies.builtin import Gloo
from torsh_trainer.testing.strategy import StrategyContract


class TestGloo(StrategyContract):
    strategy = Gloo()
    world_sizes = (1, 2, 4)
    for_unused = Gloo(find_unused_parameters=True)


class TestGlooInSmallBuckets(StrategyContract):
    variant = True
    strategy = Gloo(bucket_cap_mb=0.0005, broadcast_buffers=False)
    world_sizes = (2,)
    for_unused = Gloo(bucket_cap_mb=0.0005, find_unused_parameters=True)


class TestGlooWithoutOverlapAndWithZero1(StrategyContract):
    variant = True
    strategy = Gloo(overlap=False, find_unused_parameters=True, zero1=True)
    world_sizes = (2,)
