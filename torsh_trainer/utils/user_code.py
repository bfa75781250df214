"""Whose line it was: the place in the user's own code where an error arose, or a process waits."""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType

_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+),? in ', re.MULTILINE)
"""A frame in Python's words, and in those of faulthandler."""
_CARRIED = re.compile(r"\ACaught (\S+) (.+)\.\n(?:Original )?Traceback", re.DOTALL)
"""How torch brings an error over from a loader process or a thread: as text, traceback and all."""
_ANOTHER = re.compile(
    r"^(?:During handling of the above exception|The above exception was).*$", re.MULTILINE
)
_PRODUCT = str(Path(__file__).parents[1])
_PLUGINS = {
    "torsh_mpi",
    "torsh_trainer_deepspeed",
    "torsh_trainer_horovod",
    "torsh_trainer_lightning",
}
_LIBRARIES = {
    "cloudpickle",
    "deepspeed",
    "horovod",
    "hydra",
    "lightning",
    "lightning_fabric",
    "mpi4py",
    "numpy",
    "omegaconf",
    "pytorch_lightning",
    "torch",
}
"""Installed packages that are never the user's, even where nothing else is."""

Frame = tuple[str, int]
"""A file and a line."""


def words_of(error: BaseException, *, longest: int = 400) -> str:
    """``error`` in one line: type, first line of the message, and the user's line if there is one.

    Of the message ``longest`` characters are told.

    An error that torch has brought over from a loader process is told as it was there.
    """
    kind, text = type(error).__name__, str(error)
    if carried := _CARRIED.match(text):
        kind, text = f"{carried[1]} {carried[2]}", _message(text)
    line = next((line for line in text.splitlines() if line.strip()), "")
    place = place_of(error)
    said = f"{kind}: {' '.join(line.split())[:longest]}" if line else kind
    return f"{said} ({place})" if place else said


def place_of(error: BaseException) -> str:
    """``file:line`` of the user's innermost frame in the traceback of ``error``, or nothing."""
    frames = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__)]
    text = str(error)
    if _CARRIED.match(text):
        frames += _frames(_last_of(text)) or _frames(text)
    return _users(frames[::-1])


def place_in(stack: str) -> str:
    """The same of what faulthandler wrote: of the thread that was at work, else of the main one."""
    threads = [part for part in stack.split("\n\n") if _FRAME.search(part)]
    at_work = [part for part in threads if part.startswith("Current thread")]
    # The main thread is the oldest, and comes last.
    told = (_users(_frames(part)) for part in (*at_work, *threads[-1:]))
    return next(filter(None, told), "")


def place_here() -> str:
    """The same of the call that is under way on this thread, within a run.

    Code from which the whole run was called is not where it is.
    """
    return _place_at(sys._getframe(1))


def place_of_thread(ident: int) -> str:
    """The same of the call that is under way on another thread."""
    frame = sys._current_frames().get(ident)
    return "" if frame is None else _place_at(frame)


def _place_at(innermost: FrameType) -> str:
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(innermost)]
    ours = [index for index, (name, _) in enumerate(frames) if name.startswith(_PRODUCT)]
    return _users(frames[: ours[-1]]) if ours else ""


def _users(frames: Sequence[Frame]) -> str:
    """The innermost of ``frames`` that is the user's; the innermost comes first.

    Where all of them are installed, the package that was called first counts as the user's.
    """
    installed = []
    for name, line in frames:
        package = _package(name)
        if package is not None:
            if package not in _LIBRARIES | _PLUGINS:
                installed.append((package, name, line))
        elif not _is_pythons_or_ours(name):
            return f"{name}:{line}"
    if not installed:
        return ""
    outermost = installed[-1][0]
    _, name, line = next(one for one in installed if one[0] == outermost)
    return f"{name}:{line}"


def _package(name: str) -> str | None:
    """The installed package that a file belongs to, or None."""
    parts = Path(name).parts
    for folder in ("site-packages", "dist-packages"):
        if folder in parts[:-1]:
            return parts[parts.index(folder) + 1].removesuffix(".py")
    return None


def _is_pythons_or_ours(name: str) -> bool:
    # torch or NumPy built in place lie outside site-packages.
    sources = [getattr(sys.modules.get(package), "__file__", None) for package in _LIBRARIES]
    folders = [str(Path(source).parent) for source in sources if source]
    python = sysconfig.get_path("stdlib")
    within = any(name.startswith(f"{folder}/") for folder in (_PRODUCT, python, *folders))
    return within or name.startswith("<") or not _PLUGINS.isdisjoint(Path(name).parts)


def _frames(text: str) -> list[Frame]:
    return [(name, int(line)) for name, line in _FRAME.findall(text)]


def _last_of(text: str) -> str:
    """Of a traceback as text, the part of the error that was raised last."""
    return _ANOTHER.split(text)[-1]


def _message(text: str) -> str:
    """What a traceback as text ends with: the message, without its type."""
    *_, rest = _FRAME.split(_last_of(text))
    lines: Iterable[str] = rest.splitlines()[1:]
    said = next((line for line in lines if line and not line[0].isspace()), "")
    return said.partition(": ")[2]
