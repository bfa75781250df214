"""How processes meet: stores, agreement on a backend, and the words when it goes wrong."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from torsh_trainer.comm import create, devices
from torsh_trainer.comm.base import CommOptions
from torsh_trainer.environments.world import Rendezvous, World
from torsh_trainer.errors import ConfigError, ResourceError, TorshError, TrainingError
from torsh_trainer.testing.ranks import RankPool

CPU = torch.device("cpu")
BRIEF = CommOptions(timeout_s=20.0, startup_timeout_s=20.0)


@pytest.fixture
def ranks():
    """Two processes that have a place to meet and no group yet."""
    with RankPool(2, join=False) as pool:
        yield pool


@pytest.fixture
def port():
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def add_ranks(comm) -> float:
    tensor = torch.tensor([float(comm.world.rank + 1)])
    comm.all_reduce(tensor)
    return tensor.item()


def error_of(call) -> tuple[str, str, dict]:
    try:
        call()
    except TorshError as error:
        return type(error).__name__, str(error), error.facts
    return "", "", {}


def test_rank_0_serves_on_a_socket_that_it_was_handed(ranks):
    def case(world):
        comm = create(world, BRIEF, CPU)
        return add_ranks(comm), comm.backend, comm.world == world

    assert ranks.run(case) == [(3.0, "gloo", True)] * 2


def test_the_same_processes_meet_again_after_closing(ranks):
    def case(world):
        sums = []
        for _ in range(3):
            comm = create(world, BRIEF, CPU)
            sums.append(add_ranks(comm))
            comm.close()
            assert not dist.is_initialized()
        return sums

    assert ranks.run(case) == [[3.0] * 3] * 2


def test_rank_0_serves_at_a_plain_address_and_port(ranks, port):
    def case(world):
        comm = create(replace(world, rendezvous=Rendezvous("127.0.0.1", port)), BRIEF, CPU)
        return add_ranks(comm)

    assert ranks.run(case) == [3.0, 3.0]


def test_no_rank_binds_the_port_of_a_store_that_another_process_hosts(ranks):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def case(world, port):
        meeting = Rendezvous("127.0.0.1", port, hosted=True)
        return add_ranks(create(replace(world, rendezvous=meeting), BRIEF, CPU))

    assert ranks.run(case, store.port) == [3.0, 3.0]


def test_processes_meet_where_another_store_is_served_since(ranks):
    def case(world, port):
        meeting = Rendezvous("127.0.0.1", port, hosted=True)
        comm = create(replace(world, rendezvous=meeting), BRIEF, CPU)
        try:
            return add_ranks(comm)
        finally:
            comm.close()

    port = 0
    for _ in range(2):
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        port = store.port
        assert ranks.run(case, port) == [3.0, 3.0]
        del store


def test_a_port_in_use_is_named(ranks):
    def case(world, port):
        if world.rank > 0:
            return None
        options = replace(BRIEF, startup_timeout_s=2.0)
        here = replace(world, rendezvous=Rendezvous("127.0.0.1", port))
        return error_of(lambda: create(here, options, CPU))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        kind, words, facts = ranks.run(case, taken)[0]
    assert kind == "ResourceError"
    assert f"port {taken} is in use" in words
    assert facts["port"] == taken


def test_a_rank_that_never_arrives_is_named_by_all_others(away):
    def case(world):
        if world.rank == 2:
            away.until_noticed_by(2)  # hangs before it joins
            return None
        options = replace(BRIEF, startup_timeout_s=1.0)
        answer = error_of(lambda: create(world, options, CPU))
        away.noticed(world.rank)
        return answer

    with RankPool(3, join=False) as pool:
        answers = pool.run(case)
    for kind, words, _ in answers[:2]:
        assert kind == "ResourceError"
        assert words.startswith("rank 2 of 3 did not arrive within 1 s")


def test_the_others_say_that_rank_0_cannot_be_reached(ranks, port):
    def case(world):
        if world.rank == 0:
            return None
        options = replace(BRIEF, startup_timeout_s=1.0)
        here = replace(world, rendezvous=Rendezvous("127.0.0.1", port))
        return error_of(lambda: create(here, options, CPU))

    kind, words, facts = ranks.run(case)[1]
    assert kind == "ResourceError"
    assert f"rank 1 could not reach rank 0 at 127.0.0.1:{port} within 1 s" in words
    assert facts["address"] == f"127.0.0.1:{port}"


def test_a_backend_that_is_missing_is_an_error_that_says_why_and_where(ranks):
    def case(world):
        return error_of(lambda: create(world, replace(BRIEF, backend="nccl"), CPU))

    for kind, words, _ in ranks.run(case):
        assert kind == "ResourceError"
        assert words.startswith("ranks 0, 1 cannot use nccl: nccl moves CUDA tensors")
        assert "comm.on_missing=fallback" in words


def register_ring() -> None:
    def make(store, rank, size, timeout):
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend("ring", make, devices=["cpu"])


def test_all_ranks_fall_back_together_when_the_backend_is_missing_on_one(ranks):
    def case(world):
        if world.rank == 1:
            register_ring()
        failed = error_of(lambda: create(world, replace(BRIEF, backend="ring"), CPU))
        comm = create(world, replace(BRIEF, backend="ring", on_missing="fallback"), CPU)
        return failed[1], add_ranks(comm), comm.backend

    for words, total, backend in ranks.run(case):
        assert words.startswith("rank 0 cannot use ring: torch.distributed knows no backend")
        assert (total, backend) == (3.0, "gloo")


def test_ranks_that_ask_for_different_backends_are_told_so(ranks):
    def case(world):
        options = replace(BRIEF, backend="gloo" if world.rank else "auto")
        return error_of(lambda: create(world, options, CPU))

    for kind, words, _ in ranks.run(case):
        assert kind == "ConfigError"
        assert "different backends: auto, gloo" in words


def test_a_backend_that_a_plugin_registered_is_used_by_its_name(ranks):
    def case(world):
        register_ring()
        comm = create(world, replace(BRIEF, backend="ring"), CPU)
        tensor = torch.tensor([float(comm.world.rank + 1)])
        comm.all_reduce(tensor, op="mean")  # gloo's AVG would do, but nobody promises it here
        return tensor.item(), comm.backend

    assert ranks.run(case) == [(1.5, "ring")] * 2


def test_one_process_gets_a_real_group_of_one(ranks):
    def case(world):
        comm = create(World(), BRIEF, CPU)
        answer = comm.backend, dist.get_world_size(comm.process_group), add_ranks(comm)
        comm.close()
        return answer

    assert ranks.run(case) == [("gloo", 1, 1.0)] * 2


def test_a_group_that_exists_is_used_and_left_alone(ranks):
    def case(world):
        own = create(world, BRIEF, CPU)
        # The script that made it has started its processes by itself: no environment knows them.
        comm = create(World(), BRIEF, CPU)
        answer = comm.world.rank, comm.world.local_size, add_ranks(comm)
        comm.close()
        contradiction = error_of(lambda: create(World(), replace(BRIEF, backend="nccl"), CPU))
        other_place = replace(world, rank=1 - world.rank, local_rank=0)
        wrong_rank = error_of(lambda: create(other_place, BRIEF, CPU))
        return *answer, add_ranks(own), contradiction[1], wrong_rank[1]

    for rank, answer in enumerate(ranks.run(case)):
        assert answer[:4] == (rank, 2, 3.0, 3.0)
        assert "already in a gloo group" in answer[4]
        assert f"rank {1 - rank} of 2 by its environment and {rank} of 2" in answer[5]


def test_the_interface_reaches_gloo_and_nccl(ranks):
    def case(world):
        comm = create(world, replace(BRIEF, network_interface="lo"), CPU)
        variables = os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]
        return *variables, add_ranks(comm)

    assert ranks.run(case) == [("lo", "=lo", 3.0)] * 2


def test_a_collective_that_one_rank_leaves_out_ends_and_names_rank_and_operation(ranks):
    def case(world):
        comm = create(world, replace(BRIEF, timeout_s=1.0), CPU)
        if world.rank == 1:
            return ""
        try:
            comm.all_reduce(torch.ones(2))
        except TrainingError as error:
            return str(error)
        return ""

    words = ranks.run(case)[0]
    assert words.startswith("all_reduce failed on rank 0 (gloo): rank 1 of 2 ")
    assert "comm.timeout_s=1" in words


@pytest.mark.exhaustive
def test_torchrun_serves_the_store_and_may_restart_its_workers(run_command, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, torch\n"
        "from torsh_trainer import environments\n"
        "from torsh_trainer.comm import create\n"
        "from torsh_trainer.comm.base import CommOptions\n"
        "world = environments.detect(dict(os.environ))\n"
        "comm = create(world, CommOptions(startup_timeout_s=60.0), torch.device('cpu'))\n"
        "tensor = torch.tensor([world.rank + 1.0])\n"
        "comm.all_reduce(tensor)\n"
        "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        # In one write: two processes share the pipe.
        "sys.stdout.write(f'attempt {attempt} rank {world.rank} {tensor.item()}\\n')\n"
        "sys.stdout.flush()\n"
        "comm.barrier()\n"
        "if attempt == '0' and world.rank == 1:\n"
        "    sys.exit(1)\n"
        "comm.close()\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = ["--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1"]
    result = run_command([*torchrun, *options, script], cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for attempt in (0, 1):
        for rank in (0, 1):
            assert f"attempt {attempt} rank {rank} 3.0" in result.stdout


# -- refused before anybody meets ---------------------------------------------------------------


def test_an_unknown_backend_offers_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'gloo'"):
        create(World(), CommOptions(backend="glo"), CPU)


def test_an_unknown_interface_offers_those_that_exist():
    with pytest.raises(ConfigError, match=r"no 'eth77'; it has .*lo"):
        create(World(), CommOptions(network_interface="eth77"), CPU)


def test_several_processes_without_a_place_to_meet_are_refused():
    with pytest.raises(ConfigError, match="nothing says where they meet"):
        create(World(rank=0, size=2, local_size=2), CommOptions(), CPU)


def test_a_single_process_needs_no_group():
    comm = create(World(), CommOptions(), CPU, process_group=False)
    assert comm.backend == "local"
    assert comm.process_group is None


def test_nccl_on_one_process_that_computes_on_a_cpu_is_refused():
    with pytest.raises(ResourceError, match="rank 0 cannot use nccl"):
        create(World(), CommOptions(backend="nccl"), CPU)


@pytest.mark.parametrize("name", ["timeout_s", "startup_timeout_s"])
def test_a_time_that_is_not_positive_is_refused(name):
    with pytest.raises(ConfigError, match=f"comm.{name}=0 is not positive"):
        CommOptions(**{name: 0})


def test_a_word_that_on_missing_does_not_know_is_refused():
    with pytest.raises(ConfigError, match=r"comm.on_missing=ignore"):
        CommOptions(on_missing="ignore")


@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_two_ranks_on_one_gpu_are_refused_unless_gloo_is_asked_for(ranks, backend):
    def case(world):
        devices.identify = lambda device: "GPU-7b61"
        sums = []
        error = error_of(
            lambda: sums.append(add_ranks(create(world, replace(BRIEF, backend=backend), CPU)))
        )
        return sums, error

    for sums, (kind, words, facts) in ranks.run(case):
        if backend == "gloo":
            assert (sums, kind) == ([3.0], "")
            continue
        assert kind == "ConfigError"
        assert words.startswith("ranks 0, 1 compute on one GPU, GPU-7b61")
        assert facts["ranks"] == [0, 1]


def register_device_ring() -> None:
    """As NCCL, it takes no tensors of the CPU."""

    def make(store, rank, size, timeout):
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend("devicering", make, devices=["cuda"])


@pytest.mark.parametrize("adopted", [False, True])
def test_python_numbers_are_reduced_past_the_device(ranks, port, adopted):
    def case(world, port):
        register_device_ring()
        if adopted:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            dist.init_process_group("devicering", rank=world.rank, world_size=world.size)
        comm = create(world, replace(BRIEF, backend="devicering"), CPU)
        later = comm.begin_sum(world.rank + 0.5)
        largest = comm.reduce_values([world.rank, -world.rank], op="max")
        mean = comm.reduce_values([float(world.rank)], op="mean")
        on_device = error_of(lambda: add_ranks(comm))[1]
        comm.close()
        left = dist.is_initialized()
        if adopted:
            dist.destroy_process_group()
        return later(), largest, mean, "cpu" in on_device, left

    assert ranks.run(case, port) == [(2.0, [1.0, 0.0], [0.5], True, adopted)] * 2
