"""What can go wrong, as facts; each error is one sentence and the next move.

The exit code belongs to the kind of error, so that the door (`__main__`) never has to guess:
1 the world (disk, network, a missing library), 2 the user's configuration or input,
3 training failed, 130/143 interrupted.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class TorshError(Exception):
    """A failure that a user can act upon.

    ``sentence`` says what is wrong, ``fix`` names the next move; both are printed as
    ``sentence; fix``. ``facts`` carry the values behind the words for programs that read them
    (``result.json``). Errors are plain: they pickle, so a worker can hand one to its parent.
    """

    exit_code = 1

    def __init__(self, sentence: str, *, fix: str = "", **facts: Any) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.fix = fix
        self.facts = facts

    def __str__(self) -> str:
        return f"{self.sentence}; {self.fix}" if self.fix else self.sentence

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.sentence, self.fix, self.facts)


class ResourceError(TorshError):
    """The world outside failed: a disk, a network, a port, a library that is not installed."""

    exit_code = 1


class ConfigError(TorshError):
    """The user's configuration or input cannot be honoured."""

    exit_code = 2


class Unsupported(ConfigError):
    """A strategy, precision or backend cannot honour an option that was asked of it."""


class TrainingError(TorshError):
    """Training itself failed: the loss is not finite, or a worker died."""

    exit_code = 3


class WorkerError(TrainingError):
    """One worker process failed.

    ``facts``: ``rank``, ``traceback`` (text, may be empty), ``log`` (path of the worker's log).
    ``cause_exit_code`` is the exit code of the error inside the worker, so that a wrong option
    found by a worker still exits with 2.
    """

    @property
    def cause_exit_code(self) -> int:
        """The exit code of the error inside the worker."""
        return int(self.facts.get("cause_exit_code", self.exit_code))


class Interrupted(TorshError):
    """The user or the cluster asked the run to stop; ``facts['signal']`` is its number."""

    @property
    def cause_exit_code(self) -> int:
        """128 and the signal's number, as a shell reports it."""
        return 128 + int(self.facts.get("signal", 2))


class DryRun(TorshError):
    """Only the plan of a start was asked for: it has been printed, and nothing is begun."""

    exit_code = 0


_FEW = 60
"""More names than these are no offer."""


def nearest(word: str, candidates: Iterable[str], *, most: int = 3) -> str:
    """The words of an offer: ``did you mean 'ddp'?``, else all names where they are few."""
    names = sorted(candidates)
    close = difflib.get_close_matches(word, names, n=most, cutoff=0.6)
    if close:
        return "did you mean " + " or ".join(repr(name) for name in close) + "?"
    if len(names) > _FEW:
        return f"remove it: none of the {len(names)} names that are known is like it"
    return "choose one of " + ", ".join(names) if names else ""


def _rebuild(kind: type[TorshError], sentence: str, fix: str, facts: dict[str, Any]) -> TorshError:
    return kind(sentence, fix=fix, **facts)
