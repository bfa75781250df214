"""The contracts of strategies and communicators, kept on CUDA devices.

Plain PyTorch runs on the same GPU. Their CPU form are the classes of ``tests/distributed`` that
``test_forms`` names: the same strategies on gloo.
"""

from __future__ import annotations

from typing import ClassVar

import pytest

from torsh_trainer.strategies.builtin import NCCL
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.dp import DP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.single import Single
from torsh_trainer.testing.communicator import CommunicatorContract
from torsh_trainer.testing.strategy import StrategyContract


class _OnOne:
    device = "cuda"
    world_sizes = (1,)


class _OnTwo:
    device = "cuda"
    world_sizes = (2,)


@pytest.mark.gpu
class TestCommunicatorOnOne(_OnOne, CommunicatorContract):
    """NCCL in a group of one."""


@pytest.mark.gpus(2)
class TestCommunicatorOnTwo(_OnTwo, CommunicatorContract):
    """NCCL between two GPUs."""


@pytest.mark.gpu
class TestSingleOnOne(_OnOne, StrategyContract):
    strategy = Single()


@pytest.mark.gpu
class TestDDPOnOne(_OnOne, StrategyContract):
    strategy = DDP()
    for_unused = DDP(find_unused_parameters=True)


@pytest.mark.gpus(2)
class TestDDPOnTwo(_OnTwo, StrategyContract):
    strategy = DDP()
    for_unused = DDP(find_unused_parameters=True)


@pytest.mark.gpu
class TestFSDPOnOne(_OnOne, StrategyContract):
    strategy = FSDP()
    for_branches = FSDP(find_unused_parameters=True)


@pytest.mark.gpus(2)
class TestFSDPOnTwo(_OnTwo, StrategyContract):
    strategy = FSDP(wrap_min_bytes=0)
    for_branches = FSDP(wrap_min_bytes=0, find_unused_parameters=True)


@pytest.mark.gpus(2)
class TestFSDPOffloadedOnTwo(_OnTwo, StrategyContract):
    strategy = FSDP(cpu_offload=True)
    for_branches = FSDP(cpu_offload=True, find_unused_parameters=True)


@pytest.mark.gpu
class TestNCCLOnOne(_OnOne, StrategyContract):
    strategy = NCCL()
    for_unused = NCCL(find_unused_parameters=True)


@pytest.mark.gpus(2)
class TestNCCLOnTwo(_OnTwo, StrategyContract):
    strategy = NCCL()
    for_unused = NCCL(find_unused_parameters=True)


@pytest.mark.gpu
class TestDPOnOne(_OnOne, StrategyContract):
    strategy = DP(device_ids=(0,))
    refuses: ClassVar = {"bf16_true": "torch.nn.DataParallel copies the model's own parameters"}
