"""The collectives API without other processes: probes, arguments, errors, tables."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from torsh_trainer import distributed as tc
from torsh_trainer.distributed import bench
from torsh_trainer.errors import ConfigError, ResourceError, TrainingError


@pytest.fixture
def alone():
    """A group of this process alone."""
    with tc.init_process_group("gloo", 0, 1, "localhost", 29500) as group:
        yield group


def test_every_public_name_is_there():
    assert all(getattr(tc, name) is not None for name in tc.__all__)


@pytest.mark.parametrize(
    "module",
    [
        "distributed.prelude",
        "distributed.nccl_optimization",
        "distributed.collectives",
        "comm.compression",
    ],
)
def test_modules_that_the_guides_name_offer_the_same_things(module):
    found: dict = {}
    exec(f"from torsh_trainer.{module} import *", found)
    offered = {name: found[name] for name in tc.__all__ if name in found}
    wanted = {
        "distributed.prelude": set(tc.__all__),
        "distributed.nccl_optimization": {"NcclScheduler", "Priority"},
        "distributed.collectives": {"all_reduce", "all_gather", "broadcast", "reduce", "scatter"},
        "comm.compression": {"GradientCompressor", "CompressionAlgorithm", "CompressorMemory"},
    }[module]
    assert wanted <= offered.keys()
    assert all(value is getattr(tc, name) for name, value in offered.items())


def test_asking_for_the_package_alone_does_not_load_torch():
    script = "import sys, torsh_trainer.distributed.tuning; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=240
    )
    assert done.stdout.strip() == "False"


def test_probes_say_what_torch_says():
    assert tc.is_available() == dist.is_available()
    assert tc.is_gloo_available() == dist.is_gloo_available()
    assert tc.is_nccl_available() == (dist.is_nccl_available() and torch.cuda.is_available())
    assert isinstance(tc.is_mpi_available(), bool)


@pytest.mark.parametrize(
    "call",
    [
        lambda: tc.all_reduce(torch.ones(1)),
        tc.barrier,
        lambda: tc.average_gradients([]),
        tc.NcclScheduler,
        lambda: tc.DistributedDataParallel(torch.nn.Linear(1, 1), tc.BucketConfig()),
    ],
)
def test_without_a_group_everything_says_so_in_torchs_kinds_and_ours(call):
    with pytest.raises(tc.BackendNotInitialized, match="init_process_group first") as caught:
        call()
    assert isinstance(caught.value, ConfigError | dist.DistError)
    assert isinstance(caught.value, ValueError)  # what torch itself raises there
    assert caught.value.exit_code == 2


def test_errors_have_the_exit_codes_of_their_kind():
    assert issubclass(tc.BackendError, ResourceError)
    assert issubclass(tc.CommunicationError, TrainingError)
    assert issubclass(tc.MismatchError, tc.CommunicationError)
    codes = {kind.__name__: kind.exit_code for kind in (tc.BackendError, tc.CommunicationError)}
    assert codes == {"BackendError": 1, "CommunicationError": 3}
    assert tc.RendezvousError("x").exit_code == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tc.init_process_group("glo"), "did you mean 'gloo'"),
        (lambda: tc.init_process_group("gloo", 3, 2), "rank 3 of 2 processes"),
        (lambda: tc.init_process_group("gloo", rank=0), "one of rank and world_size"),
        (lambda: tc.init_process_group("gloo", 0, 2), "nothing says where the processes meet"),
        (lambda: tc.init_process_group("gloo", 0, 2, "localhost", "x"), "master_port='x'"),
        (lambda: tc.init_process_group("gloo", 0, 2, rank=1), "got rank twice"),
        (lambda: tc.init_process_group("gloo", 0, 2, "a", 1, 2), "at most 4 arguments"),
        (lambda: tc.init_process_group("gloo", "udp://x", 2, 0), "'udp://x' is unknown"),
        (lambda: tc.init_process_group("gloo", "tcp://x:1"), "needs rank and world_size"),
        (lambda: tc.init_process_group("gloo", tc.InitMethod.ENV), "nothing in the environment"),
    ],
)
def test_arguments_that_cannot_be_right_are_named(call, words):
    with pytest.raises(tc.CollectiveArgumentError, match=words):
        call()
    assert not tc.is_initialized()


def test_one_process_is_a_group_too(alone):
    assert (tc.get_rank(), tc.get_world_size(), alone.backend) == (0, 1, "gloo")
    tensor = torch.tensor([3.0])
    tc.all_reduce(tensor)
    tc.ring_all_reduce(tensor)
    tc.hierarchical_all_reduce(tensor)
    assert tc.all_gather(tensor)[0].item() == 3.0
    assert tc.scatter(torch.arange(3), 0).tolist() == [0, 1, 2]
    with pytest.raises(tc.CollectiveArgumentError, match="in a process group already"):
        tc.init_process_group("gloo", 0, 1)


def test_an_empty_batch_does_nothing_and_a_wrong_place_is_named(alone):
    tc.NcclBatch().execute(alone, [])
    with pytest.raises(tc.CollectiveArgumentError, match="names tensor 1, and the table has 1"):
        tc.NcclBatch().all_reduce(1).execute(alone, [torch.ones(1)])


# -- tables ----------------------------------------------------------------------------------------


def record(algorithm, nbytes, time_us, **other):
    return {
        "backend": "gloo",
        "processes": 2,
        "collective": "all_reduce",
        "algorithm": algorithm,
        "bytes": nbytes,
        "time_us": time_us,
        **other,
    }


RECORDS = [
    record("flat", 1024, 100.0),
    record("flat", 1 << 20, 1000.0),
    record("ring", 1024, 200.0),
    record("ring", 1 << 20, 500.0),
    record("tree", 1024, 1.0, backend="nccl"),
    record("tree", 1024, 1.0, processes=4),
    record("tree", 1024, 1.0, collective="broadcast"),
]


def test_the_fastest_algorithm_is_chosen_for_every_size():
    table = tc.AlgorithmTable.from_records(RECORDS, backend="gloo", world_size=2)
    assert table.rows() == [(1024, "flat"), (1 << 20, "ring")]
    assert table.choose(1) == "flat"
    assert table.choose(1 << 30) == "ring"
    # Both times are straight lines on logarithmic axes, so they cross in one place.
    chosen = [table.choose(1024 << i) for i in range(11)]
    assert chosen == sorted(chosen)
    assert set(chosen) == {"flat", "ring"}


def test_nothing_measured_is_the_backends_own_way():
    table = tc.AlgorithmTable.from_records(RECORDS, backend="mpi", world_size=2)
    assert table.choose(1024) == "flat"


def test_a_table_is_read_from_what_the_bench_writes(tmp_path):
    file = tmp_path / "table.json"
    file.write_text(json.dumps({"records": RECORDS}))
    table = tc.AlgorithmTable.from_file(file, backend="gloo", world_size=2)
    assert table == tc.AlgorithmTable.from_records(RECORDS, backend="gloo", world_size=2)
    file.write_text("[]")
    with pytest.raises(ConfigError, match="not what comm bench --json writes"):
        tc.AlgorithmTable.from_file(file, backend="gloo", world_size=2)
    with pytest.raises(ResourceError, match="cannot read"):
        tc.AlgorithmTable.from_file(tmp_path / "none", backend="gloo", world_size=2)


def test_bus_factors_are_those_of_nccl_tests():
    n = 4
    factors = {name: factor(n) for name, factor in bench.BUS_FACTORS.items()}
    share = (n - 1) / n
    assert factors == {
        "all_reduce": 2 * share,
        "reduce_scatter": share,
        "all_gather": share,
        "broadcast": 1,
        "reduce": 1,
        "gather": share,
        "scatter": share,
        "all_to_all": share,
        "send_recv": 1,
    }
