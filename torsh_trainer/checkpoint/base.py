"""The contract of a checkpointer: saving, finding and loading the state of a run."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torsh_trainer.errors import ConfigError


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


class Checkpointer(abc.ABC):
    """Saves and loads the state of a run; every method is collective over its communicator."""

    @abc.abstractmethod
    def save(self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float]) -> Path:
        """Writes ``state`` as the checkpoint of ``step``; it becomes visible whole or not at all.

        ``state`` is a nested dict with string keys; leaves are Tensors, DTensors, FlatShards, or
        plain values (numbers, strings, booleans, None, lists and dicts of them). Returns its path.

        Raises:
            ResourceError: the disk refused (full, read-only); nothing older is lost.
        """

    @abc.abstractmethod
    def load(self, state: Mapping[str, Any], step: int | None = None) -> dict[str, Any]:
        """The checkpoint of ``step`` (None: the newest) read into the shape of ``state``.

        Tensors of ``state`` are filled in place; plain values come back as saved.

        Raises:
            ConfigError: there is none, or it does not fit ``state``; the message names what differs.
        """

    @abc.abstractmethod
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""

    @abc.abstractmethod
    def close(self) -> None:
        """Waits for saves under way."""
