"""Checkpoints through torch.distributed.checkpoint, visible whole or not at all.

A save has three parts. All ranks agree on who writes what; each rank writes its files where they
are no checkpoint yet; rank 0 adds the plain values, and has the store make a checkpoint of it. With
``mode=async`` the second and the third part happen on a thread, from copies on the CPU.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from torsh_trainer import __version__
from torsh_trainer.checkpoint.base import Checkpointer, CheckpointOptions, Hashed, Sum
from torsh_trainer.checkpoint.fit import (
    Fit,
    Shape,
    check_fit,
    fit,
    is_below,
    is_free,
    join,
    shape_of,
    without,
)
from torsh_trainer.checkpoint.plain import check_names, decode, dotted_name, encode, merge, split
from torsh_trainer.checkpoint.state import plain_file, read_state
from torsh_trainer.checkpoint.store.finding import first_sound, locate, offers
from torsh_trainer.checkpoint.store.integrity import (
    HASHES,
    METADATA,
    STATE,
    Digest,
    Manifest,
    read_manifest,
    verify,
)
from torsh_trainer.checkpoint.store.places import (
    StoragePath,
    Unreachable,
    explain_store_error,
    write,
)
from torsh_trainer.checkpoint.store.retention import complete, folder_name
from torsh_trainer.checkpoint.store.stores import CheckpointRoom, store_at
from torsh_trainer.checkpoint.store.summing import spare_threads
from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError, TorshError, nearest

if TYPE_CHECKING:
    from torsh_trainer.checkpoint.plain import Leaf
    from torsh_trainer.checkpoint.plain import Path as Key
    from torsh_trainer.checkpoint.saving import Saving
    from torsh_trainer.checkpoint.tensors.disk import Written
    from torsh_trainer.checkpoint.tensors.planner import Planner

log = logging.getLogger("torsh_trainer")


Kept = TypeVar("Kept")
Shared = TypeVar("Shared")


class DcpCheckpointer(Checkpointer):
    """Saves into and loads from ``folder`` (a path, or one of a remote store), seen by all ranks.

    ``facts`` (strategy, precision, ...) are written into the manifest for the reader; loading needs
    none of them. ``run`` is the line of saves that these belong to (None: a new one). Works with
    and without a process group, on any number of ranks: a checkpoint of four ranks loads on one. An
    error on one rank is raised on every rank.
    """

    def __init__(
        self,
        folder: StoragePath,
        comm: Communicator,
        options: CheckpointOptions = CheckpointOptions(),
        *,
        facts: Mapping[str, Any] | None = None,
        run: str | None = None,
    ) -> None:
        self.folder = folder
        self._comm = comm
        self._options = options
        # Read at each save: they may grow, even from nothing.
        self._facts: Mapping[str, Any] = {} if facts is None else facts
        # Only rank 0's is ever written.
        self._store = store_at(folder, run or uuid.uuid4().hex, take_over=options.take_over)
        self._unmeasured = False  # best ones were to be kept, and no save had metrics
        self._measured = False
        self._saving: Saving | None = None
        self._planner: Planner | None = None
        self._verified: StoragePath | None = None

    # -- saving ---------------------------------------------------------------------------------

    @property
    def run(self) -> str:
        return self._store.run

    def claim(self) -> None:
        self._from_main("use", self.folder, self._store.claim)

    def release(self) -> None:
        try:
            self._store.release()
        except (OSError, Unreachable) as error:
            log.warning("%s could not be given back: %s", self.folder, error)

    def save(
        self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> StoragePath:
        """Saves, or with ``mode=async`` copies and begins to save; ``wait`` and every other call
        end that and raise its error."""
        from torsh_trainer.checkpoint.saving import (  # imported late: see _plan
            Saving,
            begin_checkpoint,
        )

        self.wait()
        target = self.folder / folder_name(step)
        self._check_monitor(metrics)
        planner = self._plan(state, target)
        room = self._from_main(
            "save the checkpoint",
            target,
            lambda: begin_checkpoint(self._store, step, target, planner),
        )

        def make_visible(written: list[Written]) -> None:
            self._store.clean(room)
            mine = _finish(room, planner, written)
            self._store.commit(room, self._manifest(step, written, mine, metrics))
            self._store.retire(self._options.keep)

        self._saving = Saving(
            planner,
            store=self._store,
            room=room,
            world=self._comm.world,
            make_visible=make_visible,
        )
        if self._options.mode == "async":
            self._saving.start()
        else:
            self.wait()
        return room.target

    def wait(self) -> None:
        saving, self._saving = self._saving, None
        if saving is None:
            return
        part = saving.write()
        if not self._comm.world.is_rank_zero:
            saving.join()  # or it could leave its mark in a folder that is already published
        parts = self._comm.all_gather_object(part)
        error = saving.publish(parts) if self._comm.world.is_rank_zero else None
        error = self._comm.broadcast_object(error)
        saving.join()
        if error is not None:
            # The same words everywhere; a rank that failed itself still has its cause.
            raise error from (part.error and part.error.__cause__) or error.__cause__

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self.release()
            if self._planner is not None:
                self._planner.close()
                self._planner = None
        if self._unmeasured and self._comm.world.is_rank_zero:
            log.warning(
                "checkpoint.keep_best had nothing to compare: no save came with metrics; let "
                "trainer.eval_every (or eval_every_epochs) meet checkpoint.every_steps"
            )
            self._unmeasured = False

    def prepare(self, state: Callable[[], Mapping[str, Any]]) -> None:
        if self._options.mode == "async":
            self.wait()
            self._plan(state(), self.folder).release()

    def _plan(self, state: Mapping[str, Any], target: StoragePath) -> Planner:
        """What this rank has to write; the last plan, unless a rank's tensors are others now."""
        # Importing torch.distributed.checkpoint takes 0.6 s: not before the first save.
        from torsh_trainer.checkpoint.tensors.disk import agree
        from torsh_trainer.checkpoint.tensors.planner import Planner
        from torsh_trainer.checkpoint.tensors.staging import Staging

        doing, world = "save the checkpoint", self._comm.world

        def hold() -> tuple[Planner, bool]:
            parts = split(state)
            check_names(parts.tensors)
            if self._planner is None:
                threads = spare_threads(world.local_size)
                staging = Staging(threads=threads) if self._options.mode == "async" else None
                self._planner = Planner(
                    is_rank_zero=world.is_rank_zero,
                    staging=staging,
                    hashes=self._options.check_loaded,
                )
            self._planner.plain = encode(parts.plain)
            return self._planner, self._planner.hold(parts.tensors)

        planner, changed = self._together(doing, target, hold)
        if any(changed):
            offers = self._comm.all_gather_object(planner.offer)
            plans = self._from_main(doing, target, lambda: agree(planner, offers))
            planner.take(plans[world.rank])
        return planner

    def _check_monitor(self, metrics: Mapping[str, float]) -> None:
        options = self._options
        if options.keep_best is None:
            return
        self._measured = self._measured or bool(metrics)
        self._unmeasured = not self._measured
        if metrics and options.monitor not in metrics:
            raise ConfigError(
                f"checkpoint.monitor={options.monitor} is no metric of this run, which has "
                + ", ".join(sorted(metrics)),
                fix=nearest(options.monitor, metrics),
                metrics=sorted(metrics),
            )

    def _manifest(
        self,
        step: int,
        written: list[Written],
        mine: Mapping[str, Digest],
        metrics: Mapping[str, float],
    ) -> Manifest:
        files = {name: summed for part in written for name, summed in part.files.items()}
        return Manifest(
            step=step,
            world_size=self._comm.world.size,
            run=self._store.run,
            sequence=self._store.next_sequence(),
            saved_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            files={**files, **mine},
            metrics=dict(metrics),
            facts={"torsh_trainer": __version__, "torch": torch.__version__, **self._facts},
        )

    # -- loading --------------------------------------------------------------------------------

    def find(self, resume: str) -> StoragePath | None:
        self.wait()
        paths = self._from_main("find", self.folder, lambda: self._offers(resume))
        self._verified = first_sound(paths, self._verify)
        return self._verified

    def _offers(self, resume: str) -> Sequence[StoragePath]:
        return offers(resume, self.folder, self._options.storage_options, self._options.keep)

    def plain(self, path: StoragePath) -> dict[str, Any]:
        self.wait()
        plain, _ = self._together("read", path, lambda: (read_state(path), None))
        return plain

    def compare(self, state: Mapping[str, Any], path: StoragePath) -> Fit:
        self.wait()
        _, saved, wanted = self._shapes(path, state)
        return fit(saved, wanted)

    def load(
        self,
        state: Mapping[str, Any],
        step: int | None = None,
        *,
        path: StoragePath | None = None,
        leave: Collection[Key] = (),
    ) -> dict[str, Any]:
        # Importing torch.distributed.checkpoint takes 0.6 s: not before the first load.
        from torsh_trainer.checkpoint.tensors import disk as stored

        self.wait()
        found = path or self._from_main("find", self.folder, lambda: locate(self.folder, step))
        if found != self._verified:
            self._verify(found)
        state = without(state, leave)
        metadata, shapes, wanted = self._shapes(found, state)
        saved = {p: shape for p, shape in shapes.items() if not is_below(p, leave)}
        check_fit(saved, wanted, str(found))

        def read() -> tuple[dict[str, Any], None]:
            held = split(state).tensors
            into: dict[Key, Leaf] = {p: held[p] for p in held if p in saved and not is_free(p)}
            into |= {p: torch.empty(s.size, dtype=s.dtype) for p, s in saved.items() if is_free(p)}
            stored.read(found, metadata, into)
            return self._join_state(found, state, into, leave), None

        loaded, _ = self._together("load", found, read)
        self._continue(found)
        return loaded

    def hashes(self, path: StoragePath) -> dict[Key, Hashed] | None:
        # Importing torch.distributed.checkpoint takes 0.6 s: not before the first load.
        from torsh_trainer.checkpoint.tensors import disk as stored
        from torsh_trainer.checkpoint.tensors.hashes import parse_hashes

        def look() -> tuple[dict[Key, Hashed] | None, None]:
            if HASHES not in read_manifest(path).files:
                return None, None
            metadata = stored.read_metadata(path)
            sums = parse_hashes((path / HASHES).read_text(encoding="utf-8"), metadata)
            if sums is None:
                return None, None
            shapes = stored.shapes(metadata)
            return {
                p: Hashed(sums[name], shapes[p][1])
                for p in shapes
                if (name := dotted_name(p)) in sums
            }, None

        found, _ = self._together("read the hashes of", path, look)
        return found

    def sum_held(self, state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Sum]:
        from torsh_trainer.checkpoint.tensors.held import sum_held  # imported late: see load

        return sum_held(split(state).tensors, names, self._comm)

    def steps(self) -> list[int]:
        self.wait()
        return self._from_main(
            "list",
            self.folder,
            lambda: sorted({one.manifest.step for one in complete(self.folder)}),
        )

    def _shapes(
        self, path: StoragePath, state: Mapping[str, Any]
    ) -> tuple[Any, dict[Key, Shape], list[dict[Key, Shape]]]:
        """The metadata at ``path``, shapes of its tensors, and those that each rank wants."""
        from torsh_trainer.checkpoint.tensors import disk as stored  # imported late: see load

        def look() -> tuple[Any, dict[Key, Shape]]:
            metadata = stored.read_metadata(path)
            return metadata, {p: shape_of(tensor) for p, tensor in split(state).tensors.items()}

        metadata, wanted = self._together("load", path, look)
        return metadata, {p: Shape(*s) for p, s in stored.shapes(metadata).items()}, wanted

    def _join_state(
        self,
        path: StoragePath,
        state: Mapping[str, Any],
        tensors: Mapping[Key, Leaf],
        leave: Collection[Key],
    ) -> dict[str, Any]:
        free = {p: tensor for p, tensor in tensors.items() if is_free(p)}
        fitted = {p: tensor for p, tensor in tensors.items() if not is_free(p)}
        joined, kept = join(state, without(read_state(path, free), leave), fitted)
        if kept:
            log.warning("%s does not know %s; kept as they are", path, ", ".join(kept))
        return joined

    def _continue(self, path: StoragePath) -> None:
        """What is saved from now on belongs to the run of the checkpoint that was loaded."""
        if self._comm.world.is_rank_zero and path.resolve().parent == self.folder.resolve():
            self._store.run = read_manifest(path).run

    def _verify(self, path: StoragePath) -> None:
        rank, size = self._comm.world.rank, self._comm.world.size
        self._together("read", path, lambda: (None, bool(verify(path, rank=rank, size=size))))

    # -- all ranks alike ------------------------------------------------------------------------

    def _together(
        self, doing: str, path: StoragePath, function: Callable[[], tuple[Kept, Shared]]
    ) -> tuple[Kept, list[Shared]]:
        """Calls ``function`` on every rank; an error on one is raised on all.

        Returns what this rank keeps, and what every rank shares.
        """
        kept: Any = None
        answer: Any
        try:
            kept, answer = function()
        except Exception as error:  # noqa: BLE001 - every rank raises it, none waits in vain
            answer = explain_store_error(error, doing, path, rank=self._comm.world.rank)
        answers: list[Any] = self._comm.all_gather_object(answer)
        failed = [one for one in range(len(answers)) if isinstance(answers[one], TorshError)]
        if failed:
            # All ranks raise the same, so that all go on alike; one's own still has its cause.
            raise answer if failed[0] == self._comm.world.rank else answers[failed[0]]
        return kept, answers

    def _from_main(self, doing: str, path: StoragePath, function: Callable[[], Shared]) -> Shared:
        """What ``function`` gives on rank 0, on every rank; so is its error."""
        value: Any = None
        if self._comm.world.is_rank_zero:
            try:
                value = function()
            except Exception as error:  # noqa: BLE001 - every rank raises it, none waits in vain
                value = explain_store_error(error, doing, path, rank=0)
        answer = self._comm.broadcast_object(value)
        if isinstance(answer, TorshError):
            raise value or answer
        return answer


def _finish(room: CheckpointRoom, planner: Planner, written: list[Written]) -> dict[str, Digest]:
    """Rank 0's own files: plain values, and where every piece of every tensor lies."""
    from torsh_trainer.checkpoint.tensors.disk import metadata_file  # imported late: see save
    from torsh_trainer.checkpoint.tensors.hashes import hashes_file

    plain = merge(decode(part.plain) for part in written)
    files = {
        STATE: plain_file(plain),
        METADATA: metadata_file(planner.metadata, [part.results for part in written]),
    }
    sums = [part.sums for part in written]
    if any(sums):
        files[HASHES] = hashes_file(planner.metadata, sums)
    for name, content in files.items():
        write(room.writing / name, content)
    return {name: Digest.of(content) for name, content in files.items()}
