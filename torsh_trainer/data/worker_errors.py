"""What a loader process raised, in its own words, where torch wraps them in a traceback."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torsh_trainer.errors import ResourceError, TorshError, TrainingError

_WRAPPED = re.compile(r"Caught (\S+) in (?:DataLoader )?(.+?)\.\n(.*)", re.DOTALL)
_FRAME = re.compile(r'^  File "(.+)", line (\d+)', re.MULTILINE)


def telling(batches: Iterator[Any]) -> Iterator[Any]:
    """``batches``, whose errors from a loader process come in one sentence.

    Raises:
        ResourceError: a process raised an OSError; its words, and the user's line.
        TrainingError: it raised something else.
    """
    try:
        yield from batches
    except Exception as error:
        worded = _in_words(error)
        if worded is None:
            raise
        raise worded from error


def _in_words(error: Exception) -> TorshError | None:
    """None where no process of a loader has raised it."""
    wrapped = _WRAPPED.match(str(error))
    if wrapped is None:
        return None
    kind, where, traceback = wrapped.groups()
    places = [frame for frame in _FRAME.findall(traceback) if not _is_a_library(frame[0])]
    place = f" ({places[-1][0]}:{places[-1][1]})" if places else ""
    made = ResourceError if isinstance(error, OSError) else TrainingError
    return made(
        f"{_last_words(traceback) or kind}{place}, in {where} of the data loader",
        fix="correct the dataset; data.num_workers=0 reads it in the process that trains, where a "
        "debugger reaches it",
        traceback=traceback,
    )


def _last_words(traceback: str) -> str:
    """``OSError: no such file``: the first line that says what the last error was."""
    lines = traceback.rstrip().splitlines()
    frames = [i for i, line in enumerate(lines) if line.startswith("  ")]
    after = [line for line in lines[frames[-1] + 1 if frames else 0 :] if line.strip()]
    return after[0] if after else ""


def _is_a_library(filename: str) -> bool:
    """Whether a file is ours, Python's, or somebody's that was installed."""
    ours, python = str(Path(__file__).parents[1]), sysconfig.get_path("stdlib")
    return filename.startswith((ours, python, "<")) or "site-packages" in Path(filename).parts
