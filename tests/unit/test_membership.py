"""A run whose processes change is as one whose processes do not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from torsh_trainer import DDP, Callback, CheckpointOptions, Loading, Trainer
from torsh_trainer.comm.base import CommOptions
from torsh_trainer.comm.membership import Membership, Snapshot
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError
from torsh_trainer.launchers.base import LaunchContext
from torsh_trainer.launchers.local import Local
from torsh_trainer.strategies.base import Mesh
from torsh_trainer.strategies.single import Single
from torsh_trainer.testing.resuming import SentenceTask, differences
from torsh_trainer.testing.tiny import TinyModelOptions
from torsh_trainer.training.trainer import run_in

T = TypeVar("T")
STEPS = 7


class AttemptOverError(Exception):
    """What a lost process leads to."""


class Broken(Membership):
    """Every attempt ends after one of ``steps``; what was kept every ``every`` steps goes on."""

    def __init__(self, steps: tuple[int, ...], every: int) -> None:
        self._steps, self._every = list(steps), every
        self._kept: Mapping[str, Any] | None = None
        self._home: Path | None = None

    def run(self, attempt: Callable[[World], T], world: World) -> T:
        while True:
            try:
                return attempt(world)
            except AttemptOverError:
                torch.manual_seed(99)  # another process has other random numbers

    @property
    def kept(self) -> Mapping[str, Any] | None:
        return self._kept

    def home(self, make: Callable[[], Path]) -> Path:
        self._home = self._home or make()
        return self._home

    def keep(self, step: int, snapshot: Snapshot) -> None:
        self._kept = snapshot()

    def after_step(self, step: int, snapshot: Snapshot) -> None:
        if step in self._steps:
            self._steps.remove(step)
            raise AttemptOverError
        if step % self._every == 0:
            self.keep(step, snapshot)

    def survives(self, error: BaseException) -> bool:
        return isinstance(error, AttemptOverError)


@dataclass(frozen=True)
class Breaking(Single):
    """One process that is lost again and again."""

    steps: tuple[int, ...] = ()

    def membership(self, world: World, options: CommOptions) -> Membership:
        return Broken(self.steps, every=2)


@dataclass(frozen=True)
class Growing(Breaking):
    """One process that then counts for three."""

    sizes: Iterator[int] = field(default_factory=lambda: iter((1, 3)))

    def mesh(self, world: World) -> Mesh:
        return replace(super().mesh(world), dp_replicate=next(self.sizes))


class Seen(Callback):
    """The steps that were done, in order."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step(self, report: Any) -> None:
        self.steps.append(report.step)


EVERY_OTHER = CheckpointOptions(every_steps=2, keep_last=2)


def trained(
    folder: Path,
    strategy: Single,
    seen: Callback,
    checkpoint: CheckpointOptions = EVERY_OTHER,
) -> tuple[Any, dict[str, Any]]:
    trainer = Trainer(
        task=SentenceTask(TinyModelOptions(dropout=0.3), optimizers="both"),
        strategy=strategy,
        loading=Loading(batch_size=8),
        checkpoint=checkpoint,
        callbacks=[seen],
        run_dir=folder,
        max_steps=STEPS,
        log_every=3,
        eval_every=3,
        ema_decay=0.9,
        deterministic=True,
    )
    result = trainer.fit()
    state = dict(result.model.state_dict())
    kept = ("steps", "updates", "samples", "epochs", "train_loss", "metrics")
    content = {name: result.content[name] for name in kept}
    saved = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
    return state, {**content, "saved": saved, "path": Path(result.checkpoint or "").name}


def test_what_was_kept_in_memory_goes_on_to_the_same_end_bit_for_bit(tmp_path):
    plain, broken = Seen(), Seen()
    theirs = trained(tmp_path / "plain", Single(), plain)
    ours = trained(tmp_path / "broken", Breaking(steps=(1, 5, 7)), broken)
    assert broken.steps == [1, 1, 2, 3, 4, 5, 5, 6, 7, 7]
    assert plain.steps == list(range(1, STEPS + 1))
    assert differences(ours[0], theirs[0]) == []
    assert ours[1] == theirs[1]
    assert "error" not in json.loads((tmp_path / "broken" / "result.json").read_text())
    assert not list((tmp_path / "broken").glob("result.*.json"))  # the directory was made once


def test_what_was_kept_is_on_disk_when_other_processes_cannot_go_on(tmp_path):
    theirs = trained(tmp_path / "plain", Single(), Seen())
    folder, every = tmp_path / "broken", CheckpointOptions(every_steps=3, keep_last=2)
    with pytest.raises(ConfigError) as refusal:
        trained(folder, Growing(steps=(5,)), Seen(), every)
    place = folder / "checkpoints" / "step-00000004"
    assert "data.batch_size=8 does not divide over" in str(refusal.value)
    assert f"step 4 is in {place}, from which checkpoint.resume=auto goes" in str(refusal.value)
    assert json.loads((folder / "result.json").read_text())["error"]
    ours = trained(folder, Single(), Seen(), replace(EVERY_OTHER, resume="auto"))
    assert differences(ours[0], theirs[0]) == []
    assert ours[1] == theirs[1]


def test_nothing_is_left_on_disk_where_nothing_is_to_be_saved(tmp_path):
    with pytest.raises(ConfigError) as refusal:
        trained(tmp_path, Growing(steps=(5,)), Seen(), CheckpointOptions(at_end=False))
    assert str(refusal.value).endswith("data.batch_size=6 or 9 would")
    assert not (tmp_path / "checkpoints").exists()


# -- where processes come and go -------------------------------------------------------------------

ELASTIC = World(size=2, local_size=2, source="horovod", elastic=True)


def test_a_strategy_that_needs_the_same_processes_says_so():
    with pytest.raises(ConfigError) as refusal:
        DDP().membership(ELASTIC, CommOptions())
    assert "strategy=ddp cannot honour processes that come and go" in str(refusal.value)
    assert "set strategy=horovod" in str(refusal.value)


def scaled_task() -> SentenceTask:
    task = SentenceTask()
    task.optimizer = replace(task.optimizer, lr_scaling="linear")
    return task


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loading": Loading(micro_batch_size=4)}, "data.micro_batch_size=4 without data.batch"),
        ({"task": scaled_task()}, "optimizer.lr_scaling=linear"),
        ({"checkpoint": CheckpointOptions(mode="async")}, "checkpoint.mode=async"),
        ({"stages": ("find_lr", "fit")}, "trainer.stages=['find_lr', 'fit']"),
    ],
)
def test_what_their_number_would_change_is_refused(options, words):
    trainer = Trainer(**{"task": SentenceTask(), "max_steps": 1, **options})
    with pytest.raises(ConfigError) as refusal:
        run_in(ELASTIC, trainer)
    assert f"{words}" in str(refusal.value)
    assert "processes come and go here" in str(refusal.value)


def test_a_launcher_starts_no_processes_beside_the_first_that_was_started():
    alone = World(source="horovod", elastic=True)
    context = LaunchContext(env={"CUDA_VISIBLE_DEVICES": "0,1"}, found=alone)
    assert Local().size(context) == 1
    with pytest.raises(ConfigError, match="horovod already started 1 processes"):
        Local(num_processes=2).size(context)
