"""A run that waits for torch.compile says so, once."""

from __future__ import annotations

import logging
import time

import pytest
import torch
from torch import nn

from torsh_trainer.strategies import compiling
from torsh_trainer.strategies.compiling import Told, tell_of_compilations

WORDS = "torch.compile compiles the model"


def said(caplog: pytest.LogCaptureFixture) -> int:
    return sum(WORDS in record.message for record in caplog.records)


def wait_until_said(caplog: pytest.LogCaptureFixture) -> None:
    while not said(caplog):
        time.sleep(0.01)


def test_a_long_compilation_is_said_while_it_goes_on_and_the_next_one_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = Told(patience_s=0.05)
    told.begin()
    wait_until_said(caplog)
    told.end()
    told.begin()
    time.sleep(0.2)
    told.end()
    assert said(caplog) == 1


def test_short_ones_count_together(caplog: pytest.LogCaptureFixture) -> None:
    told = Told(patience_s=0.3)
    while not said(caplog):
        told.begin()
        time.sleep(0.02)
        told.end()


def test_one_that_ends_in_time_goes_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    told = Told(patience_s=30.0)
    told.begin()
    told.end()
    assert said(caplog) == 0


def test_torch_tells_of_its_compilations(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell_of_compilations()
    tell_of_compilations()  # once a process
    told = compiling._told
    assert told is not None
    monkeypatch.setattr(told, "_patience_s", 0.0)
    monkeypatch.setattr(told, "_said", False)
    model = Doubling()
    model.compile(backend=_slow)
    with caplog.at_level(logging.WARNING):
        model(torch.ones(1, 2))
    assert said(caplog) == 1


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def _slow(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
    time.sleep(0.3)
    return graph.forward
