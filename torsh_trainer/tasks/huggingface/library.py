"""The library transformers, which is loaded where it is used and nowhere else."""

from __future__ import annotations

import functools
from typing import Any

from torsh_trainer.tasks.sources import library


@functools.cache
def transformers() -> Any:
    """The library, quiet: what it would print is told in sentences of ours.

    Raises:
        ResourceError: it is not installed.
    """
    found = library("transformers", needs="a Hugging Face model", install="torsh-trainer[hf]")
    found.utils.logging.set_verbosity_error()
    found.utils.logging.disable_progress_bar()
    return found


def first_line(error: Exception) -> str:
    """What an error of the library says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2]) if lines else type(error).__name__
    return text if len(text) <= 300 else text[:300] + "..."
