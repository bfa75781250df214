"""The built-in launchers keep the contract of launchers."""

from torsh_trainer.launchers.inline import Inline
from torsh_trainer.launchers.local import Local
from torsh_trainer.testing import LauncherContract


class TestLocal(LauncherContract):
    launcher = Local(num_processes=2)


class TestLocalWithOneProcess(LauncherContract):
    launcher = Local(num_processes=1)
    processes = 1
    in_process = True


class TestInline(LauncherContract):
    launcher = Inline()
    processes = 1
    in_process = True
