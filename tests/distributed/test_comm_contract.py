"""torch's communicator over gloo, and the null object for one process, keep the contract."""

from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.testing.communicator import CommunicatorContract


class TestGloo(CommunicatorContract):
    world_sizes = (1, 2, 4)

    @staticmethod
    def communicator(comm):
        return comm


class TestLocal(CommunicatorContract):
    world_sizes = (1,)

    @staticmethod
    def communicator(comm):
        return LocalCommunicator()
