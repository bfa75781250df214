"""Formats of ``checkpoint export``: safetensors, torch, Hugging Face's folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from torsh_trainer.checkpoint.cli import companions
from torsh_trainer.checkpoint.cli.contents import Contents, TensorEntry
from torsh_trainer.checkpoint.cli.exporting import (
    DTYPES,
    Export,
    ExportFormat,
    read_counts,
    read_model,
    read_optimizers,
    read_weights,
    save_torch,
)
from torsh_trainer.errors import ResourceError
from torsh_trainer.utils.files import strict_json
from torsh_trainer.utils.lookup import list_first

_SAFETENSORS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARDS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


class TorchExport(ExportFormat):
    """A state_dict in a file of torch.save."""

    holds_optimizer = True
    file_name = "model.pt"

    def write(
        self, contents: Contents, chosen: Mapping[str, TensorEntry], wanted: Export, path: Path
    ) -> list[str]:
        save_torch(_torch_content(contents, chosen, wanted), path)
        return []


class SafetensorsExport(ExportFormat):
    """One file of safetensors."""

    file_name = _SAFETENSORS

    def check(self) -> None:
        _safetensors()

    def notes(self, contents: Contents, wanted: Export) -> list[str]:
        if not contents.extra_state:
            return []
        left = list_first(list(contents.extra_state))
        return [f"left out, as safetensors holds tensors alone: {left}"]

    def write(
        self, contents: Contents, chosen: Mapping[str, TensorEntry], wanted: Export, path: Path
    ) -> list[str]:
        _save_safetensors(read_weights(contents, chosen, wanted), path)
        return []


class HuggingFaceExport(SafetensorsExport):
    """A folder as ``save_pretrained`` of transformers leaves it: shards, index, config.json."""

    is_folder = True
    options = frozenset({"max_shard_size", "config"})

    def leave_out(self, contents: Contents) -> frozenset[str]:
        return companions.tied_names(contents)

    def notes(self, contents: Contents, wanted: Export) -> list[str]:
        notes = super().notes(contents, wanted)
        if companions.CONFIG not in companions.files(contents, wanted.config):
            notes.append("no config.json: give the model's with --config FILE")
        return notes

    def write(
        self, contents: Contents, chosen: Mapping[str, TensorEntry], wanted: Export, path: Path
    ) -> list[str]:
        names = _write_shards(contents, chosen, wanted, wanted.shard_bytes, path)
        beside = companions.files(contents, wanted.config)
        for name, content in beside.items():
            (path / name).write_bytes(content)
        return [*beside, *names]

    def replaces(self, name: str) -> bool:
        return _SHARDS.fullmatch(name) is not None


def _torch_content(
    contents: Contents, chosen: Mapping[str, TensorEntry], wanted: Export
) -> dict[str, Any]:
    """A state_dict; with the optimizer, as ``get_optimizer_state_dict`` of torch gives it."""
    if not wanted.optimizer:
        return read_model(contents, chosen, wanted)
    states = read_optimizers(contents, wanted)
    groups = [group for state in states.values() for group in state["groups"]]
    return {
        "model": read_model(contents, chosen, wanted),
        "optimizer": {
            "state": {k: v for state in states.values() for k, v in state["state"].items()},
            # set_optimizer_state_dict knows no setting that the user's optimizer has not.
            "param_groups": [{k: g[k] for k in g if k != "initial_lr"} for g in groups],
        },
        "base_lrs": [group["initial_lr"] for group in groups],
        "optimizer_names": [name for name, state in states.items() for _ in state["groups"]],
        **read_counts(contents),
    }


def _write_shards(
    contents: Contents,
    chosen: Mapping[str, TensorEntry],
    wanted: Export,
    shard_bytes: int,
    folder: Path,
) -> list[str]:
    shards = list(_shards(chosen, wanted, shard_bytes))
    if len(shards) == 1:
        _save_safetensors(read_weights(contents, chosen, wanted), folder / _SAFETENSORS)
        return [_SAFETENSORS]
    weight_map, names = {}, []
    total = 0
    for i, shard in enumerate(shards, start=1):
        names.append(f"model-{i:05d}-of-{len(shards):05d}.safetensors")
        tensors = read_weights(contents, shard, wanted)
        _save_safetensors(tensors, folder / names[-1])
        weight_map.update(dict.fromkeys(tensors, names[-1]))
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / _INDEX).write_text(strict_json(index), encoding="utf-8")
    return [*names, _INDEX]


def _shards(
    chosen: Mapping[str, TensorEntry], wanted: Export, shard_bytes: int
) -> Iterator[dict[str, TensorEntry]]:
    """Tensors in order, so many to a shard as fit; one that is larger gets a shard of its own."""
    shard: dict[str, TensorEntry] = {}
    size = 0
    for name, entry in chosen.items():
        narrow = wanted.dtype is not None and entry.dtype.is_floating_point
        itemsize = (
            DTYPES[wanted.dtype].itemsize if narrow and wanted.dtype else entry.dtype.itemsize
        )
        if shard and size + entry.numbers * itemsize > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = entry
        size += entry.numbers * itemsize
    yield shard


def _save_safetensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    path.touch()
    mode = path.stat().st_mode
    try:
        _safetensors()(dict(tensors), str(path), metadata={"format": "pt"})
    except Exception as error:
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
    path.chmod(mode)  # the library lets nobody else read


def _safetensors() -> Any:
    try:  # an optional library, needed by nothing else here
        from safetensors.torch import save_file
    except ImportError as error:
        raise ResourceError(
            "safetensors is not installed", fix="pip install 'torsh-trainer[weights]'"
        ) from error
    return save_file
