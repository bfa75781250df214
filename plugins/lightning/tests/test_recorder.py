"""The recorder itself, under Lightning alone: it sees what is there, and changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cases import CASES
from loops import SEED, under_lightning
from modules.optimizers import Configurable
from recorder import CALLBACK_HOOKS, HOOKS, Recording, differences

NUMBERS = ("logged", "parameters")


@pytest.mark.parametrize("name", ["classification", "gan", "every flag of log"])
def test_a_case_recorded_twice_is_the_same_and_another_seed_is_seen(name, tmp_path):
    expected = under_lightning(CASES[name], tmp_path / "a")
    assert not differences(expected, under_lightning(CASES[name], tmp_path / "b"))
    other = differences(expected, under_lightning(CASES[name], tmp_path / "c", seed=SEED + 1))
    assert {"parameters", "metrics", "logged"} <= other.keys()


@pytest.mark.parametrize("name", ["classification", "gan", "hooks: WarmsUp", "flags: accumulation"])
def test_being_watched_changes_no_number(name, tmp_path):
    watched = under_lightning(CASES[name], tmp_path / "a")
    alone = under_lightning(CASES[name], tmp_path / "b", watched="nothing")
    assert not differences(_numbers(watched), _numbers(alone))
    assert watched.parameters


def test_a_hook_in_another_place_is_seen(tmp_path):
    case = CASES["flags: steps"]

    class Eager(Configurable):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 2:
                self.on_before_backward(outputs["loss"])

    expected = under_lightning(case, tmp_path / "a")
    module = case.module().form
    found = under_lightning(replace(case, module=lambda: Eager(module)), tmp_path / "b")
    assert "module.on_before_backward" in differences(expected, found)["events"]
    assert "losses" not in differences(expected, found)


def test_the_cases_reach_every_hook_that_lightning_has(tmp_path):
    names = ("boring, all stages", "callbacks: checkpoints", "optimizers: every step", "gan")
    heard = set()
    for number, name in enumerate(names):
        events = under_lightning(CASES[name], tmp_path / str(number)).events
        heard |= {(event.who, event.hook) for event in events}
    # Loading and failing have tests of their own.
    later = {"on_load_checkpoint", "on_exception"}
    assert {hook for who, hook in heard if who == "module"} >= set(HOOKS) - later
    assert {hook for who, hook in heard if who == "callback"} >= set(CALLBACK_HOOKS) - later


def _numbers(recording: Recording) -> Recording:
    return Recording(**{kind: getattr(recording, kind) for kind in NUMBERS})
