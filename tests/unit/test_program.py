"""A task that brings its own loop: the run around it is like any other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from torsh_trainer import CheckpointOptions, Loading, Trainer
from torsh_trainer.callbacks.base import Callback, EvaluationReport, StepReport
from torsh_trainer.callbacks.jsonl import Jsonl
from torsh_trainer.checkpoint.rng import rng_state
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, Unsupported
from torsh_trainer.optim.optimizers import OptimizerSpec
from torsh_trainer.strategies.base import BatchPlan, Clip
from torsh_trainer.tasks.base import DataSource
from torsh_trainer.tasks.regression import Regression
from torsh_trainer.training.preview import preview
from torsh_trainer.training.program import (
    ComparisonMode,
    Position,
    ProgramContext,
    ProgramParts,
    ProgramTask,
    TrainingProgram,
    TrainingProgramFactory,
)


class Descent(ProgramTask):
    """Goes down a parabola: there are no samples, and nothing is weighed."""

    data = DataSource()
    optimizer = OptimizerSpec("SGD", lr=0.1)

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1, bias=False)

    def plan_program(self, context: ProgramContext) -> TrainingProgramFactory:
        return DescentFactory(context)


class DescentFactory(TrainingProgramFactory):
    closed = False

    def __init__(self, context: ProgramContext) -> None:
        self.context = context

    @property
    def batch(self) -> BatchPlan:
        return BatchPlan(1, 1, 1, 1)

    @property
    def total_steps(self) -> int | None:
        return self.context.spec.max_steps

    def setup_facts(self) -> Mapping[str, Any]:
        return {"task": "descent"}

    def make_program(self, parts: ProgramParts) -> TrainingProgram:
        return DescentLoop(parts, self.context)

    def close(self) -> None:
        type(self).closed = True


class DescentLoop(TrainingProgram):
    def __init__(self, parts: ProgramParts, context: ProgramContext) -> None:
        self.position, self.metrics, self.feed_state = Position(), {}, {}
        self.parts, self.context = parts, context

    def fit(self) -> None:
        engine = self.parts.engine
        while self.position.step < (self.parts.limits.max_steps or 0):
            engine.zero_grad()
            loss = engine.model(torch.ones(1)).square().sum()
            engine.backward(loss)
            engine.step_one("main", Clip())
            self.position.step += 1
            self.position.updates += 1
            self.train_loss = float(loss)
            report = StepReport(self.position.step, 0, 0, {"loss": self.train_loss, "lr": 0.1})
            for callback in self.parts.callbacks:
                callback.on_step(report)
        if self.parts.cadence.save_at_end:
            self.saved = str(self.parts.checkpointer.save(self.position.step, self.state(), {}))

    def evaluate(self, split: str) -> EvaluationReport:
        weight = next(self.parts.engine.model.parameters())
        self.metrics = {"weight": float(weight)}
        return EvaluationReport(split, self.position.step, 0, 0, self.metrics, 0.0)

    def predict(self) -> Iterable[Any]:
        return [torch.full((2,), float(self.position.step))]

    def state(self, *, template: bool = False) -> dict[str, Any]:
        engine = self.parts.engine
        position = self.position
        return {
            **self.parts.about,
            "engine": engine.state_template() if template else engine.state_dict(),
            "position": {"step": position.step, "updates": position.updates},
            "loop": {},
            "schedule": {},
            "task": {},
            "callbacks": {},
            "feed": {},
            "rng": {"rank_0": rng_state(torch.device("cpu"))},
        }

    def load(
        self, state: Mapping[str, Any], *, has_loaded: Callable[[], object] = lambda: None
    ) -> None:
        self.parts.engine.load_state_dict(state["engine"])
        has_loaded()
        self.position = Position(**state["position"])


class Heard(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step(self, report: StepReport) -> None:
        self.steps.append(report.step)


def run(folder, **knobs):
    given = {"task": Descent(), "strategy": "single", "max_steps": 3, "run_dir": folder, **knobs}
    return Trainer(**given).fit(*given.get("stages", ("fit",)))


def test_its_steps_are_those_of_plain_torch_and_reach_result_callbacks_and_files(tmp_path):
    heard = Heard()
    result = run(
        tmp_path, callbacks=[heard, Jsonl()], stages=("fit", "evaluate", "predict"), seed=3
    )
    weight = float(next(_untrained(3).parameters()))
    for _ in range(3):
        weight -= 0.1 * 2 * weight
    assert result.metrics["weight"] == pytest.approx(weight, rel=1e-6)
    assert (result.content["steps"], heard.steps) == (3, [1, 2, 3])
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["split"] for row in rows] == ["train"] * 3 + ["eval"]
    assert torch.load(tmp_path / "predictions.pt").tolist() == [3.0, 3.0]
    assert DescentFactory.closed


def test_it_goes_on_from_its_checkpoint(tmp_path):
    whole = run(tmp_path / "whole", max_steps=5)
    run(tmp_path / "part", max_steps=2)
    heard = Heard()
    resumed = run(tmp_path / "part", max_steps=5, callbacks=[heard])
    assert heard.steps == [3, 4, 5]
    assert resumed.content["train_loss"] == whole.content["train_loss"]


def test_what_it_would_take_from_a_checkpoint_is_told_without_running_it(tmp_path):
    run(tmp_path, max_steps=2)
    trainer = Trainer(task=Descent(), strategy="single", max_steps=5, run_dir=tmp_path)
    told = preview(trainer, World(), run_dir=tmp_path)
    assert not told.refused
    assert "step 2 of 5" in told.text
    assert "main: SGD of 1 parameters" in told.text
    assert "samples of the stream" not in told.text
    over = preview(replace(trainer, max_steps=2), World(), run_dir=tmp_path)
    assert "raise trainer.max_steps" in over.text


def test_what_only_the_trainers_own_loop_can_do_is_refused_by_name(tmp_path):
    with pytest.raises(Unsupported, match="find_lr") as refused:
        run(tmp_path, stages=("find_lr", "fit"))
    assert refused.value.fix == "leave it out"
    with pytest.raises(Unsupported, match="how to compare two runs"):
        Descent().compare_as(ComparisonMode(2))


def test_a_program_under_its_old_name_is_refused_by_name(tmp_path):
    class Old(Regression):
        def course(self, setting: Any) -> Any: ...

    with pytest.raises(ConfigError, match=r"Old\.course: nothing calls") as refused:
        run(tmp_path, task=Old(lambda: nn.Linear(1, 1), DataSource()))
    assert "torsh_trainer.training.program.ProgramTask" in refused.value.fix


def _untrained(seed: int) -> nn.Module:
    """The model that a run with that seed begins with, as a run that does not train has it."""
    options = CheckpointOptions(at_end=False, resume="never")
    trainer = Trainer(
        task=Descent(),
        strategy="single",
        seed=seed,
        stages=("evaluate",),
        checkpoint=options,
        loading=Loading(),
    )
    model = trainer.run().model
    assert model is not None
    return model
