"""What a resume checks, what it says, and what it goes on with; through the library's door."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fitted_line import Dice, Line, X, Y, allowing, content_of, equal, parameters, seed_all, trainer
from torch import nn
from torch.nn import functional as F

from torsh_trainer import (
    Callback,
    CheckpointOptions,
    Loading,
    OptimizerSpec,
    Trainer,
)
from torsh_trainer.callbacks.base import StepReport
from torsh_trainer.checkpoint.setup import WORDS, check_allow, compare
from torsh_trainer.data.sampler import epoch_order
from torsh_trainer.errors import ConfigError
from torsh_trainer.optim.precision import Precision
from torsh_trainer.optim.schedule import Cosine, ReduceOnPlateau, TorchSchedule


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "run"
    trainer(folder, max_steps=4).fit()
    return folder


@pytest.fixture
def resuming(saved_run: Path, tmp_path: Path) -> Callable[..., Trainer]:
    """A trainer that goes on from step 4 of a run of ``trainer``, in a directory of its own."""

    def make(**knobs: Any) -> Trainer:
        options = knobs.pop("checkpoint", CheckpointOptions())
        options = replace(options, resume=str(saved_run))
        return trainer(tmp_path / "resumed", checkpoint=options, **knobs)

    return make


class Wider(Line):
    def build_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.25), nn.Linear(9, 1), nn.Linear(1, 1))
        Line.built = model
        return model


Wider.__qualname__ = Line.__qualname__  # the task is the same; its model is not


class Other(Line):
    """Another task by name."""


# -- one error that lists everything --------------------------------------------------------------

CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": 5}, "trainer.seed was 0 and is 5"),
    "data": ({"task": Line(size=40)}, "data.samples was 48 and is 40"),
    "order": (
        {"loading": Loading(batch_size=8, shuffle=False)},
        "data.shuffle was true and is false",
    ),
    "overfit": ({"overfit_batches": 3}, "trainer.overfit_batches was null and is 3"),
    "batch": ({"loading": Loading(batch_size=16)}, "data.batch_size was 8 and is 16"),
    "class": ({"task": Line(OptimizerSpec("AdamW"))}, "optimizer main was SGD and is AdamW"),
    "setting": (
        {"task": Line(OptimizerSpec("SGD", lr=0.01, options={"momentum": 0.5}))},
        "optimizer.momentum was 0.9 and is 0.5",
    ),
    "group": (
        {
            "task": Line(
                OptimizerSpec(
                    "SGD",
                    lr=0.01,
                    options={"momentum": 0.9},
                    groups=({"match": "2.*", "momentum": 0.1},),
                )
            )
        },
        "optimizer.momentum was 0.9 and is 0.1 for 2.weight, 2.bias",
    ),
    "frozen": ({"frozen": ("0.*",)}, "optimizer main no longer trains 0.weight, 0.bias"),
    "ema": ({"ema_decay": 0.5}, "trainer.ema_decay was null and is 0.5"),
    "task": ({"task": Other()}, "task was Line and is Other"),
}
WORD_OF = {"order": "data", "overfit": "data"}
WORD_OF |= dict.fromkeys(("class", "setting", "group", "frozen"), "optimizer")


@pytest.mark.parametrize("change", CHANGES)
def test_what_must_be_the_same_is_refused_by_name_and_goes_on_with_the_word_that_is_named(
    resuming: Callable[..., Trainer], change: str
) -> None:
    knobs, words = CHANGES[change]
    with pytest.raises(ConfigError) as caught:
        resuming(**knobs).fit()
    assert words in caught.value.sentence
    assert f"checkpoint.allow=[{WORD_OF.get(change, change)}]" in caught.value.fix
    result = resuming(**knobs, checkpoint=allowing(WORD_OF.get(change, change))).fit()
    assert result.content["steps"] == 8
    assert all(bool(torch.isfinite(value).all()) for value in parameters(result).values())


def test_everything_that_differs_stands_in_one_error_and_nothing_has_changed(
    resuming: Callable[..., Trainer], saved_run: Path, tmp_path: Path
) -> None:
    before = content_of(saved_run)
    knobs = {"seed": 5, "task": Wider(OptimizerSpec("AdamW"), size=40), "max_grad_norm": 1.0}
    with pytest.raises(ConfigError) as caught:
        resuming(**knobs).fit()
    for words in (
        "trainer.seed was 0 and is 5",
        "data.samples was 48 and is 40",
        "optimizer main was SGD and is AdamW",
        "missing from it: engine.model.3.weight, engine.model.3.bias",
        "engine.model.0.weight ([8, 6] float32 there, [9, 6] float32 here)",
    ):
        assert words in caught.value.sentence
    assert "checkpoint.allow=[seed,data,optimizer]" in caught.value.fix
    assert "trainer.pretrained" in caught.value.fix
    assert caught.value.sentence.count("0.weight") == 1  # not again for its slots
    assert Line.built is not None
    touched = Line.built.state_dict()
    fresh = trainer(tmp_path / "fresh", task=knobs["task"], seed=5, max_steps=1)
    fresh = replace(fresh, stages=("evaluate",))
    fresh.run()
    assert Line.built is not touched
    for name, tensor in Line.built.state_dict().items():
        assert torch.equal(touched[name], tensor), name
    assert content_of(saved_run) == before
    assert not (tmp_path / "resumed" / "checkpoints").exists()


def test_a_refusal_reaches_the_callbacks_and_result_json(
    resuming: Callable[..., Trainer], tmp_path: Path
) -> None:
    errors: list[BaseException] = []

    class Listening(Callback):
        def on_error(self, error: BaseException) -> None:
            errors.append(error)

    with pytest.raises(ConfigError) as caught:
        resuming(seed=5, callbacks=[Listening()]).fit()
    assert errors == [caught.value]
    told = json.loads((tmp_path / "resumed" / "result.json").read_text())
    assert told["error"]["facts"]["allow"] == ["seed"]


def test_words_are_checked_and_the_nearest_is_offered() -> None:
    check_allow(tuple(WORDS))
    with pytest.raises(ConfigError, match="did you mean 'seed'"):
        CheckpointOptions(allow=("sed",))
    with pytest.raises(ConfigError, match=r"model that differs is not resumed.*pretrained"):
        CheckpointOptions(allow=("model",))
    with pytest.raises(ConfigError, match=r"not a list; write checkpoint.allow=\[seed\]"):
        CheckpointOptions(allow="seed")  # type: ignore[arg-type]


def test_a_checkpoint_without_a_setup_is_compared_by_its_tensors_alone() -> None:
    found = compare({}, {"trainer.seed": 5, "optimizer": {}, "schedule": None})
    assert (found.refused, found.applied, found.inexact) == ((), (), ())


def test_a_checkpoint_that_is_only_evaluated_needs_the_model_alone(
    saved_run: Path, tmp_path: Path
) -> None:
    other = Line(OptimizerSpec("AdamW"), size=20)
    result = trainer(tmp_path / "a", task=other, seed=9).evaluate(str(saved_run))
    same = trainer(tmp_path / "b").evaluate(str(saved_run))
    assert result.metrics == same.metrics
    with pytest.raises(ConfigError, match=r"missing from it: engine\.model\.3\.weight"):
        trainer(tmp_path / "c", task=Wider()).evaluate(str(saved_run))


# -- what may differ ------------------------------------------------------------------------------


def test_another_cut_of_the_same_batch_goes_on_and_says_what_becomes_inexact(
    resuming: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="torsh_trainer"):
        resuming(loading=Loading(batch_size=8, micro_batch_size=2), precision=BF16).fit()
    assert (
        "sums are taken in another order, and by micro-batch a dropout draws other units: "
        "data.micro_batch_size was 8 and is 2" in caplog.text
    )
    assert "numbers are rounded otherwise: precision was fp32 and is bf16-mixed" in caplog.text


def test_a_run_that_goes_on_with_random_numbers_of_the_other_way_is_told(
    resuming: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="torsh_trainer"):
        resuming(randomness="by_micro_batch").fit()
    assert (
        "a dropout draws other units: trainer.randomness was by_sample and is by_micro_batch"
        in caplog.text
    )


BF16 = Precision(compute="bf16")


def test_the_cut_of_the_run_that_was_saved_stays_unless_the_knobs_name_another(
    tmp_path: Path,
) -> None:
    whole = trainer(tmp_path / "a", loading=Loading(batch_size=8, micro_batch_size=2)).fit()
    halves = tmp_path / "b"
    trainer(halves, loading=Loading(batch_size=8, micro_batch_size=2), max_steps=4).fit()
    assert equal(trainer(halves).fit(), whole)
    assert not equal(trainer(tmp_path / "c").fit(), whole)  # a whole batch drops other units


def test_settings_that_are_allowed_to_differ_hold_from_there_and_the_state_stays(
    tmp_path: Path,
) -> None:
    plain = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1))

    class Plain(Line):
        def build_model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1))

    def task(decay: float) -> Line:
        return Plain(OptimizerSpec("AdamW", lr=0.01, options={"weight_decay": decay}))

    still = Plain(OptimizerSpec("SGD", lr=0.0))
    start = trainer(tmp_path / "start", task=still, max_steps=1).fit()
    plain.load_state_dict(parameters(start))
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in plain.parameters() if p.ndim > 1]},
            {"params": [p for p in plain.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=0.01,
        weight_decay=0.1,
    )
    for step in range(8):
        if step == 4:
            optimizer.param_groups[0]["weight_decay"] = 0.5
        epoch, at = divmod(step * 8, 48)
        ids = epoch_order(48, seed=0, epoch=epoch, shuffle=True)[at : at + 8]
        optimizer.zero_grad()
        F.mse_loss(plain(X[ids]), Y[ids]).backward()
        optimizer.step()
    trainer(tmp_path / "run", task=task(0.1), max_steps=4).fit()
    resumed = trainer(tmp_path / "run", task=task(0.5), checkpoint=allowing("optimizer")).fit()
    torch.testing.assert_close(parameters(resumed), plain.state_dict())


class Rates(Callback):
    """The learning rate of each step."""

    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}

    def on_step(self, report: StepReport) -> None:
        if report.metrics is not None:
            self.by_step[report.step] = report.metrics["lr"]


def test_a_learning_rate_and_a_length_that_differ_apply_from_there_and_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, schedule, rates = tmp_path / "run", Cosine(warmup_steps=2), Rates()
    trainer(folder, schedule=schedule, max_steps=4).fit()
    faster = Line(OptimizerSpec("SGD", lr=0.02, options={"momentum": 0.9}))
    with caplog.at_level(logging.INFO, logger="torsh_trainer"):
        trainer(folder, task=faster, schedule=schedule, max_steps=10, callbacks=[rates]).fit()
    assert rates.by_step == pytest.approx(
        {step + 1: 0.02 * schedule.factor(step, 10) for step in range(4, 10)}
    )
    assert "optimizer.lr was 0.01 and is 0.02 from here on" in caplog.text
    assert "the schedule was made for 4 steps and is for 10 from here on" in caplog.text


def test_momentum_that_a_schedule_has_cycled_does_not_outlive_it(tmp_path: Path) -> None:
    cycling = TorchSchedule(
        scheduler="OneCycleLR", options={"max_lr": 0.02, "total_steps": 40, "base_momentum": 0.5}
    )
    folder = tmp_path / "run"
    trainer(folder, schedule=cycling, max_steps=4).fit()
    seen = {}

    class Looking(Line):
        def build_optimizers(self, named: Any) -> Any:
            seen.update(super().build_optimizers(named))
            return seen

    Looking.__qualname__ = Line.__qualname__
    trainer(folder, task=Looking(), schedule=Cosine()).fit()
    assert seen["main"].param_groups[0]["momentum"] == 0.9


STATEFUL: dict[str, tuple[Any, Any, str]] = {
    "torch": (
        TorchSchedule(scheduler="StepLR", options={"step_size": 2, "gamma": 0.5}),
        TorchSchedule(scheduler="StepLR", options={"step_size": 3, "gamma": 0.5}),
        "schedule.options was {'step_size': 2, 'gamma': 0.5} and is {'step_size': 3, 'gamma': 0.5}",
    ),
    "plateau": (
        ReduceOnPlateau(patience=0),
        ReduceOnPlateau(patience=0),
        "optimizer.lr was 0.01 and is 0.02, and schedule=reduce_on_plateau keeps its own",
    ),
}


@pytest.mark.parametrize("kind", STATEFUL)
def test_a_schedule_that_remembers_refuses_what_its_memory_contradicts_or_begins_afresh(
    tmp_path: Path, kind: str
) -> None:
    before, after, words = STATEFUL[kind]
    folder, rates = tmp_path / "run", Rates()
    trainer(folder, schedule=before, max_steps=4).fit()
    lr = 0.01 if kind == "torch" else 0.02
    task = Line(OptimizerSpec("SGD", lr=lr, options={"momentum": 0.9}))
    knobs: dict[str, Any] = {"task": task, "schedule": after, "callbacks": [rates]}
    with pytest.raises(ConfigError) as caught:
        trainer(folder, **knobs).fit()
    assert words in caught.value.sentence
    assert "checkpoint.allow=[schedule]" in caught.value.fix
    trainer(folder, **knobs, checkpoint=allowing("schedule")).fit()
    assert rates.by_step[5] == lr


def test_a_plateau_takes_another_patience_and_keeps_its_rates(tmp_path: Path) -> None:
    folder, rates = tmp_path / "run", Rates()
    greedy = ReduceOnPlateau(patience=0, gamma=0.5, threshold=10.0, threshold_mode="abs")
    trainer(folder, schedule=greedy, max_steps=4, eval_every=1).fit()
    patient = replace(greedy, patience=50)
    trainer(folder, schedule=patient, eval_every=1, callbacks=[rates]).fit()
    assert set(rates.by_step.values()) == {0.01 * 0.5**3}


def test_epochs_are_counted_in_steps_of_the_new_size_where_the_batch_may_differ(
    resuming: Callable[..., Trainer],
) -> None:
    larger = resuming(
        loading=Loading(batch_size=16),
        max_steps=None,
        max_epochs=2,
        checkpoint=allowing("batch"),
    ).fit()
    # 4 steps of 8, the last 16 of the first epoch in one, and three of the second.
    assert (larger.content["steps"], larger.content["samples"]) == (8, 96)


def test_an_average_that_is_switched_on_begins_at_the_weights_and_one_switched_off_is_dropped(
    tmp_path: Path,
) -> None:
    with_average, without = tmp_path / "with", tmp_path / "without"
    trainer(with_average, ema_decay=0.5, max_steps=4).fit()
    trainer(without, max_steps=4).fit()
    off = trainer(with_average, checkpoint=allowing("ema")).fit()
    on = trainer(without, ema_decay=0.5, checkpoint=allowing("ema")).fit()
    whole = trainer(tmp_path / "whole").fit()
    assert equal(off, whole)
    assert equal(on, whole)


def test_every_stream_of_random_numbers_goes_on_where_it_was(tmp_path: Path) -> None:
    def run(folder: str, *parts: int) -> list[tuple[Any, ...]]:
        drawn = []
        for number, steps in enumerate(parts):
            seed_all(number)  # a new process begins with other numbers
            dice = Dice()
            trainer(tmp_path / folder, max_steps=steps, callbacks=[dice]).fit()
            drawn += dice.drawn
        return drawn

    assert run("whole", 7) == run("parts", 3, 7)


def test_what_a_run_is_made_of_stands_in_its_checkpoint(saved_run: Path, tmp_path: Path) -> None:
    from torsh_trainer.checkpoint.dcp import DcpCheckpointer
    from torsh_trainer.comm.local import LocalCommunicator

    config = {"trainer": {"seed": 0}, "data": {"sizes": (1, 2)}}
    trainer(tmp_path / "run", max_steps=1, config=config).fit()
    saver = DcpCheckpointer(tmp_path / "run" / "checkpoints", LocalCommunicator())
    found = saver.find("auto")
    assert found is not None
    plain = saver.plain(found)
    assert plain["config"] == {"trainer": {"seed": 0}, "data": {"sizes": [1, 2]}}
    assert plain["setup"]["trainer.seed"] == 0
    assert plain["setup"]["optimizer"]["main"]["class"] == "SGD"
