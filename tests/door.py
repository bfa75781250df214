"""The command line in the process of a test, for the tests of several folders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from torsh_trainer.__main__ import main


@dataclass(frozen=True)
class Answer:
    """What the door gave back."""

    code: int
    out: str
    err: str

    @property
    def config(self) -> dict:
        """What ``--cfg`` printed."""
        assert self.code == 0, self.err
        return yaml.safe_load(self.out)


Door = Callable[..., Answer]


@pytest.fixture
def door(home: Path, capsys: pytest.CaptureFixture[str]) -> Door:
    """``door("+recipe=quick.yaml", ...)``: the command line, in this process and in ``home``."""

    def call(*args: str) -> Answer:
        capsys.readouterr()
        code = main(args)
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return call
