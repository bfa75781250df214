"""From a command of a shell file to a line that starts a job: its launchers and its script."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from torsh_trainer.translate.launch import (
    accelerate_flags,
    cluster_flags,
    deepspeed_flags,
    torch_flags,
)
from torsh_trainer.translate.launch.flags import FlagTable, StatedFlag, find_row, read_flags
from torsh_trainer.translate.launch.job import LaunchJob, LaunchLine, Link, WorldShape
from torsh_trainer.translate.shell.words import Command, Word

PYTHON = "python"
HOROVODRUN = "horovodrun"
GIVE_PLACES = ("deepspeed", "accelerate", "torchrun")
"""Launchers that give each process RANK and WORLD_SIZE, whatever the file has exported."""


@dataclass(frozen=True)
class LaunchCommand:
    """One command that starts processes: its flags, and how many it starts.

    ``beginnings`` are how it may be written: words that follow one another. ``folds_dashes``: it
    takes ``-`` for ``_``. ``keeps``: it stays in the command around the recipe.
    """

    name: str
    beginnings: tuple[tuple[str, ...], ...]
    table: FlagTable
    shape: Callable[[LaunchJob, Link], WorldShape]
    folds_dashes: bool = False
    keeps: bool = False


LAUNCHERS: tuple[LaunchCommand, ...] = (
    LaunchCommand(
        "deepspeed",
        (
            ("deepspeed",),
            ("ds",),
            ("deepspeed.pt",),
            ("python", "-m", "deepspeed"),
            ("python", "-m", "deepspeed.launcher.runner"),
        ),
        deepspeed_flags.TABLE,
        deepspeed_flags.shape_world,
    ),
    LaunchCommand(
        "accelerate",
        (
            ("accelerate", "launch"),
            ("accelerate-launch",),
            ("python", "-m", "accelerate.commands.launch"),
            ("python", "-m", "accelerate.commands.accelerate_cli", "launch"),
        ),
        accelerate_flags.TABLE,
        accelerate_flags.shape_world,
        folds_dashes=True,
    ),
    LaunchCommand(
        "torchrun",
        (
            ("torchrun",),
            ("python", "-m", "torch.distributed.run"),
            ("python", "-m", "torch.distributed.launch"),
            ("python", "-m", "torch.distributed.elastic.multiprocessing.launch"),
        ),
        torch_flags.TABLE,
        torch_flags.shape_world,
        folds_dashes=True,
    ),
    LaunchCommand("srun", (("srun",),), cluster_flags.SRUN, cluster_flags.shape_srun, keeps=True),
    LaunchCommand(
        "mpirun",
        (("mpirun",), ("mpiexec",), ("orterun",)),
        cluster_flags.MPIRUN,
        cluster_flags.shape_mpirun,
        keeps=True,
    ),
    LaunchCommand(HOROVODRUN, ((HOROVODRUN,),), {}, lambda job, link: WorldShape()),
)
"""Every command that starts processes, in the order in which a word is compared."""

_PYTHON = re.compile(r"(python|python3|pypy3?|ipython)(\d*\.?\d*)$")
_SCRIPT = re.compile(r".*\.py$")
_PYTHON_VALUED = ("-W", "-X", "--check-hash-based-pycs")
_TALKERS = frozenset(
    (
        *("echo", "printf", "pip", "pip3", "conda", "mamba", "apt", "apt-get", "git"),
        *("which", "command", "type", "pkill", "killall", "kill", "ps", "pgrep", "grep"),
        *("egrep", "rg", "cat", "tee", "tail", "head", "less", "sed", "awk", "jq", "cd"),
        *("ls", "rm", "mkdir", "rmdir", "cp", "mv", "ln", "chmod", "chown", "touch"),
        *("find", "export", "source", ".", "module", "ml", "wget", "curl", "tar"),
        *("unzip", "sleep", "wait", "date", "sbatch", "scancel", "squeue", "salloc"),
        *("set", "ulimit", "trap", "alias", "hash", "test", "[", "[[", ":", "true"),
        *("false", "read", "return", "exit", "local", "declare", "du", "df", "free"),
        *("nvidia-smi", "docker-compose", "kubectl", "ray", "gsutil", "aws", "rsync"),
        *("scp", "ssh-keygen", "xargs", "tmux", "screen", "wandb", "huggingface-cli"),
        *("hf", "spack", "brew", "yum", "dnf", "pushd", "popd", "nvcc", "make", "cmake"),
        *("ninja",),
    )
)
"""Commands that only name a launcher, where they name one."""

_INSTALLS = frozenset({"install", "uninstall", "show", "list"})
_NO_SCRIPTS = frozenset(
    (
        *("pip", "venv", "virtualenv", "http.server", "json.tool", "ensurepip", "site"),
        *("pytest", "unittest", "build", "ipykernel", "jupyter", "notebook", "spacy"),
        *("nltk.downloader", "compileall"),
    )
)
"""Modules that ``python -m`` starts and that train nothing."""


def launcher_named(name: str) -> LaunchCommand | None:
    """The launcher of that name."""
    return next((launcher for launcher in LAUNCHERS if launcher.name == name), None)


def read_line(command: Command) -> LaunchLine | None:
    """The line that ``command`` is, where it starts a job; None where it starts none."""
    words = (*command.around, *command.words)
    if not words or PurePosixPath(words[0].text).name in _TALKERS:
        return None
    links: list[Link] = []
    wrappers: list[Word] = []
    at = 0
    while at < len(words):
        found = _launcher_at(words, at)
        if found is not None:
            launcher, length = found
            said, problems, used = _flags_of(launcher, words[at + length :])
            links.append(Link(launcher.name, words[at], tuple(said), tuple(problems)))
            at += length + used
            if launcher.name == HOROVODRUN:
                return LaunchLine(command, tuple(links), None, False, words[at:], tuple(wrappers))
            if not launcher.keeps:
                return _with_script(command, links, words, at, wrappers)
            continue
        name = PurePosixPath(words[at].text).name
        if _is_python(words, at):
            return _python(command, links, words, at, wrappers)
        if _SCRIPT.fullmatch(words[at].text) and not words[at].text.startswith("-"):
            links.append(Link(PYTHON, words[at], ()))
            return LaunchLine(
                command, tuple(links), words[at], False, words[at + 1 :], tuple(wrappers)
            )
        if name in _TALKERS or words[at].text in _INSTALLS:
            return None
        wrappers.append(words[at])
        at += 1
    if links and links[-1].launcher in ("srun", "mpirun") and wrappers:
        return None  # it starts a program that is no script
    return None


def _launcher_at(words: Sequence[Word], at: int) -> tuple[LaunchCommand, int] | None:
    name = PurePosixPath(words[at].text).name
    head = "python" if _is_python(words, at) else name
    rest = [word.text for word in words[at + 1 : at + 8]]
    if head == "python":
        rest = rest[next((i for i, text in enumerate(rest) if text == "-m"), 0) :]
    for launcher in LAUNCHERS:
        for beginning in launcher.beginnings:
            if head == beginning[0] and tuple(rest[: len(beginning) - 1]) == beginning[1:]:
                skipped = len(words[at + 1 : at + 8]) - len(rest) if head == "python" else 0
                return launcher, len(beginning) + skipped
    return None


def _is_python(words: Sequence[Word], at: int) -> bool:
    """An interpreter by its name; or a word that only a shell could tell, before ``-m``."""
    if _PYTHON.fullmatch(PurePosixPath(words[at].text).name):
        return True
    following = [word.text for word in words[at + 1 : at + 3]]
    return bool(words[at].open) and "-m" in following and not words[at].text.startswith("-")


def _flags_of(launcher: LaunchCommand, words: Sequence[Word]) -> tuple[list[StatedFlag], list, int]:
    if not launcher.keeps:
        return read_flags(
            words, launcher.table, launcher=launcher.name, folds_dashes=launcher.folds_dashes
        )
    said: list[StatedFlag] = []
    at = 0
    while at < len(words) and words[at].text.startswith("-") and len(words[at].text) > 1:
        name, equals, inline = words[at].text.partition("=")
        row = find_row(name, launcher.table) if not equals else None
        word = words[at]
        if equals:
            said.append(
                StatedFlag(name, (Word(inline, word.place, word.open, word.holes),), word.place)
            )
            at += 1
            continue
        takes = row.takes if row is not None else 0
        if row is None and name[:2] in launcher.table and not name.startswith("--"):
            said.append(StatedFlag(name[:2], (Word(name[2:], word.place),), word.place))
            at += 1
            continue
        if row is None and name.startswith("--") and not _starts_program(words, at + 1):
            takes = 1  # an option that no table has, with its value
        said.append(StatedFlag(name, tuple(words[at + 1 : at + 1 + takes]), word.place))
        at += 1 + takes
    return said, [], min(at, len(words))


def _starts_program(words: Sequence[Word], at: int) -> bool:
    if at >= len(words):
        return True
    text = words[at].text
    name = PurePosixPath(text).name
    return (
        text.startswith("-")
        or bool(_PYTHON.fullmatch(name))
        or text.endswith((".py", ".sh"))
        or _launcher_at(words, at) is not None
    )


def _with_script(
    command: Command, links: list[Link], words: Sequence[Word], at: int, wrappers: list[Word]
) -> LaunchLine:
    """Behind the flags of a launcher: the script or module, and its arguments."""
    module = links[-1].find("module", "m") is not None
    rest = words[at:]
    if rest and _PYTHON.fullmatch(PurePosixPath(rest[0].text).name) and len(rest) > 1:
        rest = rest[1:]  # with --no_python, or one too many
        if rest[0].text == "-u" and len(rest) > 1:
            rest = rest[1:]
        if rest[0].text == "-m" and len(rest) > 1:
            module, rest = True, rest[1:]
    script = rest[0] if rest else None
    return LaunchLine(command, tuple(links), script, module, tuple(rest[1:]), tuple(wrappers))


def _python(
    command: Command, links: list[Link], words: Sequence[Word], at: int, wrappers: list[Word]
) -> LaunchLine | None:
    first = words[at]
    at += 1
    while at < len(words) and words[at].text.startswith("-") and len(words[at].text) > 1:
        text = words[at].text
        if text == "-m" and at + 1 < len(words):
            if words[at + 1].text in _NO_SCRIPTS:
                return None
            links.append(Link(PYTHON, first, ()))
            return LaunchLine(
                command, tuple(links), words[at + 1], True, tuple(words[at + 2 :]), tuple(wrappers)
            )
        if text in ("-c", "-V", "--version", "-h", "--help"):
            return None
        at += 2 if text in _PYTHON_VALUED else 1
    if at >= len(words) or words[at].text in ("-", "setup.py"):
        return None
    if PurePosixPath(words[at].text).name == "setup.py":
        return None
    links.append(Link(PYTHON, first, ()))
    return LaunchLine(
        command, tuple(links), words[at], False, tuple(words[at + 1 :]), tuple(wrappers)
    )


def read_arguments(words: Sequence[Word]) -> list[StatedFlag]:
    """What the script is given: flags with their values, and words that stand alone."""
    said: list[StatedFlag] = []
    at = 0
    while at < len(words):
        word = words[at]
        if not _is_flag(word):
            said.append(StatedFlag(word.text, (word,), word.place))
            at += 1
            continue
        name, equals, inline = word.text.partition("=")
        if equals:
            said.append(
                StatedFlag(name, (Word(inline, word.place, word.open, word.holes),), word.place)
            )
            at += 1
            continue
        end = at + 1
        while end < len(words) and not _is_flag(words[end]):
            end += 1
        said.append(StatedFlag(name, tuple(words[at + 1 : end]), word.place))
        at = end
    return said


def _is_flag(word: Word) -> bool:
    return re.match(r"--?[A-Za-z_]", word.text) is not None
