"""The mpi backend keeps the contracts that gloo keeps, and its launcher those of launchers."""

from dataclasses import replace

import pytest
from torsh_mpi.launcher import Mpi

from torsh_trainer.strategies import builtin
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.testing import CommunicatorContract, LauncherContract, StrategyContract
from torsh_trainer.testing.ranks import OPTIONS

MPI = replace(OPTIONS, backend="mpi")


class TestCommunicator(CommunicatorContract):
    comm_options = MPI
    world_sizes = (2, 4)


class TestDDP(StrategyContract):
    variant = True
    strategy = DDP()
    comm_options = MPI
    for_unused = DDP(find_unused_parameters=True)


class TestDDPWithZero1(StrategyContract):
    variant = True
    strategy = DDP(zero1=True, find_unused_parameters=True)
    comm_options = MPI
    world_sizes = (2,)


class TestBuiltIn(StrategyContract):
    strategy = builtin.MPI()
    comm_options = MPI
    for_unused = builtin.MPI(find_unused_parameters=True)


class TestBuiltInWithZero1(StrategyContract):
    """The parameters lie in memory that the ranks share, and each steps its own."""

    variant = True
    strategy = builtin.MPI(zero1=True, find_unused_parameters=True)
    comm_options = MPI
    world_sizes = (2,)


class TestFSDP(StrategyContract):
    variant = True
    world_sizes = (2,)
    strategy = FSDP()
    for_branches = FSDP(find_unused_parameters=True)
    comm_options = MPI


@pytest.mark.exhaustive  # groups of two are those of TestFSDP, and of HSDP on gloo
class TestHSDP(StrategyContract):
    variant = True
    strategy = FSDP(shard_size=2, wrap_min_parameters=60)
    for_branches = FSDP(shard_size=2, wrap_min_parameters=60, find_unused_parameters=True)
    comm_options = MPI
    world_sizes = (4,)


class TestDDPBesideTheSameSamples(StrategyContract):
    variant = True
    strategy = DDP()
    comm_options = MPI
    world_sizes = (2,)
    model_replicate = 2
    for_unused = DDP(find_unused_parameters=True)


class TestBuiltInWithZero1BesideTheSameSamples(StrategyContract):
    variant = True
    strategy = builtin.MPI(zero1=True, find_unused_parameters=True)
    comm_options = MPI
    world_sizes = (2,)
    model_replicate = 2


class TestLauncher(LauncherContract):
    launcher = Mpi(num_processes=2)
