"""``launcher=mpirun`` with a real mpirun: the contract of launchers, and what it refuses."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, ResourceError, WorkerError
from torsh_trainer.launchers.base import LaunchContext
from torsh_trainer.launchers.mpirun import MpirunLauncher
from torsh_trainer.launchers.plan import JobRequest
from torsh_trainer.launchers.remote.by_socket import open_reception
from torsh_trainer.launchers.remote.calling import call
from torsh_trainer.testing import LauncherContract


@pytest.mark.exhaustive  # its agents are those of ssh, whose launcher keeps the whole contract
class TestLauncher(LauncherContract):
    launcher = MpirunLauncher(num_processes=2)


CONTEXT = LaunchContext(env=dict(os.environ))


def test_ranks_have_the_place_that_mpirun_gave_and_a_failure_names_its_rank(tmp_path):
    def entry(world: World, fails: bool) -> tuple[int, str, str]:
        if fails and world.rank == 1:
            raise ConfigError("data.batch_size=7 is odd", fix="make it even")
        return world.size, world.source, os.environ["OMPI_COMM_WORLD_RANK"]

    launcher = MpirunLauncher(num_processes=2)
    context = replace(CONTEXT, log_dir=tmp_path / "logs")
    assert launcher.launch(entry, False, context=context) == (2, "openmpi", "0")
    with pytest.raises(WorkerError, match=r"data\.batch_size=7 is odd") as error:
        launcher.launch(entry, True, context=context)
    assert (error.value.facts["rank"], error.value.cause_exit_code) == (1, 2)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"num_processes": 2, "processes_per_host": 2}, "both say how many"),
        ({"processes_per_host": 2}, "counts on hosts, and none are named"),
        ({"hosts": ("a",), "hostfile": Path("x")}, "both name hosts"),
        ({"num_processes": 0}, "launcher.num_processes=0 is no number"),
        ({"export": ("A=b",)}, "'A' is no name of a variable"),
    ],
)
def test_a_knob_that_cannot_be_is_refused_by_its_name(knobs, words):
    with pytest.raises(ConfigError, match=words):
        MpirunLauncher(**knobs)


@pytest.mark.parametrize(
    ("knobs", "kind", "words"),
    [
        ({"mpirun": "/no/mpirun"}, ResourceError, "there is no /no/mpirun beside"),
        ({"mpirun": "/bin/true"}, ConfigError, "none of Open MPI, MPICH and Intel MPI"),
        ({"hosts": ("a:2",), "num_processes": 3}, ConfigError, "the hosts have 2 slots"),
        ({"hosts": ("me@a",)}, ConfigError, "takes no users before hosts"),
        ({"num_processes": 2, "bind_to": "nonsense"}, ResourceError, "mpirun ended: "),
        ({"hosts": ("no-such-host",)}, ResourceError, "mpirun ended: "),
        ({"num_processes": 2, "python": "/no/python"}, ResourceError, "mpirun ended: "),
        ({"num_processes": 2, "mpirun_arguments": ("--nonsense",)}, ResourceError, "nonsense"),
    ],
)
def test_what_mpirun_cannot_do_is_told_in_one_sentence(knobs, kind, words, tmp_path):
    with pytest.raises(kind) as error:
        MpirunLauncher(**knobs).launch(print, context=replace(CONTEXT, log_dir=tmp_path / "logs"))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ("mpirun (Open MPI) 5.0.11", "--bind-to core --host a:2,b:1 --map-by slot"),
        ("HYDRA build details:", "-f FILE -bind-to core -genvlist"),
    ],
)
def test_each_mpirun_is_given_its_own_words(says, words, tmp_path):
    """Stubs of the two, which say who they are; the plan is what would be run."""
    stub = tmp_path / "mpirun"
    stub.write_text(f'#!/bin/sh\necho "{says}"\n')
    stub.chmod(0o755)
    launcher = MpirunLauncher(hosts=("a:2", "b"), mpirun=str(stub), bind_to="core", export=())
    request = JobRequest(tmp_path, tmp_path, (), sys.executable)
    plan = launcher.plan_launch(request, context=CONTEXT)
    [command] = map(shlex.join, plan.commands)
    assert command.startswith(f"{stub} -n 3 ")
    assert words.partition("FILE")[0] in command
    assert words.partition("FILE")[2] in command
    assert "TORSH_LAUNCHER_TOKEN" in command, "by its name"
    listed = [(str(file.path) in command, file.content) for file in plan.files]
    assert listed == ([(True, "a:2\nb:1\n")] if "FILE" in words else [])


def test_a_stranger_who_calls_is_not_taken_for_an_agent():
    with open_reception(alone=True) as reception:
        port = int(reception.places.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"\0" * 64)
            assert reception._take_call(silence_s=5.0, ended=lambda: None) is None
        takes = {"silence_s": 5.0, "ended": lambda: None}
        threading.Thread(target=reception._take_call, kwargs=takes).start()
        with pytest.raises(OSError, match="is not this job's launcher"):
            call(reception.places, b"another token", patience_s=0.1)
