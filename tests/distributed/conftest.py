"""Lives: training on two ranks that may be killed, and what must be true afterwards."""

from __future__ import annotations

import json
import os
import random
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from torsh_trainer import (
    Callback,
    CheckpointOptions,
    DataSource,
    Loading,
    OptimizerSpec,
    Task,
    Trainer,
)
from torsh_trainer.callbacks.base import EvaluationReport, RunInfo, SaveReport, StepReport
from torsh_trainer.environments.world import World
from torsh_trainer.errors import TorshError
from torsh_trainer.optim.schedule.shapes import Cosine
from torsh_trainer.testing.ranks import RankFailure, RankPool
from torsh_trainer.training.trainer import run_in

RANKS = 2
SURVIVES_S = 0.5
"""How long a rank whose peer was killed lives on: long for all that it does by itself; then it
waits for the peer, and what it says at last nobody reads."""
X = torch.randn(44, 64, generator=torch.Generator().manual_seed(1))
Y = X[:, :8].sin().sum(1, keepdim=True)


class Source(DataSource):
    """Five batches of eight and a ragged tail an epoch, so that saves fall amid epochs."""

    train = TensorDataset(X, Y)
    eval = TensorDataset(X[:16], Y[:16])


class Regression(Task):
    """Dropout, AdamW and 2 MB of state: what a resumed run must get right, and a save to hit."""

    data = Source()
    optimizer = OptimizerSpec("AdamW", lr=0.01)

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(64, 512), nn.Dropout(0.1), nn.ReLU(), nn.Linear(512, 256), nn.Linear(256, 1)
        )

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch[1])


class Diary(Callback):
    """Writes down what happens, one line each; what is written outlives a SIGKILL."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._main = False

    def on_start(self, info: RunInfo) -> None:
        self._main = info.world.is_rank_zero
        self._note(began=info.first_step)

    def on_step(self, report: StepReport) -> None:
        numbers = report.metrics or {}
        self._note(step=report.step, loss=numbers["loss"].hex(), norm=numbers["grad_norm"].hex())

    def on_evaluate(self, report: EvaluationReport) -> None:
        self._note(evaluated=report.step, loss=report.metrics["loss"].hex())

    def on_save(self, report: SaveReport) -> None:
        self._note(saved=report.step)

    def on_end(self, result: Any) -> None:
        self._note(ended=result["steps"])

    def _note(self, **facts: Any) -> None:
        if self._main:
            with self._file.open("a") as file:
                file.write(json.dumps(facts) + "\n")


@dataclass
class Life:
    """What one life of a run left: its curve by step, and how it ended."""

    began: int | None = None
    curve: dict[int, tuple[str, str]] = field(default_factory=dict)
    evaluations: dict[int, str] = field(default_factory=dict)
    saved: list[int] = field(default_factory=list)
    ended: int | None = None
    answers: list[Any] = field(default_factory=list)
    death: str = ""


@dataclass(frozen=True)
class Run:
    """A run in ``folder`` that may live several times; every life resumes where it can."""

    folder: Path
    strategy: str = "ddp"
    steps: int = 18
    every_steps: int = 1
    keep_last: int | None = None
    mode: Any = "sync"
    at_end: bool = True
    eval_every: int | None = None
    checkpoints: Path | None = None
    resume: str = "auto"

    @property
    def place(self) -> Path:
        """The folder of its checkpoints."""
        return self.checkpoints or self.folder / "checkpoints"

    def trainer(self, diary: Path) -> Trainer:
        options = CheckpointOptions(
            dir=str(self.place),
            every_steps=self.every_steps,
            keep_last=self.keep_last,
            mode=self.mode,
            at_end=self.at_end,
            resume=self.resume,
        )
        return Trainer(
            task=Regression(),
            strategy=self.strategy,
            schedule=Cosine(),
            loading=Loading(batch_size=8),
            checkpoint=options,
            callbacks=(Diary(diary),),
            run_dir=self.folder,
            log_level="info",
            max_steps=self.steps,
            log_every=1,
            eval_every=self.eval_every,
            eval_every_epochs=None,
            max_grad_norm=1.0,
            deterministic=True,
            device="cpu",
        )

    def live(
        self,
        assassin: Callable[[list[int]], None] | None = None,
        *,
        prepare: Callable[[World], None] | None = None,
        timeout_s: float = 240.0,
    ) -> Life:
        """One life on two fresh ranks; ``assassin`` gets their process ids on a thread.

        ``prepare`` is called in every rank before the run begins.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        diary = self.folder / "diary.jsonl"
        diary.unlink(missing_ok=True)
        life = Life()
        with RankPool(RANKS, join=False, grace_s=SURVIVES_S) as pool:
            pool.run(_nothing)
            thread = threading.Thread(target=assassin or _nobody, args=(pool.pids,))
            thread.start()
            try:
                trainer = self.trainer(diary)
                life.answers = pool.run(_run, trainer, prepare, timeout_s=timeout_s)
            except RankFailure as failure:
                life.death = str(failure)
            finally:
                thread.join()
        _read(diary, life)
        return life

    def visible(self) -> list[Path]:
        """Its checkpoints, by step."""
        return sorted(self.place.glob("step-*"))

    def hidden(self) -> list[str]:
        """What lies beside them and is half a checkpoint, or half gone."""
        folders: list[str] = []
        files: list[str] = []
        for place, below, names in os.walk(self.place):  # takes folders that vanish for empty
            if place == str(self.place):
                folders = [name for name in below if name.startswith(".")]
            temporary = [n for n in names if n.startswith(".") and n.endswith(".tmp")]
            files += [str(Path(place, n).relative_to(self.place)) for n in temporary]
        return sorted(folders) + sorted(files)


def _nothing(world: World) -> None:
    """The first case that a pool runs starts its processes."""


def _nobody(pids: Sequence[int]) -> None:
    """Kills none."""


def _run(world: World, trainer: Trainer, prepare: Callable[[World], None] | None) -> Any:
    """One rank's life: the content of result.json, or the error as a pair of kind and facts."""
    random.seed(world.rank)  # a checkpoint holds what a user's code draws from as well
    numpy.random.seed(world.rank)  # noqa: NPY002 - the old global state is the one kept
    if prepare is not None:
        prepare(world)
    try:
        return run_in(world, trainer).content
    except TorshError as error:
        return {
            "error": type(error).__name__,
            "text": str(error),
            "exit_code": getattr(error, "cause_exit_code", error.exit_code),
            "facts": error.facts,
        }


def _read(diary: Path, life: Life) -> None:
    for line in diary.read_text().splitlines() if diary.exists() else []:
        facts = json.loads(line)
        if "began" in facts:
            life.began = facts["began"]
        elif "step" in facts:
            life.curve[facts["step"]] = facts["loss"], facts["norm"]
        elif "evaluated" in facts:
            life.evaluations[facts["evaluated"]] = facts["loss"]
        elif "saved" in facts:
            life.saved.append(facts["saved"])
        else:
            life.ended = facts["ended"]


def step_of(path: Path) -> int:
    """By the name alone."""
    return int(path.name.removeprefix("step-"))


def damage(path: Path, sound: Path) -> str:
    """What is wrong with a checkpoint; empty when nothing is.

    Looks for itself, with nothing of the code under test: sizes and checksums as the manifest has
    them, no file too many, and every byte of the tensors and every plain value as in ``sound``,
    which an undisturbed run saved at the same step.
    """
    try:
        files = json.loads((path / "manifest.json").read_text())["files"]
    except (OSError, ValueError) as error:
        return f"{path.name}: manifest.json: {error}"
    there = {file.name for file in path.iterdir()} - {"manifest.json"}
    if there != set(files):
        return f"{path.name}: {sorted(there ^ set(files))}"
    for name, expected in files.items():
        content = (path / name).read_bytes()
        found = {"size_bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
        if found != expected:
            return f"{path.name}: {name} is {found}, and its manifest says {expected}"
        mine, undisturbed = (_meaning(c, name) for c in (content, (sound / name).read_bytes()))
        if mine != undisturbed:
            parts = [key for key in mine if mine[key] != undisturbed.get(key)]
            return f"{path.name}: {name} is not what the undisturbed run saved: {parts}"
    return ""


def _meaning(content: bytes, name: str) -> dict[str, Any]:
    """What two sound checkpoints of one step must share of a file, by part."""
    if name == ".metadata":  # a pickle, which one object in two places makes shorter
        return {}
    if name == "state.json":
        return {key: part for key, part in json.loads(content).items() if key != "config"}
    return {"bytes": content}


@dataclass(frozen=True)
class Undisturbed:
    """A run that nobody touched: ``life`` saved nothing before its end, ``kept`` every step."""

    life: Life
    kept: Run
    seconds: float

    def sound(self, step: int) -> Path:
        return self.kept.place / f"step-{step:08d}"

    def differs(self, life: Life) -> str:
        """Where a life's curve leaves the undisturbed one, bit for bit; empty when nowhere."""
        for step, numbers in life.curve.items():
            if numbers != self.life.curve[step]:
                return f"step {step}: {numbers}, and undisturbed {self.life.curve[step]}"
        for step, loss in life.evaluations.items():
            if step in self.life.evaluations and loss != self.life.evaluations[step]:
                return f"evaluation at {step}: {loss}, and {self.life.evaluations[step]}"
        return ""


class Lives:
    """What the tests of this folder use: ``Run``, and what it is measured against."""

    Run = Run
    Life = Life
    step_of = staticmethod(step_of)
    damage = staticmethod(damage)

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made = cache(self._undisturbed)

    def undisturbed(self, strategy: str, mode: str = "sync") -> Undisturbed:
        """The one run of that kind that nobody touches, made when it is first asked for."""
        return self._made(strategy, mode)  # one form of call: for the cache another is another

    def _undisturbed(self, strategy: str, mode: str) -> Undisturbed:
        """Trained once without saves and once with one each step, which must change nothing."""
        place = self._folder / f"{strategy}-{mode}"
        plain = Run(place / "plain", strategy, every_steps=10**9, mode=mode)
        kept = Run(place / "kept", strategy, every_steps=1, mode=mode)
        lives = [run.live() for run in (plain, kept)]
        for life in lives:
            assert not life.death, life.death
            assert life.ended == plain.steps, life.answers
        seconds = max(answer["wall_s"] for answer in lives[1].answers)
        assert lives[0].curve == lives[1].curve, "saving changed the curve"
        assert sorted(lives[0].curve) == list(range(1, plain.steps + 1))
        return Undisturbed(lives[0], kept, seconds)


@pytest.fixture(scope="session")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Lives:
    """Runs on two ranks that may be killed; see ``Run.live``."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return Lives(tmp_path_factory.mktemp("lives"))


# -- a disk of one's own --------------------------------------------------------------------------


class Disk:
    """A file system of limited size that can be full, or read-only, and harms nobody else.

    A process holds it in namespaces of its own (``unshare``): that needs no root, and the mount is
    gone when the process is, however that happens. All others reach it through that process's root
    under /proc.
    """

    def __init__(self, mountpoint: Path, size_bytes: int, *, files: int = 0) -> None:
        self._mountpoint = mountpoint
        self._shell = subprocess.Popen(
            ["unshare", "--user", "--map-root-user", "--mount", "sh"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        limits = f"size={size_bytes},nr_inodes={files}"  # 0 is as many as one likes
        self._tell(f"mount -t tmpfs -o {limits} tmpfs {mountpoint}")
        self.path = Path(f"/proc/{self._shell.pid}/root{mountpoint}")

    def read_only(self) -> None:
        """Nothing can be written any more, as after an error of the disk."""
        # Another mount on top: the one below has files that are open for writing, and is busy.
        self._tell(f"mount --bind {self._mountpoint} {self._mountpoint}")
        self._tell(f"mount -o remount,bind,ro {self._mountpoint}")

    def writable(self) -> None:
        """As it was before ``read_only``."""
        self._tell(f"umount {self._mountpoint}")

    def close(self) -> None:
        self._shell.kill()
        self._shell.communicate()

    def _tell(self, command: str) -> None:
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        said = []
        try:
            self._shell.stdin.write(f"{command}; echo status $?\n")
            self._shell.stdin.flush()
        except BrokenPipeError:  # unshare itself was refused, and has said why
            pass
        for line in self._shell.stdout:
            if line == "status 0\n":
                return
            said.append(line)
            if line.startswith("status "):
                break
        self.close()
        pytest.fail(
            f"`{command}` failed in a namespace of its own: {''.join(said)}This test needs a disk "
            "that can be full: allow user namespaces here (sysctl kernel.unprivileged_userns_clone "
            "or kernel.apparmor_restrict_unprivileged_userns; docker run --privileged)"
        )


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[..., Disk]]:
    """``disk(size_bytes, files=0)``: a new ``Disk``, gone after the test."""
    disks: list[Disk] = []

    def make(size_bytes: int, **limits: int) -> Disk:
        mountpoint = tmp_path / f"disk-{len(disks)}"
        mountpoint.mkdir()
        disks.append(Disk(mountpoint, size_bytes, **limits))
        return disks[-1]

    yield make
    for one in disks:
        one.close()


# -- a rank that does not come --------------------------------------------------------------------


class Away:
    """How a rank stays away from what the others do until they have noticed, and no longer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def noticed(self, rank: int) -> None:
        """What ``rank`` waited for is over."""
        (self._folder / f"noticed-{rank}").touch()

    def until_noticed_by(self, others: int) -> None:
        """Returns once so many ranks have noticed, or after minutes."""
        end_s = time.monotonic() + 240
        while len(list(self._folder.glob("noticed-*"))) < others and time.monotonic() < end_s:
            time.sleep(0.02)


@pytest.fixture
def away(tmp_path: Path) -> Away:
    """For the rank that does not come, and for those that find it missing."""
    return Away(tmp_path)
