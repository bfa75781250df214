"""``launcher=ssh`` through a real server of ssh here: the contracts, and what it refuses."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import PrefixStore, TCPStore

from tests.isolation import Sshd
from torsh_trainer.comm import start
from torsh_trainer.comm.base import CommOptions
from torsh_trainer.environments.world import Rendezvous, World
from torsh_trainer.errors import ConfigError, TorshError
from torsh_trainer.hosts.ssh import SshWords
from torsh_trainer.launchers.base import LaunchContext
from torsh_trainer.launchers.inside import Payload
from torsh_trainer.launchers.plan import JobRequest
from torsh_trainer.launchers.remote.by_ssh import AgentCommand, SshConnection
from torsh_trainer.launchers.remote.connection import close_all
from torsh_trainer.launchers.remote.transport import AgentSeat, AgentTransport
from torsh_trainer.launchers.ssh import Ssh, place_ranks
from torsh_trainer.launchers.transport import Transport
from torsh_trainer.testing import LauncherContract, TransportContract

HERE = "127.0.0.1"


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    server = Sshd(tmp_path_factory.mktemp("sshd"))
    yield server
    server.close()


class TestLauncher(LauncherContract):
    launcher = Ssh(hosts=(HERE,))

    @pytest.fixture(autouse=True)
    def _reach(self, sshd: Sshd) -> None:
        type(self).launcher = Ssh(hosts=(f"{HERE}:2",), ssh_config=sshd.config)


@pytest.mark.exhaustive  # the launcher starts, tells and ends its workers by it
class TestTransport(TransportContract):
    @pytest.fixture(autouse=True)
    def _reach(self, sshd: Sshd) -> Iterator[None]:
        self.ssh = SshWords(("-F", str(sshd.config)))
        self.opened: list[SshConnection] = []
        yield
        close_all(self.opened)

    def transport(self, payload: Payload) -> Transport:
        env = {"PYTHONPATH": os.environ.get("PYTHONPATH", str(Path(__file__).parents[2]))}
        command = AgentCommand(self.ssh, sys.executable, env)
        connection = SshConnection(HERE, command, silence_s=60.0)
        self.opened.append(connection)
        return AgentTransport(payload, seats=[AgentSeat(connection)] * 2, shown="rank_zero")


def test_exported_values_reach_ranks_and_stand_in_no_command_line_and_no_file(
    sshd, tmp_path, capfd
):
    def entry(world: World) -> list[str]:
        print("rank", world.rank, "is here")
        commands = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline")]
        said = any(os.environ["A_SECRET"].encode() in command for command in commands)
        return [os.environ["A_SECRET"], os.environ["OMP_NUM_THREADS"], str(said)]

    env = {**os.environ, "A_SECRET": "tell-nobody", "OMP_NUM_THREADS": "3"}
    context = LaunchContext(env=env, log_dir=tmp_path / "logs")
    launcher = Ssh(
        hosts=(f"{HERE}:2",), ssh_config=sshd.config, export=("A_SECRET", "OMP_*"), output="all"
    )
    assert launcher.launch(entry, context=context) == ["tell-nobody", "3", "False"]
    out = capfd.readouterr().out
    for rank in range(2):
        assert f"rank {rank} ({HERE})| rank {rank} is here\n" in out
    assert (tmp_path / "logs/rank-1.log").read_text() == "rank 1 is here\n"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["rank-1.log"]


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"python": "/tmp"}, "its Python may not be run by this user; name another"),
        ({"folder": "/tmp"}, "the run folder runs/x is told from here"),
        ({"export": ("NOBODY_SETS_IT",)}, "NOBODY_SETS_IT, which is not set here"),
    ],
)
def test_what_a_host_cannot_do_is_told_in_one_sentence(sshd, knobs, words):
    context = replace(CONTEXT, log_dir=Path("runs/x/logs"))
    with pytest.raises(TorshError, match=words):
        Ssh(hosts=(HERE,), ssh_config=sshd.config, **knobs).launch(print, context=context)


CONTEXT = LaunchContext(env={"PATH": os.environ["PATH"], "PYTHONPATH": "/my code"})


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({}, "launcher.hosts and launcher.hostfile name none"),
        ({"hosts": ("a",), "hostfile": Path("x")}, "both name hosts"),
        ({"processes_per_host": 0}, "launcher.processes_per_host=0 is no number of processes"),
        ({"threads_per_process": -1}, "launcher.threads_per_process=-1 is no number of threads"),
        ({"ssh_port": 70000}, "launcher.ssh_port=70000 is not a port"),
        ({"port": 0}, "launcher.port=0 is not a port"),
        ({"silence_s": 0.1}, "launcher.silence_s=0.1 is too short"),
        ({"grace_s": float("nan")}, "launcher.grace_s=nan is too short"),
        ({"startup_timeout_s": float("inf")}, "launcher.startup_timeout_s=inf"),
        ({"python": "-c"}, "launcher.python='-c' is no path or name"),
        ({"folder": "a\nb"}, "is no path or name"),
        ({"identity_file": Path("/no/key")}, "launcher.identity_file=/no/key: there is no such"),
        ({"ssh_config": Path("/no/conf")}, "launcher.ssh_config=/no/conf: there is no such file"),
        ({"user": "-x"}, "launcher.user='-x'"),
        ({"jump_host": "-x"}, "launcher.jump_host='-x'"),
        ({"export": ("A=b-secret",)}, "'A' is no name of a variable"),
        ({"export": ("RANK",)}, "RANK is what the launcher tells each process"),
        ({"ssh_options": ("Port=3",)}, "write launcher.ssh_port"),
        ({"ssh_options": ("StrictHostKeyChecking=no",)}, "would take any host for the one"),
        ({"ssh_options": ("stricthostkeychecking=OFF",)}, "would take any host for the one"),
        ({"ssh_options": ("UserKnownHostsFile=/dev/null",)}, "would take any host for the one"),
        ({"ssh_options": ("-oPort=3",)}, "is not Name=value of ssh_config"),
        ({"shared_folder": False}, "launcher.shared_folder=false cannot be honoured"),
    ],
)
def test_a_knob_that_cannot_be_is_refused_by_its_name(knobs, words):
    with pytest.raises(ConfigError) as error:
        Ssh(**({"hosts": ("a",)} if knobs and "hosts" not in knobs else {}) | knobs)
    assert words in str(error.value)
    assert "b-secret" not in str(error.value)


def test_a_plan_is_what_would_be_started_and_starts_nothing(tmp_path):
    launcher = Ssh(hosts=("a:2", "me@b"), ssh_port=2222, python="~/my env/python")
    request = JobRequest(tmp_path, tmp_path, (), sys.executable)
    plan = launcher.plan_launch(request, context=CONTEXT)
    assert plan.files == ()
    argv, other = map(list, plan.commands)
    assert argv == launcher._command(CONTEXT).argv("a")
    assert argv[-3:-1] == ["--", "a"]
    assert other[-3:-1] == ["--", "me@b"]
    assert argv[-1].startswith("exec env PYTHONSAFEPATH=1 'PYTHONPATH=/my code' ~/'my env/python'")


def test_a_dry_run_from_the_command_line_ends_with_0_and_leaves_nothing(run_door, tmp_path):
    done = run_door(
        ["+recipe=digits", "launcher=ssh", "launcher.hosts=[a,b:2]", "launcher.dry_run=true"]
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("--- command\nssh ") == 2
    assert list(tmp_path.iterdir()) == []


def test_processes_that_exist_already_are_not_started_again():
    found = World(rank=0, size=2, source="torchrun")
    with pytest.raises(ConfigError, match="torchrun has already started this one as one of 2"):
        Ssh(hosts=("a",)).launch(print, context=replace(CONTEXT, found=found))


def test_the_number_of_processes_is_told_where_it_is_known():
    assert Ssh(hosts=("a:2", "b:3")).size(CONTEXT) == 5
    assert Ssh(hosts=("a", "b"), processes_per_host=4).size(CONTEXT) == 8
    with pytest.raises(ConfigError, match="once the hosts are asked"):
        Ssh(hosts=("a:2", "b")).size(CONTEXT)


def test_places_follow_the_slots_of_each_host():
    meeting = Rendezvous("10.0.0.1", 1234, token="secret")
    worlds = place_ranks([2, 1], meeting, source="ssh")
    assert [(w.rank, w.local_rank, w.local_size, w.node_rank, w.nodes) for w in worlds] == [
        (0, 0, 2, 0, 2),
        (1, 1, 2, 0, 2),
        (2, 0, 1, 1, 2),
    ]
    assert "secret" not in repr(worlds)


def test_notes_of_a_job_stand_under_its_token():
    """A stranger reaches the store, as anybody does who reaches its port, and finds nothing."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    meeting = Rendezvous(HERE, port, token="of-this-job")
    world = World(rank=0, size=2, local_rank=0, local_size=2, rendezvous=meeting)
    try:
        start._store(world, CommOptions()).set("rank 0", "a note")
        stranger = TCPStore(HERE, port, is_master=False, wait_for_workers=False)
        assert PrefixStore("torsh/of-this-job/0/0", stranger).check(["rank 0"])
        for prefix in ("torsh/0/0", "torsh/another/0/0"):
            assert not PrefixStore(prefix, stranger).check(["rank 0"])
    finally:
        start.forget(HERE, port)
