"""docs/migrate/lightning.md, done as it says: its files written, its commands run."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.exhaustive,  # each command of a page, with what it prints
    pytest.mark.timeout(2000),  # the first test waits for all commands of the page
]

PAGE = Path(__file__).parents[3] / "docs" / "migrate" / "lightning.md"
FILE = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("project")
    for name, text in FILE.findall(PAGE.read_text()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def ran(project, door) -> list[str]:
    """Every command of the page, run in its order."""
    lines = "".join(COMMANDS.findall(PAGE.read_text())).splitlines()
    for line in lines:
        program, *args = shlex.split(line)
        if program not in ("python", "torchrun"):
            subprocess.run(line, cwd=project, shell=True, check=True)
            continue
        if args[:2] == ["-m", "torsh_trainer"]:
            args = [*args[2:], "trainer.log_every=1", "log_level=warning"]
        started = "launcher.num_processes=2" in args and "-m" not in args
        code, said = door(args, project, processes=2 if started or program == "torchrun" else 1)
        assert code == 0, (line, said)
    return lines


def results(project: Path) -> list[dict[str, Any]]:
    """Of the runs, the oldest first."""
    files = [file for file in project.glob("runs/*/*/result.json") if "sweeps" not in file.parts]
    files = sorted(files, key=lambda file: file.stat().st_mtime)
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.exhaustive
def test_every_command_of_the_page_works_and_its_strategies_agree(ran, project):
    single, ddp, fsdp, gloo, resumed, template = results(project)
    assert [one["strategy"] for one in (ddp, fsdp, gloo)] == ["ddp", "fsdp", "gloo"]
    assert all(one["world_size"] == 2 for one in (ddp, fsdp, gloo, resumed))
    for one in (fsdp, gloo):
        assert one["train_loss"] == pytest.approx(ddp["train_loss"], rel=1e-6)
        assert one["metrics"] == pytest.approx(ddp["metrics"], rel=1e-6)
    assert resumed["epochs"] == 4
    assert resumed["metrics"]["val/acc"] >= single["metrics"]["val/acc"] > 0.5
    assert template["metrics"].keys() == {"val/loss", "val/acc"}


def test_the_run_of_one_process_is_the_scripts(ran, project):
    script = torch.load(project / "checkpoints" / "last.ckpt", weights_only=True)
    assert script["epoch"] == 1
    first = results(project)[0]
    (best,) = [
        state["current_score"]
        for key, state in script["callbacks"].items()
        if key.startswith("ModelCheckpoint")
    ]
    assert first["metrics"]["val/acc"] == float(best)
    assert first["steps"] == script["global_step"]


def test_a_sweep_of_jobs_with_two_processes_is_a_table(ran, project):
    (table,) = project.glob("runs/sweeps/*/sweep.csv")
    assert len(table.read_text().splitlines()) == 3
    jobs = [json.loads(file.read_text()) for file in table.parent.glob("*/result.json")]
    assert [(job["strategy"], job["world_size"]) for job in jobs] == [("ddp", 2)] * 2
    assert all(job["metrics"]["val/acc"] > 0.3 for job in jobs)


def test_what_the_templates_files_name_is_written(ran, project):
    (csv,) = project.glob("runs/*/*/csv/version_0/metrics.csv")
    assert "val/acc" in csv.read_text()
