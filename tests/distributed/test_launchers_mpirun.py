"""``launcher=mpirun`` with a real mpirun: the contract of launchers, and what it refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, DryRun, ResourceError
from torsh_trainer.launchers.base import LaunchContext
from torsh_trainer.launchers.mpirun import MpirunLauncher
from torsh_trainer.testing import LauncherContract


class TestLauncher(LauncherContract):
    launcher = MpirunLauncher(num_processes=2)
