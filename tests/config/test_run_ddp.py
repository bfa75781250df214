"""``run_ddp.sh -n 2 -c FILE -l INFO``: what it starts, alone and in jobs of Slurm."""

from __future__ import annotations

import json
import os

import pytest

TRAINS = "-m torsh_trainer +recipe=my file.yaml strategy=ddp log_level=info"


@pytest.fixture
def run_ddp(repository, run_command, tmp_path):
    """Runs the script with an ``srun`` and a Python that print what they are given."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho srun "$@"\n')
    srun.chmod(0o755)

    def run(*words: str, **variables: str):
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": "echo", **variables}
        return run_command([repository / "run_ddp.sh", *words], cwd=tmp_path, env=env)

    return run


def test_it_starts_processes_here_and_tasks_in_an_allocation(run_ddp):
    words = ["-n", "2", "-c", "my file.yaml", "-l", "INFO", "trainer.seed=1"]
    assert run_ddp(*words).stdout == f"{TRAINS} launcher.num_processes=2 trainer.seed=1\n"
    in_a_job = f"srun --ntasks=2 echo {TRAINS} trainer.seed=1\n"
    assert run_ddp(*words, SLURM_JOB_ID="7").stdout == in_a_job
    of_the_script = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "4294967291"}
    assert run_ddp(*words, **of_the_script).stdout == in_a_job
    of_a_task = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    assert run_ddp(*words, **of_a_task).stdout == f"{TRAINS} trainer.seed=1\n"


@pytest.mark.parametrize(
    "words", [[], ["-n", "2"], ["-c", "x"], ["-n", "two", "-c", "x"], ["-z"], ["-n"]]
)
def test_bad_words_start_nothing(run_ddp, words):
    done = run_ddp(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "-n 2" in done.stderr or "run_ddp.sh -n PROCESSES -c RECIPE" in done.stderr


@pytest.mark.exhaustive
def test_it_trains_on_two_processes(repository, run_command, tmp_path):
    file = repository / "recipes/digits/recipe.yaml"
    further = ["trainer.max_steps=2", "trainer.stages=[fit]", "hydra.run.dir=out"]
    script = repository / "run_ddp.sh"
    done = run_command([script, "-n", "2", "-c", file, "-l", "INFO", *further], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out/result.json").read_text())["world_size"] == 2
