"""``launcher=ssh`` and ``mpirun`` over machines: namespaces with own network, name, processes.

What is killed, unplugged or refused is so in earnest; afterwards nothing of the job runs anywhere.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.isolation import Lab, LabProcess, require_isolation

HOSTS = ("lab1", "lab2", "lab3", "lab4")
PRELUDE = """
import os, signal, socket, sys, time
from pathlib import Path
from torsh_trainer.errors import TorshError
from torsh_trainer.launchers.base import LaunchContext
from torsh_trainer.launchers.mpirun import MpirunLauncher
from torsh_trainer.launchers.ssh import Ssh

signal.signal(signal.SIGINT, signal.default_int_handler)
folder, hosts = Path.cwd(), sys.argv[1].split(",")
context = LaunchContext(env=dict(os.environ), log_dir=folder / "run" / "logs")
(folder / "run").mkdir(exist_ok=True)

def announce(world):
    (folder / f"half-{world.rank}").write_text(f"{os.getpid()} {socket.gethostname()}")
    (folder / f"half-{world.rank}").rename(folder / f"pid-{world.rank}")

def deaf(world):
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
    announce(world)
    while True:
        time.sleep(1)

def saves(world):
    stop = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stop.append(number))
    announce(world)
    while not stop:
        time.sleep(0.02)
    (folder / f"saved-{world.rank}").touch()
    return [int(number) for number in stop]

def places(world):
    return (world.size, world.nodes, world.source, "OMPI_COMM_WORLD_RANK" in os.environ)

def meets(world):
    import torch
    from torsh_trainer.comm import create
    from torsh_trainer.comm.base import CommOptions
    comm = create(world, CommOptions(backend="gloo"), torch.device("cpu"))
    total = torch.tensor([world.rank + 1.0])
    torch.distributed.all_reduce(total)
    comm.close()
    return {"total": total.item(), "at": world.rendezvous.address}

started = time.monotonic()
kind, keys, knobs = sys.argv[3], Path(sys.argv[4]), {"silence_s": 4.0, **eval(sys.argv[5])}
if kind == "ssh":
    knobs["ssh_config"] = keys / "ssh_config"
else:
    # Hosts of a fresh lab have the names and the numbers of processes of those before it.
    words = f"--prtemca plm_ssh_agent {keys}/ssh --prtemca prte_tmpdir_base {keys}"
    knobs["mpirun_arguments"] = tuple(words.split())
try:
    launcher = {"ssh": Ssh, "mpirun": MpirunLauncher}[kind](hosts=tuple(hosts), **knobs)
    print("answer", launcher.launch(globals()[sys.argv[2]], context=context))
except TorshError as error:
    print(type(error).__name__, error, error.facts.get("rank"), error.facts.get("answer"))
    sys.exit(getattr(error, "cause_exit_code", error.exit_code))
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    require_isolation()
    found = Lab(tmp_path_factory.mktemp("lab"), len(HOSTS))
    (found.folder / "ssh").write_text(f'#!/bin/sh\nexec ssh -F {found.ssh_config} "$@"\n')
    (found.folder / "ssh").chmod(0o755)
    yield found
    found.close()


class Job:
    """A script at the head of the lab that launches ``entry`` on hosts."""

    def __init__(
        self, lab: Lab, folder: Path, hosts: str, entry: str = "deaf", *, kind: str = "ssh"
    ) -> None:
        self.folder, self.hosts, self.lab = folder, hosts, lab
        folder.mkdir(exist_ok=True)
        (folder / "script.py").write_text(PRELUDE)
        words = [sys.executable, "script.py", hosts, entry, kind, lab.folder, "{}"]
        self.process: LabProcess = lab.at_head(words, cwd=folder, env=os.environ)

    def await_ranks(self, count: int) -> None:
        files = [self.folder / f"pid-{rank}" for rank in range(count)]
        while not all(file.exists() for file in files):
            assert self.process.is_running(), self.process.end()
            time.sleep(0.02)

    def rank_on(self, host: str) -> int:
        """A rank of the host, as the test counts."""
        found = self.lab.programs_on(host)
        return next(pid for pid, words in found.items() if "launchers.worker" in words)

    def end(self) -> tuple[int, str]:
        """Exit code and output, once nothing is left on the job's hosts either."""
        code, out, err = self.process.end()
        self.lab.await_empty(*(word.partition(":")[0] for word in self.hosts.split(",")))
        return code, out + err


# -- a job that runs ------------------------------------------------------------------------------


def test_two_hosts_of_two_processes_reduce_over_all_though_they_call_themselves_the_loopback(
    lab, tmp_path
):
    """Debian writes 127.0.1.1 for a host's own name, which gloo would take."""
    for host in ("lab1", "lab2"):
        lab.run_on(
            host, "bash", "-c", f'h=$(cat /etc/hosts); echo "127.0.1.1 {host}\n$h" > /etc/hosts'
        )
    code, out = Job(lab, tmp_path, "lab1:2,lab2:2", "meets").end()
    assert code == 0, out
    assert "answer {'total': 10.0, 'at': '10.99.0.1'}" in out


@pytest.mark.exhaustive
def test_unequal_hosts_and_two_jobs_at_once(lab, tmp_path):
    first = Job(lab, tmp_path / "a", "lab1:2,lab2:1", "meets")
    second = Job(lab, tmp_path / "b", "lab2:1,lab1:1", "meets")
    codes, outs = zip(first.end(), second.end(), strict=True)
    assert codes == (0, 0), outs
    assert "'total': 6.0, 'at': '10.99.0.1'" in outs[0]
    assert "'total': 3.0, 'at': '10.99.0.2'" in outs[1]


# -- what dies ------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_killed_rank_ends_the_job_with_its_words(lab, tmp_path):
    job = Job(lab, tmp_path, "lab1:2,lab2:1")
    job.await_ranks(3)
    os.kill(job.rank_on("lab2"), signal.SIGKILL)
    code, out = job.end()
    assert code == 3
    assert "WorkerError rank 2 on lab2 was killed by SIGKILL" in out


@pytest.mark.exhaustive
def test_a_killed_ssh_ends_the_job_on_all_hosts(lab, tmp_path):
    job = Job(lab, tmp_path, "lab1,lab2")
    job.await_ranks(2)
    (client,) = [pid for pid, words in children(job.process.pid) if " lab2 " in words]
    os.kill(client, signal.SIGKILL)
    code, out = job.end()
    assert code == 3
    assert "rank 1 is lost with its host: lab2: the connection ended (ssh was ended by" in out


@pytest.mark.exhaustive
def test_a_killed_agent_takes_its_ranks_with_it(lab, tmp_path):
    job = Job(lab, tmp_path, "lab1,lab2")
    job.await_ranks(2)
    found = lab.programs_on("lab2")
    (agent,) = [pid for pid, words in found.items() if "remote.agent" in words]
    os.kill(agent, signal.SIGKILL)
    code, out = job.end()
    assert code == 3
    assert "rank 1 is lost with its host: lab2: the connection ended" in out


def test_a_killed_launcher_leaves_nothing_anywhere(lab, tmp_path):
    job = Job(lab, tmp_path, "lab1,lab2")
    job.await_ranks(2)
    os.kill(job.process.pid, signal.SIGKILL)
    job.end()


@pytest.mark.exhaustive
def test_a_stopped_launcher_is_a_lost_one_for_its_hosts(lab, tmp_path):
    job = Job(lab, tmp_path, "lab1,lab2")
    job.await_ranks(2)
    job.process.stop()
    lab.await_empty("lab1", "lab2")
    job.process.resume()
    code, out = job.end()
    assert code == 3
    assert "it heard nothing of this launcher for 4 s, and has ended its ranks" in out


def test_an_unplugged_host_is_noticed_on_both_sides(lab, tmp_path):
    job = Job(lab, tmp_path, "lab1,lab4")
    job.await_ranks(2)
    lab.run_at_head("ip", "link", "set", "ve4", "down")
    code, out = job.end()
    lab.run_at_head("ip", "link", "set", "ve4", "up")
    assert code == 3
    assert "rank 1 is lost with its host: lab4: " in out


def test_a_host_that_is_switched_off_ends_the_job(lab, tmp_path):
    job = Job(lab, tmp_path, "lab1,lab3")
    job.await_ranks(2)
    os.kill(lab.first_of("lab3"), signal.SIGKILL)
    code, out = job.end()
    assert code == 3
    assert "rank 1 is lost with its host: lab3: the connection ended" in out


@pytest.mark.exhaustive
def test_ctrl_c_lets_all_hosts_save(lab, tmp_path):
    job = Job(lab, tmp_path, "lab1:2,lab2:1", "saves")
    job.await_ranks(3)
    os.kill(job.process.pid, signal.SIGINT)
    code, out = job.end()
    assert code == 130
    assert "Interrupted stopped by Ctrl-C (SIGINT) None [2]" in out
    assert all((tmp_path / f"saved-{rank}").exists() for rank in range(3))


# -- by mpirun ------------------------------------------------------------------------------------


def test_mpirun_starts_processes_on_two_hosts(lab, tmp_path):
    code, out = Job(lab, tmp_path, "lab1:2,lab2:1", "places", kind="mpirun").end()
    assert code == 0, out
    assert "answer (3, 2, 'openmpi', True)" in out


@pytest.mark.exhaustive
def test_processes_of_mpirun_on_two_hosts_meet(lab, tmp_path):
    code, out = Job(lab, tmp_path, "lab1:2,lab2:1", "meets", kind="mpirun").end()
    assert code == 0, out
    assert "answer {'total': 6.0, 'at': '10.99.0.1'}" in out


@pytest.mark.exhaustive
def test_a_rank_of_mpirun_that_is_killed_ends_the_job_with_its_words(lab, tmp_path):
    job = Job(lab, tmp_path, "lab1:1,lab2:1", kind="mpirun")
    job.await_ranks(2)
    os.kill(job.rank_on("lab2"), signal.SIGKILL)
    code, out = job.end()
    assert code == 3
    assert "WorkerError rank 1 on lab2 was killed by SIGKILL" in out


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", ["mpirun", "launcher"])
def test_a_killed_mpirun_or_launcher_leaves_nothing_anywhere(lab, tmp_path, victim):
    job = Job(lab, tmp_path, "lab1:1,lab2:1", kind="mpirun")
    job.await_ranks(2)
    (mpirun,) = [pid for pid, words in children(job.process.pid) if "-n 2" in words]
    os.kill(mpirun if victim == "mpirun" else job.process.pid, signal.SIGKILL)
    code, out = job.end()
    if victim == "mpirun":
        assert code == 3
        assert "is lost with its host" in out


@pytest.mark.exhaustive
def test_an_unplugged_host_of_mpirun_is_noticed(lab, tmp_path):
    job = Job(lab, tmp_path, "lab1:1,lab4:1", kind="mpirun")
    job.await_ranks(2)
    lab.run_at_head("ip", "link", "set", "ve4", "down")
    lab.await_empty("lab1", "lab4", of="torsh_trainer")  # Open MPI's own daemon waits on
    lab.run_at_head("ip", "link", "set", "ve4", "up")
    code, out = job.end()
    assert code == 3
    assert "is lost with its host" in out


def children(pid: int) -> list[tuple[int, str]]:
    found = []
    for number in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        words = Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        found.append((int(number), words))
    return found


# -- what is refused ------------------------------------------------------------------------------

REFUSALS = """
import json, os, sys, tempfile
from pathlib import Path
from torsh_trainer.errors import TorshError
from torsh_trainer.launchers.base import LaunchContext
from torsh_trainer.launchers.ssh import Ssh

sys.modules["torsh_trainer.launchers.remote.agreeing"].PATIENCE_S = 1.0

def entry(world):
    return "it ran"

told = {}
for name, knobs in json.loads(sys.argv[1]).items():
    folder = Path(knobs.pop("at", tempfile.mkdtemp()))
    knobs = {key: Path(value) if key in ("ssh_config", "identity_file") else value
             for key, value in knobs.items()}
    context = LaunchContext(env={**os.environ, "A_SECRET": "tell-nobody"}, log_dir=folder / "logs")
    try:
        told[name] = str(Ssh(**knobs).launch(entry, context=context))
    except TorshError as error:
        told[name] = f"{type(error).__name__}: {error}"
print(json.dumps(told))
"""


def refuse(lab: Lab, folder: Path, cases: dict[str, dict[str, object]]) -> dict[str, str]:
    """What a launcher with each of these knobs says."""
    folder.mkdir(exist_ok=True)
    (folder / "refusals.py").write_text(REFUSALS)
    usual = {"hosts": ["lab1", "lab2"], "ssh_config": str(lab.ssh_config)}
    told = json.dumps({name: {**usual, **knobs} for name, knobs in cases.items()})
    code, out, err = lab.at_head(
        [sys.executable, "refusals.py", told], cwd=folder, env=os.environ
    ).end()
    assert code == 0, out + err
    lab.await_empty("lab1", "lab2")
    found: dict[str, str] = json.loads(out.splitlines()[-1])
    return found


def test_what_keeps_a_host_out_is_one_sentence_with_the_host_and_the_command(lab, tmp_path):
    keys = lab.folder
    (keys / "other_hosts").write_text(f"lab1 {(keys / 'user_key.pub').read_text()}")
    plain = f"IdentityFile {keys}/user_key\nUserKnownHostsFile {keys}/other_hosts\n"
    (keys / "config_changed").write_text(plain)
    (keys / "config_unknown").write_text(plain.replace("other_hosts", "no_hosts"))
    (keys / "config_key").write_text(
        f"IdentityFile {keys}/host_key\nIdentitiesOnly yes\nUserKnownHostsFile {keys}/known_hosts\n"
    )
    told = refuse(
        lab,
        tmp_path,
        {
            "name": {"hosts": ["lab1", "nosuch"]},
            "changed": {"ssh_config": str(keys / "config_changed")},
            "unknown": {"ssh_config": str(keys / "config_unknown")},
            "key": {"ssh_config": str(keys / "config_key")},
            "port": {"ssh_port": 2222},
            "python": {"python": "/no/such/python"},
            "python of others": {"python": "/bin/true"},
            "folder": {"folder": "/no/such/folder"},
            "user": {"user": "nobody-here"},
            "option": {"ssh_options": ["NoSuchOption=1"]},
            "address": {"address": "lab1-loop"},
            "unset": {"export": ["NOT_SET_ANYWHERE"]},
        },
    )
    config = f"-F {lab.ssh_config}"
    assert "ResourceError: nosuch: this name has no address here" in told["name"]
    assert "lab1: its host key is another than the one that is known" in told["changed"]
    assert "lab1: its host key is not known here; compare it: ssh" in told["unknown"]
    assert "lab1: it lets nobody in with the keys that are here; ssh-copy-id" in told["key"]
    assert "lab1: nothing listens for ssh there" in told["port"]
    assert f"tried as: ssh {config} -p 2222 lab1" in told["port"], "the command is told"
    assert "lab1: the Python of this host is not there" in told["python"]
    assert "launcher.python=/usr/bin/python3" in told["python"]
    assert "lab1: ssh ended with 0" in told["python of others"]
    assert "ConfigError: lab1 cannot work in /no/such/folder" in told["folder"]
    assert "lab1: it lets nobody in" in told["user"]
    assert "lab1: ssh knows no such option" in told["option"]
    assert "launcher.address=lab1-loop is unknown on lab1" in told["address"]
    assert "launcher.export names NOT_SET_ANYWHERE, which is not set here" in told["unset"]
    assert not any("Traceback" in words or "\n" in words for words in told.values()), told


def test_hosts_that_do_not_fit_are_refused_before_anything_starts(lab, tmp_path):
    fake = tmp_path / "fake" / "torch-2.0.0.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.0.0\n")
    python = tmp_path / "python there"
    python.write_text(
        f'#!/bin/sh\necho Welcome to $(hostname)\n[ "$OTHER" ] || [ $(hostname) != lab2 ] || '
        f'export PYTHONPATH={tmp_path}/fake:$PYTHONPATH\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    noisy = tmp_path / "noisy"
    noisy.write_text(python.read_text().replace('[ "$OTHER" ]', "true"))
    noisy.chmod(0o755)
    (tmp_path / "runs").mkdir()
    lab.run_on("lab2", "mount", "-t", "tmpfs", "none", str(tmp_path / "runs"))
    taken = "import socket, time; s = socket.create_server(('10.99.0.1', 4321)); time.sleep(600)"
    with lab.beside("lab1", taken):
        told = refuse(
            lab,
            tmp_path,
            {
                "torch": {"python": str(python)},
                "noise": {"python": str(noisy)},
                "shared": {"at": str(tmp_path / "runs")},
                "taken": {"port": 4321},
                "loopback": {"address": "localhost"},
                "given": {"address": "10.99.0.1", "port": 4322},
                "jump": {"hosts": ["root@lab2"], "jump_host": "lab1"},
            },
        )
    assert "torch is " in told["torch"]
    assert "2.0.0 on lab2: processes would exchange what the other does not" in told["torch"]
    assert told["noise"] == "it ran", "what a login prints is no message"
    assert "the run folder is not shared: lab2 does not see a file that stands in" in told["shared"]
    assert "lab1: port 4321 on 10.99.0.1 cannot be had" in told["taken"]
    assert "launcher.address=localhost is 127.0.0.1 on lab1" in told["loopback"]
    assert (told["given"], told["jump"]) == ("it ran", "it ran")

    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine.py").write_text("A = 1\n")
    hidden = f"mount -t tmpfs none {tmp_path}/code; echo A=2 > {tmp_path}/code/mine.py"
    lab.run_on("lab2", "bash", "-c", hidden)
    told = refuse(lab, tmp_path / "code", {"code": {"at": str(tmp_path)}})
    assert f"the Python files of {tmp_path}/code are not the same on lab2" in told["code"]


def test_hostile_words_in_every_knob_start_nothing(lab, tmp_path):
    evil = f"$(touch {tmp_path}/evil);`touch {tmp_path}/evil`'\"; touch {tmp_path}/evil #"
    knobs = ("python", "folder", "user", "jump_host", "address")
    cases: dict[str, dict[str, object]] = {name: {name: evil} for name in knobs}
    cases |= {
        "hosts": {"hosts": [evil]},
        "export": {"export": [evil]},
        "option": {"ssh_options": [f"Compression={evil}"]},
        "proxy": {"ssh_options": [evil]},
        "dash": {"hosts": ["-oProxyCommand=reboot"]},
        "secret": {"export": ["A_SECRET"], "python": evil},
    }
    told = refuse(lab, tmp_path, cases)
    assert not (tmp_path / "evil").exists()
    assert not any(words == "it ran" for words in told.values()), told
    assert not any("tell-nobody" in words for words in told.values()), told


# -- a whole run ----------------------------------------------------------------------------------

TRAIN = [
    *("+recipe=digits", "strategy=ddp", "trainer.stages=[fit]", "trainer.log_every=1"),
    "trainer.max_steps=100",
    *("log_level=warning", "trainer.eval_every_epochs=null"),
]


def train(lab: Lab, folder: Path, *words: str) -> LabProcess:
    return lab.at_head(
        [sys.executable, "-m", "torsh_trainer", *TRAIN, *words], cwd=folder, env=os.environ
    )


WAITING = """\
import time
from pathlib import Path

from torsh_trainer.callbacks.base import Callback


class Waiting(Callback):
    \"\"\"Steps beyond the 40th take their time, until the test lets them go.\"\"\"

    def on_step(self, report):
        if report.step > 40 and not Path("go").exists():
            time.sleep(0.2)
"""


def losses(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if row["split"] == "train"}


def test_two_machines_train_as_one_does_stop_on_ctrl_c_and_go_on(lab, tmp_path):
    over = [
        *("launcher=ssh", "launcher.hosts=[lab1,lab2]", f"launcher.ssh_config={lab.ssh_config}"),
        *(
            "hydra.run.dir=far",
            "checkpoint.every_steps=40",
            "+callbacks.waiting._target_=held.Waiting",
        ),
    ]
    (tmp_path / "held.py").write_text(WAITING)
    first = train(lab, tmp_path, *over)
    while not (tmp_path / "far/checkpoints/step-00000040").exists():
        assert first.is_running(), first.end()
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGINT)
    code, out, err = first.end()
    lab.await_empty("lab1", "lab2")
    assert code == 130, out + err
    stopped = max(losses(tmp_path / "far"))
    assert stopped < 100, "it was over before it was interrupted"
    (tmp_path / "go").touch()
    code, out, err = train(lab, tmp_path, *over).end()
    assert code == 0, out + err
    near = train(lab, tmp_path, "launcher.num_processes=2", "hydra.run.dir=near")
    code, out, err = near.end()
    assert code == 0, out + err
    far = losses(tmp_path / "far")
    assert max(far) == 100
    assert far == losses(tmp_path / "near")
