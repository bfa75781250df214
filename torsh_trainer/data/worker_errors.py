"""What a loader process raised, in its own words, where torch wraps them in a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torsh_trainer.errors import ResourceError, TrainingError
from torsh_trainer.user_code import is_carried, words_of


def telling(batches: Iterator[Any]) -> Iterator[Any]:
    """``batches``, whose errors from a loader process come in one sentence.

    Raises:
        ResourceError: a process raised an OSError; its words, and the user's line.
        TrainingError: it raised something else.
    """
    try:
        yield from batches
    except Exception as error:
        if not is_carried(error):
            raise
        kind = ResourceError if isinstance(error, OSError) else TrainingError
        raise kind(
            words_of(error),
            fix="correct the dataset; data.num_workers=0 reads it in the process that trains, "
            "where a debugger reaches it",
            traceback=str(error),
        ) from error
