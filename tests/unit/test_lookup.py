"""Import paths that users write: what has moved is found where it is today, with a note."""

from __future__ import annotations

import pytest

from torsh_trainer.optim.precision import Precision
from torsh_trainer.optim.schedule import Cosine
from torsh_trainer.utils import lookup
from torsh_trainer.utils.lookup import MOVED, import_object


def test_a_class_named_by_its_old_module_is_found_and_a_note_says_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lookup, "_noted", set())
    assert import_object("torsh_trainer.schedule.Cosine", option="schedule._target_") is Cosine
    assert import_object("torsh_trainer.precision:Precision", option="precision") is Precision
    assert import_object("torsh_trainer.schedule.Cosine", option="schedule._target_") is Cosine
    until = "; the old name goes in release 0.2.0"
    first = "torsh_trainer.schedule.Cosine is now torsh_trainer.optim.schedule.Cosine"
    second = "torsh_trainer.precision.Precision is now torsh_trainer.optim.precision.Precision"
    notes = capsys.readouterr().err.splitlines()
    assert notes == [f"note: {first}{until}", f"note: {second}{until}"]


@pytest.mark.parametrize("module", MOVED.values())
def test_every_new_place_is_a_module(module: str) -> None:
    __import__(module)
