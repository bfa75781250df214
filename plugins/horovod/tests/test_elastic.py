"""Horovod's own elastic mode: processes come, go and die, and the run is as if none had."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torsh_trainer_horovod import HorovodElasticConfig, HorovodIntegration, runtime
from torsh_trainer_horovod.strategy import Horovod

from torsh_trainer.comm.base import CommOptions
from torsh_trainer.comm.compression import TopK
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError
from torsh_trainer.strategies.base import BatchPlan, Job
from torsh_trainer.testing.ranks import RankPool
from torsh_trainer.testing.tiny import TinyTask

pytestmark = pytest.mark.usefixtures("warm_interpreters")

LIMIT_S = 240
PATIENT = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "600"}
"""Who waits until Horovod gives up waits longer than a test may take."""
RECIPE = (
    "+recipe=digits",
    "data.batch_size=96",
    "data.micro_batch_size=16",  # the same micro-batches on one to three processes
    "trainer.max_steps=60",
    "trainer.log_every=5",
    "trainer.stages=[fit]",
    "checkpoint.every_steps=15",
    "hydra.run.dir=run",
)
EVENTS = '''
"""What happens to the hosts of a job, and when."""

import os
import signal
import time
from pathlib import Path

from horovod.common.elastic import notification_manager

from torsh_trainer.callbacks.base import Callback


class Hosts(Callback):
    """Other hosts after some steps; training goes on once Horovod has told this process."""

    changes = {20: "localhost:2", 40: "localhost:1"}

    def on_start(self, info):
        self.place = (info.world.rank, info.world.size)

    def on_step(self, report):
        if report.step in self.changes and self.place[0] == 0:
            Path("hosts.new").write_text(self.changes[report.step])
            os.replace("hosts.new", "hosts.txt")
            end_s = time.monotonic() + 480
            while all(one._host_messages.empty() for one in notification_manager._listeners):
                assert time.monotonic() < end_s, "Horovod has told nothing"
                time.sleep(0.01)


class Death(Hosts):
    """A third comes, and rank 0 dies."""

    changes = {20: "localhost:1\\n127.0.0.1:1\\n127.1:1"}

    def on_step(self, report):
        super().on_step(report)
        if report.step == 35 and self.place == (0, 3):
            os.kill(os.getpid(), signal.SIGKILL)
'''


def typed(folder: Path, *words: str) -> str:
    """What the command says, once it has ended well."""
    here = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with subprocess.Popen(
        words,
        cwd=folder,
        env={**os.environ, **PATIENT, "PATH": here},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # horovodrun then ends what it has started
            said, _ = process.communicate(timeout=240)
            pytest.fail(f"not over after {LIMIT_S} s: {said}")
    assert process.returncode == 0, said
    return said


def elastic(folder: Path, hosts: str, event: str, *more: str, processes: int, most: int) -> str:
    """A run in Horovod's elastic mode on those hosts, to which ``event`` happens."""
    (folder / "events.py").write_text(EVENTS)
    (folder / "hosts.txt").write_text(hosts)
    script = folder / "hosts.sh"
    script.write_text(f"#!/bin/sh\ncat {folder}/hosts.txt\n")
    script.chmod(0o755)
    job = HorovodElasticConfig(min_workers=1, max_workers=most, initial_workers=processes)
    train = (sys.executable, "-m", "torsh_trainer", *RECIPE, "strategy=horovod")
    event = f"+callbacks.event._target_=events.{event}"
    line = job.horovodrun(*train, event, *more, discovery=str(script), network_interface="lo")
    return typed(folder, *line)


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run" / "result.json").read_text())
    return found


def reports(folder: Path) -> list[tuple[str, int, int, float]]:
    """Every report: what of, after which step and how many samples, and its loss."""
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [(row["split"], row["step"], row["samples"], row["loss"]) for row in rows]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same recipe in one process from beginning to end."""
    folder = tmp_path_factory.mktemp("undisturbed")
    typed(folder, sys.executable, "-m", "torsh_trainer", *RECIPE, "strategy=single")
    return folder


def check_as_undisturbed(folder: Path, undisturbed: Path) -> None:
    ours, theirs = reports(folder), reports(undisturbed)
    assert [row[:3] for row in ours] == [row[:3] for row in theirs]
    assert [row[3] for row in ours] == pytest.approx([row[3] for row in theirs], rel=1e-5)
    for name in ("steps", "updates", "samples", "epochs"):
        assert result(folder)[name] == result(undisturbed)[name]
    mine, plain = result(folder)["metrics"], result(undisturbed)["metrics"]
    assert mine == pytest.approx(plain, rel=1e-5)
    saved = sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())
    assert saved == sorted(path.name for path in (undisturbed / "run" / "checkpoints").iterdir())


def test_a_process_comes_and_goes_and_no_sample_is_lost_or_seen_twice(tmp_path, undisturbed):
    traced = "strategy.timeline=timeline.json"
    said = elastic(tmp_path, "localhost:1", "Hosts", traced, processes=1, most=2)
    check_as_undisturbed(tmp_path, undisturbed)
    changed = {"cause": "the hosts changed", "steps_again": 0}
    assert result(tmp_path)["resets"] == [
        {**changed, "from": 1, "to": 2, "step": 20},
        {**changed, "from": 2, "to": 1, "step": 40},
    ]
    assert said.count("the hosts changed after step 20: 1 processes were at work, and 2 go on") == 1
    assert said.count("the hosts changed after step 40: 2 processes were at work, and 1 go on") == 1
    assert "localhost[1] has been removed from elastic job" in said
    for name in ("timeline.1.json", "timeline.2.json", "timeline.json"):  # of each attempt
        assert json.loads((tmp_path / name).read_text())


@pytest.mark.exhaustive
def test_of_three_processes_two_go_on_when_rank_0_is_killed(tmp_path, undisturbed):
    said = elastic(tmp_path, "localhost:1\n127.0.0.1:1", "Death", processes=2, most=3)
    check_as_undisturbed(tmp_path, undisturbed)
    assert result(tmp_path)["resets"] == [
        {"cause": "the hosts changed", "from": 2, "to": 3, "step": 20, "steps_again": 0},
        {"cause": "a process was lost", "from": 3, "to": 2, "step": 30, "steps_again": 5},
    ]
    assert "go on from step 30, doing 5 steps again" in said


# -- what it refuses -------------------------------------------------------------------------------

HERE = World(size=2, local_size=2, source="horovod", elastic=True)


@pytest.mark.parametrize(
    ("knobs", "backend", "words"),
    [
        ({"op": "sum"}, "auto", "op=sum while processes come and go"),
        ({"op": "adasum"}, "auto", "op=adasum while processes come and go"),
        ({"backward_passes_per_step": 2}, "auto", "backward_passes_per_step=2 while"),
        ({}, "mpi", "comm.backend=mpi while processes come and go"),
        ({}, "nccl", "comm.backend=nccl while processes come and go"),
        ({"autotune": True}, "auto", "autotune while processes come and go"),
    ],
)
def test_what_depends_on_the_processes_is_refused_where_they_come_and_go(knobs, backend, words):
    with pytest.raises(ConfigError) as refusal:
        Horovod(**knobs).membership(HERE, CommOptions(backend))
    assert words in str(refusal.value)


def both_set(comm: Any) -> str:
    try:
        knobs = Horovod(fusion_threshold_mb=1, cycle_time_ms=2)
        runtime.start_elastic(knobs.variables)
    except ConfigError as error:
        return str(error)
    return ""


def tuned_by_horovodrun(comm: Any) -> str:
    os.environ["HOROVOD_AUTOTUNE"] = "1"
    try:
        runtime.start_elastic({})
    except ConfigError as error:
        return str(error)
    finally:
        del os.environ["HOROVOD_AUTOTUNE"]
    return ""


def compressing(comm: Any) -> str:
    comm.world = World(size=comm.world.size, rank=comm.world.rank, elastic=True)
    task = TinyTask()
    job = Job(task, task.build_model, BatchPlan(4, 4, 1, 1), compression=TopK(0.1))
    try:
        Horovod().prepare(job, comm)
    except ConfigError as error:
        return str(error)
    return ""


def test_settings_that_horovod_does_not_survive_and_what_processes_owe_are_refused():
    with RankPool(1) as ranks:
        assert "fusion_threshold_mb and strategy.cycle_time_ms are both" in ranks.run(both_set)[0]
        assert "compression=topk while processes come and go" in ranks.run(compressing)[0]
        assert "HOROVOD_AUTOTUNE (horovodrun --autotune)" in ranks.run(tuned_by_horovodrun)[0]


# -- in a script -----------------------------------------------------------------------------------


def test_an_elastic_configuration_knows_the_command_that_starts_it():
    elastic = HorovodIntegration.config_with_elastic(2, 8).elastic
    assert elastic is not None
    assert elastic.horovodrun("python", "train.py", discovery="./hosts.sh") == (
        *("horovodrun", "-np", "2", "--min-np", "2", "--max-np", "8"),
        *("--elastic-timeout", "300", "--host-discovery-script", "./hosts.sh"),
        *("python", "train.py"),
    )


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((0, 2), "min_workers=0 is below 1"),
        ((3, 2), "max_workers=2 is below 3"),
        ((2, 4, 1), "initial_workers=1 is below 2"),
        ((2, 4, 5), "initial_workers=5 is above max_workers=4"),
    ],
)
def test_numbers_of_processes_that_contradict_one_another_are_refused(numbers, words):
    with pytest.raises(ConfigError) as refusal:
        HorovodElasticConfig(*numbers)
    assert words in str(refusal.value)


def test_an_elastic_configuration_in_a_process_that_nobody_started_so_is_refused():
    integration = HorovodIntegration(HorovodIntegration.config_with_elastic(1, 2))
    with pytest.raises(ConfigError, match="start it with horovodrun -np 1 --min-np 1 --max-np 2"):
        integration.options  # noqa: B018 - asking is what fails
    with pytest.raises(ConfigError, match="leave initialize out"):
        integration.initialize(0, 1, 0, 1)
