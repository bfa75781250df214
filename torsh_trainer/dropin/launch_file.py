"""The one launch line of a shell file, taken out of it to be run by itself; the file is not run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.base import TranslationRequest
from torsh_trainer.translate.jobs import choose_job
from torsh_trainer.translate.launch.job import LaunchLine
from torsh_trainer.translate.launch.translator import LaunchFile
from torsh_trainer.translate.reading import text_of
from torsh_trainer.translate.shell.words import Word

_LAUNCHERS = ("deepspeed", "horovodrun")


@dataclass(frozen=True)
class LineToRun:
    """A launch line as words, where it runs, and the environment that it finds.

    ``notes`` are told before.
    """

    words: tuple[str, ...]
    folder: Path = field(default_factory=Path.cwd)
    env: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The line as a shell would be given it."""
        return shlex.join(self.words)


def take_line(
    path: Path, *, job: str | None, settings: Mapping[str, str], env: Mapping[str, str]
) -> LineToRun:
    """The launch line of the shell file in ``path``; ``job`` says which, of several.

    ``settings`` state what only a shell would know; ``env`` is what the file inherits.

    Raises:
        ConfigError: there is none, ``job`` does not tell them apart, it is of another launcher, or
            it hangs on something that is not known or not there.
        ResourceError: the file cannot be read.
    """
    request = TranslationRequest(settings=dict(settings))
    file = LaunchFile(str(path), text_of(path), path.parent, request, environment=env)
    lines, others = file.lines()
    if not lines:
        raise file.nothing_found()
    file.check_settings(lines)
    line = lines[choose_job([_name_line(path, one) for one in lines], job, source=str(path))]
    name = f"{path}:{line.line}"
    if line.links[0].launcher not in _LAUNCHERS:
        raise ConfigError(
            f"{name} is started by {line.links[0].launcher}, and lines of "
            f"{' and '.join(_LAUNCHERS)} are tried under their engines",
            fix="run the script by drop-in alone: python -m torsh_trainer drop-in -np 2 train.py",
        )
    words = (*line.command.around, *line.command.words)
    words = tuple(word for word in words if not word.is_all_arguments)
    start = next(at for at, word in enumerate(words) if word is line.links[0].word)
    _check_known(words[start:], name=name)
    inherited = {**line.command.exported, **line.command.variables}
    _check_known(tuple(word for key, word in inherited.items() if key not in env), name=name)
    folder = _find_folder(path, line, words[start:])
    _check_written(file, words[start:], folder, name=name)
    notes = _list_notes(file, [one for one in (*lines, *others) if one is not line], line)
    return LineToRun(
        tuple(word.text for word in words[start:]),
        folder,
        {key: word.text for key, word in inherited.items()},
        tuple(notes),
    )


def _name_line(path: Path, line: LaunchLine) -> str:
    """The name of a job: the line of its file, and the round of a loop around it."""
    rounds = ", ".join(f"{name}={value}" for name, value in line.command.rounds)
    return f"{path}:{line.line}" + (f" ({rounds})" if rounds else "")


def _check_known(words: tuple[Word, ...], *, name: str) -> None:
    for word in words:
        for hole in word.holes:
            stated = hole.name if hole.name.replace("_", "").isalnum() else ""
            raise ConfigError(
                f"{name}: only a shell knows {hole.text}",
                fix=f"state it: --set {stated}=VALUE"
                if stated
                else "give the line as it would be, with --command",
            )


def _find_folder(path: Path, line: LaunchLine, words: tuple[Word, ...]) -> Path:
    """Where the line runs: from here, as the file would; else from the file's own folder."""
    scripts = [word.text for word in words if word.text.endswith(".py")]
    entered = line.command.folder
    places = [Path.cwd() / entered, path.absolute().parent / entered]
    for place in places:
        if not scripts or (place / scripts[0]).is_file():
            return place
    raise ConfigError(
        f"{path}:{line.line} starts {scripts[0]}, which is not in {places[0]}",
        fix="start verify in the folder from which you start the file",
    )


def _check_written(file: LaunchFile, words: tuple[Word, ...], folder: Path, *, name: str) -> None:
    """Makes sure that what the file would write before, and the line names, is there."""
    for written, how in file.script.files.items():
        named = any(written in (word.text, word.text.partition("=")[2]) for word in words)
        if named and not (folder / written).exists():
            raise ConfigError(
                f"{name} names {written}, which line {how.place.line} writes: nothing of the file "
                "is run but the launch line",
                fix=f"write {written} first, as that line does",
            )


def _list_notes(file: LaunchFile, others: list[LaunchLine], line: LaunchLine) -> Iterator[str]:
    left = file.list_left(others)
    if left:
        yield f"not run, {left.removeprefix('left alone, ')}"
    unread = [source for source, is_read in file.script.sourced.items() if not is_read]
    if unread:
        yield f"not read: {', '.join(unread)}; what it sets is missing here"
    if any(word.is_all_arguments for word in line.command.words):
        yield "the file's own arguments ($@): none are taken here, --set @='--lr 0.1' gives them"
    for condition in line.command.conditions:
        yield f"the file starts it where this holds: {condition}"
    if len(line.wrappers) > 0:
        yield f"left out around it: {' '.join(word.text for word in line.wrappers)}"
