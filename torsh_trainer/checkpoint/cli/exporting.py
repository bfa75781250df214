"""What ``checkpoint export`` is asked for, and the contract of a format that it writes."""

from __future__ import annotations

import abc
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from torsh_trainer.checkpoint.cli import companions
from torsh_trainer.checkpoint.cli.contents import Contents, TensorEntry
from torsh_trainer.errors import ConfigError
from torsh_trainer.utils import registry
from torsh_trainer.utils.lookup import list_first

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_SHARD_BYTES = 5 * 10**9  # as transformers does
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class ExportFormat(abc.ABC):
    """A format that ``checkpoint export --format NAME`` writes; made without arguments."""

    holds_optimizer: ClassVar[bool] = False
    """Whether ``--optimizer`` goes along."""

    is_folder: ClassVar[bool] = False
    """Whether it is a folder of files, and not one."""

    options: ClassVar[frozenset[str]] = frozenset()
    """Which of ``max_shard_size`` and ``config`` mean something to it."""

    file_name: ClassVar[str] = "model"
    """What a file of it is usually called."""

    def check(self) -> None:  # noqa: B027 - optional
        """Makes sure that it can be written here; asked before a checkpoint is opened.

        Raises:
            ResourceError: a library is missing.
        """

    def leave_out(self, contents: Contents) -> frozenset[str]:
        """Names of tensors that its readers make of others, such as tied ones."""
        return frozenset()

    def notes(self, contents: Contents, wanted: Export) -> list[str]:
        """Sentences for the reader about what does not go along; asked before anything is written.

        Raises:
            ConfigError: the checkpoint lacks what is asked for.
        """
        return []

    @abc.abstractmethod
    def write(
        self, contents: Contents, chosen: Mapping[str, TensorEntry], wanted: Export, path: Path
    ) -> list[str]:
        """Writes the tensors ``chosen``, by their names in the file, to ``path``.

        ``path`` is beside its place, and is moved there as the last act: a file that does not exist
        yet, or an empty folder (``is_folder``). Returns the names of the files in that folder, what
        tells of the others last; nothing for a file. The weights themselves: ``read_weights``.

        Raises:
            OSError: the disk refused.
        """

    def replaces(self, name: str) -> bool:
        """Whether a file of this name in a folder that is there is of an earlier export, and goes
        where this one did not write it."""
        return False


@dataclass(frozen=True)
class Export:
    """What to write, and where.

    ``prefix`` goes before every name; ``strip`` takes the names that begin so, without it.
    ``dtype`` converts floating-point weights and buffers; an optimizer's state stays as saved.

    Raises:
        ConfigError: there is no such format, or an option does not belong to it.
        ResourceError: the plugin that brings the format cannot be imported.
    """

    format: str
    output: Path
    ema: bool = False
    optimizer: bool = False
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    prefix: str = ""
    strip: str = ""
    max_shard_size: str | None = None
    config: Path | None = None
    force: bool = False

    def __post_init__(self) -> None:
        if self.optimizer and not self.kind.holds_optimizer:
            raise ConfigError(
                f"--optimizer: {self.format} files hold weights alone",
                fix="take --format torch or --format lightning",
            )
        if self.optimizer and self.ema:
            raise ConfigError(
                "--ema --optimizer: the optimizer does not belong to the average",
                fix="leave one of them out",
            )
        for option in ("max_shard_size", "config"):
            if getattr(self, option) is not None and option not in self.kind.options:
                name = option.replace("_", "-")
                raise ConfigError(f"--{name} belongs to --format hf", fix="leave it out")

    @property
    def kind(self) -> ExportFormat:
        """The format itself."""
        found: ExportFormat = registry.EXPORT_FORMATS.load(self.format)()
        return found

    def name(self, name: str) -> str:
        """What the tensor that the model calls ``name`` is called in the file."""
        return self.prefix + name.removeprefix(self.strip)

    @property
    def shard_bytes(self) -> int:
        """The most that one file of weights may hold.

        Raises:
            ConfigError: it is no size.
        """
        if self.max_shard_size is None:
            return _SHARD_BYTES
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", self.max_shard_size.strip())
        count = 0
        if found and not (found[3] and not found[2]):
            unit = _BINARY[found[2]] if found[3] else _UNITS[found[2]]
            count = int(float(found[1]) * unit)
        if count < 1:
            raise ConfigError(
                f"--max-shard-size {self.max_shard_size} is no size", fix="write 500MB or 5GB"
            )
        return count


def read_weights(
    contents: Contents, chosen: Mapping[str, TensorEntry], wanted: Export
) -> dict[str, Tensor]:
    """The tensors themselves, each with memory of its own, as safetensors wants them."""
    dtype = None if wanted.dtype is None else DTYPES[wanted.dtype]
    names: dict[str, list[str]] = {}
    for name, entry in chosen.items():
        names.setdefault(entry.full_name, []).append(name)
    read = {}
    once = {entry.full_name: entry for entry in chosen.values()}
    for entry, tensor in contents.read(once.values()):
        narrow = dtype is not None and tensor.dtype.is_floating_point
        value = tensor.to(dtype) if narrow else tensor
        if not wanted.optimizer:  # its state is of the padded shape
            value = companions.without_padding(contents, entry.name, value)
        for i, name in enumerate(names[entry.full_name]):
            read[name] = value.clone() if i else value
    return {name: read[name] for name in chosen}


def read_model(
    contents: Contents, chosen: Mapping[str, TensorEntry], wanted: Export
) -> dict[str, Any]:
    """The model's state_dict, with what of it is no tensor (``get_extra_state``)."""
    extra = {
        wanted.name(name): value
        for name, value in contents.extra_state.items()
        if name.startswith(wanted.strip)
    }
    return {**read_weights(contents, chosen, wanted), **extra}


def read_counts(contents: Contents) -> dict[str, int]:
    """How far training was: ``step``, ``updates``, ``samples``, ``epoch``."""
    position = contents.plain.get("position", {})
    step = int(position.get("step", contents.manifest.step))
    return {
        "step": step,
        "updates": int(position.get("updates", step)),
        "samples": int(position.get("samples", 0)),
        "epoch": int(position.get("epoch", 0)),
    }


def read_optimizers(contents: Contents, wanted: Export) -> dict[str, dict[str, Any]]:
    """Every optimizer's state under the names in the file, ready for the next update.

    A pure schedule sets the learning rate just before an update, other programs just after one:
    groups get the rate of the update to come, and their base rate as ``initial_lr``.

    Raises:
        ConfigError: there is none, or it trains parameters that are not exported.
    """
    states = contents.optimizer_states()
    names = [name for state in states.values() for g in state["groups"] for name in g["params"]]
    if not names:
        raise ConfigError(
            f"--optimizer: {contents.path} holds weights alone", fix="leave --optimizer out"
        )
    others = [name for name in names if not name.startswith(wanted.strip)]
    if others:
        raise ConfigError(
            f"--strip {wanted.strip}: the optimizer trains other parameters too: "
            f"{list_first(others)}",
            fix="export weights alone: --format safetensors",
        )
    schedule = contents.plain.get("schedule", {})
    base, upcoming = iter(schedule.get("base", ())), iter(schedule.get("next", ()))
    for state in states.values():
        state["state"] = {wanted.name(name): slots for name, slots in state["state"].items()}
        for group in state["groups"]:
            group["params"] = [wanted.name(name) for name in group["params"]]
            group["lr"] = next(upcoming, group["lr"])
            group["initial_lr"] = next(base, group.get("initial_lr", group["lr"]))
    return states


def save_torch(content: Any, path: Path) -> None:
    """Writes a file of torch.save.

    Raises:
        OSError: the disk refused, in its own words.
    """
    raw = _Remembering(path, "wb")
    try:
        with io.BufferedWriter(raw, buffer_size=1 << 20) as file:
            torch.save(content, file)
    except RuntimeError as error:
        raise (raw.refused or error) from error


class _Remembering(io.FileIO):
    """torch.save loses the disk's own words: "unexpected pos 704 vs 598"."""

    refused: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.refused = error
            raise
