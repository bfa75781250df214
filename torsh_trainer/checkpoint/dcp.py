"""Checkpoints through torch.distributed.checkpoint, visible whole or not at all.

A save has three parts. All ranks agree on who writes what; each rank writes its files into a
hidden folder; rank 0 adds the plain values and the manifest, syncs, and renames the folder. With
``mode=async`` the second and the third part happen on a thread, from copies on the CPU.
"""

from __future__ import annotations

import json
import logging
import shutil
import uuid
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from torsh_trainer import __version__
from torsh_trainer.checkpoint.base import Checkpointer, CheckpointOptions
from torsh_trainer.checkpoint.fit import Shape, check_fit, is_free, join, shape_of
from torsh_trainer.checkpoint.integrity import (
    METADATA,
    STATE,
    Manifest,
    digest,
    read_manifest,
    verify,
    write_manifest,
)
from torsh_trainer.checkpoint.plain import check_names, decode, encode, merge, split
from torsh_trainer.checkpoint.resume import first_sound, locate, offers
from torsh_trainer.checkpoint.retention import (
    complete,
    expired,
    folder_name,
    hide,
    is_named,
    next_sequence,
    saving_folder,
    sweep,
)
from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import TorshError
from torsh_trainer.files import explained, sync_folder, write_file

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan

    from torsh_trainer.checkpoint.plain import Path as Key
    from torsh_trainer.checkpoint.saving import Saving
    from torsh_trainer.checkpoint.tensors import Planner, Written

log = logging.getLogger("torsh_trainer")


Kept = TypeVar("Kept")
Shared = TypeVar("Shared")


class DcpCheckpointer(Checkpointer):
    """Saves into and loads from ``folder``, which all ranks see.

    ``facts`` (strategy, precision, ...) are written into the manifest for the reader; loading needs
    none of them. Works with and without a process group, on any number of ranks: a checkpoint of
    four ranks loads on one. An error on one rank is raised on every rank.
    """

    def __init__(
        self,
        folder: Path,
        comm: Communicator,
        options: CheckpointOptions = CheckpointOptions(),
        *,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self._comm = comm
        self._options = options
        self._facts = dict(facts or {})
        self._run = uuid.uuid4().hex  # only rank 0's is ever written
        self._saving: Saving | None = None
        self._swept = False
        self._verified: Path | None = None

    # -- saving ---------------------------------------------------------------------------------

    def save(self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float]) -> Path:
        """Saves, or with ``mode=async`` copies and begins to save; ``wait`` and every other call
        end that and raise its error."""
        # Importing torch.distributed.checkpoint takes 0.6 s: not before the first save.
        from torsh_trainer.checkpoint.saving import Saving
        from torsh_trainer.checkpoint.tensors import Planner

        self.wait()
        target = self.folder / folder_name(step)

        def offer() -> tuple[Planner, tuple[SavePlan, Any]]:
            parts = split(state)
            check_names(parts.tensors)
            planner = Planner(parts.tensors, is_main=self._comm.world.is_main)
            return planner, (planner.offer, encode(parts.plain))

        planner, answers = self._together("save the checkpoint", target, offer)
        plans = [plan for plan, _ in answers]
        hidden, plans = self._from_main(
            "save the checkpoint", target, lambda: self._agree(planner, plans, step)
        )
        planner.take(plans[self._comm.world.rank])

        def make_visible(written: list[Written]) -> None:
            plain = merge(decode(encoded) for _, encoded in answers)
            _finish(hidden, planner, written, plain)
            self._publish(hidden, target, self._manifest(step, hidden, written, metrics))

        self._saving = Saving(
            planner,
            folder=hidden,
            target=target,
            world=self._comm.world,
            make_visible=make_visible,
        )
        if self._options.mode == "async":
            self._saving.start()
        else:
            self.wait()
        return target

    def wait(self) -> None:
        saving, self._saving = self._saving, None
        if saving is None:
            return
        part = saving.write()
        if not self._comm.world.is_main:
            saving.join()  # or it could leave its mark in a folder that is already published
        parts = self._comm.all_gather_object(part)
        error = saving.publish(parts) if self._comm.world.is_main else None
        error = self._comm.broadcast_object(error)
        error = part.error or error  # this rank's own still has its cause
        saving.join()
        if error is not None:
            raise error

    def close(self) -> None:
        self.wait()

    def _agree(
        self, planner: Planner, offered: list[SavePlan], step: int
    ) -> tuple[Path, list[SavePlan]]:
        from torsh_trainer.checkpoint.tensors import agree  # imported late: see save

        hidden = saving_folder(self.folder, step)
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._swept:
            sweep(self.folder)
            self._swept = True
        if hidden.exists():
            shutil.rmtree(hidden)
        hidden.mkdir()
        return hidden, agree(planner, offered, hidden)

    def _manifest(
        self, step: int, hidden: Path, written: list[Written], metrics: Mapping[str, float]
    ) -> Manifest:
        files = {name: summed for part in written for name, summed in part.files.items()}
        mine = {name: digest(hidden / name) for name in (STATE, METADATA)}
        return Manifest(
            step=step,
            world_size=self._comm.world.size,
            run=self._run,
            sequence=next_sequence(self.folder),
            saved_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            files={**files, **mine},
            metrics=dict(metrics),
            facts={"torsh_trainer": __version__, "torch": torch.__version__, **self._facts},
        )

    def _publish(self, hidden: Path, target: Path, manifest: Manifest) -> None:
        write_manifest(hidden, manifest)
        sync_folder(hidden)
        replaced = hide(target) if is_named(target) else None
        hidden.rename(target)
        sync_folder(self.folder)
        if replaced is not None:
            log.info("%s was there before and is replaced", target)
            shutil.rmtree(replaced, ignore_errors=True)
        if self._options.keep_last is not None:
            for path in expired(self.folder, run=self._run, keep_last=self._options.keep_last):
                try:
                    shutil.rmtree(hide(path))
                except OSError as error:
                    # The new checkpoint is safe: an old one too many is no reason to stop.
                    log.warning("%s could not be deleted: %s", path, error)

    # -- loading --------------------------------------------------------------------------------

    def find(self, resume: str) -> Path | None:
        self.wait()
        paths = self._from_main("find", self.folder, lambda: offers(resume, self.folder))
        self._verified = first_sound(paths, self._verify)
        return self._verified

    def load(
        self, state: Mapping[str, Any], step: int | None = None, *, path: Path | None = None
    ) -> dict[str, Any]:
        # Importing torch.distributed.checkpoint takes 0.6 s: not before the first load.
        from torsh_trainer.checkpoint import tensors as stored

        self.wait()
        found = path or self._from_main("find", self.folder, lambda: locate(self.folder, step))
        if found != self._verified:
            self._verify(found)

        def compare() -> tuple[Any, dict[Key, Shape]]:
            metadata = stored.read_metadata(found)
            return metadata, {p: shape_of(tensor) for p, tensor in split(state).tensors.items()}

        metadata, wanted = self._together("load", found, compare)
        saved = {p: Shape(*shape) for p, shape in stored.shapes(metadata).items()}
        check_fit(saved, wanted, str(found))

        def read() -> tuple[dict[str, Any], None]:
            held = split(state).tensors
            into = {p: held[p] for p in held if p in saved and not is_free(p)}
            into |= {p: torch.empty(s.size, dtype=s.dtype) for p, s in saved.items() if is_free(p)}
            stored.read(found, metadata, into)
            return self._joined(found, state, into), None

        loaded, _ = self._together("load", found, read)
        self._continue(found)
        return loaded

    def steps(self) -> list[int]:
        self.wait()
        return self._from_main(
            "list", self.folder, lambda: [one.manifest.step for one in complete(self.folder)]
        )

    def _joined(
        self, path: Path, state: Mapping[str, Any], tensors: Mapping[Key, Tensor]
    ) -> dict[str, Any]:
        plain = decode(json.loads((path / STATE).read_text(encoding="utf-8")))
        joined, kept = join(state, plain, tensors)
        if kept:
            log.warning("%s does not know %s; kept as they are", path, ", ".join(kept))
        return joined

    def _continue(self, path: Path) -> None:
        """What is saved from now on belongs to the run of the checkpoint that was loaded."""
        if self._comm.world.is_main and path.resolve().parent == self.folder.resolve():
            self._run = read_manifest(path).run

    def _verify(self, path: Path) -> None:
        rank, size = self._comm.world.rank, self._comm.world.size
        self._together("read", path, lambda: (None, bool(verify(path, rank=rank, size=size))))

    # -- all ranks alike ------------------------------------------------------------------------

    def _together(
        self, doing: str, path: Path, function: Callable[[], tuple[Kept, Shared]]
    ) -> tuple[Kept, list[Shared]]:
        """Calls ``function`` on every rank; an error on one is raised on all.

        Returns what this rank keeps, and what every rank shares.
        """
        try:
            kept, shared = function()
        except Exception as error:  # noqa: BLE001 - every rank raises it, none waits in vain
            told = explained(error, doing, path, rank=self._comm.world.rank)
            self._comm.all_gather_object(told)
            raise told from told.__cause__
        answers = self._comm.all_gather_object(shared)
        for answer in answers:
            if isinstance(answer, TorshError):
                raise answer
        return kept, answers

    def _from_main(self, doing: str, path: Path, function: Callable[[], Shared]) -> Shared:
        """What ``function`` gives on rank 0, on every rank; so is its error."""
        value: Any = None
        if self._comm.world.is_main:
            try:
                value = function()
            except Exception as error:  # noqa: BLE001 - every rank raises it, none waits in vain
                value = explained(error, doing, path, rank=0)
        answer = self._comm.broadcast_object(value)
        if isinstance(answer, TorshError):
            raise value or answer
        return answer


def _finish(
    hidden: Path, planner: Planner, written: list[Written], plain: Mapping[str, Any]
) -> None:
    """Rank 0's own files: plain values, and where every piece of every tensor lies."""
    from torsh_trainer.checkpoint.tensors import write_metadata  # imported late: see save

    for marker in hidden.glob(".part-*"):
        marker.unlink()
    write_file(hidden / STATE, json.dumps(encode(plain), indent=1, allow_nan=False).encode())
    write_metadata(hidden, planner.metadata, [part.results for part in written])
