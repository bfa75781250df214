"""One save under way: written by every rank, made visible by rank 0, on a thread or not."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from torsh_trainer import errors
from torsh_trainer.checkpoint.store.places import (
    StoragePath,
    Unreachable,
    explain_store_error,
    names,
    write,
)
from torsh_trainer.checkpoint.store.refusal import add_advice
from torsh_trainer.checkpoint.store.stores import CheckpointRoom, Store
from torsh_trainer.checkpoint.tensors.disk import Written, write_tensors
from torsh_trainer.checkpoint.tensors.planner import Planner
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ResourceError, TorshError
from torsh_trainer.utils.files import strict_json

log = logging.getLogger("torsh_trainer")

DOING = "save the checkpoint"

_AFTER_THE_END_S = 30.0
"""How long a save may go on when the program has ended without closing the checkpointer."""


class Part(NamedTuple):
    """What one rank wrote, or why it could not."""

    written: Written | None
    error: TorshError | None

    def pack(self) -> bytes:
        """As another process reads it: no code, for anybody may have written such a file."""
        written, error = None, None
        if self.written is not None:
            written = self.written.pack()
        if self.error is not None:
            kind = type(self.error).__name__
            error = [kind, self.error.sentence, self.error.fix, self.error.facts]
        # Nothing but numbers and strings, but for what a checkpoint encodes anyway.
        return strict_json({"written": written, "error": error}, indent=None).encode()

    @classmethod
    def unpack(cls, content: bytes) -> Part:
        """The inverse of ``pack``."""
        said = json.loads(content)
        written = None if said["written"] is None else Written.unpack(said["written"])
        if said["error"] is None:
            return cls(written, None)
        name, sentence, fix, facts = said["error"]
        kind = getattr(errors, name, ResourceError)
        return cls(written, kind(sentence, fix=fix, **facts))


class Saving:
    """One checkpoint on its way, as one rank sees it.

    ``write`` and ``publish`` happen once, whoever calls them first: the thread that ``start``
    makes, or the loop when it waits. The thread never communicates: a collective beside those of
    the loop could meet another rank's in a different order. Ranks tell rank 0's thread that they
    are done by a file in ``room``.
    """

    def __init__(
        self,
        planner: Planner,
        *,
        store: Store,
        room: CheckpointRoom,
        world: World,
        make_visible: Callable[[list[Written]], None],
    ) -> None:
        self._planner = planner
        self._store = store
        self._room = room
        self._world = world
        self._make_visible = make_visible
        self._writing = threading.Lock()
        self._part: Part | None = None
        self._publishing = threading.Lock()
        self._published = threading.Event()
        self._outcome: TorshError | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Copies what this rank writes, and goes on from the copy on a thread.

        A failure to copy is this rank's part, as a failure to write is.
        """
        error = self._attempt(self._planner.stage)
        if error is not None:
            self._part = Part(None, error)
        # Not a daemon: a program that ends without close() still gets its last checkpoint.
        self._thread = threading.Thread(target=self._run, name=f"saving {self._room.target.name}")
        self._thread.start()

    def write(self) -> Part:
        """Writes this rank's files, or waits until they are written."""
        with self._writing:
            if self._part is None:
                self._part = self._write()
            return self._part

    def publish(self, parts: list[Part]) -> TorshError | None:
        """On rank 0: makes the checkpoint visible, or removes what there is of it."""
        with self._publishing:
            if not self._published.is_set():
                self._published.set()
                self._outcome = self._publish(parts)
            return self._outcome

    def join(self) -> None:
        """Returns once the thread, if there is one, touches no file any more."""
        if self._thread is not None:
            self._thread.join()

    def _write(self) -> Part:
        written: list[Written] = []
        error = self._attempt(
            lambda: written.append(write_tensors(self._planner, self._room.writing))
        )
        return Part(None, error) if error else Part(written[0], None)

    def _publish(self, parts: list[Part]) -> TorshError | None:
        error = next((part.error for part in parts if part.error), None)
        if error is None:
            written = [part.written for part in parts if part.written]
            error = self._attempt(lambda: self._make_visible(written))
        if error is not None:
            self._store.discard(self._room)
            error = add_advice(error, self._store.folder, size_bytes=self._planner.whole_size_bytes)
        return error

    def _attempt(self, action: Callable[[], object]) -> TorshError | None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - it is raised on every rank by wait()
            return explain_store_error(error, DOING, self._room.target, rank=self._world.rank)
        return None

    def _run(self) -> None:
        part = self.write()
        if part.error is not None:
            self._warn(part.error)
        if not self._world.is_rank_zero:
            # Where it cannot be written, the loop's next call tells rank 0.
            with contextlib.suppress(OSError, Unreachable):
                write(self._marker(self._world.rank), part.pack())
            return
        others = self._await_others()
        if others is not None:
            error = self.publish([part, *others])
            if error is not None and part.error is None:
                self._warn(error)

    def _warn(self, error: TorshError) -> None:
        """Tells at once what the loop will hear of with its next call, which may be hours away."""
        log.warning("%s. Training goes on, and the next save tries again", error)

    def _await_others(self) -> list[Part] | None:
        """What the other ranks wrote; None when the loop came first, or the program is over."""
        markers = [self._marker(rank) for rank in range(1, self._world.size)]
        ended_at: float | None = None
        while not {marker.name for marker in markers} <= self._there():
            if self._published.wait(self._store.poll_s):
                return None
            if not threading.main_thread().is_alive():
                ended_at = ended_at or time.monotonic()
                if time.monotonic() - ended_at > _AFTER_THE_END_S:
                    log.warning("%s is given up: not every rank wrote its part", self._room.target)
                    return None
        with self._publishing:
            if self._published.is_set():
                return None
            return [Part.unpack(marker.read_bytes()) for marker in markers]

    def _there(self) -> set[str]:
        with contextlib.suppress(OSError, Unreachable):  # then the next look may tell
            return names(self._room.writing)
        return set()

    def _marker(self, rank: int) -> StoragePath:
        return self._room.writing / f".part-{rank}"


def begin_checkpoint(
    store: Store, step: int, target: StoragePath, planner: Planner
) -> CheckpointRoom:
    """Room for a checkpoint, as ``Store.begin`` makes it; on rank 0.

    Raises:
        ResourceError: the disk refused.
    """
    try:
        return store.begin(step)
    except OSError as error:
        refused = explain_store_error(error, DOING, target, rank=0)
        raise add_advice(refused, store.folder, size_bytes=planner.whole_size_bytes) from error
