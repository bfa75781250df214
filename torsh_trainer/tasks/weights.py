"""Starting from pretrained weights, and freezing parameters; on a CPU module, before wrapping."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from torsh_trainer.deferred.seen import storage_key
from torsh_trainer.errors import ConfigError, TorshError, nearest
from torsh_trainer.tasks.weight_files import StoredTensor, open_weights
from torsh_trainer.utils.lookup import list_first, matching, no_match

WRAPPERS = ("module.", "_orig_mod.", "model.")
"""What DDP, torch.compile and a LightningModule put before the names of a model."""


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
