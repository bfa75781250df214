"""The contract of a checkpointer: saving, finding and loading the state of a run."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torsh_trainer.checkpoint.setup import check_allow
from torsh_trainer.checkpoint.store.places import StoragePath
from torsh_trainer.checkpoint.store.retention import Keep
from torsh_trainer.errors import ConfigError, nearest
from torsh_trainer.utils import registry

if TYPE_CHECKING:  # looking for checkpoints needs no torch
    from torch import dtype

    from torsh_trainer.checkpoint.fit import Fit
    from torsh_trainer.checkpoint.plain import Path as Key


@dataclass(frozen=True)
class CheckpointOptions:
    """Knobs of saving and resuming.

    ``dir`` is a folder or a URL that fsspec knows; None is ``checkpoints/`` in the run directory.
    ``every_steps``/``every_epochs`` None saves only at the end (``at_end``).

    A checkpoint of this run stays when any of these rules keeps it; without rules all stay:
    ``keep_last`` so many, ``keep_best`` so many by ``monitor``, a metric of the evaluation at that
    step (lower is better with ``monitor_mode`` min), ``keep_every`` the steps that it divides.

    ``resume`` is auto (the newest complete one in ``dir``, if any), best (that by ``monitor``),
    never, or a path or URL of a checkpoint or a run directory. ``allow`` says in what a run may
    differ from the one that it goes on from: words of ``setup.WORDS``.
    ``backend`` is the checkpointer: dcp, or one of an installed plugin.
    ``storage_options`` go to the file system of a URL as they are. ``take_over`` takes a URL from a
    run on another host that has left its lock behind.
    ``check_loaded`` writes a hash of every tensor with a save, and after a load compares what
    model, optimizer and average then are with it.
    """

    dir: str | None = None
    every_steps: int | None = None
    every_epochs: int | None = None
    at_end: bool = True
    keep_last: int | None = None
    keep_best: int | None = None
    monitor: str = "loss"
    monitor_mode: Literal["min", "max"] = "min"
    keep_every: int | None = None
    resume: str = "auto"
    allow: tuple[str, ...] = ()
    backend: str = "dcp"
    mode: Literal["sync", "async"] = "sync"
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    take_over: bool = False
    check_loaded: bool = True

    def __post_init__(self) -> None:
        for name in ("every_steps", "every_epochs", "keep_last", "keep_best", "keep_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(
                    f"checkpoint.{name}={value} is not a positive number",
                    fix="give 1 or more, or null to switch it off",
                )
        if self.dir is not None and str(self.dir).startswith("memory:"):
            raise ConfigError(
                f"checkpoint.dir={self.dir} is memory of this process, and gone with it",
                fix="name a folder, or the URL of an object store",
            )
        check_allow(self.allow)
        registry.CHECKPOINTERS.find(self.backend, option="checkpoint.backend")
        for name, known in (("mode", ("sync", "async")), ("monitor_mode", ("min", "max"))):
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(f"unknown checkpoint.{name}={value}", fix=nearest(value, known))

    @property
    def saves(self) -> bool:
        """True when a fit saves anything."""
        return self.at_end or self.every_steps is not None or self.every_epochs is not None

    @property
    def keep(self) -> Keep:
        """What stays of what was saved."""
        return Keep(
            self.keep_last, self.keep_best, self.keep_every, self.monitor, self.monitor_mode
        )


MODULUS = 1 << 64
"""Of the hashes of tensors."""


class Sum(NamedTuple):
    """The hash of what was added up, and how many elements that were.

    Ranks that hold the same elements add them up more than once.
    """

    elements: int
    hash: int

    def covers(self, whole: Sum) -> bool:
        """Whether it is ``whole``, held once or several times, and nothing else."""
        times, rest = divmod(self.elements, whole.elements)
        return not rest and times > 0 and (self.hash - times * whole.hash) % MODULUS == 0


class Hashed(NamedTuple):
    """What was saved of a tensor: once, in that dtype."""

    sum: Sum
    dtype: dtype


class Checkpointer(abc.ABC):
    """Saves and loads the state of a run; every method is collective over its communicator.

    It is made as ``Class(folder, comm, options, facts=facts, run=run)``: where checkpoints lie,
    among which processes, the knobs, facts of the run for whoever looks at a checkpoint (a mapping
    that may still grow), and the name of the line of saves that is gone on with, if any.

    A state is a nested dict with string keys; leaves are Tensors, DTensors, FlatShards, or plain
    values (numbers, strings, bytes, booleans, None, lists, tuples and dicts of them). Ranks may
    hold different keys: what any rank has is saved, once.
    """

    @abc.abstractmethod
    def save(
        self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> StoragePath:
        """Writes ``state`` as the checkpoint of ``step``; it becomes visible whole or not at all.

        ``metrics`` are those of this very state. Returns its path. With ``mode=async`` it returns
        as soon as ``state`` may change; the checkpoint becomes visible later, and the next call of
        any method waits for it and raises its error.

        Raises:
            ResourceError: the disk refused (full, read-only); nothing older is lost.
            ConfigError: ``state`` holds something else; the message says where. Or there are
                metrics, and the one to keep the best by is not among them.
        """

    @property
    def run(self) -> str:
        """Names the line of saves that those of this run belong to, on rank 0."""
        return ""

    def prepare(self, state: Callable[[], Mapping[str, Any]]) -> None:  # noqa: B027 - optional
        """Does ahead what the first save of such a state would wait for, if anything.

        Raises:
            ConfigError: ``state`` holds what cannot be saved; the message says where.
        """

    def claim(self) -> None:  # noqa: B027 - optional
        """Holds the folder for the saves of this run alone, until ``close`` or ``release``.

        Raises:
            ConfigError: another run holds it; names the lock, the host and the process.
        """

    def release(self) -> None:  # noqa: B027 - optional
        """Gives the folder back; communicates with nobody, so that it may follow an error."""

    @abc.abstractmethod
    def find(self, resume: str) -> StoragePath | None:
        """The checkpoint that ``checkpoint.resume`` means, verified; None to start afresh.

        Raises:
            ConfigError: a path that is not there, or that holds no checkpoint.
            ResourceError: there are checkpoints, and every one is damaged.
        """

    @abc.abstractmethod
    def plain(self, path: StoragePath) -> dict[str, Any]:
        """What the checkpoint at ``path`` holds beside tensors, nested as it was saved.

        Raises:
            ResourceError: a file of it is damaged; the message names it.
        """

    @abc.abstractmethod
    def compare(self, state: Mapping[str, Any], path: StoragePath) -> Fit:
        """How the tensors of the checkpoint at ``path`` differ from those of ``state``.

        Nothing is read into ``state``. Every rank gets the same answer, about all of them.

        Raises:
            ResourceError: a file of it is damaged; the message names it.
        """

    @abc.abstractmethod
    def load(
        self,
        state: Mapping[str, Any],
        step: int | None = None,
        *,
        path: StoragePath | None = None,
        leave: Collection[Key] = (),
    ) -> dict[str, Any]:
        """The checkpoint of ``step`` (None: the newest), or at ``path``, in the shape of ``state``.

        Tensors of ``state`` are filled in place; plain values come back as saved. What lies under
        ``fit.FREE`` (``callbacks``, ``rng``, ``schedule``, ``task``, ...) comes back exactly as
        saved, with new tensors on the CPU, whatever ``state`` holds there. Optimizer slots that the
        checkpoint lacks for a whole parameter are left out. So is all below the paths in ``leave``,
        on either side.

        Raises:
            ConfigError: there is none, or it does not fit ``state``; the message says where.
            ResourceError: a file of it is damaged; the message names it.
        """

    def hashes(self, path: StoragePath) -> Mapping[Key, Hashed] | None:
        """By tensor, a hash of what was saved; None where the checkpoint has none.

        Raises:
            ResourceError: a file of it is damaged; the message names it.
        """
        return None

    def sum_held(self, state: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Sum]:
        """What all ranks hold of the tensors of ``state`` with these dotted names.

        Every rank names the same, and may hold some of them.
        """
        raise NotImplementedError("whoever gives hashes also sums up what is held")

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
        """Waits for a save under way, and raises its error; gives the folder back."""
