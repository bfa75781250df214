"""The contract of a checkpointer: saving, finding and loading the state of a run."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torsh_trainer.errors import ConfigError, nearest


@dataclass(frozen=True)
class CheckpointOptions:
    """Knobs of saving and resuming.

    ``dir`` None is ``checkpoints/`` in the run directory. ``every_steps``/``every_epochs`` None
    saves only at the end (``at_end``). ``keep_last`` deletes older ones of this run; None keeps
    all. ``resume`` is auto (the newest complete one in ``dir``, if any), never, or a path of a
    checkpoint or a run directory.
    """

    dir: str | None = None
    every_steps: int | None = None
    every_epochs: int | None = None
    at_end: bool = True
    keep_last: int | None = None
    resume: str = "auto"
    mode: Literal["sync", "async"] = "sync"

    def __post_init__(self) -> None:
        for name in ("every_steps", "every_epochs", "keep_last"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(
                    f"checkpoint.{name}={value} is not a positive number",
                    fix="give 1 or more, or null to switch it off",
                )
        if self.mode not in ("sync", "async"):
            raise ConfigError(
                f"unknown checkpoint.mode={self.mode}", fix=nearest(self.mode, ("sync", "async"))
            )


class Checkpointer(abc.ABC):
    """Saves and loads the state of a run; every method is collective over its communicator.

    A state is a nested dict with string keys; leaves are Tensors, DTensors, FlatShards, or plain
    values (numbers, strings, bytes, booleans, None, lists, tuples and dicts of them). Ranks may
    hold different keys: what any rank has is saved, once.
    """

    @abc.abstractmethod
    def save(self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float]) -> Path:
        """Writes ``state`` as the checkpoint of ``step``; it becomes visible whole or not at all.

        Returns its path. With ``mode=async`` it returns as soon as ``state`` may change; the
        checkpoint becomes visible later, and the next call of any method waits for it and raises
        its error.

        Raises:
            ResourceError: the disk refused (full, read-only); nothing older is lost.
            ConfigError: ``state`` holds something else; the message says where.
        """

    @abc.abstractmethod
    def find(self, resume: str) -> Path | None:
        """The checkpoint that ``checkpoint.resume`` means, verified; None to start afresh.

        Raises:
            ConfigError: a path that is not there, or that holds no checkpoint.
            ResourceError: there are checkpoints, and every one is damaged.
        """

    @abc.abstractmethod
    def load(
        self, state: Mapping[str, Any], step: int | None = None, *, path: Path | None = None
    ) -> dict[str, Any]:
        """The checkpoint of ``step`` (None: the newest), or at ``path``, in the shape of ``state``.

        Tensors of ``state`` are filled in place; plain values come back as saved. What lies under
        ``callbacks``, ``rng``, ``schedule`` and ``task`` comes back exactly as saved, with new
        tensors on the CPU, whatever ``state`` holds there. Optimizer slots that the checkpoint
        lacks for a whole parameter are left out.

        Raises:
            ConfigError: there is none, or it does not fit ``state``; the message says where.
            ResourceError: a file of it is damaged; the message names it.
        """

    @abc.abstractmethod
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Returns once a save under way is visible.

        Raises:
            ResourceError: it failed.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Waits for a save under way, and raises its error."""
