"""The launcher with real worker processes; most of them do without torch, to start quickly."""

import ctypes
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import joblib
import pytest

from torsh_trainer import environments
from torsh_trainer.errors import ConfigError, Interrupted, ResourceError, WorkerError
from torsh_trainer.launchers.base import LaunchContext
from torsh_trainer.launchers.inside import report_ready
from torsh_trainer.launchers.local import Local

FOREVER = 3600


@pytest.fixture(autouse=True)
def _logs_of_failed_jobs_stay_in_the_tests_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def launch(entry, *args, log_dir=None, found=None, **knobs):
    env = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
    knobs = {"num_processes": 2, **knobs}
    return Local(**knobs).launch(
        entry, *args, context=LaunchContext(env=env, found=found, log_dir=log_dir)
    )


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition):
    while not condition():
        time.sleep(0.02)


def sum_of_ranks(world):
    """Meets as any program would that takes the World at its word, and sums rank + 1."""
    import torch
    import torch.distributed as dist

    meeting = world.rendezvous
    fd = {} if meeting.listen_fd is None else {"master_listen_fd": meeting.listen_fd}
    store = dist.TCPStore(
        meeting.address,
        meeting.port,
        world.size,
        is_master=world.is_rank_zero and not meeting.hosted,
        **fd,
    )
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    value = torch.tensor([world.rank + 1.0])
    dist.all_reduce(value)
    dist.destroy_process_group()
    return value.item()


# -- what a job gives back ----------------------------------------------------------------------


def test_processes_meet_and_rank_0_answers():
    assert launch(sum_of_ranks) == 1 + 2


def test_two_jobs_at_once_do_not_collide_and_need_no_main_thread():
    answers = {}

    def one(name):
        answers[name] = launch(sum_of_ranks)

    threads = [threading.Thread(target=one, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {"a": 3.0, "b": 3.0}


def test_a_job_starts_inside_a_joblib_worker():
    jobs = joblib.Parallel(n_jobs=2)(joblib.delayed(launch)(place_of) for _ in range(2))
    assert [job[:2] for job in jobs] == [(0, 2), (0, 2)]


def place_of(world):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    return world.rank, world.size, {name: os.environ[name] for name in names}


def test_workers_carry_their_place_and_their_threads_in_the_usual_variables():
    rank, size, variables = launch(place_of, num_processes=3, threads_per_process=2)
    assert (rank, size) == (0, 3)
    assert variables == {
        "RANK": "0",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "3",
        "OMP_NUM_THREADS": "2",
    }


def test_cores_are_divided_among_the_processes():
    cores = len(os.sched_getaffinity(0))
    variables = launch(place_of, num_processes=2)[2]
    assert variables["OMP_NUM_THREADS"] == str(max(1, cores // 2))


def test_an_answer_that_refers_to_classes_of_the_caller_comes_back():
    class Answer:
        value = 7

    assert launch(lambda world: Answer()).value == 7


# -- how a job fails ----------------------------------------------------------------------------


def raise_on(world, rank):
    if world.rank == rank:
        raise ValueError("the label is 11\nand there are 10 classes")
    time.sleep(FOREVER)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_a_worker_names_rank_traceback_and_log(rank, tmp_path):
    with pytest.raises(WorkerError) as caught:
        launch(raise_on, rank, log_dir=tmp_path)
    error = caught.value
    assert f"rank {rank} failed with ValueError: the label is 11" in str(error)
    assert error.facts["rank"] == rank
    assert "raise ValueError" in error.facts["traceback"]
    assert error.facts["log"] == str(tmp_path / f"rank-{rank}.log")
    assert error.facts["log"] in str(error)
    assert "raise ValueError" in Path(error.facts["log"]).read_text()
    assert error.cause_exit_code == 3
    assert "raise ValueError" in str(error.__cause__)


def refuse(world):
    raise ConfigError("data.batch_size=7 is odd", fix="make it even", key="data.batch_size")


def test_a_workers_own_sentence_and_exit_code_come_through_and_pickle():
    with pytest.raises(WorkerError) as caught:
        launch(refuse)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert str(error) == "data.batch_size=7 is odd; make it even"
        assert error.cause_exit_code == 2
        assert error.facts["cause"] == "ConfigError"
        assert error.facts["cause_facts"] == {"key": "data.batch_size"}


def kill_self(world, number):
    if world.rank == 1:
        print("last words", flush=True)
        os.kill(os.getpid(), number)
    time.sleep(FOREVER)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_worker_ends_the_job(number, tmp_path):
    with pytest.raises(WorkerError) as caught:
        launch(kill_self, number, log_dir=tmp_path)
    assert f"rank 1 was killed by {number.name}" in str(caught.value)
    wanted = "last words" if number == signal.SIGKILL else "in kill_self"
    assert wanted in caught.value.facts["traceback"]


@pytest.mark.parametrize("door", ["os._exit", "sys.exit"])
def test_a_worker_that_leaves_early_ends_the_job_even_with_code_0(door, tmp_path):
    def entry(world):
        if world.rank == 1:
            module, name = door.split(".")  # by name: a logger may have put its own into sys here
            getattr({"os": os, "sys": sys}[module], name)(0)
        time.sleep(FOREVER)

    with pytest.raises(WorkerError, match="rank 1") as caught:
        launch(entry, log_dir=tmp_path)
    assert caught.value.facts["log"].endswith("rank-1.log")


class SlowToArrive:
    """Its unpickling hangs in rank 1, as an import from a dead network drive would."""

    def __reduce__(self):
        return hang_in_rank_1, ()


def hang_in_rank_1():
    if os.environ["RANK"] == "1":
        time.sleep(FOREVER)


def test_a_worker_that_hangs_at_start_up_is_named_with_its_stack():
    # As long as a worker takes on a slow machine to come to where it hangs.
    with pytest.raises(WorkerError, match="did not start within 20 s") as caught:
        launch(raise_never, SlowToArrive(), startup_timeout_s=20)
    assert 1 in caught.value.facts["cause_facts"]["ranks"]
    assert "rank 1" in caught.value.facts["traceback"]
    assert "hang_in_rank_1" in caught.value.facts["traceback"]


def raise_never(world, arrived):
    return arrived


def meet_late(world):
    if world.rank == 0:
        time.sleep(FOREVER)
    report_ready()
    return world.rank


meet_late.reports_ready = True


def test_an_entry_may_say_itself_when_it_has_started():
    with pytest.raises(WorkerError, match="did not start within 3 s") as caught:
        launch(meet_late, startup_timeout_s=3)
    assert 0 in caught.value.facts["cause_facts"]["ranks"]


def lose_a_peer(world, there):
    """The follower tells first, by a tenth of a second: a peer is lost that was there."""
    if world.rank == 1:
        there.touch()
        time.sleep(0.1)
        raise KeyError("the cause")
    wait_until(there.exists)
    raise ConnectionResetError("connection reset by peer")


def read_in_the_standard_library(world):
    return json.loads("{")


def test_the_line_that_is_told_is_the_users_and_not_the_librarys():
    line = read_in_the_standard_library.__code__.co_firstlineno + 1
    with pytest.raises(WorkerError, match=re.escape(f"({__file__}:{line})")):
        launch(read_in_the_standard_library)


def test_the_cause_is_told_and_not_what_follows_from_it(tmp_path):
    with pytest.raises(WorkerError, match="rank 1 failed with KeyError"):
        launch(lose_a_peer, tmp_path / "there")


def wait_for_one_that_is_elsewhere(world):
    if world.rank == 1:
        time.sleep(FOREVER)
    raise ConnectionResetError("timed out")


def test_where_the_others_are_is_told_when_a_collective_fails():
    line = wait_for_one_that_is_elsewhere.__code__.co_firstlineno + 2
    with pytest.raises(WorkerError, match=f"; rank 1 was at {re.escape(__file__)}:{line}; its"):
        launch(wait_for_one_that_is_elsewhere)


def crash(world):
    if world.rank == 1:
        ctypes.string_at(0)
    time.sleep(FOREVER)


def test_a_crash_is_told_with_the_users_line():
    line = crash.__code__.co_firstlineno + 2
    place = re.escape(f"{__file__}:{line}")
    with pytest.raises(WorkerError, match=f"was killed by SIGSEGV at {place}; "):
        launch(crash)


def die_in_a_collective(world):
    import torch
    import torch.distributed as dist

    fd = {} if world.rank else {"master_listen_fd": world.rendezvous.listen_fd}
    store = dist.TCPStore("127.0.0.1", world.rendezvous.port, 2, is_master=world.is_rank_zero, **fd)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    dist.all_reduce(torch.ones(1))
    if world.rank == 1:
        os._exit(9)
    dist.all_reduce(torch.ones(1))


def test_gloos_error_on_the_surviving_rank_does_not_hide_the_rank_that_died():
    with pytest.raises(WorkerError, match="rank 1 ended before it was done, with exit code 9"):
        launch(die_in_a_collective)


def leave_a_child(world, folder):
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOREVER})"])
    (folder / f"pids-{world.rank}").write_text(f"{os.getpid()} {child.pid}")
    if world.rank == 1:
        wait_until((folder / "pids-0").exists)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(FOREVER)


def test_no_process_of_a_failed_job_is_left_nor_what_they_started(tmp_path):
    with pytest.raises(WorkerError):
        launch(leave_a_child, tmp_path)
    pids = [int(pid) for i in range(2) for pid in (tmp_path / f"pids-{i}").read_text().split()]
    wait_until(lambda: not any(map(alive, pids)))


def test_what_cannot_be_sent_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="cannot be sent to worker processes"):
        launch(place_of, threading.Lock())


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ResourceError, match=f"port {port} on 127.0.0.1 is in use") as caught:
            launch(place_of, port=port)
    assert "launcher.port=null" in caught.value.fix


def test_a_wanted_port_that_is_free_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert launch(lambda world: world.rendezvous.port, port=port) == port


def test_a_request_to_stop_inside_a_worker_is_no_failure():
    def entry(world):
        raise Interrupted("stopped after step 5", fix="resume", signal=15, step=5)

    with pytest.raises(Interrupted, match="stopped after step 5") as caught:
        launch(entry)
    assert caught.value.cause_exit_code == 143
    assert caught.value.facts["step"] == 5


# -- output -------------------------------------------------------------------------------------


def speak(world):
    print(f"out of {world.rank}")
    print(f"err of {world.rank}", file=sys.stderr)


def test_rank_0_speaks_where_the_parent_does_and_the_others_into_their_logs(tmp_path, capfd):
    launch(speak, log_dir=tmp_path / "logs")
    out, err = capfd.readouterr()
    assert (out, err) == ("out of 0\n", "err of 0\n")
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "out of 1\nerr of 1\n"
    assert not (tmp_path / "logs" / "rank-0.log").exists()


# -- nodes --------------------------------------------------------------------------------------


def gather_over_sockets(world, answers):
    """Rank 0 accepts everybody on the socket it was given; torch would take half a minute."""
    meeting = world.rendezvous
    (answers / str(world.rank)).write_text(f"{world.local_rank} {world.node_rank} {world.nodes}")
    if world.rank:
        with socket.create_connection((meeting.address, meeting.port)) as line:
            line.sendall(bytes([world.rank]))
        return None
    with socket.socket(fileno=meeting.listen_fd) as listener:
        return sorted(listener.accept()[0].recv(1)[0] for _ in range(world.size - 1))


@pytest.mark.parametrize(
    "variables",
    [
        [{"RANK": "0"}, {"RANK": "2"}],  # the first rank of each machine
        [{"NODE_RANK": "0", "LOCAL_RANK": "0"}, {"NODE_RANK": "2", "LOCAL_RANK": "0"}],
        [{"NODE_RANK": "0", "NNODES": "2"}, {"NODE_RANK": "1", "NNODES": "2"}],
        [
            {"JOB_COMPLETION_INDEX": "0", "NNODES": "2"},
            {"JOB_COMPLETION_INDEX": "1", "NNODES": "2"},
        ],
    ],
    ids=["first rank", "first rank as NODE_RANK", "node number", "pod index"],
)
def test_each_machine_starts_its_share_of_a_world(variables, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # Another address than 127.0.0.1: the loopback itself would say that all four are on one node.
    shared = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.2", "MASTER_PORT": str(port)}
    answers = {}

    def machine(number):
        found = environments.detect({**shared, **variables[number]})
        knobs = {"num_processes": 2} if "NNODES" not in variables[number] else {}
        knobs.setdefault("num_processes", "auto")
        answers[number] = launch(gather_over_sockets, tmp_path, found=found, **knobs)

    threads = [threading.Thread(target=machine, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {0: [1, 2, 3], 1: None}
    places = [(tmp_path / str(rank)).read_text() for rank in range(4)]
    assert places == ["0 0 2", "1 0 2", "0 1 2", "1 1 2"]
