"""Training killed with SIGKILL, again and again, goes on as if nothing had happened."""

from __future__ import annotations

import os
import random
import re
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import torsh_trainer.checkpoint.dcp
from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.environments.world import World

SEED = int(os.environ.get("KILL_SEED") or secrets.randbelow(2**31))
"""Other moments every time; a failure names it, and the variable KILL_SEED repeats it."""

KILLS = {"ddp": 17, "fsdp": 9}  # at least, in both modes: 52 in all
AMID_A_SAVE = 4
MOST_LIVES = 100


class Chain:
    """The lives of one run in one folder, each of them examined before the next begins."""

    def __init__(self, run: Any, undisturbed: Any, lives: Any) -> None:
        self.run, self.undisturbed, self._lives = run, undisturbed, lives
        self.newest = 0
        self.told = [str(run)]

    def live(self, assassin: Any = None, *, prepare: Callable[[World], None] | None = None) -> bool:
        """One life; true when it was not cut short, and the run is done and in order."""
        self.told.append(str(assassin or prepare or "nobody kills"))
        life = self.run.live(assassin, prepare=prepare)
        steps = [self._lives.step_of(path) for path in self.run.visible()]
        self.told.append(
            f"    began at {life.began}, walked {len(life.curve)} steps, announced saves "
            f"{life.saved[-2:]}; then visible {steps[-3:]}, hidden {self.run.hidden()}"
        )
        self._examine(life, steps)
        if life.death:
            return False
        assert life.ended == self.run.steps, life.answers
        self._finish()
        return True

    def _examine(self, life: Any, steps: list[int]) -> None:
        newest = max(steps, default=0)
        for path in self.run.visible():
            sound = self.undisturbed.sound(self._lives.step_of(path))
            assert not (wrong := self._lives.damage(path, sound)), wrong
        assert newest >= self.newest, "the newest checkpoint of an earlier life is gone"
        # An asynchronous save may still be on its way; the one before it is not.
        certain = life.saved if self.run.mode == "sync" else life.saved[:-1]
        assert newest >= max(certain, default=0), "an announced checkpoint is not there"
        if life.began is not None:
            assert life.began == self.newest, "it did not go on from the newest checkpoint"
        walked = list(range(self.newest + 1, self.newest + 1 + len(life.curve)))
        assert sorted(life.curve) == walked, "a step is missing"
        assert not (differs := self.undisturbed.differs(life)), differs
        self.newest = newest

    def _finish(self) -> None:
        assert self.newest == self.run.steps
        assert not self.run.hidden(), f"leftovers: {self.run.hidden()}"
        if self.run.keep_last is not None:
            assert len(self.run.visible()) == self.run.keep_last


# -- fifty random moments -------------------------------------------------------------------------


class Assassin:
    """Kills one rank or both at a random moment; ``amid`` tells whether a save was on.

    Half of them wait a little longer, for a save to begin and for a random part of it to pass.
    """

    def __init__(self, rng: random.Random, run: Any, within_s: float) -> None:
        self.delay_s = rng.uniform(0.0, within_s)
        self.into_s = rng.choice((None, rng.uniform(0.0, 0.03)))
        self.ranks = rng.choice(([0], [1], [0, 1], [0, 1]))
        self.amid = False
        self._run = run
        self._before = set(run.hidden())  # what an earlier death left

    def __call__(self, pids: list[int]) -> None:
        time.sleep(self.delay_s)
        if self.into_s is not None:
            deadline = time.monotonic() + 0.2
            while not self._saving() and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(self.into_s)
        self.amid = self._saving()
        for rank in self.ranks:
            os.kill(pids[rank], signal.SIGKILL)

    def _saving(self) -> bool:
        return bool(set(self._run.hidden()) - self._before)

    def __str__(self) -> str:
        aim = "" if self.into_s is None else f", then {self.into_s:.4f} s into a save"
        return f"kills {self.ranks} after {self.delay_s:.4f} s{aim}"


@pytest.mark.matrix(1)
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.exhaustive
def test_a_run_killed_at_random_moments_comes_to_the_same_end_bit_for_bit(
    strategy: str, mode: str, lives: Any, tmp_path: Path, record_property: Callable[..., None]
) -> None:
    undisturbed = lives.undisturbed(strategy, mode)
    rng = random.Random(f"{SEED} {strategy} {mode}")
    deaths: list[Assassin] = []

    def wanted() -> bool:
        return len(deaths) < KILLS[strategy] or sum(a.amid for a in deaths) < AMID_A_SAVE

    def come_to_an_end(chain: Chain) -> None:
        while len(deaths) < MOST_LIVES:
            # Half of a whole life: most runs are killed several times before they end.
            within_s = undisturbed.seconds / 2
            assassin = Assassin(rng, chain.run, within_s) if wanted() else None
            if chain.live(assassin):
                return
            assert assassin is not None, "it died of itself"
            deaths.append(assassin)

    while wanted():
        chain = Chain(some_run(rng, lives, tmp_path, strategy, mode), undisturbed, lives)
        chain.told.append(f"KILL_SEED={SEED} repeats these choices")
        with told(chain):
            come_to_an_end(chain)
    record_property("kills", len(deaths))
    record_property("amid a save", sum(a.amid for a in deaths))


def some_run(rng: random.Random, lives: Any, folder: Path, strategy: str, mode: str) -> Any:
    """A run in a folder of its own, which saves every step or every other."""
    return lives.Run(
        folder / str(len(list(folder.iterdir()))),
        strategy,
        mode=mode,
        every_steps=rng.choice((1, 2)),
        keep_last=rng.choice((None, 1, 3)),
    )


# -- every moment of a save, one after the other --------------------------------------------------


class Moment:
    """Kills ``rank`` just before it touches the file system for the ``number``-th time.

    Python tells an audit hook of every file that is made, opened, renamed or removed, before it
    is: nothing here knows how a save works. Rank 0 counts from the folder that its ``save``-th
    save makes to the next one, other ranks from the start. ``seen`` is where the moment is noted.
    """

    EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.truncate")

    def __init__(self, chain: Chain, seen: Path, *, rank: int, number: int, save: int = 1) -> None:
        self.place, self.seen = chain.run.place, seen
        self.rank, self.number, self.save = rank, number, save

    def __str__(self) -> str:
        return f"kills {self.rank} at moment {self.number} of save {self.save}"

    def __call__(self, world: World) -> None:
        """In the rank, before its life begins."""
        if world.rank == self.rank:
            self._count = 0
            self._saves = 0 if world.is_rank_zero else self.save
            sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in self.EVENTS or isinstance(args[0], int):
            return
        path = os.fsdecode(args[0])
        inside = path.startswith(f"{self.place}/")
        if event == "open" and not (inside and args[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        if inside and event == "os.mkdir":
            self._saves += 1
        # What is removed with a folder goes by its name in it.
        if self._saves == self.save and (inside or "/" not in path):
            self._count += 1
            if self._count == self.number:
                with self.seen.open("a") as file:
                    file.write(f"{event} {Path(path).name}\n")
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_rank_0_is_killed_at_every_moment_of_a_save(mode: str, lives: Any, tmp_path: Path) -> None:
    seen, number = tmp_path / "seen", 1
    chain = Chain(
        lives.Run(tmp_path / "run", mode=mode, keep_last=1), lives.undisturbed("ddp", mode), lives
    )
    with told(chain):
        # From here on there is a checkpoint that a save may lose, or delete.
        assert not chain.live(prepare=Moment(chain, tmp_path / "first", rank=0, number=1, save=3))
        assert chain.newest
        while not chain.live(prepare=Moment(chain, seen, rank=0, number=number)):
            number += 1
    moments = seen.read_text().splitlines()
    assert len(moments) == number - 1
    for name in ("__0_0.distcp", "state.json", ".metadata", "manifest.json"):
        assert any(m.startswith("open ") and name in m for m in moments), name
    visible = next(i for i, m in enumerate(moments) if m.startswith("os.rename .saving-"))
    for retention in ("os.rename step-", "os.remove ", "os.rmdir "):
        assert any(m.startswith(retention) for m in moments[visible:]), retention


@pytest.mark.matrix(1)
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.exhaustive
def test_rank_1_is_killed_whenever_it_opens_a_file_of_a_checkpoint(
    mode: str, lives: Any, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    chain = Chain(lives.Run(tmp_path / "run", mode=mode), lives.undisturbed("ddp", mode), lives)
    with told(chain):
        for number in range(1, 6):
            assert not chain.live(prepare=Moment(chain, seen, rank=1, number=number))
        assert chain.live()
    moments = seen.read_text().splitlines()
    assert any(m.startswith("open __1_0.distcp") for m in moments)
    assert mode == "sync" or any(m.startswith("os.rename .") for m in moments), moments


# -- what would not be noticed proves nothing -----------------------------------------------------


class Careless(DcpCheckpointer):
    """Puts a checkpoint together where everybody sees it; dies amid the third."""

    def save(self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float]) -> Path:
        path = super().save(step, state, metrics)
        if self._comm.world.is_rank_zero:
            aside = self.folder.with_name("aside")
            shutil.move(path, aside)
            path.mkdir()
            for count, file in enumerate(sorted(aside.iterdir())):
                if (step, count) == (3, 2):
                    os.kill(os.getpid(), signal.SIGKILL)
                shutil.move(file, path)
            aside.rmdir()
        return path


class Trusting(DcpCheckpointer):
    """Takes every checkpoint for sound."""

    def _verify(self, path: Path) -> None:
        """Looks at nothing."""


def use(checkpointer: type) -> Callable[[World], None]:
    """Ranks that save and load by another class than the run's own."""

    def prepare(world: World) -> None:
        torsh_trainer.checkpoint.dcp.DcpCheckpointer = checkpointer  # type: ignore[misc]

    return prepare


def test_a_save_that_is_seen_before_it_is_whole_is_found_out(lives: Any, tmp_path: Path) -> None:
    chain = Chain(lives.Run(tmp_path), lives.undisturbed("ddp", "sync"), lives)
    with pytest.raises(AssertionError, match=r"step-00000003: .*manifest.json"):
        chain.live(prepare=use(Careless))


def test_a_load_that_does_not_look_at_checksums_is_found_out(lives: Any, tmp_path: Path) -> None:
    undisturbed = lives.undisturbed("ddp", "sync")
    chain = Chain(lives.Run(tmp_path), undisturbed, lives)
    assert not chain.live(prepare=Moment(chain, tmp_path / "seen", rank=0, number=1, save=4))
    state = chain.run.visible()[-1] / "state.json"
    state.write_text(re.sub(r'"samples": \d', '"samples": 4', state.read_text()))
    assert "state.json is {" in lives.damage(state.parent, undisturbed.sound(3))
    life = chain.run.live(prepare=use(Trusting))
    assert life.began == 3
    assert undisturbed.differs(life)


@contextmanager
def told(chain: Chain) -> Iterator[None]:
    """A failure tells the story that led to it."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError("\n".join([str(error), *chain.told])) from error
