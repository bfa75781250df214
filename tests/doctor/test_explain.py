"""``doctor explain``: words of known failures are explained; of others it says that none is."""

from __future__ import annotations

import io
import json
import socket
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from tests.isolation import require_isolation
from torsh_trainer.comm import devices, start
from torsh_trainer.comm.base import CommOptions
from torsh_trainer.doctor.command import main
from torsh_trainer.doctor.explain import explain_logs
from torsh_trainer.doctor.symptoms import SYMPTOMS, find_hints
from torsh_trainer.environments.world import Rendezvous, World
from torsh_trainer.errors import ConfigError, ResourceError, TorshError

LINES = {
    "store_timeout": "RuntimeError: The client socket has timed out after 60s while trying to "
    "connect to (10.0.0.1, 29500).",
    "rendezvous_unknown_self": "elastic.rendezvous.api.RendezvousConnectionError: "
    "The connection to the C10d store has failed. See inner exception for details.",
    "name_unresolved": "[W socket.cpp:426] [c10d] The IPv6 network addresses of (node1, 29500) "
    "cannot be retrieved (gai error: -2 - Name or service not known).",
    "rendezvous_timeout": "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
    "rendezvous_closed": "torch.distributed.elastic.rendezvous.api.RendezvousClosedError",
    "torchrun_without_hosts": "ValueError: Error initializing torch.distributed using env:// "
    "rendezvous: environment variable RANK expected, but not set",
    "port_taken": "The server socket has failed to bind to [::]:29500 (errno: 98 - Address already "
    "in use).",
    "stale_workers": "Timed out initializing process group in store based barrier on rank: 0, for "
    "key: store_based_barrier_key:1 (world_size=8, worker_count=16, timeout=0:30:00)",
    "loopback_host_name": "RuntimeError: Gloo connectFullMesh failed with [../gloo/transport/tcp/"
    "pair.cc:144] no error. Connection refused, remote=[127.0.1.1]:35511",
    "interface_missing": "node7:123:123 [0] NCCL WARN Bootstrap : no socket interface found",
    "docker_bridge": "node1:98:98 [0] NCCL INFO NET/Socket : Using [0]docker0:172.17.0.1<0>",
    "duplicate_gpu": "ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA "
    "device 3b000",
    "device_unbound": "[rank1]:[W] using GPU 1 to perform barrier as devices used by this process "
    "are currently unknown. This can potentially cause a hang if this rank to GPU mapping is "
    "incorrect.",
    "gpus_not_visible": "MisconfigurationException: You requested gpu: [0, 1, 2, 3, 4, 5, 6, 7] "
    "But your machine only has: [0]",
    "tasks_differ": "ValueError: You set `--ntasks=4` in your SLURM bash script, but this variable "
    "is not supported.",
    "world_lost": "Distributed environment: NO",
    "first_allreduce_hangs": "NCCL WARN NET/IB : Got completion from peer 10.0.0.2 with error 12",
    "container_without_gpus": "Error response from daemon: could not select device driver with "
    "capabilities: [[gpu]].",
    "gpu_lost": "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "driver_too_old": "RuntimeError: The NVIDIA driver on your system is too old (found version "
    "11040).",
    "shared_memory": "RuntimeError: DataLoader worker (pid 12) is killed by signal: Bus error. It "
    "is possible that dataloader's workers are out of shared memory.",
    "locked_memory": "NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory",
    "open_files": "RuntimeError: received 0 items of ancdata",
    "two_nccl": "ImportError: libtorch_cuda.so: undefined symbol: ncclGroupSimulateEnd",
    "out_of_memory": "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.",
    "no_scontrol": "FileNotFoundError: [Errno 2] No such file or directory: 'scontrol'",
    "site_policy": "sbatch: error: please do not specify number of cores, CPUs or tasks per node",
    "more_processors": "srun: error: Unable to create step for job 7: More processors requested "
    "than permitted",
    "old_slurm": "srun: unrecognized option '--gpus-per-task'",
    "job_pends": "  7  gpu  train  me PD  0:00  9 (PartitionConfig)",
    "log_folder": "7  train  FAILED      0:53",
    "time_limit": "slurmstepd: error: *** JOB 7 ON node1 CANCELLED AT 12:00 DUE TO TIME LIMIT ***",
    "efa_fallback": "NCCL WARN NET/OFI aws-ofi-nccl initialization failed",
    "another_failed_first": "Process failed on node 1, got signal: 15",
    "child_failed": "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
    "peer_gone": "RuntimeError: Connection closed by peer [10.0.0.2]:3321",
    "collective_timeout": "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(...)",
    "torsh_port": "error: port 29500 is in use, and rank 0 wanted to serve the job there; give ...",
    "torsh_unreached": "error: rank 1 could not reach rank 0 at node1:29500 within 60 s; see ...",
    "torsh_absent_ranks": "error: ranks 2, 3 of 4 did not arrive within 60 s; see the logs ...",
    "torsh_mesh": "error: all 2 processes arrived, but gloo could not connect rank 1: ...",
    "torsh_one_gpu": "error: ranks 0, 1 compute on one GPU, GPU-12; give Slurm ...",
    "torsh_backends_differ": "error: the processes ask for different backends: gloo, nccl; ...",
}
"""Each symptom, in words as they were reported."""

HEALTHY = """\
W0101 12:00:00.000000 1 torch/distributed/run.py:792] Setting OMP_NUM_THREADS environment variable
node1:98:98 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>
node1:98:98 [0] NCCL INFO NET/IB : No device found.
node1:98:98 [0] NCCL INFO Using network Socket
node1:98:98 [0] NCCL INFO ncclCommInitRank comm 0x55 rank 0 nranks 2 - Init COMPLETE
Distributed environment: MULTI_GPU  Backend: nccl
Num processes: 8
step 100 loss 0.31 error_rate 0.02 SLURM_NTASKS=4
"""


def explain(text: str):
    return explain_logs(["-"], io.StringIO(text))


def names(text: str) -> list[str]:
    return [one.symptom.name for one in explain(text).explanations]


def test_every_symptom_is_found_in_words_as_they_were_reported():
    assert [symptom.name for symptom in SYMPTOMS] == list(LINES)
    for name, line in LINES.items():
        assert name in names(f"starting\n{line}\n"), name


def test_symptoms_are_more_than_the_thirty_reported_and_each_names_its_source():
    assert len(SYMPTOMS) >= 36
    for symptom in SYMPTOMS:
        assert symptom.cause
        assert symptom.fix
        assert symptom.source


def test_hints_stand_in_what_their_pattern_finds():
    """A line is compared with the pattern only where it has a hint: each has to be needed."""
    assert find_hints(r"in use|(a|b)c? ends, errno: \d+|x{2}y") == ("in use", " ends, errno: ", "y")
    for symptom in SYMPTOMS:
        assert all(len(hint) >= 4 for hint in symptom.hints), symptom
        line = LINES[symptom.name]
        assert any(hint in line.lower() for hint in symptom.hints), symptom


def test_a_log_of_a_run_that_works_is_not_explained():
    found = explain(HEALTHY)
    assert found.explanations == []
    assert found.first_error is None


def test_causes_come_before_what_follows_from_them_with_line_and_count(tmp_path, capsys):
    log = tmp_path / "rank-0.log"
    log.write_text(
        f"start\n{LINES['peer_gone']}\n\x1b[31m{LINES['two_nccl']}\x1b[0m\n{LINES['two_nccl']}\n"
    )
    assert main(["explain", str(log)]) == 0
    out = capsys.readouterr().out
    assert f"{log}:3: two_nccl (and 1 times more)" in out
    assert out.index("two_nccl") < out.index("peer_gone")
    assert "pip list | grep nccl" in out
    assert "\x1b" not in out
    assert main(["explain", "--json", str(log)]) == 0
    first, second = json.loads(capsys.readouterr().out)["explanations"]
    assert (first["name"], first["line"], first["count"]) == ("two_nccl", 3, 2)
    assert second["follows"]


def test_the_logs_of_a_run_directory_are_read_together(tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").write_text(LINES["peer_gone"])
    (tmp_path / "logs" / "rank-1.log").write_text(f"step 1\n{LINES['open_files']}")
    assert main(["explain", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{tmp_path}/logs/rank-1.log:2: open_files")
    assert f"{tmp_path}/logs/rank-0.log:1: peer_gone" in out


def test_what_is_not_known_is_said_to_be_with_the_first_error(tmp_path, capsys):
    log = tmp_path / "odd.log"
    log.write_text("one\nValueError: shapes differ\n")
    assert main(["explain", str(log)]) == 1
    out = capsys.readouterr().out
    assert f"2 lines hold none of the {len(SYMPTOMS)} symptoms" in out
    assert f"the first error is {log}:2: ValueError: shapes differ" in out


def test_what_follows_a_failure_elsewhere_is_no_cause(tmp_path, capsys):
    log = tmp_path / "rank-1.log"
    log.write_text(LINES["peer_gone"])
    assert main(["explain", str(log)]) == 0
    assert "the cause is in the log of another process" in capsys.readouterr().out


def test_logs_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "log.gz").write_bytes(b"\x1f\x8b\0\0")
    with pytest.raises(ConfigError, match=r"is no text; unpack it"):
        main(["explain", str(tmp_path / "log.gz")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no logs"):
        main(["explain", str(tmp_path / "empty")])
    with pytest.raises(ResourceError, match=r"cannot read .*gone\.log"):
        main(["explain", str(tmp_path / "gone.log")])


# -- provoked -------------------------------------------------------------------------------------


def test_torch_says_these_words(monkeypatch, capfd):
    """What torch prints when the fault is there, in this process."""
    soon = timedelta(seconds=1)

    def words(work) -> str:
        capfd.readouterr()
        with pytest.raises((RuntimeError, ValueError)) as caught:
            work()
        return f"{caught.value}\n{capfd.readouterr().err}"

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = words(lambda: TCPStore("127.0.0.1", port, 1, is_master=True, timeout=soon))
        assert "port_taken" in names(said), said
    said = words(lambda: TCPStore("127.0.0.1", port, 2, is_master=False, timeout=soon))
    assert "store_timeout" in names(said), said
    said = words(lambda: TCPStore("no.such.invalid", 29500, 2, is_master=False, timeout=soon))
    assert "name_unresolved" in names(said), said
    said = words(lambda: dist.init_process_group("gloo"))
    assert "torchrun_without_hosts" in names(said), said
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    store = dist.HashStore()
    said = words(lambda: dist.init_process_group("gloo", store=store, rank=0, world_size=1))
    assert "interface_missing" in names(said), said


@pytest.mark.exhaustive
def test_torch_says_these_words_of_a_store_with_too_many():
    store = dist.HashStore()
    store.add("store_based_barrier_key:x", 15)
    with pytest.raises(RuntimeError) as caught:
        dist.distributed_c10d._store_based_barrier(
            0, store, "x", 8, timedelta(seconds=1), logging_interval=timedelta(milliseconds=200)
        )
    assert "stale_workers" in names(str(caught.value)), str(caught.value)


FAILS = "import sys; sys.exit(1)"
FILES = """
import resource, torch
resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
class Data(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, at): return [torch.zeros(2) for _ in range(64)]
if __name__ == "__main__":
    held = list(torch.utils.data.DataLoader(Data(), num_workers=1, collate_fn=list))
"""
SHARED = """
import torch
class Data(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, at): return torch.zeros(2**22)
if __name__ == "__main__":
    list(torch.utils.data.DataLoader(Data(), num_workers=1))
"""


@pytest.fixture
def explain_failure(tmp_path, run_command):
    """``explain_failure(*command)``: symptoms in what a program says that fails for real."""
    for name, text in (("fails", FAILS), ("files", FILES), ("shared", SHARED)):
        (tmp_path / f"{name}.py").write_text(text)

    def run(*command: str) -> list[str]:
        done = run_command(list(command), cwd=tmp_path)
        assert done.returncode != 0
        return names(f"{done.stdout}\n{done.stderr}")

    return run


@pytest.mark.exhaustive
def test_torchrun_and_loaders_say_these_words(explain_failure):
    """A worker that fails, a rendezvous, few files."""
    run = (sys.executable, "-m", "torch.distributed.run")
    assert "child_failed" in explain_failure(*run, "--nproc-per-node", "1", "fails.py")
    meet = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    short = ("--rdzv-conf", "join_timeout=1")
    assert "rendezvous_timeout" in explain_failure(*run, *meet, *short, "fails.py")
    hangs = ("timeout", "15", sys.executable, "files.py")
    assert "open_files" in explain_failure(*hangs)


@pytest.mark.exhaustive
def test_a_loader_without_shared_memory_says_these_words(explain_failure):
    require_isolation()
    small = f"mount -t tmpfs -o size=8m shm /dev/shm; {sys.executable} shared.py"
    assert "shared_memory" in explain_failure("unshare", "--mount", "bash", "-c", small)


def test_this_trainer_says_these_words():
    """Its own errors, raised where they are raised."""
    options = CommOptions(startup_timeout_s=1)
    here = Rendezvous("127.0.0.1", 1)
    world = World(rank=1, size=2, local_rank=1, local_size=2, rendezvous=here)

    def words(work) -> list[str]:
        with pytest.raises(TorshError) as caught:
            work()
        return names(str(caught.value))

    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = Rendezvous("127.0.0.1", taken.getsockname()[1])
        first = World(size=2, local_size=2, rendezvous=place)
        assert "torsh_port" in words(lambda: start._tcp_store(first, place, options))
    assert "torsh_unreached" in words(lambda: start._tcp_store(world, here, options))
    assert "torsh_absent_ranks" in words(lambda: start._roll_call(dist.HashStore(), world, options))

    def mesh() -> None:
        with start._connecting(world, "gloo"):
            raise RuntimeError("connectFullMesh failed")

    assert "torsh_mesh" in words(mesh)
    notes = {0: {"wanted": "gloo"}, 1: {"wanted": "nccl"}}
    assert "torsh_backends_differ" in words(lambda: start._choose(notes, options))
    gpus = {0: "GPU-1", 1: "GPU-1"}
    assert "torsh_one_gpu" in words(lambda: devices.check_apart(gpus, world, shares=False))
