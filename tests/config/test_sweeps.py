"""Sweeps: one run directory a job, a table at the end, and a failing job that takes nobody down."""

from __future__ import annotations

import csv
import json
import math
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from torsh_trainer.config import sweep
from torsh_trainer.config.sweep import JobRecord, rank_jobs

pytestmark = pytest.mark.usefixtures("warm_interpreters")

PYTHON = sys.executable

QUICK = "+recipe=quick.yaml"
ACCURACY = ("trainer.objective=accuracy", "trainer.objective_mode=max")


def folder(home: Path) -> Path:
    (found,) = (home / "runs" / "sweeps").iterdir()
    return found


def table(home: Path) -> list[dict[str, str]]:
    with (folder(home) / "sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def result(home: Path, job: int | str) -> dict[str, Any]:
    return json.loads((folder(home) / str(job) / "result.json").read_text())


def test_each_combination_is_a_job_with_a_directory_of_its_own(door, home):
    answer = door(QUICK, "-m", "strategy=single,ddp", "optimizer.lr=1e-2,1e-3", *ACCURACY)
    assert answer.code == 0, answer.err
    found = {
        (result(home, job)["strategy"], config(home, job)["optimizer"]["lr"]) for job in range(4)
    }
    assert found == {(s, lr) for s in ("single", "ddp") for lr in (0.01, 0.001)}
    overrides = yaml.safe_load((folder(home) / "3" / ".hydra" / "overrides.yaml").read_text())
    assert overrides[0] == f"+recipe={home}/quick.yaml"
    assert "strategy=ddp" in overrides


def config(home: Path, job: int) -> dict[str, Any]:
    return yaml.safe_load((folder(home) / str(job) / "config.yaml").read_text())


def test_the_table_is_sorted_by_the_objective_of_the_jobs(door, home):
    answer = door(QUICK, "-m", "trainer.max_steps=1,30,10", "optimizer.lr=1e-2", *ACCURACY)
    assert answer.code == 0, answer.err
    rows = table(home)
    accuracies = [float(row["accuracy"]) for row in rows]
    assert accuracies == sorted(accuracies, reverse=True)
    assert accuracies == [result(home, row["job"])["metrics"]["accuracy"] for row in rows]
    assert rows[0]["trainer.max_steps"] == "30"
    assert "optimizer.lr" not in rows[0]  # the same in all
    assert "3 jobs" in answer.out
    shown = [line for line in answer.out.splitlines() if "│" in line]
    assert [line.split("│")[1].strip() for line in shown] == [row["job"] for row in rows]


def test_without_an_objective_the_least_training_loss_wins(door, home):
    assert door(QUICK, "-m", "trainer.max_steps=1,20", "optimizer.lr=1e-2").code == 0
    rows = table(home)
    assert [float(row["train_loss"]) for row in rows] == sorted(
        result(home, job)["train_loss"] for job in range(2)
    )


def test_a_failing_job_is_told_with_its_overrides_and_the_others_go_on(door, home):
    answer = door(QUICK, "-m", "trainer.max_steps=-1,2,abc,1", *ACCURACY)
    assert answer.code == 2
    rows = table(home)
    assert [row["status"] for row in rows] == ["done", "done", "failed", "failed"]
    assert [row["job"] for row in rows[2:]] == ["0", "2"]
    assert "expected a whole number" in rows[3]["error"]
    assert "job 0 (trainer.max_steps=-1) failed: trainer.max_steps=-1 is below 1" in answer.out
    assert result(home, 2)["error"]["type"] == "ConfigError"
    assert "Error executing job" not in answer.err


def test_jobs_differ_by_their_recipe_file(door, home):
    text = (home / "quick.yaml").read_text()
    (home / "other.yaml").write_text(text.replace("max_steps: 2", "max_steps: 3"))
    assert door("-m", "+recipe=quick.yaml,other.yaml").code == 0
    assert [result(home, job)["steps"] for job in range(2)] == [2, 3]


def test_a_recipe_by_name_and_one_by_path_go_together(door, home):
    config = door("-m", "+recipe=quick.yaml,digits", "trainer.max_steps=1", "log_level=warning")
    assert config.code == 0, config.err
    assert {Path(row["recipe"]).stem for row in table(home)} == {"quick", "digits"}


def test_an_objective_that_no_job_has_is_a_failure_that_names_those_there_are(door, home):
    answer = door(QUICK, "-m", "trainer.seed=1,2", "trainer.objective=acuracy")
    assert answer.code == 2
    assert "trainer.objective=acuracy: the run has no such metric" in answer.out
    assert "accuracy" in answer.out


@pytest.mark.exhaustive
def test_jobs_at_the_same_time_have_processes_of_their_own(run_door, home):
    answer = run_door(
        [
            "-m",
            QUICK,
            "hydra/launcher=joblib",
            "hydra.launcher.n_jobs=2",
            "launcher=local",
            "launcher.num_processes=2",
            "strategy=ddp,fsdp",
            *ACCURACY,
        ],
        home,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert {result(home, job)["strategy"] for job in range(2)} == {"ddp", "fsdp"}
    assert {result(home, job)["world_size"] for job in range(2)} == {2}
    losses = [result(home, job)["train_loss"] for job in range(2)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(table(home)) == 2


def test_jobs_go_through_submitit(run_door, home, monkeypatch):
    monkeypatch.setattr(sys, "executable", PYTHON)  # submitit waits for the very process it started
    args = ["-m", QUICK, "hydra/launcher=submitit_local", "trainer.max_steps=2,-1", *ACCURACY]
    answer = run_door([*args, "hydra.launcher.cpus_per_task=1"], home)
    assert answer.returncode == 2, answer.stdout + answer.stderr
    assert [row["status"] for row in table(home)] == ["done", "failed"]


def optuna(*args: str) -> list[str]:
    knobs = ["hydra.sweeper.n_jobs=1", "hydra.sweeper.sampler.seed=1"]
    return ["-m", QUICK, "hydra/sweeper=optuna", *knobs, *args]


def test_optuna_maximises_what_the_objective_says(door, home):
    answer = door(
        *optuna(
            "hydra.sweeper.n_trials=4",
            "optimizer.lr=interval(0.0001,0.1)",
            "optimizer=choice(sgd,adamw)",
            "trainer.max_steps=8",
            *ACCURACY,
        )
    )
    assert answer.code == 0, answer.err
    rows = table(home)
    assert len(rows) == 4
    best = yaml.safe_load((folder(home) / "optimization_results.yaml").read_text())
    assert best["best_value"] == max(float(row["accuracy"]) for row in rows)
    assert best["best_value"] == float(rows[0]["accuracy"])
    assert best["best_params"]["optimizer"] == rows[0]["optimizer"]


def test_the_direction_given_to_optuna_sorts_the_table(door, home):
    answer = door(
        *optuna(
            "hydra.sweeper.n_trials=3",
            "hydra.sweeper.direction=maximize",
            "optimizer.lr=interval(0.0001,0.1)",
            "trainer.objective=accuracy",
        )
    )
    assert answer.code == 0, answer.err
    accuracies = [float(row["accuracy"]) for row in table(home)]
    assert accuracies == sorted(accuracies, reverse=True)


def test_optuna_is_told_of_a_failed_job_and_goes_on(door, home):
    args = ["hydra.sweeper.n_trials=5", "trainer.max_steps=choice(2,-1)", *ACCURACY]
    answer = door(*optuna(*args))
    assert answer.code == 2
    statuses = [row["status"] for row in table(home)]
    assert len(statuses) == 5
    assert set(statuses) == {"done", "failed"}


@pytest.mark.exhaustive
def test_a_job_that_fails_under_optuna_is_told_in_one_line(run_door, home):
    args = ["hydra.sweeper.n_trials=1", "trainer.max_steps=choice(-2,-1)"]
    answer = run_door(optuna(*args), home)
    assert answer.returncode == 2
    about = [line for line in answer.stderr.splitlines() if "A new study" not in line]
    assert len(about) == 2, about
    assert about[0].startswith("job 0: trainer.max_steps=-")
    assert about[1].startswith("job 0 failed: trainer.max_steps=-")


def test_optuna_without_any_result_ends_with_the_table(door, home):
    answer = door(*optuna("hydra.sweeper.n_trials=2", "trainer.max_steps=choice(-2,-1)"))
    assert answer.code == 2
    assert [row["status"] for row in table(home)] == ["failed", "failed"]
    assert "error:" not in answer.err


def test_several_objectives_at_once_are_refused(door):
    answer = door(*optuna("hydra.sweeper.direction=[minimize,maximize]", "trainer.seed=range(1,5)"))
    assert answer.code == 2
    assert "a run has one" in answer.err


def test_an_interrupt_ends_the_whole_sweep_with_its_table_so_far(background_door, home):
    door = background_door(QUICK, "-m", "trainer.max_steps=2,1000000")
    door.wait_for("runs/sweeps/*/1/metrics.jsonl")
    out, err = door.interrupted(signal.SIGINT)
    assert door.code == 130, out + err
    assert [row["status"] for row in table(home)] == ["done"]
    assert "job 1: stopped by Ctrl-C (SIGINT)" in err
    assert "Traceback" not in err


@pytest.mark.matrix(1)
@pytest.mark.parametrize("sweeper", [[], ["hydra/sweeper=optuna", "hydra.sweeper.n_jobs=2"]])
def test_jobs_side_by_side_save_before_an_interrupt_ends_them(background_door, home, sweeper):
    joblib = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", *sweeper]
    typed = ["trainer.seed=1,2,3", "trainer.max_steps=1000000", "checkpoint.every_steps=9"]
    door = background_door(QUICK, "-m", *joblib, *typed)
    for job in range(2):
        door.wait_for(f"runs/sweeps/*/{job}/checkpoints/step-*")
    out, err = door.interrupted(signal.SIGINT)
    assert door.code == 130, out + err
    (sweep,) = home.glob("runs/sweeps/*")
    assert sorted(path.name for path in sweep.iterdir() if path.is_dir()) == ["0", "1"]
    for job in range(2):
        said = json.loads((sweep / f"{job}/result.json").read_text())
        assert "stopped by Ctrl-C (SIGINT)" in json.dumps(said)
        assert list(sweep.glob(f"{job}/checkpoints/step-*"))
        assert f"job {job}: stopped by Ctrl-C (SIGINT)" in err
    assert not list(sweep.rglob("*.lock"))
    assert "error:" not in err


# -- the order of the table ----------------------------------------------------------------------


def record(
    number: int, objective: float | None, *, error: str | None = None, **kwargs
) -> JobRecord:
    return JobRecord(number, [f"a={number}"], "runs/x", objective, error=error, **kwargs)


def test_the_best_comes_first_then_jobs_without_a_number_then_failures():
    records = [
        record(0, None, error="x"),
        record(1, 3.0),
        record(2, math.nan),
        record(3, None),
        record(4, 1.0),
    ]
    assert [r.number for r in rank_jobs(records, "min")] == [4, 1, 2, 3, 0]
    assert [r.number for r in rank_jobs(records, "max")] == [1, 4, 2, 3, 0]


def test_the_jobs_know_which_way_is_better():
    records = [record(i, float(i), mode="max") for i in range(3)]
    assert [r.number for r in rank_jobs(records)] == [2, 1, 0]
    assert [r.number for r in rank_jobs(records, "min")] == [0, 1, 2]


def test_a_record_crosses_processes_by_a_file(tmp_path):
    one = JobRecord(3, ["a=1"], str(tmp_path / "3"), 0.5, objective_name="accuracy", mode="max")
    one.write()
    assert sweep.read(tmp_path) == [one]
