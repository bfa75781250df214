"""Disks that are full, read-only or damaged while two ranks train: what is lost, and what is said.

A mount is made for that, in a namespace of its own: see ``Disk`` in conftest.py.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torsh_trainer.environments.world import World

MIB = 1 << 20
LARGE = 64 * MIB
"""A disk that nothing but a test fills."""
EVERY = 4  # saves at 4, 8, 12, 16 and, at the end, 18
THIRD = 3 * EVERY


class Trouble:
    """Strikes as ``rank`` opens ``file`` of the checkpoint of ``step`` to write it.

    The other rank's tensors are written by then, so that it is this file that meets with it.
    Python tells an audit hook of a file before it is opened, or a folder before it is made.
    """

    def __init__(self, place: Path, file: str, *, step: int = THIRD) -> None:
        self.place, self.file, self.step = place, file, step
        self.rank = 1 if file.startswith("__1") else 0

    def strike(self) -> None:
        raise NotImplementedError

    def __call__(self, world: World) -> None:
        """In the rank, before its life begins."""
        if world.rank == self.rank:
            self._armed = True
            sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in ("open", "os.mkdir") or isinstance(args[0], int) or not self._armed:
            return
        path = Path(os.fsdecode(args[0]))
        if not self._is_it(event, path):
            return
        self._armed = False
        if self.file.startswith("__"):
            other = f"__{1 - self.rank}_0.distcp"
            size_bytes = (self.place / f"step-{EVERY:08d}" / other).stat().st_size
            there = path.with_name(other)
            patiently(lambda: there.exists() and there.stat().st_size == size_bytes)
        self.strike()

    def _is_it(self, event: str, path: Path) -> bool:
        saving = f".saving-step-{self.step:08d}"
        if not self.file:
            return event == "os.mkdir" and path.name.startswith(saving)
        is_file = path.name == self.file or path.name.startswith(f".{self.file}.")
        return event == "open" and is_file and path.parent.name.startswith(saving)


class Full(Trouble):
    """Somebody else fills the disk, up to a rest that no file of tensors fits in."""

    def strike(self) -> None:
        disk = os.statvfs(self.place)
        rest = 64 << 10 if self.file.startswith("__") else 0
        with (self.place / f"filler-{self.step}").open("wb") as file:
            file.write(bytes(max(0, disk.f_bavail * disk.f_frsize - rest)))


class Freed(Trouble):
    """What filled the disk goes."""

    def strike(self) -> None:
        free(self.place)


class ReadOnly(Trouble):
    """The disk becomes read-only: ``asked`` is answered by the test, which alone can do that."""

    def __init__(self, place: Path, file: str, asked: Path) -> None:
        super().__init__(place, file)
        self.asked = asked

    def strike(self) -> None:
        self.asked.touch()
        patiently(lambda: not self.asked.exists())

    def answered_by(self, disk: Any) -> Callable[[list[int]], None]:
        def answer(pids: list[int]) -> None:
            patiently(self.asked.exists)
            disk.read_only()
            self.asked.unlink()

        return answer


def patiently(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def free(place: Path) -> None:
    for filler in place.glob("filler-*"):
        filler.unlink()


def check(run: Any, lives: Any, steps: list[int]) -> None:
    """Just these steps are there, each whole and as an undisturbed run saved it."""
    assert [lives.step_of(path) for path in run.visible()] == steps
    for path in run.visible():
        sound = lives.undisturbed("ddp").sound(lives.step_of(path))
        assert not (wrong := lives.damage(path, sound)), wrong


def goes_on(run: Any, lives: Any, *, first: int) -> None:
    """One more life comes to the end, bit for bit as if nothing had been."""
    undisturbed = lives.undisturbed("ddp")
    life = run.live()
    assert (life.began, life.ended) == (first, run.steps), life.answers or life.death
    assert sorted(life.curve) == list(range(first + 1, run.steps + 1))
    assert not (differs := undisturbed.differs(life)), differs
    assert not run.hidden(), f"leftovers: {run.hidden()}"


def refusal(life: Any) -> dict[str, Any]:
    """The error that ended a life, which must be the same on both ranks."""
    assert not life.death, life.death
    first, second = life.answers
    assert first == second
    assert first["error"] == "ResourceError", first
    assert first["exit_code"] == 1
    return dict(first)


def log_of(run: Any, rank: int = 0) -> str:
    return (run.folder / "logs" / f"rank-{rank}.log").read_text()


# -- a disk that is full --------------------------------------------------------------------------


@pytest.mark.matrix(1)
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp", "state.json", "manifest.json"])
def test_a_disk_that_is_full_ends_the_run_and_loses_nothing(
    file: str, mode: str, lives: Any, disk: Any, tmp_path: Path
) -> None:
    place = disk(LARGE).path
    run = lives.Run(tmp_path / "run", mode=mode, every_steps=EVERY, checkpoints=place)
    trouble, again = Full(place, file), Full(place, file, step=THIRD + EVERY)

    def meddle(world: World) -> None:
        trouble(world)
        if mode == "async":  # which tries the next one, and finds what the first gave back
            again(world)

    life = run.live(prepare=meddle)
    error = refusal(life)
    assert f"/step-{THIRD if mode == 'sync' else THIRD + EVERY:08d}: " in error["text"]
    assert "No space left on device" in error["text"]
    assert f"step-00000008 is whole: checkpoint.resume={place}/step-00000008 goes" in error["text"]
    # Asynchronous saving has told of it at once, and tried the next save.
    told = error["text"] if mode == "sync" else log_of(run, trouble.rank)
    assert f"/step-{THIRD:08d}: No space left on device ({file})" in told
    assert re.search(r"device \([\w.]+\): .* MiB are free; ", error["text"])
    assert max(life.curve) == (THIRD if mode == "sync" else THIRD + EVERY)
    check(run, lives, [4, 8])
    assert not run.hidden()
    free(place)
    goes_on(run, lives, first=8)
    check(run, lives, [4, 8, 12, 16, 18])


def test_a_disk_too_small_says_how_much_it_takes_and_how_much_is_free(
    lives: Any, disk: Any, tmp_path: Path
) -> None:
    sound = lives.undisturbed("ddp").sound(4)
    needed = sum(file.stat().st_size for file in sound.iterdir())
    place = disk(int(2.5 * needed)).path
    run = lives.Run(tmp_path / "run", every_steps=EVERY, checkpoints=place)
    error = refusal(run.live())
    words = r"step-00000012: No space left on device \(__[01]_0.distcp\): it takes (\S+) MiB, "
    told = re.search(words + r"and (\S+) MiB are free; free some space there", error["text"])
    assert told, error["text"]
    assert float(told[1]) == pytest.approx(needed / MIB, rel=0.1)
    assert float(told[2]) == pytest.approx(0.5 * needed / MIB, rel=0.2)
    assert error["facts"]["free_bytes"] < error["facts"]["size_bytes"]
    check(run, lives, [4, 8])


@pytest.mark.exhaustive
def test_a_disk_without_inodes_says_that_it_is_files_and_not_bytes(
    lives: Any, disk: Any, tmp_path: Path
) -> None:
    place = disk(LARGE, files=17).path  # a folder and five files a checkpoint
    run = lives.Run(tmp_path / "run", every_steps=EVERY, checkpoints=place)
    error = refusal(run.live())
    assert re.search(r"there is room, but for \d more files \(inodes\); ", error["text"])
    check(run, lives, [4, 8])


def test_a_save_that_failed_for_a_while_is_told_and_the_next_one_is_made(
    lives: Any, disk: Any, tmp_path: Path
) -> None:
    place = disk(LARGE).path

    def meddle(world: World) -> None:
        Full(place, "__1_0.distcp")(world)
        Freed(place, "", step=THIRD + EVERY)(world)

    run = lives.Run(tmp_path / "run", mode="async", every_steps=EVERY, checkpoints=place)
    life = run.live(prepare=meddle)
    assert life.ended == run.steps, life.answers or life.death
    told = log_of(run)
    assert "step-00000012: No space left on device (__1_0.distcp)" in told
    assert "It is tried again" in told
    assert not (differs := lives.undisturbed("ddp").differs(life)), differs
    check(run, lives, [4, 8, 16, 18])


# -- a disk that is read-only ---------------------------------------------------------------------


def test_a_folder_on_a_read_only_disk_is_refused_before_the_first_step(
    lives: Any, disk: Any, tmp_path: Path
) -> None:
    mounted = disk(LARGE)
    run = lives.Run(tmp_path / "run", every_steps=EVERY, checkpoints=mounted.path)
    mounted.read_only()
    life = run.live()
    error = refusal(life)
    words = f"cannot use {mounted.path}: Read-only file system (.lock); "
    assert error["text"].startswith(words)
    assert "checkpoint.dir" in error["text"]
    assert (life.began, life.curve) == (None, {})


@pytest.mark.matrix(1)
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("file", ["", "__1_0.distcp", "manifest.json"])
def test_a_disk_that_becomes_read_only_ends_the_run_and_loses_nothing(
    file: str, mode: str, lives: Any, disk: Any, tmp_path: Path
) -> None:
    mounted = disk(LARGE)
    run = lives.Run(tmp_path / "run", mode=mode, every_steps=EVERY, checkpoints=mounted.path)
    trouble = ReadOnly(mounted.path, file, tmp_path / "asked")
    error = refusal(run.live(trouble.answered_by(mounted), prepare=trouble))
    assert ": Read-only file system" in error["text"]
    told = error["text"] if mode == "sync" or not file else log_of(run, trouble.rank)
    assert f"/step-{THIRD:08d}: Read-only file system{f' ({file})' if file else ';'}" in told
    assert "could not be given back" not in log_of(run)
    check(run, lives, [4, 8])
    mounted.writable()
    goes_on(run, lives, first=8)
    check(run, lives, [4, 8, 12, 16, 18])


def test_a_run_goes_on_from_a_read_only_disk_when_it_saves_elsewhere(
    lives: Any, disk: Any, tmp_path: Path
) -> None:
    mounted = disk(LARGE)
    shutil.copytree(lives.undisturbed("ddp").sound(8), mounted.path / "step-00000008")
    mounted.read_only()
    run = lives.Run(tmp_path / "run", every_steps=EVERY, resume=str(mounted.path))
    goes_on(run, lives, first=8)


# -- checkpoints that are damaged -----------------------------------------------------------------


def truncated(newest: Path) -> None:
    os.truncate(newest / "__1_0.distcp", 1000)


def flipped(file: str) -> Callable[[Path], None]:
    def flip(newest: Path) -> None:
        content = bytearray((newest / file).read_bytes())
        content[len(content) // 2] ^= 4
        (newest / file).write_bytes(content)

    return flip


def missing(file: str) -> Callable[[Path], None]:
    return lambda newest: (newest / file).unlink()


def foreign(newest: Path) -> None:
    """The same file of the checkpoint before: as large, and sound in itself."""
    shutil.copy(newest.with_name("step-00000012") / "__0_0.distcp", newest)


def replaced_by_a_folder(newest: Path) -> None:
    (newest / "state.json").unlink()
    (newest / "state.json").mkdir()


DAMAGE = {
    "truncated": (truncated, "__1_0.distcp has 1000 bytes, and "),
    "a bit of tensors": (flipped("__0_0.distcp"), "__0_0.distcp is not what was written (CRC-32 "),
    "a bit of plain values": (flipped("state.json"), "state.json is not what was written (CRC-32 "),
    "a bit of the manifest": (flipped("manifest.json"), "manifest.json is not what was written"),
    "missing tensors": (missing("__1_0.distcp"), "__1_0.distcp is missing"),
    "missing manifest": (missing("manifest.json"), "it has no manifest.json"),
    "foreign": (foreign, "__0_0.distcp is not what was written (CRC-32 "),
    "a folder": (replaced_by_a_folder, "state.json is missing"),
}


@pytest.fixture(scope="module")
def saved(lives: Any) -> list[Path]:
    """What two ranks saved at 6, 12 and 18."""
    return [lives.undisturbed("ddp").sound(step) for step in (6, 12, 18)]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("kind", DAMAGE)
def test_two_ranks_go_on_from_the_one_before_and_say_what_was_wrong_with_the_newest(
    kind: str, lives: Any, saved: list[Path], tmp_path: Path
) -> None:
    run = lives.Run(tmp_path / "run", every_steps=6, checkpoints=tmp_path / "checkpoints")
    for path in saved:
        shutil.copytree(path, run.place / path.name)
    damage, words = DAMAGE[kind]
    damage(newest := run.place / "step-00000018")
    named = lives.Run(tmp_path / "named", every_steps=6, resume=str(newest))
    life = named.live()
    error = refusal(life)
    why = f"the checkpoint {newest} is damaged or incomplete: {words}"
    assert error["text"].startswith(why)
    assert "checkpoint.resume=PATH" in error["text"]
    assert (life.began, life.curve) == (None, {})
    goes_on(run, lives, first=12)
    assert f"skipped: {why}" in log_of(run)


def test_files_and_folders_of_strangers_are_left_alone(
    lives: Any, saved: list[Path], tmp_path: Path
) -> None:
    run = lives.Run(tmp_path / "run", every_steps=6, checkpoints=tmp_path / "checkpoints")
    for path in saved[:2]:
        shutil.copytree(path, run.place / path.name)
    strangers = [
        run.place / "step-00000012" / "notes.txt",
        run.place / "step-00000012" / ".nfs0001",
        run.place / "step-00000099" / "notes.txt",
        run.place / ".saving-mine",
    ]
    strangers[2].parent.mkdir()
    for stranger in strangers:
        stranger.write_text("mine")
    life = run.live()
    assert (life.began, life.ended) == (12, 18), life.answers or life.death
    assert "skipped: the checkpoint" in log_of(run)
    assert [stranger.read_text() for stranger in strangers] == ["mine"] * 4
