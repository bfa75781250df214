"""One process: its communicator is a null object, and mistakes are the same as among many."""

import pytest
import torch

from torsh_trainer.comm import create
from torsh_trainer.comm.base import CommOptions
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError

CPU = torch.device("cpu")


@pytest.fixture
def comm():
    return LocalCommunicator()


def test_it_stands_alone_on_the_cpu_without_a_process_group(comm):
    assert (comm.world.rank, comm.world.size) == (0, 1)
    assert comm.device == CPU
    assert comm.backend == "local"
    assert comm.process_group is None


def test_it_keeps_the_world_that_the_environment_gave():
    world = World(source="torchrun", reasons=("RANK=0 -> rank 0",))
    comm = create(world, CommOptions(), CPU, process_group=False)
    assert isinstance(comm, LocalCommunicator)
    assert comm.world is world


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "product"])
def test_a_reduction_over_one_is_the_value(comm, op):
    tensor = torch.tensor([1.5, -2.0])
    comm.all_reduce(tensor, op=op)
    assert tensor.tolist() == [1.5, -2.0]
    work = comm.all_reduce(tensor, op=op, async_op=True)
    assert work.wait()
    assert comm.reduce_values([0.25, 3.0], op=op) == [0.25, 3.0]


def test_what_is_gathered_does_not_share_memory_with_what_was_given(comm):
    tensor = torch.ones(2)
    for gathered in (comm.all_gather(tensor)[0], comm.gather(tensor)[0]):
        gathered.zero_()
    assert tensor.tolist() == [1.0, 1.0]


def test_there_is_nobody_to_send_to(comm):
    with pytest.raises(ConfigError, match="nobody to send to"):
        comm.send(torch.ones(1), dst=0)
    with pytest.raises(ConfigError, match="nobody to receive from"):
        comm.recv(torch.ones(1), src=0)


def test_the_mean_of_integers_is_refused_as_among_many(comm):
    with pytest.raises(ConfigError, match=r"mean of torch.int64.*op='sum'"):
        comm.all_reduce(torch.ones(1, dtype=torch.int64), op="mean")


def test_a_world_of_several_does_not_fit():
    with pytest.raises(ConfigError, match="2 processes cannot share"):
        LocalCommunicator(world=World(size=2, local_size=2))


def test_a_part_of_one_is_itself_or_nobody(comm):
    assert comm.split([0]).world.size == 1
    assert comm.split([]) is None
    with pytest.raises(ConfigError, match="rank 1 is not one of"):
        comm.split([0, 1])
