"""What ``checkpoint import`` is asked for, and the contract of a format that it reads."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from torsh_trainer.checkpoint.store.places import StoragePath
from torsh_trainer.errors import ConfigError, nearest
from torsh_trainer.utils import registry


@dataclass(frozen=True)
class Import:
    """What to read, and where to put it.

    ``strip`` takes the names that begin so, without it. ``parameters`` is a file that names the
    parameters in the optimizer's order, one a line; ``optimizers`` are the optimizers' names.
    ``step`` and ``samples`` (how many were consumed) win over what the file says. ``format`` is
    ``auto`` or a name of one, and the file has to be of it. Nothing is ever replaced.
    """

    file: Path
    output: StoragePath
    strip: str = ""
    parameters: Path | None = None
    optimizers: tuple[str, ...] = ()
    step: int | None = None
    samples: int | None = None
    format: str = "auto"

    def __post_init__(self) -> None:
        for name in ("step", "samples"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"--{name} {value} is below 0", fix="give 0 or more")
        known = ["auto", *registry.IMPORT_FORMATS.names()]
        if self.format not in known:
            raise ConfigError(f"--from {self.format} is unknown", fix=nearest(self.format, known))


@dataclass(frozen=True)
class Imported:
    """What a file came to: weights by name and, by optimizer, ``state`` and ``groups`` by name.

    ``kind`` begins with the name of its format. ``schedulers`` are states of torch's schedulers;
    ``counts`` what the file counts (``step``, ``samples``, ``epoch``, ...); ``notes`` are sentences
    for the reader.
    """

    kind: str
    weights: dict[str, Tensor]
    optimizers: dict[str, dict[str, Any]]
    schedulers: list[Any]
    counts: Mapping[str, Any]
    notes: tuple[str, ...] = ()


class ImportFormat(abc.ABC):
    """A format that ``checkpoint import`` reads; made without arguments."""

    name: ClassVar[str]
    """What ``--from`` calls it."""

    priority: ClassVar[int] = 50
    """The first that recognises a file reads it, from the highest on: deepspeed 40, hf and
    safetensors 30, torch, which takes any file, 10."""

    @abc.abstractmethod
    def recognises(self, file: Path) -> bool:
        """Whether ``file``, which may not exist, is of this format; by its name and a glance."""

    @abc.abstractmethod
    def read(self, wanted: Import, file: Path) -> Imported:
        """What ``file`` comes to; ``wanted`` has the options. No code in a file is run.

        Raises:
            ConfigError: it is damaged, holds no weights, or an option means nothing to it.
            ResourceError: it cannot be read, or a library is missing.
        """

    def accepts(self, kind: str) -> bool:
        """Whether ``--from`` with this name takes a file that came to ``kind``."""
        return kind.split()[0] == self.name
