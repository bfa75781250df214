"""What the tests of other formats share."""

from __future__ import annotations

from pathlib import Path

import pytest
from formats.fitting import HALF, WHOLE, Run, train

from torsh_trainer import CheckpointOptions
from torsh_trainer.optim.schedule.shapes import Cosine


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Ten steps with a decaying rate and a moving average, also saved after five."""
    return train(
        tmp_path_factory.mktemp("whole") / "run",
        WHOLE,
        schedule=Cosine(),
        ema_decay=0.9,
        checkpoint=CheckpointOptions(every_steps=HALF),
    )


@pytest.fixture(scope="module")
def half(whole: Run) -> Path:
    """The checkpoint of the fifth step."""
    return whole.checkpoint.with_name(f"step-{HALF:08d}")
