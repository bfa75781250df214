"""Starting from pretrained weights, and freezing parameters; on a CPU module, before wrapping."""

from __future__ import annotations

import contextlib
import errno
import json
import pickle
import re
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from torsh_trainer.deferred.recording import read_later
from torsh_trainer.deferred.seen import storage_key
from torsh_trainer.errors import ConfigError, ResourceError, TorshError, nearest
from torsh_trainer.utils.foreign import check_nest
from torsh_trainer.utils.lookup import list_first, matching, no_match

NESTED_UNDER = ("state_dict", "model_state_dict", "model", "module", "params")
"""Keys under which training scripts and Lightning keep a model's weights in a checkpoint."""

WRAPPERS = ("module.", "_orig_mod.", "model.")
"""What DDP, torch.compile and a LightningModule put before the names of a model."""

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
class ShapeMismatch:
    """A tensor whose shape in the file is not the model's."""

    name: str
    in_file: tuple[int, ...]
    in_model: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} ({list(self.in_file)} in the file, {list(self.in_model)} in the model)"


@dataclass(frozen=True)
class Report:
    """What became of every tensor: names as the model has them, ``unexpected`` as the file does.

    ``elements`` are how many numbers of the model were loaded, and how many it has.
    """

    path: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[ShapeMismatch, ...]
    elements: tuple[int, int]
    stripped: str = ""

    @property
    def complete(self) -> bool:
        """Every tensor of the model came from the file, and nothing was left over."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        tensors = len(self.loaded) + len(self.missing) + len(self.mismatched)
        share = self.elements[0] / max(1, self.elements[1])
        text = f"{len(self.loaded)} of {tensors} tensors ({share:.1%} of the elements) loaded from "
        return "; ".join([text + self.path, *self.shortfalls()])

    def shortfalls(self) -> list[str]:
        """One phrase for each way in which the file and the model differ."""
        phrases = []
        if self.missing:
            phrases.append(f"not in the file: {list_first(self.missing)}")
        if self.unexpected:
            phrases.append(f"not in the model: {list_first(self.unexpected)}")
        if self.mismatched:
            phrases.append(f"of another shape: {list_first([str(m) for m in self.mismatched])}")
        return phrases


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file, not read yet; ``dtype`` is None where that is not known before."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    dtype: torch.dtype | None = None

    def tensor(self) -> Tensor:
        """It, read at once or, while a model is built in pieces, when it is needed."""
        return self.read() if self.dtype is None else read_later(self.read, self.shape, self.dtype)


def load_pretrained(
    model: nn.Module,
    path: str | Path,
    *,
    strict: bool = True,
    rename: Mapping[str, str] | None = None,
    prefix: str = "",
) -> Report:
    """Copies the weights in a file into ``model`` (parameters and buffers), cast to its dtypes.

    ``path`` is a .safetensors file, a ``*.index.json`` of a sharded one, a file that torch.save
    wrote, or a folder with one of these under its Hugging Face name. ``prefix`` takes the part of
    the file under it (``"encoder."``). ``rename`` maps regular expressions to replacements,
    applied in order to the names that are left. A wrapper's prefix (DDP, torch.compile,
    LightningModule) falls away by itself where the model has none. Nothing is changed unless all
    checks pass. Pickled code is never run: torch files are read with ``weights_only``.

    Raises:
        ConfigError: there is no such file, it holds no weights or more than weights, nothing of it
            fits, or (``strict``) not everything does.
        ResourceError: safetensors is not installed.
    """
    path = Path(path)
    try:
        stored = open_weights(path)
    except TorshError as error:
        sentence = f"trainer.pretrained={error.sentence}"
        raise type(error)(sentence, fix=error.fix, **error.facts) from error.__cause__
    stored = _under(stored, prefix, path)
    stored = _rename_stored(stored, rename or {}, path)
    return load_stored(model, stored, named=str(path), strict=strict)


def load_stored(
    model: nn.Module,
    stored: dict[str, StoredTensor],
    *,
    named: str,
    strict: bool,
    extra: Mapping[str, Any] | None = None,
) -> Report:
    """Copies tensors by name into ``model`` as ``load_pretrained`` does; ``named`` is their place.

    ``extra`` is what a state_dict holds beside tensors.

    Raises:
        ConfigError: nothing fits, or (``strict``) not everything does.
    """
    target = _tensors(model)
    stored, stripped = _unwrap_names(stored, target)
    report = _compare(stored, target, named, stripped)
    _refuse(report, target, strict=strict)
    values = {name: stored[name].tensor() for name in report.loaded if name in stored}
    take_values(model, {**values, **(extra or {})}, strict=False)
    return report


def take_values(model: nn.Module, values: Mapping[str, Any], *, strict: bool = True) -> None:
    """``model.load_state_dict`` of ``values``; without ``strict`` they may be some of the names.

    Raises:
        ConfigError: the module cannot take them.
    """
    content = OrderedDict(values)
    # By it modules know which release of theirs has saved.
    cast(Any, content)._metadata = getattr(model.state_dict(), "_metadata", None)
    try:
        model.load_state_dict(content, strict=strict)
    except RuntimeError as error:
        raise ConfigError(
            f"{type(model).__name__}.load_state_dict does not take what its state_dict gives: "
            + " ".join(str(error).split()),
            fix="make the two of them fit each other",
        ) from error


def freeze(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Stops parameters whose names match from training; returns the names of all frozen ones.

    Patterns (fnmatch) apply in order; one that begins with ``!`` lets parameters train again:
    ``["*", "!head.*"]`` trains the head alone.

    Raises:
        ConfigError: a pattern matches no parameter; the nearest names are offered.
    """
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        found = matching(pattern.removeprefix("!"), parameters)
        if not found:
            raise no_match(pattern, parameters, option="trainer.frozen")
        for name in found:
            trains = pattern.startswith("!") and parameters[name].is_floating_point()
            parameters[name].requires_grad_(trains)
    return [name for name, parameter in parameters.items() if not parameter.requires_grad]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}


# -- files ----------------------------------------------------------------------------------------


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


# -- names ----------------------------------------------------------------------------------------


def _under(stored: dict[str, StoredTensor], prefix: str, path: Path) -> dict[str, StoredTensor]:
    part = {k.removeprefix(prefix): v for k, v in stored.items() if k.startswith(prefix)}
    if not part:
        heads = {name.split(".")[0] + "." for name in stored}
        raise ConfigError(
            f"nothing in {path} has the prefix {prefix!r}", fix=nearest(prefix, heads)
        )
    return part


def _rename_stored(
    stored: dict[str, StoredTensor], rename: Mapping[str, str], path: Path
) -> dict[str, StoredTensor]:
    for pattern, replacement in rename.items():
        try:
            renamed = {re.sub(pattern, replacement, name): v for name, v in stored.items()}
        except (re.error, IndexError) as error:
            raise ConfigError(
                f"rename: {pattern!r} -> {replacement!r} is not a regular expression: {error}",
                fix="escape dots and brackets with a backslash",
            ) from error
        if len(renamed) < len(stored):
            raise ConfigError(
                f"rename: {pattern!r} gives two tensors of {path} one name",
                fix="make the pattern narrower",
            )
        if not any(re.search(pattern, name) for name in stored):
            raise ConfigError(
                f"rename: {pattern!r} matches nothing in {path}",
                fix=f"its names are {list_first(list(stored))}",
            )
        stored = renamed
    return stored


def _unwrap_names(
    stored: dict[str, StoredTensor], target: Mapping[str, Tensor]
) -> tuple[dict[str, StoredTensor], str]:
    """``stored`` without a prefix that a wrapper left, where none of its names fit as they are."""
    stripped = ""
    for _ in WRAPPERS:
        if any(name in target for name in stored):
            break
        for wrapper in WRAPPERS:
            shorter = {k.removeprefix(wrapper): v for k, v in stored.items()}
            if all(name.startswith(wrapper) for name in stored):
                stored, stripped = shorter, stripped + wrapper
                break
    return stored, stripped


def _compare(
    stored: Mapping[str, StoredTensor], target: Mapping[str, Tensor], path: str, stripped: str
) -> Report:
    fits = {n for n, t in target.items() if n in stored and stored[n].shape == tuple(t.shape)}
    # Tied weights: a file may hold one of the names that share a tensor.
    places = {_place(target[name]) for name in fits if target[name].numel()}
    fits |= {n for n, t in target.items() if n not in stored and _place(t) in places}
    mismatched = tuple(
        ShapeMismatch(name, stored[name].shape, tuple(target[name].shape))
        for name in target
        if name in stored and name not in fits
    )
    return Report(
        path=path,
        loaded=tuple(name for name in target if name in fits),
        missing=tuple(name for name in target if name not in fits and name not in stored),
        unexpected=tuple(name for name in stored if name not in target),
        mismatched=mismatched,
        elements=(sum(target[n].numel() for n in fits), sum(t.numel() for t in target.values())),
        stripped=stripped,
    )


def _place(tensor: Tensor) -> tuple[int, int, tuple[int, ...]]:
    return storage_key(tensor), int(tensor.storage_offset()), tuple(tensor.shape)


def _refuse(report: Report, target: Mapping[str, Tensor], *, strict: bool) -> None:
    """Raises where the file does not fit: in part when ``strict``, else not at all."""
    if report.complete or (not strict and report.loaded):
        return
    fix = "set trainer.pretrained_strict=false to load what fits"
    if not report.loaded:
        fix = "check that the file belongs to this model, or rename its tensors"
    offers = _renames(report.unexpected, report.missing)
    if offers:
        fix += f" (nearest names: {offers})"
    raise ConfigError(
        f"trainer.pretrained={report.path} does not fit the model: "
        + "; ".join(report.shortfalls()),
        fix=fix,
        loaded=len(report.loaded),
        tensors=len(target),
    )


def _renames(unexpected: Sequence[str], missing: Sequence[str]) -> str:
    """``file.name -> model.name`` for the first few that look alike."""
    offers = []
    for name in unexpected[:3]:
        offer = nearest(name, missing, most=1)
        if offer.startswith("did you mean"):
            offers.append(f"{name} -> {offer.split(chr(39))[1]}")
    return ", ".join(offers)
