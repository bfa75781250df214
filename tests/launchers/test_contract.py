"""Submit launchers keep their contract, at a real scheduler."""

from __future__ import annotations

import sys
import tempfile

import pytest

from torsh_trainer.launchers.kubernetes.launcher import KubernetesLauncher
from torsh_trainer.launchers.slurm.launcher import SlurmLauncher
from torsh_trainer.testing import SubmitLauncherContract


@pytest.mark.usefixtures("slurm")
class TestSlurm(SubmitLauncherContract):
    launcher = SlurmLauncher()


@pytest.mark.usefixtures("kube")
class TestKubernetes(SubmitLauncherContract):
    launcher = KubernetesLauncher(
        image="none",
        volumes=(f"host:{tempfile.gettempdir()}:{tempfile.gettempdir()}",),
        python=sys.executable,
        backoff_limit=0,
    )
