"""``strategy=horovod`` as a user types it, under Horovod's launcher and under ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("warm_interpreters")

TRAIN = [sys.executable, "-m", "torsh_trainer", "+recipe=digits", "trainer.max_steps=4"]
LINES = {
    "ours": [*TRAIN, "strategy=horovod", "launcher.num_processes=2"],
    "horovodrun": ["horovodrun", "-np", "2", "--gloo", *TRAIN, "strategy=horovod"],
    # The same micro-batches: what is dropped out goes by their number.
    "single": [*TRAIN, "strategy=single", "data.micro_batch_size=32"],
}


def typed(line: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    here = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        line,
        cwd=folder,
        env={**os.environ, "PATH": here, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=480,
    )


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """``result("single")``: the result.json of that line, typed once."""

    @cache
    def of(name: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(name)
        done = typed([*LINES[name], "trainer.stages=[fit]", "hydra.run.dir=run"], folder)
        assert done.returncode == 0, done.stdout + done.stderr
        found: dict[str, Any] = json.loads((folder / "run" / "result.json").read_text())
        return found

    return of


@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", ["ours", "horovodrun"])
def test_a_recipe_trains_with_the_loss_of_one_process(name, result):
    assert result(name)["strategy"] == "horovod"
    assert result(name)["world_size"] == 2
    assert result(name)["train_loss"] == pytest.approx(result("single")["train_loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("strategy.fusion_treshold_mb=3", "did you mean strategy.fusion_threshold_mb?"),
        ("precision.reduce=bf16", "strategy=horovod cannot honour precision.reduce=bf16"),
    ],
)
def test_what_it_cannot_do_is_one_line_with_a_way_out(words, said, tmp_path):
    done = typed([*TRAIN, "strategy=horovod", words], tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert said in line
    assert ";" in line


def test_more_processes_than_horovodrun_has_started_are_one_line(tmp_path):
    place = {"RANK": 0, "SIZE": 2, "LOCAL_RANK": 0, "LOCAL_SIZE": 2}
    theirs = {f"HOROVOD_{name}": str(number) for name, number in place.items()}
    done = typed([*TRAIN, "strategy=horovod", "launcher.num_processes=4"], tmp_path, **theirs)
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert "launcher.num_processes=4, but horovod already started 2 processes" in line
