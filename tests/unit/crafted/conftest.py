"""What the tests of crafted checkpoints share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.comm.local import LocalCommunicator


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an attack makes, it makes here."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A sound checkpoint of two tensors, one of them free of any template."""
    state = {
        "model": {"w": torch.arange(100.0)},
        "rng": {"rank_0": {"torch": torch.arange(9)}},
        "position": {"step": 1},
    }
    saver = DcpCheckpointer(tmp_path / "checkpoints", LocalCommunicator())
    saved = saver.save(1, state, {"loss": 0.5})
    saver.close()
    assert isinstance(saved, Path)
    return saved
