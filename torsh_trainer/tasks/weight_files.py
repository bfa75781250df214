"""Files of weights: safetensors, shards with an index, torch.save; opened, read when needed."""

from __future__ import annotations

import contextlib
import errno
import json
import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torsh_trainer.deferred.recording import read_later
from torsh_trainer.errors import ConfigError, ResourceError, nearest
from torsh_trainer.utils.foreign import check_nest
from torsh_trainer.utils.lookup import list_first

NESTED_UNDER = ("state_dict", "model_state_dict", "model", "module", "params")
"""Keys under which training scripts and Lightning keep a model's weights in a checkpoint."""

SUFFIXES = (".safetensors", ".json", ".bin", ".pt", ".pth", ".ckpt")
"""What files of weights are usually called."""

UNREADABLE = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, RuntimeError),
    *(TypeError, ValueError, pickle.UnpicklingError, struct.error),
)
"""What torch.load makes of files that it did not write, beside what the disk refuses."""

_SWELLS, _SMALL_BYTES = 8, 2**28
"""So many times its size, and so much besides, a file may come to in memory."""


_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""As safetensors calls them."""

_IN_FOLDER = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file, not read yet; ``dtype`` is None where that is not known before."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    dtype: torch.dtype | None = None

    def tensor(self) -> Tensor:
        """It, read at once or, while a model is built in pieces, when it is needed."""
        return self.read() if self.dtype is None else read_later(self.read, self.shape, self.dtype)


def open_weights(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file or a folder of weights, by name, none of them read yet.

    Raises:
        ConfigError: there is no such file, or it holds no weights or more than weights.
        ResourceError: safetensors is not installed.
    """
    if path.is_dir():
        path = _file_in(path)
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file", fix=_beside(path))
    try:
        stored = _open_file(path)
    except OSError as error:
        reason = error.strerror or str(error)
        fix = "correct its permissions, or name another file"
        raise ResourceError(f"{path} cannot be read: {reason}", fix=fix) from error
    if not stored:
        raise ConfigError(f"{path} holds no tensors", fix="name a file of weights")
    return stored


def _open_file(path: Path) -> dict[str, StoredTensor]:
    if path.name.endswith(".index.json"):
        return _open_shards(path)
    return _open_safetensors(path) if path.suffix == ".safetensors" else _open_torch(path)


def _beside(path: Path) -> str:
    """The nearest names of what could hold weights beside a file that is not there."""
    fix = "correct the path"
    with contextlib.suppress(OSError):
        known = [one.name for one in path.parent.iterdir() if one.suffix in SUFFIXES]
        offer = nearest(path.name, known)
        fix = offer if offer.startswith("did you mean") or 0 < len(known) < 10 else fix
    return fix


def _file_in(folder: Path) -> Path:
    for name in _IN_FOLDER:
        if (folder / name).is_file():
            return folder / name
    if any(folder.rglob(".metadata")):
        raise ConfigError(
            f"{folder} is a checkpoint of a run, not a file of weights",
            fix=f"go on with it by checkpoint.resume={folder}, begin with its weights by "
            f"trainer.pretrained={folder}, or take them out: checkpoint export {folder} "
            "--format safetensors --output FILE",
        )
    raise ConfigError(
        f"{folder}: the folder has none of {', '.join(_IN_FOLDER)}, and no checkpoint of a run",
        fix="name the file itself",
    )


def _open_shards(index: Path) -> dict[str, StoredTensor]:
    try:
        where = json.loads(index.read_text())["weight_map"]
        files = sorted({*where.values()})
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{index} is not an index of shards", fix="it needs a weight_map"
        ) from error
    stored: dict[str, StoredTensor] = {}
    for name in files:
        if not isinstance(name, str) or not name.isprintable():
            raise ConfigError(f"{index} names a shard {name!r}", fix="it needs names of files")
        if name in ("", "..") or Path(name).name != name or name.endswith(".index.json"):
            raise ConfigError(
                f"{index} names a shard outside its folder: {name}",
                fix="shards lie beside their index",
            )
        stored.update(open_weights(index.with_name(name)))
    if missing := [str(name) for name in where if name not in stored]:
        raise ConfigError(
            f"{index} names tensors that no shard holds: {list_first(missing)}",
            fix="copy the shards again",
        )
    return stored


def _open_safetensors(path: Path) -> dict[str, StoredTensor]:
    try:  # an optional library, needed by nothing else in the core
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ResourceError(
            f"{path} needs safetensors, which is not installed",
            fix="pip install 'torsh-trainer[weights]'",
        ) from error
    try:
        file = safe_open(path, framework="pt")
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        kinds = {
            name: (tuple(s.get_shape()), _DTYPES.get(s.get_dtype())) for name, s in slices.items()
        }
    except SafetensorError as error:
        raise ConfigError(
            f"{path} is not a whole safetensors file: {error}",
            fix="download or copy it again",
        ) from error
    return {
        name: StoredTensor(shape, _Reader(file, name), kind)
        for name, (shape, kind) in kinds.items()
    }


@dataclass(frozen=True)
class _Reader:
    file: Any
    name: str

    def __call__(self) -> Tensor:
        tensor: Tensor = self.file.get_tensor(self.name)
        return tensor


def _open_torch(path: Path) -> dict[str, StoredTensor]:
    content = read_torch(path)
    weights = find_weights(content)
    if not weights:
        keys = list_first([str(key) for key in content]) if isinstance(content, Mapping) else ""
        raise ConfigError(
            f"{path} holds a {type(content).__name__} without weights"
            + (f": {keys}" if keys else ""),
            fix=f"save a state_dict, by itself or under {', '.join(NESTED_UNDER)}",
        )
    return {
        k: StoredTensor(tuple(v.shape), partial(torch.detach, v), v.dtype)
        for k, v in weights.items()
    }


def read_torch(path: Path) -> Any:
    """What a file of torch.save holds, tensors on the CPU; no code in it is run.

    Raises:
        ConfigError: it cannot be read, or only by running code.
    """
    check_archive(path)
    try:
        content = _load_torch(path)
    except pickle.UnpicklingError as error:
        raise (_code_error(path, str(error)) or _unreadable(path, error)) from error
    except UNREADABLE as error:
        raise _unreadable(path, error) from error
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise _unreadable(path, error) from error  # an offset in it leads to no place
    check_content(content, path)
    return content


def check_archive(path: Path) -> None:
    """Refuses a zip archive that unpacks to far more than it is; torch.save compresses nothing.

    Raises:
        ConfigError: it does.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(part.file_size for part in archive.infolist())
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        return  # from before the zip format, or no archive: whoever reads it says so
    _refuse_bloated(unpacked, path, "unpacks to")


def check_content(content: Any, path: Path) -> None:
    """Refuses what a small file can hold and memory cannot, before anything is copied.

    Raises:
        ConfigError: dicts and lists hold themselves, tensors have no values (device meta), or they
            stand for far more numbers than the file has: ``torch.zeros(1).expand(10**11)``.
    """
    check_nest(content, path)
    found, count = [content], 0
    while found:
        value = found.pop()
        if isinstance(value, Tensor):
            if value.is_meta:
                raise ConfigError(
                    f"{path} has tensors without values (device meta)",
                    fix="save the model once its weights are there",
                )
            count += value.numel() * value.element_size()
        elif isinstance(value, Mapping):
            found += value.values()
        elif isinstance(value, list | tuple):
            found += value
    _refuse_bloated(count, path, "stands for tensors of")


def _refuse_bloated(count: int, path: Path, what: str) -> None:
    size = path.stat().st_size
    if count > _SWELLS * size + _SMALL_BYTES:
        raise ConfigError(
            f"{path} has {size / 2**20:,.1f} MiB, and {what} {count / 2**20:,.0f} MiB",
            fix="save it once more with torch.save, of tensors that are contiguous",
        )


def _code_error(path: Path, reason: str) -> ConfigError | None:
    """The error for a file with more in it than weights; None when that is not the reason."""
    if "weights only" not in reason.lower() or "nsupported" not in reason:
        return None
    if "nsupported operand" in reason and path.read_bytes()[:1] not in (b"\x80", b"P"):
        return None  # neither a pickle nor an archive: text
    named = re.search(r"(?:GLOBAL|global|class) `?([\w.]+)", reason)
    what = f" ({named.group(1)})" if named else ""
    return ConfigError(
        f"{path} is not plain weights: it holds pickled objects{what}, "
        "and unpickling those can run code",
        fix="where you trust the file, save its state_dict alone, best as .safetensors",
    )


def _unreadable(path: Path, error: Exception) -> ConfigError:
    # Of the rest, such as a KeyError for an unknown opcode, nobody can make sense.
    told = isinstance(error, RuntimeError | pickle.UnpicklingError)
    reason = str(error).split(". ")[0].splitlines()[0] if told else ""
    if not told or reason.startswith("Weights only load failed"):
        reason = "it is something else"
    return ConfigError(
        f"{path} cannot be read as a file of torch.save: {reason}",
        fix="download or copy it again, or give it its right suffix (.safetensors)",
    )


def _load_torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
    return torch.load(path, map_location="cpu", weights_only=True)  # from before the zip format


def find_weights(content: Any) -> dict[str, Tensor]:
    """The state_dict in what a file holds: itself, or under one of the usual keys."""
    if not isinstance(content, Mapping):
        return {}
    for key in NESTED_UNDER:
        if isinstance(content.get(key), Mapping):
            found = find_weights(content[key])
            if found:
                return found
    # A state_dict may carry more than tensors (_metadata, extra state); names are strings.
    return {k: v for k, v in content.items() if isinstance(k, str) and isinstance(v, Tensor)}
