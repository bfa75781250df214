"""What lies in files (device: nvme): the bits of what lies in memory, and no file left behind."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torsh_trainer_deepspeed import DeepSpeed, library, operators
from torsh_trainer_deepspeed.files import Files, SwapFolder
from torsh_trainer_deepspeed.needs import check_space, partitions, slots_of
from torsh_trainer_deepspeed.strategy import ELEMENTWISE

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.data.loading import Loading
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.optim.precision import Precision
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.single import Single
from torsh_trainer.testing import reference
from torsh_trainer.testing.cases import Driver
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.reference import Scenario, TrainingOutcome
from torsh_trainer.testing.resuming import SentenceTask, differences, live, saving
from torsh_trainer.testing.state import fill, whole_state
from torsh_trainer.testing.tiny import WIDTH, TinyData, TinyModel, TinyModelOptions, TinyTask
from torsh_trainer.training.trainer import Trainer

ROWS, MORE_ROWS = 70_000, 140_000
"""DeepSpeed writes what takes a MiB: half of a matrix with so many rows in fp32, and in bf16."""


class WideModel(TinyModel):
    """A tiny model with two matrices that are not; what nothing reaches is not there."""

    def __init__(self, options: TinyModelOptions, rows: int) -> None:
        super().__init__(options)
        del self.blocks[1]
        self.wide = nn.Linear(WIDTH, rows)
        self.narrow = nn.Linear(rows, WIDTH)
        if options.frozen:
            self.narrow.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.narrow(F.gelu(self.wide(hidden)))
        logits: Tensor = self.head(self.norm(self.blocks[0](hidden)))
        return logits


class Wide(TinyTask):
    """A task with such a model."""

    rows = ROWS

    def build_model(self) -> TinyModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.options.seed)
            return WideModel(self.options, self.rows)


@dataclass(frozen=True)
class WideScenario(Scenario):
    rows: int = ROWS

    @property
    def task(self) -> TinyTask:
        task = Wide(self.model, self.optimizer)
        task.rows = self.rows
        return task


# -- the same bits ---------------------------------------------------------------------------------

STEPS = 4


class Seen(NamedTuple):
    losses: list[Any]
    norms: list[float]
    skipped: list[bool]
    state: dict[str, Any]
    files: list[str]


def trained(comm: Communicator, strategy: Strategy, scenario: Scenario, folder: Path) -> Seen:
    """Two steps under one engine, and two under another that goes on from its state alone."""
    outcome, saved, files = TrainingOutcome(), None, []
    for first in (0, STEPS // 2):
        driver = Driver(comm, strategy, scenario)
        scenario = replace(scenario, model=replace(scenario.model, seed=7))
        if saved is not None:
            driver.engine.load_state_dict(fill(driver.engine.state_template(), saved))
        for number in range(first, first + STEPS // 2):
            driver.step(number, outcome)
        saved = whole_state(driver.engine.state_dict(), comm)
        files = sorted(path.name for path in folder.rglob("*.swp"))
        comm.barrier()
        driver.engine.close()
    comm.barrier()
    assert not list(folder.iterdir())
    return Seen(outcome.losses, outcome.norms, outcome.skipped, saved or {}, files)


SMALL = {"sub_group_size": 1000, "reduce_bucket_size": 200}
"""Partitions of one matrix each, one of which begins with another parameter."""

BF16 = Precision(params="bf16", compute="bf16")
BOTH = {"pipeline_read": True, "pipeline_write": True}
ALL = {"max_in_cpu": 0}

CASES: dict[str, tuple[dict[str, Any], Scenario]] = {
    "fp32, AdamW": (
        {"offload_optimizer": {}},
        WideScenario(optimizer="adamw", data=TinyData(steps=STEPS, accumulate=2)),
    ),
    "fp32, SGD, a skipped step, overlapping": (
        {"offload_optimizer": BOTH, "aio": {"block_size": 262144, "queue_depth": 4}},
        WideScenario(data=TinyData(steps=STEPS, spoilt=2), skip_nonfinite=True),
    ),
    "bf16, AdamW, parameters too": (
        {"offload_optimizer": BOTH, "offload_param": ALL},
        WideScenario(optimizer="adamw", data=TinyData(steps=STEPS), precision=BF16, rows=MORE_ROWS),
    ),
    "bf16, SGD, parameters alone, some frozen": (
        {"offload_param": ALL},
        WideScenario(
            TinyModelOptions(frozen=True),
            data=TinyData(steps=STEPS),
            precision=BF16,
            rows=MORE_ROWS,
        ),
    ),
}


def both(blocks: dict[str, Any], folder: Path) -> tuple[DeepSpeed, DeepSpeed]:
    """As a file says it, on the disk; and with knobs, in memory."""
    zero: dict[str, Any] = {"stage": 3, **SMALL}
    offloads = [name for name in blocks if name.startswith("offload")]
    for name in offloads:
        zero[name] = {"device": "nvme", "nvme_path": str(folder), **blocks[name]}
    others = {name: block for name, block in blocks.items() if name not in offloads}
    file = folder.with_suffix(".json")
    file.write_text(json.dumps({"zero_optimization": zero, **others}, indent=1))
    in_memory = dict.fromkeys(offloads, "cpu")
    return DeepSpeed(config=str(file)), DeepSpeed(stage=3, **in_memory, **SMALL)


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("case", "ranks"), [*zip(CASES, (2, 1, 1, 2), strict=True)])
def test_what_lies_in_files_has_the_bits_of_what_lies_in_memory(case, ranks, tmp_path):
    blocks, scenario = CASES[case]
    folder = tmp_path / "disk"
    folder.mkdir()
    on_disk, in_memory = both(blocks, folder)
    theirs = shared_pool(ranks).run(trained, in_memory, scenario, folder)
    for ours, other in zip(
        shared_pool(ranks).run(trained, on_disk, scenario, folder), theirs, strict=True
    ):
        assert not differences(ours._replace(files=[])._asdict(), other._asdict())
        assert ours.losses[0] != ours.losses[-1]
        assert ours.skipped == [number == scenario.data.spoilt for number in range(STEPS)]
        parts = ("gradient", "exp_avg") if scenario.optimizer == "adamw" else ("gradient",)
        for part in parts if "offload_optimizer" in blocks else ("_param",):
            assert any(part in name for name in ours.files), (part, ours.files)


def test_knobs_say_the_same_and_the_result_is_that_of_plain_pytorch(tmp_path):
    strategy = DeepSpeed(stage=3, offload_optimizer="nvme", nvme_path=str(tmp_path), **SMALL)
    scenario = WideScenario(data=TinyData(steps=STEPS))
    plain = reference.train(scenario, 2)
    for ours in shared_pool(2).run(trained, strategy, scenario, tmp_path):
        assert ours.files
        assert ours.norms == pytest.approx(plain.norms, rel=1e-4)
        for mine, other in zip(ours.losses, plain.losses, strict=True):
            assert [loss for (loss,) in mine] == pytest.approx([x for (x,) in other], rel=1e-5)
        for name, value in plain.parameters.items():
            torch.testing.assert_close(ours.state["model"][name], value, rtol=1e-4, atol=1e-6)


def as_deepspeed_does(
    comm: Communicator, strategy: Strategy, scenario: Scenario, folder: Path
) -> Seen:
    keeps = Files._keep_gradients
    Files._keep_gradients = lambda self: None
    try:
        return trained(comm, strategy, scenario, folder)
    finally:
        Files._keep_gradients = keeps


def test_a_gradient_that_is_lost_on_the_way_shows(tmp_path):
    """DeepSpeed itself loses those that do not begin at a multiple of what a disk reads."""
    on_disk, in_memory = both({"offload_optimizer": {}}, tmp_path / "disk")
    (tmp_path / "disk").mkdir()
    scenario = WideScenario(data=TinyData(steps=STEPS))
    (theirs,) = shared_pool(1).run(trained, in_memory, scenario, tmp_path / "disk")
    (lossy,) = shared_pool(1).run(as_deepspeed_does, on_disk, scenario, tmp_path / "disk")
    assert lossy.losses[0] == theirs.losses[0]
    assert lossy.losses[1] != theirs.losses[1]


# -- checkpoints -----------------------------------------------------------------------------------


class WideSentences(Wide, SentenceTask):
    pass


def one_leg(comm: Communicator, strategy: Strategy, folder: Path, until: int) -> Any:
    trainer = Trainer(
        task=WideSentences(optimizers="adamw"),
        strategy=strategy,
        loading=Loading(batch_size=8, micro_batch_size=2),
        checkpoint=saving(folder, keep_last=1, mode="async" if until == 2 else "sync"),
        eval_every_epochs=None,
        max_steps=6,
        device="cpu",
        log_level="error",
    )
    leg = live(comm, trainer, folder, until=until)
    return leg.consumed, leg.losses, leg.norms


def test_a_run_goes_on_from_files_elsewhere_and_into_files_from_elsewhere(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    files = DeepSpeed(stage=3, offload_optimizer="nvme", nvme_path=str(disk), **SMALL)
    journey = [(files, 2, 2), (FSDP(), 2, 3), (files, 1, 4), (files, 2, 5), (DDP(), 2, 6)]
    ((_, losses, norms),) = shared_pool(1).run(one_leg, Single(), tmp_path / "whole", 6)
    ids = shared_pool(1).run(one_leg, Single(), tmp_path / "whole2", 6)[0][0]
    whole = {step: dict(zip(map(tuple, ids[step]), losses[step], strict=True)) for step in ids}
    seen = []
    for strategy, ranks, until in journey:
        legs = shared_pool(ranks).run(one_leg, strategy, tmp_path / "run", until)
        for step in legs[0][0]:
            seen.append(step)
            ours = {
                tuple(ids): loss
                for consumed, losses, _ in legs
                for ids, loss in zip(consumed[step], losses[step], strict=True)
            }
            assert ours == pytest.approx(whole[step], rel=1e-4)
            assert legs[0][2][step] == pytest.approx(norms[step], rel=1e-3)
        assert not list(disk.iterdir())
    assert seen == [1, 2, 3, 4, 5, 6]


# -- what is in the way ----------------------------------------------------------------------------


def refused(comm: Communicator, strategy: Strategy) -> str:
    try:
        Driver(comm, strategy, WideScenario())
    except (ConfigError, ResourceError) as error:
        return str(error)
    return ""


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "too few buffers": (
        {"offload_optimizer": {**BOTH, "buffer_count": 5}},
        r"line \d+: .*buffer_count is 5, and the optimizer takes 6: 3 x .*; set it to 6",
    ),
    "too small a buffer": (
        {"offload_param": {"buffer_size": 1000}, "bf16": {"enabled": True}},
        r"DeepSpeed refuses the configuration: .*buffer size 1000",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_run_is_told_and_leaves_no_file(what, tmp_path):
    blocks, words = WRONG[what]
    folder = tmp_path / "disk"
    folder.mkdir()
    (said,) = shared_pool(1).run(refused, both(blocks, folder)[0])
    assert re.search(words, said)
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("place", "kind", "words"),
    [
        ("/not/there", ConfigError, "nvme_path=/not/there is no folder; make it"),
        ("/proc", ResourceError, "nvme_path=/proc cannot hold the files of this run: "),
    ],
)
def test_a_place_that_cannot_hold_files_is_named(place, kind, words):
    with pytest.raises(kind, match=words):
        SwapFolder(place, 0)


def test_too_little_room_on_disk_or_in_memory_is_told_in_numbers():
    check_space("/disk", needed=2**30, free=2**30)
    with pytest.raises(ResourceError, match=r"/disk would hold 2.0 GiB .* and 1.0 GiB are free"):
        check_space("/disk", needed=2**31, free=2**30)
    world = World(size=2, local_size=2)
    library.check_buffers(2**20, world, None, available=2**21)
    with pytest.raises(ResourceError, match=r"lock 1 MiB .* may lock 0 MiB; .* \(ulimit -l\)"):
        library.check_buffers(2**20, world, 2**16, available=None)
    with pytest.raises(ResourceError, match=r"lock 2 MiB .* 3 MiB are available to 2; make"):
        library.check_buffers(2**21, world, None, available=3 * 2**20)


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE))
def test_the_slots_of_an_optimizer_are_those_that_a_step_makes(kind):
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    settings = {"momentum": 0.9} if kind in ("SGD", "RMSprop") else {}
    optimizer = getattr(torch.optim, kind)([parameter], lr=0.1, **settings)
    counted = slots_of(optimizer)
    assert not optimizer.state
    optimizer.step()
    slots = [slot for slot in optimizer.state[parameter].values() if isinstance(slot, Tensor)]
    assert counted == sum(slot.shape == parameter.shape for slot in slots)


def test_partitions_are_those_that_deepspeed_makes(tmp_path):
    scenario = WideScenario()
    groups = [list(scenario.task.build_model().parameters())]
    strategy = DeepSpeed(stage=3, offload_optimizer="nvme", nvme_path=str(tmp_path), **SMALL)
    for theirs in shared_pool(2).run(partition_sizes, strategy, scenario):
        assert partitions(groups, 2, most=SMALL["sub_group_size"]) == theirs


def partition_sizes(comm: Communicator, strategy: Strategy, scenario: Scenario) -> list[int]:
    driver = Driver(comm, strategy, scenario)
    engine: Any = driver.engine
    sizes = [int(size) for size in engine._zero.fp16_partitioned_groups_flat_numel]
    engine.close()
    return sizes


# -- whose they are --------------------------------------------------------------------------------


def test_two_runs_at_once_do_not_meet_and_what_a_killed_one_left_is_removed(tmp_path, caplog):
    alive = SwapFolder(str(tmp_path), 0)
    child = os.fork()
    if not child:
        try:
            left = SwapFolder(str(tmp_path), 0)
            (left.path / "some.swp").write_text("state")
        finally:
            os._exit(0)  # as one that is killed: nothing is tidied up
    os.waitpid(child, 0)
    (left,) = set(tmp_path.iterdir()) - {alive.path}
    assert (left / "some.swp").exists()
    other = SwapFolder(str(tmp_path), 0)
    assert set(tmp_path.iterdir()) == {alive.path, other.path}
    assert f"{left} was left by a run that was killed" in caplog.text
    alive.remove()
    assert set(tmp_path.iterdir()) == {other.path}
    del other
    assert not list(tmp_path.iterdir())


def test_without_libaio_the_error_names_the_package(tmp_path, monkeypatch):
    comm = LocalCommunicator(torch.device("cpu"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CC", "false")  # which links nothing, libaio neither
    library.load(comm)
    with pytest.raises(ResourceError, match=r"against libaio, .* apt-get install libaio-dev"):
        operators.compile_operators(operators.FILES, comm)
