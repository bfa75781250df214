"""Submit launchers keep their contract, at a real scheduler."""

from __future__ import annotations

import pytest

from torsh_trainer.launchers.slurm.launcher import SlurmLauncher
from torsh_trainer.testing import SubmitLauncherContract


@pytest.mark.usefixtures("slurm")
class TestSlurm(SubmitLauncherContract):
    launcher = SlurmLauncher()
