"""Checkpoints on an object store, by real ranks against a real server of S3's protocol."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.checkpoint.store import stores
from torsh_trainer.checkpoint.store.integrity import MANIFEST, read_manifest, verify
from torsh_trainer.checkpoint.store.places import RemotePath, Unreachable, parse_storage_path
from torsh_trainer.checkpoint.tensors import disk as stored
from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.errors import ConfigError, TorshError
from torsh_trainer.testing.ranks import RankFailure, RankPool

pytestmark = pytest.mark.usefixtures("warm_interpreters")

SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(*server.get_host_and_port(), flush=True)
sys.stdin.read()  # until the tests are over, however they end
server.stop()
"""
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing"}
ROWS = 1 << 15
"""Of a tensor whose halves are larger than what is read ahead."""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    host, port = process.stdout.readline().split()
    yield f"http://{host}:{port}"
    process.communicate("", timeout=120)


@pytest.fixture(scope="module")
def options(endpoint) -> dict[str, object]:
    return {
        "endpoint_url": endpoint,
        "key": CREDENTIALS["AWS_ACCESS_KEY_ID"],
        "secret": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    }


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


_numbers = itertools.count()


@pytest.fixture
def folder(options) -> RemotePath:
    """A folder in a bucket that is there, empty."""
    place = parse_storage_path(f"s3://bucket-{next(_numbers)}/runs/one", options)
    assert isinstance(place, RemotePath)
    with place._asking("use") as (fs, path):
        fs.mkdir(path.partition("/")[0])
    return place


def full(value: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(int(value))
    return {
        "sharded": torch.randn(7, 3, generator=generator),
        "replicated": torch.randn(5, generator=generator),
    }


def state(comm: Communicator, value: float) -> dict:
    """Shards, replicas, and what each rank alone has."""
    whole = full(value)
    if comm.world.size > 1:
        mesh = init_device_mesh("cpu", (comm.world.size,))
        whole["sharded"] = distribute_tensor(whole["sharded"], mesh, [Shard(0)])
    rng = {f"rank_{comm.world.rank}": {"torch": torch.arange(comm.world.rank + 3)}}
    return {"engine": {"model": whole}, "position": {"step": int(value)}, "rng": rng}


def checkpointer(comm: Communicator, folder: RemotePath, **options) -> DcpCheckpointer:
    return DcpCheckpointer(folder, comm, CheckpointOptions(**options))


def alone(folder: RemotePath, **options) -> DcpCheckpointer:
    return checkpointer(LocalCommunicator(), folder, **options)


def assert_holds(loaded: dict, value: float) -> None:
    for name, tensor in full(value).items():
        held = loaded["engine"]["model"][name]
        held = held.full_tensor() if isinstance(held, DTensor) else held
        assert torch.equal(held, tensor), name
    assert loaded["position"] == {"step": int(value)}


def assert_is(folder: RemotePath, value: float, **where) -> None:
    assert_holds(alone(folder).load(state(LocalCommunicator(), 99), **where), value)


# -- saving and loading ---------------------------------------------------------------------------


def save_three(comm: Communicator, folder: RemotePath, mode: str) -> tuple[list[int], str]:
    saver = checkpointer(comm, folder, mode=mode, keep_last=2)
    saver.claim()
    for step in (1, 2, 3):
        held = state(comm, step)
        path = saver.save(step, held, {"loss": 1.0 / step})
        with torch.no_grad():
            held["engine"]["model"]["replicated"].zero_()  # while threads may be writing
        comm.barrier()
    saver.close()
    assert_holds(saver.load(state(comm, 99)), 3)
    return saver.steps(), str(path)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_two_ranks_save_and_load_and_one_process_reads_what_they_saved(ranks, folder, mode):
    target = folder / "step-00000003"
    assert ranks.run(save_three, folder, mode) == [([2, 3], str(target))] * 2
    assert set(folder.listing()) == {"step-00000002", "step-00000003"}  # no lock, no leftovers
    assert set(target.listing()) == {*read_manifest(target).files, MANIFEST}
    assert verify(target).world_size == 2
    assert_is(folder, 3)
    assert_is(folder, 2, step=2)
    streams = alone(folder).load(state(LocalCommunicator(), 99))["rng"]
    assert {rank: len(stream["torch"]) for rank, stream in streams.items()} == {
        "rank_0": 3,
        "rank_1": 4,
    }


def resume_from(comm: Communicator, folder: RemotePath, elsewhere: Path) -> str:
    options = CheckpointOptions(storage_options=folder.options)
    saver = DcpCheckpointer(elsewhere, comm, options)
    found = saver.find(str(folder))
    assert_holds(saver.load(state(comm, 99), path=found), 5)
    return str(found)


def test_two_ranks_go_on_in_a_folder_from_the_url_that_one_process_saved(ranks, folder, tmp_path):
    path = alone(folder).save(5, state(LocalCommunicator(), 5), {})
    assert ranks.run(resume_from, folder, tmp_path) == [str(path)] * 2
    assert list(tmp_path.iterdir()) == []


def large(comm: Communicator, value: float) -> DTensor:
    mesh = init_device_mesh("cpu", (comm.world.size,))
    return distribute_tensor(torch.full((ROWS, 256), value), mesh, [Shard(0)])


def count_what_is_read(comm: Communicator, folder: RemotePath) -> tuple[int, int]:
    from s3fs.core import S3File

    path = checkpointer(comm, folder).save(1, {"w": large(comm, 1.0)}, {})
    fetched: list[int] = []
    for_real = S3File._fetch_range

    def counted(file, start, end):
        fetched.append(end - start)
        return for_real(file, start, end)

    S3File._fetch_range = counted
    try:
        into = large(comm, 0.0)
        stored.read(path, stored.read_metadata(path), {("w",): into})
    finally:
        S3File._fetch_range = for_real
    assert bool((into.to_local() == 1.0).all())
    return sum(fetched), into.to_local().nbytes


def test_a_rank_reads_its_own_part_and_little_more(ranks, folder):
    for fetched, mine in ranks.run(count_what_is_read, folder):
        assert mine <= fetched < 1.5 * mine  # all of it is twice as much


def damaged_and_found(comm: Communicator, folder: RemotePath) -> list[str]:
    saver = checkpointer(comm, folder)
    told = []
    for look in (
        lambda: saver.load(state(comm, 99), path=folder / "step-00000002"),
        lambda: saver.load(state(comm, 99), path=folder / "step-00000003"),
        lambda: saver.find("auto"),
    ):
        try:
            told.append(str(look()))
        except TorshError as error:
            told.append(error.sentence)
    return told


def test_damage_is_found_on_all_ranks_and_auto_takes_the_one_before(ranks, folder):
    saver = alone(folder)
    for step in (1, 2, 3):
        saver.save(step, state(LocalCommunicator(), step), {})
    file = folder / "step-00000002" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[500] ^= 1
    file.write_bytes(bytes(content))
    (folder / "step-00000003" / "state.json").unlink()
    first, second = ranks.run(damaged_and_found, folder)
    assert first == second
    assert "__0_0.distcp is not what was written" in first[0]
    assert "state.json is missing" in first[1]
    assert first[2] == str(folder / "step-00000001")


# -- killed at any moment -------------------------------------------------------------------------


def save_and_die(comm: Communicator, folder: RemotePath, moment: str) -> None:
    """Saves step 2, and is killed by itself at ``moment``."""

    def die(*args: object, **kwargs: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    saver = checkpointer(comm, folder, keep_last=1)
    saver.claim()
    saver.load(state(comm, 99))
    if moment == "before any file" and comm.world.is_rank_zero:
        saver._store.clean = die
        stored.write_tensors = die
    if moment == "one rank's files are missing" and comm.world.rank == 1:
        stored._Writer.write_data = die
    if moment == "before the manifest" and comm.world.is_rank_zero:
        stores.write_manifest = die
    if moment == "after the manifest" and comm.world.is_rank_zero:
        saver._store.retire = die
    saver.save(2, state(comm, 2), {})


@pytest.mark.parametrize(
    ("moment", "visible"),
    [
        ("one rank's files are missing", 1),
        ("before the manifest", 1),
        ("after the manifest", 2),
    ],
)
@pytest.mark.matrix(1)
def test_a_process_killed_while_saving_leaves_what_was_whole(folder, moment, visible):
    alone(folder).save(1, state(LocalCommunicator(), 1), {})
    with RankPool(2) as pool, pytest.raises(RankFailure):
        pool.run(save_and_die, folder, moment)
    assert "step-00000002" in folder.listing()  # something was written
    reader = alone(folder)
    assert reader.steps() == list(range(1, visible + 1))
    assert reader.find("auto") == folder / f"step-0000000{visible}"
    assert_is(folder, visible)

    # The same run goes on: the lock of the dead process is no hindrance, and its leftovers go.
    following = alone(folder, keep_last=1)
    following.claim()
    following.load(state(LocalCommunicator(), 99))
    following.save(3, state(LocalCommunicator(), 3), {})
    following.close()
    assert set(folder.listing()) == {"step-00000003"}
    assert_is(folder, 3)


def test_what_dies_before_its_first_checkpoint_is_swept_by_the_next_run(folder):
    with RankPool(2) as pool, pytest.raises(RankFailure):
        pool.run(first_save_and_die, folder)
    assert (folder / "step-00000002").is_dir()
    saver = alone(folder)
    saver.claim()
    assert saver.find("auto") is None
    path = saver.save(2, state(LocalCommunicator(), 2), {})
    saver.close()
    assert path == folder / "step-00000002"
    assert set(path.listing()) == {*read_manifest(path).files, MANIFEST}


def first_save_and_die(comm: Communicator, folder: RemotePath) -> None:
    def die(*args: object, **kwargs: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    stores.write_manifest = die
    saver = checkpointer(comm, folder)
    saver.claim()
    saver.save(2, state(comm, 2), {})


# -- two runs, and stores that refuse -------------------------------------------------------------


def claim(comm: Communicator, folder: RemotePath) -> str:
    try:
        checkpointer(comm, folder).claim()
    except TorshError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_second_run_is_refused_on_every_rank_until_the_first_is_over(ranks, folder):
    holder = alone(folder)
    holder.claim()
    first, second = ranks.run(claim, folder)
    assert first == second
    assert first.startswith("ConfigError: another run saves into ")
    assert f"{folder}/.lock is held by process {os.getpid()} on " in first
    holder.close()
    assert ranks.run(claim, folder) == ["", ""]
    with pytest.raises(ConfigError, match=rf"held by process {ranks.pids[0]} on "):
        alone(folder).claim()


def test_a_bucket_that_is_not_there_is_told_before_training_and_not_made(ranks, options):
    folder = parse_storage_path("s3://no-such-bucket/runs", options)
    first, second = ranks.run(claim, folder)
    assert first == second
    assert first.startswith("Unreachable: cannot ")
    assert "s3://no-such-bucket/runs" in first
    assert not folder.exists()


def test_a_server_that_is_not_there_is_no_fresh_start(options):
    gone = {**options, "endpoint_url": "http://127.0.0.1:9", "config_kwargs": {"retries": {}}}
    gone["config_kwargs"] = {"retries": {"max_attempts": 0}, "connect_timeout": 1}
    with pytest.raises(Unreachable, match=r"checkpoint\.storage_options"):
        alone(parse_storage_path("s3://bucket/run", gone)).find("auto")


# -- as a user would ------------------------------------------------------------------------------


def test_a_run_goes_on_by_the_command_line_from_what_it_saved_in_a_bucket(
    run_door, endpoint, folder
):
    def run(*more: str):
        result = run_door(
            [
                "+recipe=digits",
                "trainer.device=cpu",
                "data.micro_batch_size=32",
                f"checkpoint.dir={folder}",
                f"+checkpoint.storage_options.endpoint_url={endpoint}",
                *more,
            ],
            env=CREDENTIALS,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout + result.stderr

    run("trainer.max_steps=2", "hydra.run.dir=first")
    assert alone(folder).steps() == [2]
    told = run("trainer.max_steps=4", "hydra.run.dir=second")
    assert f"resumed from {folder}/step-00000002 at step 2" in told
    assert alone(folder).steps() == [2, 4]
