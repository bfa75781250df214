"""What a checkpoint holds, read without a run: tensors by name, plain values, who wrote what.

Importing this takes as long as importing torch.distributed.checkpoint does.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torsh_trainer.checkpoint.plain import Path as Key
from torsh_trainer.checkpoint.plain import dotted_name, put
from torsh_trainer.checkpoint.state import read_state
from torsh_trainer.checkpoint.store.integrity import Manifest, read_manifest, verify
from torsh_trainer.checkpoint.store.places import StoragePath, explain_store_error
from torsh_trainer.checkpoint.tensors import disk as stored
from torsh_trainer.errors import ResourceError

_MODEL = ("engine", "model")
_AVERAGES = ("engine", "ema", "averages")
_OPTIMIZER = ("engine", "optimizer")
_READ_BYTES = 1 << 26
"""Small tensors are read together, up to this many bytes at a time."""


@dataclass(frozen=True)
class FilePiece:
    """A part of a tensor: where it begins, its shape, and the file that holds it."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a checkpoint, not read.

    ``part`` is what it belongs to (``model``, ``optimizer main``, ``ema``, ``rng``), ``name`` what
    it is called there; for a slot of an optimizer that is parameter and ``slot``.
    """

    key: Key
    part: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[FilePiece, ...]
    slot: str = ""

    @property
    def full_name(self) -> str:
        """As torch.distributed.checkpoint calls it."""
        return dotted_name(self.key)

    @property
    def numbers(self) -> int:
        """How many there are."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Of the whole tensor."""
        return self.numbers * self.dtype.itemsize


@dataclass(frozen=True)
class Contents:
    """A checkpoint opened for reading; ``plain`` is all that is no tensor, nested as saved."""

    path: StoragePath
    manifest: Manifest
    plain: Mapping[str, Any]
    entries: tuple[TensorEntry, ...]
    metadata: Any

    @classmethod
    def open(cls, path: StoragePath, *, verified: bool) -> Contents:
        """Opens the checkpoint at ``path``; with ``verified`` reads and checks every byte first.

        Raises:
            ResourceError: a file is missing or damaged; the message names it.
            ConfigError: a newer release wrote it.
        """
        try:
            manifest = verify(path) if verified else read_manifest(path)
        except ResourceError as error:
            if "why" not in error.facts:
                raise
            fix = "name another, or copy this one again"  # who looks at one does not resume
            raise ResourceError(error.sentence, fix=fix, **error.facts) from error
        plain = read_state(path)
        metadata = stored.read_metadata(path)
        return cls(path, manifest, plain, _entries(metadata), metadata)

    @cached_property
    def by_name(self) -> dict[str, TensorEntry]:
        """Full name -> tensor."""
        return {entry.full_name: entry for entry in self.entries}

    @property
    def model(self) -> dict[str, TensorEntry]:
        """The model's state_dict: parameters and buffers by their names."""
        return self._below(_MODEL)

    @property
    def extra_state(self) -> Mapping[str, Any]:
        """What the model's state_dict holds beside tensors (``get_extra_state``)."""
        found: Mapping[str, Any] = self.plain.get("engine", {}).get("model", {})
        return found

    @property
    def averages(self) -> dict[str, TensorEntry]:
        """The moving average of the parameters; empty where none was kept."""
        return self._below(_AVERAGES)

    @property
    def is_averaged(self) -> bool:
        """Whether it holds a moving average of some updates."""
        return bool(self.averages and self.plain["engine"]["ema"].get("updates"))

    def averages_by_name(self) -> dict[str, TensorEntry]:
        """Averages by the model's names; tied weights are averaged once and have several names.

        What shares a parameter equals it to the last bit.
        """
        found = dict(self.averages)
        kinds: dict[Any, list[TensorEntry]] = {}
        for name, entry in self.model.items():
            if name in self.averages:
                kinds.setdefault((entry.shape, entry.dtype), []).append(entry)
        for name, entry in self.model.items():
            alike = kinds.get((entry.shape, entry.dtype), [])
            if name in self.averages or not alike:
                continue
            ((_, tensor),) = self.read([entry])
            for other, value in self.read(alike):
                if torch.equal(tensor, value):
                    found[name] = self.averages[other.name]
                    break
        return found

    @property
    def optimizers(self) -> Mapping[str, Mapping[str, Any]]:
        """Name -> plain part of an optimizer's state: ``state`` and ``groups``."""
        found: Mapping[str, Mapping[str, Any]] = self.plain.get("engine", {}).get("optimizer", {})
        return found

    def optimizer_states(self) -> dict[str, dict[str, Any]]:
        """Name -> ``{"state": {parameter: slots}, "groups": [...]}``, with all tensors read.

        Raises:
            OSError: the disk refused.
        """
        states: dict[str, Any] = {
            name: {
                "state": copy.deepcopy(dict(optimizer.get("state", {}))),
                "groups": [dict(group) for group in optimizer.get("groups", ())],
            }
            for name, optimizer in self.optimizers.items()
        }
        for entry, tensor in self.read(entry for entry in self.entries if entry.slot):
            put(states, entry.key[2:], tensor)
        return states

    def read(self, entries: Iterable[TensorEntry]) -> Iterator[tuple[TensorEntry, Tensor]]:
        """Tensors one after another, on the CPU; at most one large one at a time is held here.

        Raises:
            OSError: the disk refused.
            Unreachable: a remote store did not answer.
        """
        for batch in _batches(entries):
            into = {entry.key: torch.empty(entry.shape, dtype=entry.dtype) for entry in batch}
            try:
                stored.read(self.path, self.metadata, into)
            except Exception as error:  # every library of a store has errors of its own
                if isinstance(self.path, Path):
                    raise
                raise explain_store_error(error, "read", self.path, rank=0) from error
            for entry in batch:
                yield entry, into.pop(entry.key)

    def _below(self, at: Key) -> dict[str, TensorEntry]:
        size = len(at)
        return {
            ".".join(entry.key[size:]): entry for entry in self.entries if entry.key[:size] == at
        }


def state_of(
    model: Mapping[str, Tensor],
    optimizers: Mapping[str, Mapping[str, Any]],
    *,
    position: Mapping[str, int],
    schedule: Mapping[str, Any],
) -> dict[str, Any]:
    """The state that a run would have saved, of what another program left."""
    state: dict[str, Any] = {
        "position": dict(position),
        "schedule": {"base": [], "running": {}, **schedule},
        "task": {},
        "callbacks": {},
        "rng": {},
    }
    for name, tensor in model.items():
        put(state, (*_MODEL, name), tensor)
    for name, optimizer in optimizers.items():
        put(state, (*_OPTIMIZER, name), dict(optimizer))
    return state


def _entries(metadata: Any) -> tuple[TensorEntry, ...]:
    files = {(at.fqn, tuple(at.offset or ())): info for at, info in metadata.storage_data.items()}
    found = []
    for key, (shape, dtype) in stored.shapes(metadata).items():
        name = dotted_name(key)
        chunks = metadata.state_dict_metadata[name].chunks
        pieces = tuple(
            FilePiece(offset, tuple(chunk.sizes), files[name, offset].relative_path)
            for chunk in chunks
            if (offset := tuple(chunk.offsets)) is not None
        )
        part, name, slot = _place(key)
        found.append(TensorEntry(key, part, name, shape, dtype, pieces, slot))
    return tuple(found)


def _place(key: Key) -> tuple[str, str, str]:
    """Part, name in it, and slot of an optimizer, of the tensor at ``key``."""
    if key[:2] == _OPTIMIZER and len(key) > 5 and key[3] == "state":
        return f"optimizer {key[2]}", ".".join(key[4:]), ".".join(key[5:])
    if key[:3] == _AVERAGES:
        return "ema", ".".join(key[3:]), ""
    if key[0] == "engine" and len(key) > 2:
        return key[1], ".".join(key[2:]), ""
    return key[0], ".".join(key[1:]) or key[0], ""


def _batches(entries: Iterable[TensorEntry]) -> Iterator[list[TensorEntry]]:
    batch: list[TensorEntry] = []
    size = 0
    for entry in entries:
        if batch and size + entry.size_bytes > _READ_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(entry)
        size += entry.size_bytes
    if batch:
        yield batch
