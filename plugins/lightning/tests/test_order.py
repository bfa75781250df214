"""``task.order=ours``: the same samples, weights and draws on any number of processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from modules.ordered import BATCH, TRAIN, ByHand, Data, Hooked, Net, Plain, on_rank, ours, run, same
from torch.utils.data import WeightedRandomSampler

from torsh_trainer.data.loading import Loading
from torsh_trainer.errors import ConfigError
from torsh_trainer.tasks.base import Task


@pytest.mark.parametrize("processes", [1, 2])
def test_it_trains_what_the_trainers_own_loop_trains(processes, on_ranks, tmp_path):
    """With a dropout, noise of the data, accumulation, and a tail of 3 in a step of 11."""
    knobs = {"accumulate": 2, "strategy": "single" if processes == 1 else "ddp"}
    (own, *_), (mine, *_) = (
        on_ranks(on_rank, tmp_path / name, task, {**knobs, **more})
        for name, task, more in (
            ("own", lambda: Plain(0.4, TRAIN, 0.1), {"loading": Loading(batch_size=2 * BATCH)}),
            ("mine", lambda: ours(lambda: Net(0.4), lambda: Data(noise=0.1)), {}),
        )
    )
    same(own, mine)
    assert mine["samples"] == own["samples"]
    assert mine["metrics"]["val"] == pytest.approx(own["metrics"]["loss"], rel=1e-5)


STAGES = ("fit", "evaluate", "test")
WEIGHTS = torch.arange(1.0, TRAIN + 1)
CASES: dict[str, tuple[str, Callable[[], Task], dict[str, Any]]] = {
    "ddp": ("ddp", ours, {}),
    "fsdp": ("fsdp", ours, {}),
    "closures": ("ddp", lambda: ours(Hooked), {"accumulate": 3}),
    "by hand": ("gloo", lambda: ours(ByHand), {}),
    "limits": (
        "ddp",
        lambda: ours(limit_train_batches=3, limit_val_batches=0.5),
        {"accumulate": 2},
    ),
    "overfit": ("ddp", ours, {"overfit_batches": 2}),
    "dropout": ("ddp", lambda: ours(lambda: Net(0.5)), {"accumulate": 2}),
    "dropout by hand on shards": ("fsdp", lambda: ours(lambda: ByHand(0.5)), {}),
    "dropout run again": (
        "ddp",
        lambda: ours(lambda: Net(0.5)),
        {"activation_checkpointing": True, "checkpoint_modules": ["Sequential"]},
    ),
    "weighted": (
        "ddp",
        lambda: ours(
            data=lambda: Data(shuffle=None, sampler=WeightedRandomSampler(WEIGHTS, TRAIN))
        ),
        {},
    ),
}
"""Strategy, task and knobs of what two processes do as one does."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Callable[..., dict[str, Any]]:
    """``alone(name)``: the case on one process, run once."""
    found: dict[str, dict[str, Any]] = {}

    def once(name: str) -> dict[str, Any]:
        if name not in found:
            _, task, knobs = CASES[name]
            found[name] = run(tmp_path_factory.mktemp("alone"), task(), stages=STAGES, **knobs)
        return found[name]

    return once


@pytest.mark.parametrize("name", CASES)
def test_two_processes_go_the_way_of_one(name, alone, on_ranks, tmp_path):
    strategy, task, knobs = CASES[name]
    one = alone(name)
    knobs = {"strategy": strategy, "stages": STAGES, **knobs}
    for both in on_ranks(on_rank, tmp_path / "two", task, knobs):
        same(one, both)
        assert both["samples"] == one["samples"]
        assert both["epochs"] == pytest.approx(one["epochs"], rel=2e-5)
        assert both["metrics"] == pytest.approx(one["metrics"], rel=2e-5)
        assert both["indices"] == one["indices"]


def test_in_the_order_of_lightning_they_do_not(on_ranks, tmp_path):
    one = run(tmp_path / "one", ours(order="lightning"))
    two, _ = on_ranks(
        on_rank, tmp_path / "two", lambda: ours(order="lightning"), {"strategy": "ddp"}
    )
    assert one["loss"][-1] != pytest.approx(two["loss"][-1], rel=1e-2)
    assert one["metrics"]["val"] != pytest.approx(two["metrics"]["val"], rel=1e-3)


@pytest.mark.parametrize(
    ("before", "after", "step"), [("ddp", "single", 2), ("single", "fsdp", 6), ("ddp", "single", 4)]
)
def test_it_goes_on_from_the_middle_of_an_epoch_on_other_processes(
    before, after, step, alone, on_ranks, tmp_path
):
    on_ranks(on_rank, tmp_path / "before", ours, {"strategy": before, "every": step})
    saved = tmp_path / "before" / "checkpoints" / f"step-{step:08d}"
    (on, *_) = on_ranks(
        on_rank, tmp_path / "after", ours, {"strategy": after, "resume": str(saved)}
    )
    whole = alone("ddp")
    same(whole | {"loss": whole["loss"][step:]}, on)
    for name in ("samples", "indices"):
        assert on[name] == whole[name][step:]
    for name in ("steps", "epochs"):
        assert on["content"][name] == whole["content"][name]
    # Over the whole epoch, what came before it included.
    assert on["epochs"] == pytest.approx(whole["epochs"][-len(on["epochs"]) :], rel=2e-5)
    assert on["metrics"]["val"] == pytest.approx(whole["metrics"]["test_val"], rel=2e-5)


@pytest.mark.parametrize("order", ["ours", "lightning"])
def test_under_another_strategy_its_draws_and_what_was_logged_go_on(order, on_ranks, tmp_path):
    def task() -> Task:
        return ours(lambda: Net(0.4), lambda: Data(noise=0.1), order=order)

    whole, _ = on_ranks(on_rank, tmp_path / "whole", task, {"strategy": "ddp", "every": 3})
    saved = tmp_path / "whole" / "checkpoints" / "step-00000003"
    on, _ = on_ranks(on_rank, tmp_path / "on", task, {"strategy": "fsdp", "resume": str(saved)})
    same(whole | {"loss": whole["loss"][3:]}, on)
    assert on["epochs"] == pytest.approx(whole["epochs"][-len(on["epochs"]) :], rel=2e-5)


def test_its_draws_go_on_to_the_last_bit(tmp_path):
    task = lambda: ours(lambda: Net(0.4), lambda: Data(noise=0.1))  # noqa: E731
    whole = run(tmp_path / "whole", task(), every=3)
    saved = tmp_path / "whole" / "checkpoints" / "step-00000003"
    on = run(tmp_path / "on", task(), resume=str(saved))
    assert on["loss"] == whole["loss"][3:]
    assert all(torch.equal(on["weights"][name], value) for name, value in whole["weights"].items())


def test_a_ckpt_of_the_middle_of_an_epoch_goes_on_with_the_next_batch(tmp_path):
    keeps = ModelCheckpoint(every_n_train_steps=6, save_top_k=-1, filename="{step}")
    whole = run(tmp_path / "whole", ours(callbacks=[keeps]))
    (saved,) = (tmp_path / "whole").rglob("*step=6.ckpt")
    on = run(tmp_path / "on", ours(), resume=str(saved))
    assert on["indices"] == whole["indices"][6:]
    assert on["loss"][-1] == whole["loss"][-1]
    assert all(torch.equal(on["weights"][name], value) for name, value in whole["weights"].items())


DIFFERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "samples": ({"train": 30}, {}, "data.samples was 27 and is 30"),
    "shuffle": ({"shuffle": False}, {}, "data.shuffle was true and is false"),
    "batch": ({"batch_size": 4}, {}, "data.batch_size was 8 and is 4"),
    "cut": ({"batch_size": 4}, {"accumulate": 2}, "trainer.accumulate was 1 and is 2"),
    "order": ({}, {"order": "lightning"}, "task.order was ours and is lightning"),
    "allowed order": ({}, {"order": "lightning", "allow": ["data"]}, "set task.order=ours, or go"),
    "allowed batch": ({"batch_size": 4}, {"allow": ["batch"]}, "of other batches"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> str:
    """A checkpoint of the middle of an epoch."""
    folder = tmp_path_factory.mktemp("saved")
    run(folder, ours(), every=3, max_steps=3)
    return str(folder / "checkpoints" / "step-00000003")


@pytest.mark.parametrize("name", DIFFERS)
def test_other_data_or_batches_are_refused_on_a_resume(name, saved, tmp_path):
    data, knobs, words = DIFFERS[name]
    knobs = dict(knobs)
    task = ours(data=lambda: Data(**data), order=knobs.pop("order", "ours"))
    with pytest.raises(ConfigError) as refused:
        run(tmp_path, task, resume=saved, **knobs)
    assert words in str(refused.value)
    assert refused.value.fix


def test_what_differs_may_be_allowed(saved, tmp_path):
    on = run(tmp_path, ours(data=lambda: Data(train=30)), resume=saved, allow=["data"])
    assert on["samples"] == [30, 38, 46, 54, 60]
