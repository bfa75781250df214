"""A whole parent process: Ctrl-C, SIGTERM, its sudden death, and scripts without a main guard."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torsh_trainer.utils.signals import signal_name

PRELUDE = """
import os, signal, sys, time
from pathlib import Path
from torsh_trainer.errors import Interrupted, WorkerError
from torsh_trainer.launchers.base import LaunchContext
from torsh_trainer.launchers.local import Local

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job may ignore it
folder = Path(sys.argv[1])
context = LaunchContext(env=dict(os.environ))

def wait_for(*names):
    while not all((folder / name).exists() for name in names):
        time.sleep(0.02)

def announce(world):
    (folder / f"half-{world.rank}").write_text(str(os.getpid()))
    (folder / f"half-{world.rank}").rename(folder / f"pid-{world.rank}")

def run(entry, **knobs):
    try:
        print("answer", Local(num_processes=2, **knobs).launch(entry, context=context))
    except (Interrupted, WorkerError) as error:
        print(type(error).__name__, error)
        print(error.facts.get("answer"))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "handlers are back"
        sys.exit(error.cause_exit_code)
"""
SLEEP = """
def entry(world):
    announce(world)
    time.sleep(3600)
"""
SAVE = """
def entry(world):
    stop = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stop.append(number))
    announce(world)
    while not stop:
        time.sleep(0.02)
    time.sleep(0.2)
    (folder / f"saved-{world.rank}").touch()
    return {"signals": [int(number) for number in stop]}
"""
DEAF = """
def entry(world):
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
    announce(world)
    while True:
        time.sleep(1)
"""


class Parent:
    """A script that launches two workers, and its folder."""

    def __init__(self, folder, entry, run="run(entry)"):
        self.folder = folder
        script = folder / "script.py"
        script.write_text(PRELUDE + entry + run + "\n")
        self.process = subprocess.Popen(
            [sys.executable, script, folder],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(folder)},
        )

    def pids(self):
        files = [self.folder / f"pid-{rank}" for rank in range(2)]
        while not all(file.exists() for file in files):
            assert self.process.poll() is None, "the parent ended before its workers started"
            time.sleep(0.02)
        return [int(file.read_text()) for file in files]

    def end(self):
        out, _ = self.process.communicate()
        return out, self.process.returncode


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)
def test_workers_save_and_finish_when_the_parent_is_asked_to_stop(number, code, tmp_path):
    parent = Parent(tmp_path, SAVE)
    pids = parent.pids()
    parent.process.send_signal(number)
    out, returncode = parent.end()
    assert returncode == code
    assert f"Interrupted stopped by {signal_name(number)}" in out
    assert str({"signals": [int(number)]}) in out, "rank 0's answer is among the facts"
    assert (tmp_path / "saved-0").exists()
    assert (tmp_path / "saved-1").exists()
    assert not any(map(alive, pids))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_that_has_stopped_already_says_so_when_the_signal_comes(number, tmp_path):
    """Rank 0 has it at once, and rank 1 hears of it from rank 0 before the parent sends it."""
    entry = f"""
from torsh_trainer.utils.signals import Signals

def entry(world):
    announce(world)
    try:
        with Signals() as signals:
            while world.rank == 0 and not signals.received:
                time.sleep(0.02)
            raise Interrupted("stopped in good order", fix="go on from here")
    finally:
        if world.rank == 1:
            os.kill(os.getpid(), {int(number)})
"""
    parent = Parent(tmp_path, entry)
    parent.pids()
    parent.process.send_signal(number)
    out, returncode = parent.end()
    assert "go on from here" in out
    assert returncode == 128 + number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_without_handlers_end_at_once_and_quietly(number, tmp_path):
    parent = Parent(tmp_path, SLEEP, "run(entry, grace_s=3600)")
    pids = parent.pids()
    parent.process.send_signal(number)
    out, returncode = parent.end()
    assert returncode == 128 + number
    assert out == f"Interrupted stopped by {signal_name(number)}\nNone\n"
    assert not any(map(alive, pids))


def test_workers_that_do_not_stop_are_killed_after_the_grace(tmp_path):
    parent = Parent(tmp_path, DEAF, "run(entry, grace_s=1)")
    pids = parent.pids()
    parent.process.terminate()
    out, returncode = parent.end()
    assert returncode == 143
    assert "rank 0, 1 had to be killed" in out
    assert not any(map(alive, pids))


def test_a_second_ctrl_c_kills_at_once(tmp_path):
    parent = Parent(tmp_path, DEAF, "run(entry, grace_s=3600)")
    pids = parent.pids()
    parent.process.send_signal(signal.SIGINT)
    time.sleep(1)  # one that follows sooner is taken for an echo
    parent.process.send_signal(signal.SIGINT)
    assert parent.end()[1] == 130
    assert not any(map(alive, pids))


# A call of C that keeps the interpreter: no thread of the worker has its turn, no handler runs.
STUCK = """
def entry(world):
    import ctypes
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    announce(world)
    ctypes.PyDLL(None).sleep(3600)
"""


@pytest.mark.parametrize(
    "entry", [SLEEP, SAVE, DEAF, STUCK], ids=["plain", "with handlers", "deaf", "stuck"]
)
def test_workers_end_when_their_parent_is_killed(entry, tmp_path):
    parent = Parent(tmp_path, entry)
    pids = parent.pids()
    parent.process.kill()
    parent.end()
    while any(map(alive, pids)):
        time.sleep(0.02)


def test_what_a_worker_has_started_ends_with_it_when_the_parent_is_killed(tmp_path):
    child = """
def entry(world):
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    child = subprocess.Popen(["sleep", "3600"])
    (folder / f"child-{world.rank}").write_text(str(child.pid))
    announce(world)
    child.wait()
"""
    parent = Parent(tmp_path, "import subprocess\n" + child)
    pids = parent.pids()
    pids += [int((tmp_path / f"child-{rank}").read_text()) for rank in range(2)]
    parent.process.kill()
    parent.end()
    while any(map(alive, pids)):
        time.sleep(0.02)


def test_no_guard_stays_when_a_worker_has_ended(tmp_path):
    entry = """
def entry(world):
    tasks = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    (folder / f"half-{world.rank}").write_text(" ".join([str(os.getpid()), *tasks]))
    (folder / f"half-{world.rank}").rename(folder / f"pids-{world.rank}")
"""
    parent = Parent(tmp_path, entry)
    assert parent.end()[1] == 0
    for rank in range(2):
        pids = [int(pid) for pid in (tmp_path / f"pids-{rank}").read_text().split()]
        assert len(pids) == 2
        while any(map(alive, pids)):
            time.sleep(0.02)


def test_slurms_warning_reaches_the_workers(tmp_path):
    entry = """
def entry(world):
    got = []
    signal.signal(signal.SIGUSR1, lambda number, frame: got.append(int(number)))
    announce(world)
    while not got:
        time.sleep(0.02)
    return got
"""
    parent = Parent(tmp_path, entry)
    parent.pids()
    parent.process.send_signal(signal.SIGUSR1)
    out, returncode = parent.end()
    assert (out, returncode) == (f"answer [{int(signal.SIGUSR1)}]\n", 0)


def test_closures_of_a_script_without_a_main_guard_run_and_the_parent_needs_no_torch(tmp_path):
    entry = """
class Scale:
    def __init__(self, factor):
        self.factor = factor
    def __call__(self, value):
        return self.factor * value
scale = Scale(3)
offset = 4
"""
    run = "run(lambda world: scale(world.size) + offset)\nassert 'torch' not in sys.modules"
    assert Parent(tmp_path, entry, run).end() == ("answer 10\n", 0)


def test_rank_0_keeps_the_parents_terminal(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PRELUDE + "run(lambda world: (sys.stdout.isatty(), sys.stderr.isatty()))\n")
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, script, tmp_path], stdout=theirs, stderr=theirs)
    assert process.wait() == 0
    os.close(theirs)
    assert os.read(ours, 1000) == b"answer (True, True)\r\n"
    os.close(ours)


def test_under_torchrun_each_process_finds_its_place_and_meets_through_the_agent(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        PRELUDE
        + """
import torch, torch.distributed as dist
from torsh_trainer import environments

def entry(world):
    meeting = world.rendezvous
    assert meeting.hosted
    store = dist.TCPStore(meeting.address, meeting.port, world.size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    value = torch.tensor([world.rank + 1.0])
    dist.all_reduce(value)
    dist.destroy_process_group()
    (folder / f"sum-{world.rank}").write_text(f"{world.source} {value.item()} {os.getpid()}")
    return os.getpid()

found = environments.detect(os.environ)
context = LaunchContext(env=dict(os.environ), found=found)
assert Local().launch(entry, context=context) == os.getpid(), "inline, in torchrun's process"
"""
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, script, tmp_path], check=True, env=env)
    for rank in range(2):
        assert (tmp_path / f"sum-{rank}").read_text().startswith("torchrun 3.0 ")
