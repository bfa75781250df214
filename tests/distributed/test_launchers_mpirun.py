"""``launcher=mpirun`` with a real mpirun: the contract of launchers, and what it refuses."""

from __future__ import annotations

from torsh_trainer.launchers.mpirun import MpirunLauncher
from torsh_trainer.testing import LauncherContract


class TestLauncher(LauncherContract):
    launcher = MpirunLauncher(num_processes=2)
