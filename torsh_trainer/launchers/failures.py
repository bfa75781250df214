"""How a worker failed, as plain facts; and which of several failures is the cause."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torsh_trainer.comm.symptoms import is_communication
from torsh_trainer.errors import Interrupted, TorshError, WorkerError
from torsh_trainer.utils.user_code import words_of


@dataclass(frozen=True)
class Failure:
    """One worker's failure.

    ``time_s`` is the monotonic clock, which all processes of a machine share. ``collateral`` says
    that it is a failure to communicate, such as the death of another process causes; ``worded``
    that ``fix`` is final.
    """

    rank: int
    time_s: float
    sentence: str
    fix: str = ""
    traceback: str = ""
    cause: str = ""
    cause_exit_code: int = WorkerError.exit_code
    cause_facts: dict[str, Any] = field(default_factory=dict)
    collateral: bool = False
    worded: bool = False

    @property
    def interrupted(self) -> bool:
        """The worker was asked to stop, and did."""
        return self.cause in (Interrupted.__name__, KeyboardInterrupt.__name__)


def failure_of(error: BaseException, *, rank: int, time_s: float) -> Failure:
    """The facts of an exception that ended a worker's entry."""
    text = "".join(traceback.format_exception(error))
    cause = type(error).__name__
    collateral = is_communication(error)
    if isinstance(error, TorshError):
        return Failure(
            rank,
            time_s,
            error.sentence,
            fix=error.fix,
            traceback=text,
            cause=cause,
            cause_exit_code=exit_code_of(error),
            cause_facts={key: _plain(value) for key, value in error.facts.items()},
            collateral=collateral,
            worded=True,
        )
    return Failure(
        rank,
        time_s,
        f"rank {rank} failed with {words_of(error)}",
        traceback=text,
        cause=cause,
        collateral=collateral,
    )


def exit_code_of(error: BaseException) -> int:
    """With which code a process ends that ``error`` ends."""
    if not isinstance(error, TorshError):
        return WorkerError.exit_code
    return int(getattr(error, "cause_exit_code", error.exit_code))


def root_cause(failures: Iterable[Failure]) -> Failure:
    """The first failure in time that is no mere consequence of another process's end."""
    return min(failures, key=lambda f: (f.collateral, f.interrupted, f.time_s, f.rank))


def _plain(value: Any) -> Any:
    """``value`` if it is made of plain Python, else its repr: the parent imports nothing for it."""
    if isinstance(value, str | int | float | bool | bytes | None):
        return value
    if isinstance(value, list | tuple | set):
        return type(value)(_plain(item) for item in value)
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return repr(value)
