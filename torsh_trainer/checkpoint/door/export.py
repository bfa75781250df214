"""A checkpoint as plain files that other programs open: safetensors, torch, lightning, hf.

A file is written beside its place and renamed as the last act; nothing is replaced unless asked.
Needs memory for the weights (hf: for one shard), and for the optimizer's state where that goes too.
"""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from torsh_trainer.checkpoint.door import companions
from torsh_trainer.checkpoint.door.contents import Contents, Entry
from torsh_trainer.checkpoint.marks import unmarked
from torsh_trainer.checkpoint.store.places import Location
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.files import disk_error, strict_json, sync_folder
from torsh_trainer.lookup import shown

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LIGHTNING_VERSION = "2.0.0"
"""The oldest release that names the parts of its loops as ``_loops`` does."""

_SHARD_BYTES = 5 * 10**9  # as transformers does
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SAFETENSORS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARDS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@dataclass(frozen=True)
class Export:
    """What to write, and where.

    ``prefix`` goes before every name; ``strip`` takes the names that begin so, without it.
    ``dtype`` converts floating-point weights and buffers; an optimizer's state stays as saved.

    Raises:
        ConfigError: an option does not belong to the format.
    """

    format: Literal["safetensors", "torch", "lightning", "hf"]
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
        if self.optimizer and self.format in ("safetensors", "hf"):
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
            if getattr(self, option) is not None and self.format != "hf":
                name = option.replace("_", "-")
                raise ConfigError(f"--{name} belongs to --format hf", fix="leave it out")

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


def export(checkpoint: Location, wanted: Export) -> tuple[list[Path], list[str]]:
    """Writes ``checkpoint`` as ``wanted``, after every byte of it was checked.

    Returns the files written, and sentences for the reader about what could not go along.

    Raises:
        ConfigError: the output exists, or the checkpoint lacks what is asked for.
        ResourceError: the checkpoint is damaged, the disk refused, or safetensors is missing.
    """
    _check_output(wanted)
    shard_bytes = wanted.shard_bytes
    if wanted.format in ("safetensors", "hf"):
        _safetensors()
    contents = Contents.open(checkpoint, verified=True)
    weights = _chosen(contents, wanted)
    notes = _notes(contents, wanted)
    try:
        if wanted.format == "hf":
            beside = companions.files(contents, wanted.config)
            written = _write_folder(contents, weights, wanted, shard_bytes, beside)
            if companions.CONFIG not in beside:
                notes.append("no config.json: give the model's with --config FILE")
        else:
            written = [_write_file(contents, weights, wanted)]
    except OSError as error:
        raise disk_error(error, "write", wanted.output, setting="--output") from error
    return written, notes


# -- what goes in ---------------------------------------------------------------------------------


def _chosen(contents: Contents, wanted: Export) -> dict[str, Entry]:
    """Name in the file -> tensor of the checkpoint."""
    weights = dict(contents.model)
    if not weights:
        raise ConfigError(f"{contents.path} holds no model", fix="name another checkpoint")
    if wanted.ema:
        if not contents.is_averaged:
            raise ConfigError(
                f"--ema: {contents.path} holds no moving average",
                fix="leave --ema out; trainer.ema_decay=0.999 keeps one",
            )
        weights |= contents.averages_by_name()
    if wanted.format == "hf":
        weights = {n: entry for n, entry in weights.items() if n not in companions.tied(contents)}
    chosen = {
        wanted.name(name): entry for name, entry in weights.items() if name.startswith(wanted.strip)
    }
    if not chosen:
        raise ConfigError(
            f"--strip {wanted.strip}: no name of the model begins so",
            fix=f"its names are {shown(list(weights))}",
        )
    return chosen


def _weights(contents: Contents, chosen: Mapping[str, Entry], wanted: Export) -> dict[str, Tensor]:
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
        for i, name in enumerate(names[entry.full_name]):
            read[name] = value.clone() if i else value
    return {name: read[name] for name in chosen}


def _model(contents: Contents, chosen: Mapping[str, Entry], wanted: Export) -> dict[str, Any]:
    """The model's state_dict, with what of it is no tensor (``get_extra_state``)."""
    extra = {
        wanted.name(name): value
        for name, value in contents.extra_state.items()
        if name.startswith(wanted.strip)
    }
    return {**_weights(contents, chosen, wanted), **extra}


def _torch_content(
    contents: Contents, chosen: Mapping[str, Entry], wanted: Export
) -> dict[str, Any]:
    """A state_dict; with the optimizer, as ``get_optimizer_state_dict`` of torch gives it."""
    if not wanted.optimizer:
        return _model(contents, chosen, wanted)
    states = _optimizers(contents, wanted)
    groups = [group for state in states.values() for group in state["groups"]]
    return {
        "model": _model(contents, chosen, wanted),
        "optimizer": {
            "state": {k: v for state in states.values() for k, v in state["state"].items()},
            # set_optimizer_state_dict knows no setting that the user's optimizer has not.
            "param_groups": [{k: g[k] for k in g if k != "initial_lr"} for g in groups],
        },
        "base_lrs": [group["initial_lr"] for group in groups],
        "optimizer_names": [name for name, state in states.items() for _ in state["groups"]],
        **_counts(contents),
    }


def _lightning_content(
    contents: Contents, chosen: Mapping[str, Entry], wanted: Export
) -> dict[str, Any]:
    """What ``lightning.pytorch`` saves; of an average, or without an optimizer, weights alone."""
    counts = _counts(contents)
    content: dict[str, Any] = {
        "epoch": counts["epoch"],
        "global_step": counts["updates"],
        "samples": counts["samples"],
        "pytorch-lightning_version": LIGHTNING_VERSION,
        "state_dict": _model(contents, chosen, wanted),
    }
    own = _lightnings_own(contents, content, wanted)
    if not _goes_on(contents, wanted):
        settings = {
            key: value
            for key, value in own.items()
            if "hyper_parameters" in key or key == "state_dict"
        }
        return {**content, **settings}
    states = _optimizers(contents, wanted)
    if own:
        numbers = [numbered(state) for state in states.values()]
        return {**content, **own, "optimizer_states": numbers}
    return {
        **content,
        "loops": {"fit_loop": _loops(counts["updates"], counts["epoch"], len(states))},
        "callbacks": {},
        "optimizer_states": [numbered(state) for state in states.values()],
        "lr_schedulers": _schedulers(contents, states, counts["updates"]),
    }


def _lightnings_own(
    contents: Contents, content: Mapping[str, Any], wanted: Export
) -> dict[str, Any]:
    """What a run of a LightningModule has saved as Lightning does, all but its optimizers.

    The weights are those of ``content``, unless its hooks have made others of them.
    """
    saved = contents.plain.get("task", {}).get("lightning")
    if saved is None:
        return {}
    found = torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True)
    weights = content["state_dict"]
    own: dict[str, Any] = unmarked(found, lambda name: weights.get(wanted.name(name)))
    changed = own.pop("torsh_trainer").get("changed_weights", False) and not wanted.ema
    left = own["state_dict"] if changed else {}
    named = {wanted.name(n): v for n, v in left.items() if n.startswith(wanted.strip)}
    return {**own, "state_dict": named if changed else weights}


def _goes_on(contents: Contents, wanted: Export) -> bool:
    """Whether training can go on from a Lightning file: the optimizer belongs to its weights."""
    return not wanted.ema and any(o.get("groups") for o in contents.optimizers.values())


def _notes(contents: Contents, wanted: Export) -> list[str]:
    """Sentences about what does not go along."""
    notes = []
    if contents.extra_state and wanted.format in ("safetensors", "hf"):
        left = shown(list(contents.extra_state))
        notes.append(f"left out, as safetensors holds tensors alone: {left}")
    if wanted.format == "lightning" and not _goes_on(contents, wanted):
        why = "the optimizer does not belong to the average" if wanted.ema else "no optimizer"
        notes.append(f"weights alone ({why}): load_from_checkpoint reads them, fit cannot go on")
    return notes


def _counts(contents: Contents) -> dict[str, int]:
    position = contents.plain.get("position", {})
    step = int(position.get("step", contents.manifest.step))
    return {
        "step": step,
        "updates": int(position.get("updates", step)),
        "samples": int(position.get("samples", 0)),
        "epoch": int(position.get("epoch", 0)),
    }


def _optimizers(contents: Contents, wanted: Export) -> dict[str, dict[str, Any]]:
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
            f"--strip {wanted.strip}: the optimizer trains other parameters too: {shown(others)}",
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


def numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state with parameters by number, as ``Optimizer.state_dict`` has them.

    ``param_names`` keeps the names; torch's ``load_state_dict`` takes no harm from it.
    """
    names = [name for group in state["groups"] for name in group["params"]]
    number = {name: i for i, name in enumerate(names)}
    return {
        "state": {number[name]: slots for name, slots in state["state"].items()},
        "param_groups": [
            {**g, "params": [number[n] for n in g["params"]], "param_names": list(g["params"])}
            for g in state["groups"]
        ],
    }


def _schedulers(
    contents: Contents, states: Mapping[str, Any], updates: int
) -> list[dict[str, Any]]:
    """One scheduler an optimizer: torch's own where the run had one, else where it stands.

    What else a scheduler's state holds are its settings, which the module that loads this has.
    """
    running = contents.plain.get("schedule", {}).get("running", {}).get("schedulers", {})
    if running:
        return [dict(running[name]) for name in states if name in running]
    return [
        {
            "base_lrs": [group["initial_lr"] for group in state["groups"]],
            "last_epoch": updates,
            "_step_count": updates + 1,
            "_last_lr": [group["lr"] for group in state["groups"]],
            "lr_lambdas": [None for _ in state["groups"]],
        }
        for state in states.values()
    ]


def _loops(updates: int, epoch: int, optimizers: int) -> dict[str, Any]:
    """Progress of Lightning's fit loop at the beginning of ``epoch``, after ``updates``."""

    def both(total: int, current: int, *more: str) -> dict[str, dict[str, int]]:
        keys = ("ready", "completed", *more)
        return {"total": dict.fromkeys(keys, total), "current": dict.fromkeys(keys, current)}

    batches = both(updates, 0, "started", "processed")
    return {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": updates},
        "epoch_loop.batch_progress": {**batches, "is_last_batch": False},
        "epoch_loop.scheduler_progress": both(updates, 0),
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {"step": both(updates, 0), "zero_grad": both(updates, 0, "started")}
        },
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": both(updates * optimizers, 0),
        "epoch_progress": both(epoch, epoch, "started", "processed"),
    }


# -- files ----------------------------------------------------------------------------------------


def _check_output(wanted: Export) -> None:
    output = wanted.output
    if wanted.format == "hf":
        if output.exists() and not output.is_dir():
            raise ConfigError(f"{output} is a file", fix="name a folder with --output")
        if output.is_dir() and any(output.iterdir()) and not wanted.force:
            raise ConfigError(
                f"{output} exists and is not empty",
                fix="name another folder, or replace the weights in it with --force",
            )
        return
    if output.is_dir():
        name = {"safetensors": _SAFETENSORS, "torch": "model.pt", "lightning": "model.ckpt"}
        raise ConfigError(
            f"{output} is a folder", fix=f"name a file: --output {output / name[wanted.format]}"
        )
    if output.exists() and not wanted.force:
        raise ConfigError(f"{output} exists", fix="name another file, or replace it with --force")


def _write_file(contents: Contents, chosen: Mapping[str, Entry], wanted: Export) -> Path:
    output = wanted.output
    output.parent.mkdir(parents=True, exist_ok=True)
    with _beside(output) as temporary:
        if wanted.format == "safetensors":
            _save_safetensors(_weights(contents, chosen, wanted), temporary)
        elif wanted.format == "torch":
            _save_torch(_torch_content(contents, chosen, wanted), temporary)
        else:
            _save_torch(_lightning_content(contents, chosen, wanted), temporary)
        _sync(temporary)
        temporary.replace(output)
        sync_folder(output.parent)
    return output


def _write_folder(
    contents: Contents,
    chosen: Mapping[str, Entry],
    wanted: Export,
    shard_bytes: int,
    beside: Mapping[str, bytes],
) -> list[Path]:
    """The folder appears whole; in one that is there, files change one by one, the index last."""
    output = wanted.output
    output.parent.mkdir(parents=True, exist_ok=True)
    with _beside(output) as temporary:
        temporary.mkdir()
        names = _write_shards(contents, chosen, wanted, shard_bytes, temporary)
        for name, content in beside.items():
            (temporary / name).write_bytes(content)
        names = [*beside, *names]
        for name in names:
            _sync(temporary / name)
        sync_folder(temporary)
        if not output.exists():
            temporary.rename(output)
        else:
            for name in names:
                (temporary / name).replace(output / name)
            for old in output.iterdir():
                if _SHARDS.fullmatch(old.name) and old.name not in names:
                    old.unlink()
            sync_folder(output)
        sync_folder(output.parent)
    return [output / name for name in names]


def _write_shards(
    contents: Contents,
    chosen: Mapping[str, Entry],
    wanted: Export,
    shard_bytes: int,
    folder: Path,
) -> list[str]:
    shards = list(_shards(chosen, wanted, shard_bytes))
    if len(shards) == 1:
        _save_safetensors(_weights(contents, chosen, wanted), folder / _SAFETENSORS)
        return [_SAFETENSORS]
    weight_map, names = {}, []
    total = 0
    for i, shard in enumerate(shards, start=1):
        names.append(f"model-{i:05d}-of-{len(shards):05d}.safetensors")
        tensors = _weights(contents, shard, wanted)
        _save_safetensors(tensors, folder / names[-1])
        weight_map.update(dict.fromkeys(tensors, names[-1]))
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / _INDEX).write_text(strict_json(index), encoding="utf-8")
    return [*names, _INDEX]


def _shards(
    chosen: Mapping[str, Entry], wanted: Export, shard_bytes: int
) -> Iterator[dict[str, Entry]]:
    """Tensors in order, so many to a shard as fit; one that is larger gets a shard of its own."""
    shard: dict[str, Entry] = {}
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


def _save_torch(content: Any, path: Path) -> None:
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


def _safetensors() -> Any:
    try:  # an optional library, needed by nothing else here
        from safetensors.torch import save_file
    except ImportError as error:
        raise ResourceError(
            "safetensors is not installed", fix="pip install 'torsh-trainer[weights]'"
        ) from error
    return save_file


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _beside(output: Path) -> Iterator[Path]:
    """A place beside ``output`` to write to, gone afterwards whatever happens."""
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        yield temporary
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
