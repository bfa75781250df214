"""Saving and loading on several real ranks, and across numbers of ranks.

The file is also the program of a rank: ``python test_checkpoint_ranks.py RANK SIZE FOLDER``.
"""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.checkpoint.store.integrity import read_manifest, verify
from torsh_trainer.checkpoint.tensors.disk import read_metadata
from torsh_trainer.comm import create
from torsh_trainer.comm.base import CommOptions, Communicator
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.environments.world import World
from torsh_trainer.errors import TorshError

pytestmark = pytest.mark.usefixtures("warm_interpreters")


def build(seed: int) -> nn.Module:
    """Rows that do not divide by two or by four, and a parameter with less rows than ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3), nn.Linear(3, 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    torch.manual_seed(11)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 5)).square().mean().backward()
        optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    held = getattr(optimizer, "optim", optimizer)
    names = {id(p): name for name, p in model.named_parameters()}
    slots = {names[id(p)]: dict(s) for p, s in held.state.items() if s}
    return {
        "engine": {"model": dict(model.named_parameters()), "optimizer": {"main": {"state": slots}}}
    }


def reference() -> dict:
    """What every rank trains, by plain PyTorch on one process."""
    model = build(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    return state_of(model, optimizer)


def empty() -> dict:
    """A state of the same shape with other values."""
    model = build(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, steps=1)
    return state_of(model, optimizer)


def sharded(seed: int, steps: int, *mesh_shape: int) -> dict:
    mesh = init_device_mesh(
        "cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :]
    )
    model = fully_shard(build(seed), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, steps=steps)
    return state_of(model, optimizer)


def flat(state: dict) -> dict[str, torch.Tensor]:
    found = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found.update({f"{key}.{name}": tensor for name, tensor in flat(value).items()})
        else:
            found[key] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return {name: tensor.detach().clone() for name, tensor in found.items()}


# -- what the ranks do ----------------------------------------------------------------------------


def save_replicated(comm: Communicator, folder: Path) -> object:
    DcpCheckpointer(folder, comm, facts={"strategy": "ddp"}).save(2, reference(), {"loss": 0.5})
    return None


def save_sharded(comm: Communicator, folder: Path) -> object:
    saver = DcpCheckpointer(folder, comm)
    saver.save(2, sharded(1, 2, comm.world.size), {})
    target = sharded(2, 1, comm.world.size)
    loaded = saver.load(target)
    expected = flat(reference())
    return {name: torch.equal(tensor, expected[name]) for name, tensor in flat(loaded).items()}


def load_what_one_process_saved(comm: Communicator, folder: Path) -> object:
    loaded = DcpCheckpointer(folder, comm).load(sharded(2, 1, comm.world.size))
    expected = flat(reference())
    return {name: torch.equal(tensor, expected[name]) for name, tensor in flat(loaded).items()}


def save_zero_1(comm: Communicator, folder: Path) -> object:
    model = build(1)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    train(model, optimizer)
    state = state_of(model, optimizer)
    state["mine"] = {"plain": {f"rank_{comm.world.rank}": comm.world.rank}}
    saver = DcpCheckpointer(folder, comm)
    saver.save(2, state, {})
    again = build(2)
    other = ZeroRedundancyOptimizer(again.parameters(), torch.optim.AdamW, lr=0.1)
    train(again, other, steps=1)
    loaded = saver.load(state_of(again, other))
    expected = flat(reference())
    found = flat({"engine": loaded["engine"]})
    same = {name: torch.equal(tensor, expected[name]) for name, tensor in found.items()}
    return {"same": same, "slots": sorted(state["engine"]["optimizer"]["main"]["state"])}


def save_async(comm: Communicator, folder: Path) -> object:
    saver = DcpCheckpointer(folder, comm, CheckpointOptions(mode="async", keep_last=2))
    state = sharded(1, 2, comm.world.size)
    expected = flat(state)
    for step in (1, 2, 3):
        path = saver.save(step, state, {})
    for tensor in state["engine"]["model"].values():
        with torch.no_grad():
            tensor.zero_()  # while threads may be writing
        comm.barrier()  # and collectives go on
    saver.close()
    loaded = flat(saver.load(sharded(2, 1, comm.world.size)))
    same = all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    return {"same": same, "steps": saver.steps(), "path": path.name}


def told(action: Callable[[], object]) -> dict[str, object]:
    try:
        action()
    except TorshError as error:
        return {"kind": type(error).__name__, "text": str(error), "cause": repr(error.__cause__)}
    return {"kind": None}


def one_rank_cannot_write(comm: Communicator, folder: Path) -> object:
    state = {"model": {f"w{r}": torch.ones(50_000) for r in (comm.world.rank,)}}
    answers = {}
    for mode in ("sync", "async"):
        saver = DcpCheckpointer(folder / mode, comm, CheckpointOptions(mode=mode))
        saver.save(1, state, {})
        saver.wait()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if comm.world.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))

        def save(saver: DcpCheckpointer = saver) -> None:
            saver.save(2, state, {})
            saver.close()

        answers[mode] = {**told(save), "steps": saver.steps()}
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return answers


def one_rank_has_something_odd(comm: Communicator, folder: Path) -> object:
    saver = DcpCheckpointer(folder, comm)
    state = {"w": torch.ones(2), "odd": object() if comm.world.rank == 1 else 1}
    return {**told(lambda: saver.save(1, state, {})), "steps": saver.steps()}


def a_file_is_damaged(comm: Communicator, folder: Path) -> object:
    saver = DcpCheckpointer(folder, comm)
    path = saver.save(1, {"w": torch.ones(500)}, {})
    if comm.world.rank == 0:
        file = next(p for p in path.glob("*.distcp") if p.stat().st_size)
        content = bytearray(file.read_bytes())
        content[100] ^= 1
        file.write_bytes(content)
    comm.barrier()
    target = {"w": torch.zeros(500)}
    answer = told(lambda: saver.load(target))
    return {
        "load": answer,
        "find": told(lambda: saver.find("auto")),
        "touched": bool(target["w"].any()),
    }


def only_rank_0_sees_the_mistake(comm: Communicator, folder: Path) -> object:
    saver = DcpCheckpointer(folder, comm)
    return {
        "load": told(lambda: saver.load({"w": torch.ones(1)})),
        "find": told(lambda: saver.find(str(folder / "nowhere"))),
        "steps": saver.steps(),
    }


def one_rank_wants_something_else(comm: Communicator, folder: Path) -> object:
    saver = DcpCheckpointer(folder, comm)
    saver.save(1, {"w": torch.ones(4)}, {})
    return told(lambda: saver.load({"w": torch.ones(4 + comm.world.rank)}))


def save_hybrid(comm: Communicator, folder: Path) -> object:
    DcpCheckpointer(folder, comm).save(2, sharded(1, 2, 2, comm.world.size // 2), {})
    return None


CASES = {
    2: [
        save_replicated,
        save_sharded,
        load_what_one_process_saved,
        save_zero_1,
        save_async,
        one_rank_cannot_write,
        one_rank_has_something_odd,
        a_file_is_damaged,
        only_rank_0_sees_the_mistake,
        one_rank_wants_something_else,
    ],
    4: [save_hybrid],
}


def run_as_rank(rank: int, size: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    world = World(rank, size, local_rank=rank, local_size=size)
    comm = create(world, CommOptions(), torch.device("cpu"))
    for case in CASES[size]:
        answer = case(comm, folder / case.__name__)
        (folder / f"{case.__name__}-{rank}.json").write_text(json.dumps(answer))
    dist.destroy_process_group()


# -- what came of it ------------------------------------------------------------------------------


class Ranks:
    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size

    def answers(self, case: Callable) -> list:
        names = [f"{case.__name__}-{rank}.json" for rank in range(self.size)]
        return [json.loads((self.folder / name).read_text()) for name in names]

    def load(self, case: Callable) -> dict[str, torch.Tensor]:
        """The checkpoint, on this one process."""
        saver = DcpCheckpointer(self.folder / case.__name__, LocalCommunicator())
        return flat(saver.load(empty()))


def started(folder: Path, size: int) -> Ranks:
    saver = DcpCheckpointer(folder / load_what_one_process_saved.__name__, LocalCommunicator())
    saver.save(2, reference(), {})
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(size), str(folder)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    errors = []
    try:
        errors = [process.communicate(timeout=480)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * size, "\n".join(errors)
    return Ranks(folder, size)


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Ranks:
    return started(tmp_path_factory.mktemp("two"), 2)


def assert_is_the_reference(found: dict[str, torch.Tensor]) -> None:
    expected = flat(reference())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_one_process_loads_what_two_replicas_saved(two):
    assert_is_the_reference(two.load(save_replicated))


def test_replicas_share_the_writing(two):
    path = two.folder / save_replicated.__name__ / "step-00000002"
    manifest = verify(path)
    assert manifest.world_size == 2
    assert manifest.facts["strategy"] == "ddp"
    sizes = [manifest.files[f"__{rank}_0.distcp"].size_bytes for rank in range(2)]
    assert min(sizes) > 0.2 * sum(sizes)


def test_shards_come_back_on_as_many_ranks_and_on_one(two):
    for answer in two.answers(save_sharded):
        assert answer
        assert all(answer.values()), answer
    assert_is_the_reference(two.load(save_sharded))


def test_two_ranks_load_into_shards_what_one_process_saved(two):
    for answer in two.answers(load_what_one_process_saved):
        assert answer
        assert all(answer.values()), answer


def test_a_hybrid_of_replicas_and_shards_is_written_once(tmp_path):
    four = started(tmp_path, 4)
    assert_is_the_reference(four.load(save_hybrid))
    path = tmp_path / save_hybrid.__name__ / "step-00000002"
    metadata = read_metadata(path)
    for name, entry in metadata.state_dict_metadata.items():
        pieces = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        assert pieces == math.prod(entry.size), name
        assert len(entry.chunks) <= 2  # as many as ranks that share one replica


def test_optimizer_states_that_each_rank_holds_a_part_of_become_one(two):
    first, second = two.answers(save_zero_1)
    assert not set(first["slots"]) & set(second["slots"])
    for answer in (first, second):
        assert answer["same"]
        assert all(answer["same"].values()), answer
    saver = DcpCheckpointer(two.folder / save_zero_1.__name__, LocalCommunicator())
    state = saver.load(empty())
    assert state.pop("mine") == {"plain": {"rank_0": 0, "rank_1": 1}}
    assert_is_the_reference(flat(state))


def test_async_saves_on_every_rank_while_collectives_go_on(two):
    for answer in two.answers(save_async):
        assert answer == {"same": True, "steps": [2, 3], "path": "step-00000003"}
    left = [path.name for path in (two.folder / save_async.__name__).iterdir()]
    assert sorted(left) == ["step-00000002", "step-00000003"]
    for path in (two.folder / save_async.__name__).iterdir():
        assert {file.name for file in path.iterdir()} == {
            *read_manifest(path).files,
            "manifest.json",
        }


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_one_rank_cannot_write_is_raised_on_all_and_the_old_one_stays(two, mode):
    first, second = (answer[mode] for answer in two.answers(one_rank_cannot_write))
    assert first["kind"] == second["kind"] == "ResourceError"
    assert first["text"] == second["text"]
    assert "step-00000002: File too large" in first["text"]
    assert "OSError" in second["cause"]  # where it happened
    assert first["steps"] == second["steps"] == [1]
    left = [path.name for path in (two.folder / one_rank_cannot_write.__name__ / mode).iterdir()]
    assert left == ["step-00000001"]


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        (one_rank_has_something_odd, "ConfigError", "odd: it is a object"),
        (one_rank_wants_something_else, "ConfigError", "w ([4] float32 there, [5] float32 here)"),
    ],
)
def test_one_ranks_mistake_is_raised_on_all(two, case, kind, words):
    for answer in two.answers(case):
        assert answer["kind"] == kind
        assert words in answer["text"]


def test_damage_that_one_rank_finds_is_raised_on_all_before_a_tensor_is_touched(two):
    first, second = two.answers(a_file_is_damaged)
    for asked in ("load", "find"):
        assert first[asked]["kind"] == second[asked]["kind"] == "ResourceError"
        assert first[asked]["text"] == second[asked]["text"]
        assert ".distcp is not what was written" in first[asked]["text"]
    assert not first["touched"]
    assert not second["touched"]


def test_what_only_rank_0_looks_at_is_told_to_all(two):
    for answer in two.answers(only_rank_0_sees_the_mistake):
        assert "no checkpoint in" in answer["load"]["text"]
        assert "nothing is there" in answer["find"]["text"]
        assert answer["steps"] == []


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    run_as_rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
