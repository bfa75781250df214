"""DDP equals plain PyTorch, with every knob that changes how gradients travel."""

from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.testing.strategy import StrategyContract


class TestDDP(StrategyContract):
    strategy = DDP()
    world_sizes = (1, 2, 4)
    for_unused = DDP(find_unused_parameters=True)


class TestDDPWithZero1(StrategyContract):
    strategy = DDP(zero1=True, find_unused_parameters=True)
    world_sizes = (2,)


class TestDDPWithoutOverlap(StrategyContract):
    variant = True
    strategy = DDP(overlap=False, bucket_cap_mb=0.0005)
    world_sizes = (2,)
    for_unused = DDP(overlap=False, find_unused_parameters=True)


class TestDDPOnAStaticGraph(StrategyContract):
    variant = True
    strategy = DDP(static_graph=True)
    world_sizes = (2,)
    for_branches = DDP(find_unused_parameters=True)


class TestDDPWithGradientsOfTheirOwn(StrategyContract):
    variant = True
    strategy = DDP(gradient_as_bucket_view=False, broadcast_buffers=False, bucket_cap_mb=0.0005)
    world_sizes = (2,)
    for_unused = DDP(gradient_as_bucket_view=False, find_unused_parameters=True)


class TestDDPThatSumsBackwardPasses(StrategyContract):
    """Horovod's option: the gradient is larger by this factor, in the reference as well."""

    variant = True
    strategy = DDP(backward_passes_per_step=2)
    world_sizes = (2,)
    micro_batches = 2
    for_unused = DDP(backward_passes_per_step=2, find_unused_parameters=True)
