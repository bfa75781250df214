"""The saves of a training, through the real checkpointer, on a disk that is full for a while."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from torsh_trainer import Callback, CheckpointOptions
from torsh_trainer.callbacks.base import SaveReport
from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.errors import ResourceError
from torsh_trainer.training.cadence import Cadence
from torsh_trainer.training.reports import Reports
from torsh_trainer.training.saves import Saves


class Hearer(Callback):
    def __init__(self) -> None:
        self.heard: list[SaveReport] = []

    def on_save(self, report: SaveReport) -> None:
        self.heard.append(report)


class Full(DcpCheckpointer):
    """Its disk is full as often as ``times``: what is waited for then was not saved."""

    times = 0

    def wait(self) -> None:
        super().wait()
        if self.times:
            self.times -= 1
            raise ResourceError("the disk is full", fix="make room")


def state(step: int) -> dict[str, Any]:
    weight = torch.full((2,), float(step))
    return {"engine": {"model": {"weight": weight}}, "position": {"step": step}}


def saves_of(folder: Path, cadence: Cadence, *callbacks: Callback) -> tuple[Saves, Full]:
    checkpointer = Full(folder, LocalCommunicator(), CheckpointOptions(check_loaded=False))
    return Saves(checkpointer, cadence, Reports(callbacks, cadence)), checkpointer


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


def test_a_save_is_told_with_its_path_and_can_be_read_again(tmp_path) -> None:
    hearer = Hearer()
    saves, checkpointer = saves_of(tmp_path, Cadence(1), hearer)
    saves.save(3, lambda: state(3), {"loss": 0.5})
    assert [(report.step, report.path) for report in hearer.heard] == [(3, saves.path)]
    assert checkpointer.load(state(0))["engine"]["model"]["weight"].tolist() == [3.0, 3.0]
    again, _ = saves_of(tmp_path, Cadence(1))
    again.load(saves.as_plain())
    assert (again.step, again.path) == (3, saves.path)


def test_the_end_of_a_training_is_saved_once_where_it_was_asked_for(tmp_path) -> None:
    saves, _ = saves_of(tmp_path, Cadence(1, save_at_end=True))
    assert saves.is_owed_at_end(4)
    saves.save(4, lambda: state(4), {})
    assert not saves.is_owed_at_end(4)
    assert not saves_of(tmp_path, Cadence(1, save_every=3))[0].is_owed_at_end(4)


@pytest.mark.parametrize(
    ("cadence", "owed"), [(Cadence(1), False), (Cadence(1, save_every=9), True)]
)
def test_a_stop_is_saved_wherever_anything_is(cadence, owed, tmp_path) -> None:
    saves, _ = saves_of(tmp_path, cadence)
    assert saves.is_owed_at_stop(4) is owed


def test_a_count_of_its_own_says_what_was_saved(tmp_path) -> None:
    saves, _ = saves_of(tmp_path, Cadence(1, save_at_end=True))
    saves.save(8, lambda: state(8), {}, counted=4)
    assert saved(tmp_path) == ["step-00000008"]
    assert (saves.is_owed_at_end(4), saves.is_owed_at_end(5)) == (False, True)


def test_what_the_disk_has_refused_is_tried_again_at_the_next_save(tmp_path, caplog) -> None:
    saves, checkpointer = saves_of(tmp_path, Cadence(1))
    checkpointer.times = 1
    saves.save(1, lambda: state(1), {})
    assert "the disk is full" in caplog.text
    assert saved(tmp_path) == ["step-00000001"]


def test_a_second_refusal_in_a_row_is_raised(tmp_path) -> None:
    saves, checkpointer = saves_of(tmp_path, Cadence(1))
    checkpointer.times = 2
    with pytest.raises(ResourceError, match="the disk is full"):
        saves.save(1, lambda: state(1), {})


def test_at_the_end_a_save_that_failed_is_made_once_more(tmp_path) -> None:
    saves, checkpointer = saves_of(tmp_path, Cadence(1))
    made: list[int] = []

    def save() -> None:
        made.append(5)
        saves.save(5, lambda: state(5), {})

    saves.finish(save)
    assert made == []
    checkpointer.times = 1
    saves.finish(save)
    assert made == [5]
    assert saved(tmp_path) == ["step-00000005"]


def test_getting_ready_is_for_those_that_save_while_they_train(tmp_path) -> None:
    asked: list[int] = []

    def make_state() -> dict[str, Any]:
        asked.append(1)
        return state(1)

    for cadence in (Cadence(1, save_at_end=True), Cadence(1, save_every=3)):
        saves, checkpointer = saves_of(tmp_path, cadence)
        checkpointer.prepare = lambda make: make()  # type: ignore[method-assign]
        saves.prepare(make_state)
        assert saves.is_prepared
    assert asked == [1]
