"""Runs as callbacks see them: the facts of their start, and their reports."""

from __future__ import annotations

import json

from torsh_trainer.callbacks.base import EvaluationReport, RunInfo, StepReport
from torsh_trainer.environments.world import World


def run_info(run_dir=None, **changes):
    facts = {
        "run_dir": run_dir,
        "world": World(),
        "strategy": "single",
        "backend": "local",
        "precision": "fp32",
        "device": "cpu",
        "batch_size": 8,
        "micro_batch_size": 8,
        "accumulate": 1,
        "max_steps": 4,
        "steps_per_epoch": 4,
        "first_step": 0,
        "parameters": 10,
        "trainable_parameters": 10,
    }
    return RunInfo(**{**facts, **changes})


def logged(step, **metrics):
    numbers = {
        "loss": 1.0 / step,
        "lr": 0.1,
        "grad_norm": 2.0,
        "samples_per_s": 100.0,
        "data_wait_s": 0.001,
        "step_s": 0.01,
        "skipped": 0.0,
    }
    return StepReport(step, 0, 8 * step, {**numbers, **metrics})


def evaluated(step, split="eval", **metrics):
    return EvaluationReport(split, step, 0, 8 * step, metrics or {"accuracy": 0.5}, 0.25)


def drive(callback, info, reports):
    """A whole run as the loop would drive it."""
    callback.on_start(info)
    for report in reports:
        if isinstance(report, EvaluationReport):
            callback.on_evaluate(report)
        else:
            callback.on_step(report)
    callback.on_end({"metrics": {}})


def whole_run():
    reports = []
    for step in range(1, 5):
        reports += [StepReport(step, 0, 8 * step, None)] if step == 2 else [logged(step)]
        reports += [evaluated(step, accuracy=step / 4, loss=1 / step)] if step % 2 == 0 else []
    return [*reports, evaluated(4, split="test", accuracy=0.75)]


def json_rows(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
