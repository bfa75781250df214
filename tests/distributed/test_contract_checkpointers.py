"""The built-in checkpointer keeps the contract of checkpointers."""

from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.testing import CheckpointerContract


class TestDcp(CheckpointerContract):
    checkpointer = DcpCheckpointer
