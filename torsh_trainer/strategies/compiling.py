"""What torch.compile does that a user should be told of.

It says nothing while it makes a run wait, for half a minute or more; what it records as CUDA
graphs writes its results to the same memory each time; and where it fails, it prints the whole
command of a compiler and a page of its words.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torsh_trainer.errors import TrainingError, Unsupported
from torsh_trainer.strategies.base import Job

log = logging.getLogger(__name__)

_RECORDING_MODES = ("reduce-overhead", "max-autotune")


def records_graphs(compile_options: Mapping[str, Any]) -> bool:
    """Whether torch.compile with these arguments records CUDA graphs, where there is CUDA."""
    options = compile_options.get("options") or {}
    return (
        compile_options.get("mode") in _RECORDING_MODES
        or compile_options.get("backend") == "cudagraphs"
        or bool(options.get("triton.cudagraphs", False))
    )


def refuse_overwritten_gradients(job: Job, device: torch.device) -> None:
    """Makes sure that no micro-batch overwrites the gradients of the one before it.

    Autograd takes a gradient as it is into ``.grad``. Of a CUDA graph that is memory which its next
    replay writes to, so that nothing could be added up (torch raises there, at the second one).

    Raises:
        Unsupported: gradients of several micro-batches, each made by a CUDA graph.
    """
    if job.compile is None or device.type != "cuda" or not records_graphs(job.compile):
        return
    if job.batch.accumulate > 1:
        asked = {k: v for k, v in job.compile.items() if k in ("mode", "backend", "options")}
        raise Unsupported(
            f"trainer.compile_options={asked} records CUDA graphs, and with "
            f"trainer.accumulate={job.batch.accumulate} the second micro-batch of a step would "
            "overwrite the gradients of the first",
            fix="set trainer.compile_options={mode: max-autotune-no-cudagraphs}, or "
            "trainer.accumulate=1",
        )


_COMPILERS_ERROR = re.compile(r"^.*\berror: *(.+)$", re.MULTILINE)
"""As g++, clang and nvcc write it, behind file, line and column."""


@contextlib.contextmanager
def explain_failures() -> Iterator[None]:
    """Tells a failure of torch.compile's backend in one sentence.

    Raises:
        TrainingError: there was one in the block.
    """
    try:
        yield
    except torch._dynamo.exc.BackendCompilerFailed as error:
        inner = error.inner_exception
        text = str(inner).strip()
        found = _COMPILERS_ERROR.search(text)
        why = " ".join((found[1] if found else text).split("\n")[0].split())[:300]
        raise TrainingError(
            f"torch.compile: its backend {error.backend_name} cannot compile this model for a "
            f"batch of this shape: {type(inner).__name__}: {why}",
            fix="trainer.compile=false goes without; trainer.compile_options={backend: aot_eager} "
            "shows whether the backend alone is at fault; debug=true prints all of it",
        ) from error


PATIENCE_S = 5.0
"""Compilations that together take less go without a word."""
_APART_S = 60.0
"""Those that are further apart have nothing to do with each other."""


class CompileListener:
    """Is told when compilations begin and end, in one process; says once that the run waits."""

    def __init__(self, *, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._taken_s = 0.0
        self._began_s = self._ended_s = 0.0
        self._said = False
        self._timer: threading.Timer | None = None

    def begin(self, *_: Any) -> None:
        """A compilation begins."""
        self._began_s = time.monotonic()
        if self._began_s - self._ended_s > _APART_S:
            self._taken_s, self._said = 0.0, False
        if not self._said:
            self._timer = threading.Timer(max(0.0, self._patience_s - self._taken_s), self._say)
            self._timer.daemon = True
            self._timer.start()

    def end(self, *_: Any) -> None:
        """It has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._ended_s = time.monotonic()
        self._taken_s += self._ended_s - self._began_s

    def _say(self) -> None:
        self._said = True
        log.warning(
            "torch.compile compiles the model, and the run waits for it: half a minute is usual, "
            "several minutes for a large one; trainer.compile=false goes without"
        )


_told: CompileListener | None = None


def tell_of_compilations() -> None:
    """From now on a run that waits for torch.compile is told so; costs a step nothing."""
    global _told  # noqa: PLW0603  # torch has one handler a process
    # Imported here: it takes a second, and few runs compile.
    from torch._dynamo.callback import callback_handler

    if _told is None:
        _told = CompileListener()
    if _told.begin not in callback_handler.start_callbacks:  # torch._dynamo.reset() removes all
        callback_handler.register_start_callback(_told.begin)
        callback_handler.register_end_callback(_told.end)
