"""A checkpoint made of what another program left: see ``FORMATS``.

Torch files are read with ``weights_only``: no code in them is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.checkpoint.door import zero
from torsh_trainer.checkpoint.door.contents import state_of
from torsh_trainer.checkpoint.plain import encode
from torsh_trainer.checkpoint.store.places import Location
from torsh_trainer.checkpoint.store.retention import folder_name, is_named
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.errors import ConfigError, ResourceError, nearest
from torsh_trainer.files import check_plain
from torsh_trainer.foreign import in_words, shortened
from torsh_trainer.lookup import shown
from torsh_trainer.schedule.torch_scheduler import SETTINGS
from torsh_trainer.weights import WRAPPERS, find_weights, open_weights, read_torch

FORMATS = ("auto", "torch", "safetensors", "lightning", "hf", "deepspeed", "horovod")
"""What ``--from`` takes; a script on Horovod saves as any script on torch does."""

OPTIMIZER_KEYS = ("optimizer_states", "optimizer", "optimizer_state_dict", "optim", "optimizers")
"""Keys under which training scripts and Lightning keep the state of optimizers."""

_SCHEDULER_KEYS = ("lr_schedulers", "lr_scheduler", "scheduler", "scheduler_state_dict")
_STEP_KEYS = ("updates", "global_step", "step", "iteration", "iter")
_SAID_BY = {"samples": "samples", **dict.fromkeys(_STEP_KEYS, "step")}
_NAMES = ("main", "others")  # as OptimizerSpec.build_all calls them
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_LIGHTNING = "pytorch-lightning_version"


Kept = TypeVar("Kept", bound=Mapping[str, Any])


@dataclass(frozen=True)
class Import:
    """What to read, and where to put it.

    ``strip`` takes the names that begin so, without it. ``parameters`` is a file that names the
    parameters in the optimizer's order, one a line; ``optimizers`` are the optimizers' names.
    ``step`` and ``samples`` (how many were consumed) win over what the file says. ``format`` is
    one of ``FORMATS``, and the file has to be of it. Nothing is ever replaced.
    """

    file: Path
    output: Location
    strip: str = ""
    parameters: Path | None = None
    optimizers: tuple[str, ...] = ()
    step: int | None = None
    samples: int | None = None
    format: str = "auto"

    def __post_init__(self) -> None:
        for name in ("step", "samples"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"--{name} {value} is below 0", fix="give 0 or more")
        if self.format not in FORMATS:
            raise ConfigError(f"--from {self.format} is unknown", fix=nearest(self.format, FORMATS))


@dataclass(frozen=True)
class _Read:
    """What a file came to: weights and, by optimizer, ``state`` and ``groups`` by name."""

    kind: str
    weights: dict[str, Tensor]
    optimizers: dict[str, dict[str, Any]]
    schedulers: list[Any]
    counts: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def import_file(wanted: Import) -> tuple[Location, list[str]]:
    """Makes the checkpoint ``wanted``; returns its path, and sentences for the reader.

    Raises:
        ConfigError: there is no such file, it can only be read by running code, it holds no
            weights, its optimizer cannot be matched with them, or the checkpoint exists.
        ResourceError: the disk refused, or safetensors is missing.
    """
    _check_folder(wanted)
    with in_words(wanted.file, "a file of torch.save, DeepSpeed or Hugging Face"):
        read = _read(wanted)
        updates = _step(wanted, read)
        step = _attempts(wanted, read, updates)
        schedule, notes = _schedule(read)
    target = wanted.output / folder_name(step)
    if target.exists():
        raise ConfigError(f"{target} exists", fix="name another folder, or another --step")
    samples = _count(read, "samples") if wanted.samples is None else wanted.samples
    epoch = _count(read, "epoch") or 0
    state = state_of(
        read.weights,
        read.optimizers,
        position={
            "step": step,
            "updates": updates,
            "samples": samples or 0,
            "epoch": epoch,
        },
        schedule=schedule,
    )
    facts = {"imported_from": str(wanted.file), "format": read.kind}
    saver = DcpCheckpointer(wanted.output, LocalCommunicator(), CheckpointOptions(), facts=facts)
    try:
        saver.claim()
        path = saver.save(step, state, {})
        saver.close()
    except ResourceError as error:  # which knows only the knob of a run
        fix = error.fix.replace("checkpoint.dir", "--output")
        raise ResourceError(error.sentence, fix=fix, **error.facts) from error
    finally:
        saver.release()
    return path, [*_notes(wanted, read, path, updates, samples), *read.notes, *notes]


def _check_folder(wanted: Import) -> None:
    output = wanted.output
    if output.exists() and not output.is_dir():
        raise ConfigError(f"{output} is a file", fix="name a folder with --output")
    if is_named(output):
        raise ConfigError(
            f"{output} is a checkpoint",
            fix=f"name the folder that it goes into: --output {output.parent}",
        )


def _notes(
    wanted: Import, read: _Read, path: Location, step: int, samples: int | None
) -> Iterator[str]:
    tensors = sum(tensor.numel() for tensor in read.weights.values())
    yield f"{read.kind}: {len(read.weights)} tensors, {tensors:,} numbers"
    wrapper = next((w for w in WRAPPERS if all(n.startswith(w) for n in read.weights)), None)
    if wrapper and not wanted.strip:
        yield f"every name begins with {wrapper} (--strip {wrapper} leaves it out)"
    if not read.optimizers:
        yield f"weights alone: start from them with trainer.pretrained={wanted.file}"
        return
    groups = sum(len(state["groups"]) for state in read.optimizers.values())
    yield f"optimizer: {', '.join(read.optimizers)}, {groups} groups, after {step} updates"
    if step and not samples:
        yield "no count of samples: the data begins anew (--samples N goes on after N)"
    yield f"go on from it with checkpoint.resume={path}"


# -- the file -------------------------------------------------------------------------------------


def _read(wanted: Import) -> _Read:
    file = wanted.file.expanduser()
    folder = zero.folder_of(file)
    read = _read_file(wanted, file) if folder is None else _read_deepspeed(wanted, folder)
    wants = {"auto": read.kind, "horovod": "torch"}.get(wanted.format, wanted.format)
    if read.kind.split()[0] != wants.split()[0]:
        raise ConfigError(
            f"--from {wanted.format}: {file} is not of that kind, but {read.kind}",
            fix=f"leave --from out, or give --from {read.kind.split()[0]}",
        )
    return read


def _read_deepspeed(wanted: Import, folder: Path) -> _Read:
    saved = zero.read(folder)
    weights = _stripped(saved.weights, wanted.strip, folder)
    optimizers: dict[str, dict[str, Any]] = {}
    if saved.optimizer is not None:
        if wanted.parameters is not None:
            raise ConfigError(
                f"--parameters is about numbered parameters, and {folder} names them",
                fix="leave --parameters out",
            )
        optimizers = {_NAMES[0]: _without_prefix(saved.optimizer, wanted.strip)}
    elif saved.numbered is not None:
        order = _Order(weights, wanted, total=_size(saved.numbered))
        optimizers = {_NAMES[0]: order.named(saved.numbered)}
        names = [name for group in optimizers[_NAMES[0]]["groups"] for name in group["params"]]
        weights.update(zip(names, saved.masters, strict=bool(saved.masters)))
    else:
        _refuse_options(wanted, "a folder without an optimizer")
    notes = []
    if saved.loss_scale is not None:
        notes.append(
            f"the loss scale was {saved.loss_scale:g}, and begins anew: "
            f"precision.loss_scaling.initial_scale={saved.loss_scale:g} goes on from it"
        )
    kind = f"deepspeed ({saved.kind})"
    return _Read(kind, weights, _renamed(optimizers, wanted), [], saved.counts, tuple(notes))


def _without_prefix(optimizer: Mapping[str, Any], strip: str) -> dict[str, Any]:
    """The optimizer of those parameters whose names begin with ``strip``, without it."""
    return {
        "state": {
            name.removeprefix(strip): slots
            for name, slots in optimizer["state"].items()
            if name.startswith(strip)
        },
        "groups": [
            {
                **group,
                "params": [n.removeprefix(strip) for n in group["params"] if n.startswith(strip)],
            }
            for group in optimizer["groups"]
        ],
    }


def _read_file(wanted: Import, file: Path) -> _Read:
    plain_weights = file.is_dir() or file.suffix in (".safetensors", ".json")
    if plain_weights or not file.is_file():
        kind = "hf" if file.is_dir() else "safetensors"
        weights = {name: found.read() for name, found in open_weights(file).items()}
        _refuse_options(wanted, "a file of weights")
        return _Read(kind, _stripped(weights, wanted.strip, file), {}, [], {})
    content = read_torch(file)
    weights = find_weights(content)
    if not weights:
        keys = shown([str(key) for key in content]) if isinstance(content, Mapping) else ""
        raise ConfigError(
            f"{file} holds no weights" + (f", but {keys}" if keys else ""),
            fix="save the model's state_dict in it, by itself or under 'model' or 'state_dict'",
        )
    weights = _stripped(weights, wanted.strip, file)
    found = _found_optimizers(content)
    if not found:
        _refuse_options(wanted, "a file without an optimizer")
    found = _renamed(found, wanted)
    kind = "lightning" if _LIGHTNING in content else "torch"
    order = _Order(weights, wanted, total=sum(_size(state) for state in found.values()))
    named = {name: order.named(state) for name, state in found.items()}
    held: Any = next((content[key] for key in _SCHEDULER_KEYS if content.get(key)), [])
    schedulers = list(held) if isinstance(held, list | tuple) else [held]
    return _Read(kind, weights, named, schedulers, content if found else {})


def _refuse_options(wanted: Import, what: str) -> None:
    for option in ("parameters", "optimizers"):
        if getattr(wanted, option):
            raise ConfigError(
                f"--{option} is about an optimizer, and {wanted.file} is {what}",
                fix=f"leave --{option} out",
            )


def _stripped(weights: Mapping[str, Tensor], strip: str, file: Path) -> dict[str, Tensor]:
    found = {k.removeprefix(strip): v for k, v in weights.items() if k.startswith(strip)}
    if not found:
        heads = {name.split(".")[0] + "." for name in weights}
        raise ConfigError(
            f"--strip {strip}: no name in {file} begins so", fix=nearest(strip, heads)
        )
    return found


def _found_optimizers(content: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Optimizer name -> its state_dict, as it lies in the file."""
    held = next((content[key] for key in OPTIMIZER_KEYS if content.get(key)), None)
    states: dict[str, Mapping[str, Any]] = {}
    if _is_state(held):
        assert isinstance(held, Mapping)
        states = _parted(held, content.get("optimizer_names"))
    elif isinstance(held, Mapping) and all(map(_is_state, held.values())):
        states = dict(held)
    elif isinstance(held, list | tuple) and all(map(_is_state, held)):
        names = [*_NAMES, *(f"optimizer_{i}" for i in range(3, len(held) + 1))]
        states = dict(zip(names, held, strict=False))
    elif held is not None:
        raise ConfigError(
            "the optimizer in the file is no state_dict of torch",
            fix="save optimizer.state_dict(); without it, trainer.pretrained takes the weights",
        )
    return states


def _renamed(states: dict[str, Kept], wanted: Import) -> dict[str, Kept]:
    if not wanted.optimizers:
        return states
    if len(wanted.optimizers) != len(states):
        raise ConfigError(
            f"--optimizers names {len(wanted.optimizers)}, and {wanted.file} holds {len(states)}",
            fix="give one name for each, in their order",
        )
    return dict(zip(wanted.optimizers, states.values(), strict=True))


def _parted(state: Mapping[str, Any], names: Any) -> dict[str, Mapping[str, Any]]:
    """One state_dict of several optimizers, as ``export --optimizer`` writes it, in its parts."""
    groups = state["param_groups"]
    if not isinstance(names, list) or len(names) != len(groups):
        return {_NAMES[0]: state}
    parts: dict[str, dict[str, Any]] = {}
    for name, group in zip(names, groups, strict=True):
        part = parts.setdefault(str(name), {"state": {}, "param_groups": []})
        part["param_groups"].append(group)
        mine = {key: state["state"][key] for key in group["params"] if key in state["state"]}
        part["state"].update(mine)
    return dict(parts)


def _is_state(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), list)
        and all(isinstance(group, Mapping) and "params" in group for group in value["param_groups"])
    )


def _size(state: Mapping[str, Any]) -> int:
    return sum(len(group["params"]) for group in state["param_groups"])


# -- numbers to names -----------------------------------------------------------------------------


class _Order:
    """Names for the parameters that optimizers know by number, one optimizer after another.

    Names come from ``--parameters``, from the file (``param_names``, or names for numbers), or,
    where one group holds every parameter, from the order of the weights: a state_dict has the
    parameters in the order of ``model.parameters()``, with buffers between them.
    """

    def __init__(self, weights: Mapping[str, Tensor], wanted: Import, *, total: int) -> None:
        self._weights = weights
        self._wanted = wanted
        self._total = total
        self._given = _names_in(wanted.parameters, total, weights)
        self._used = 0

    def named(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """``{"state": {name: slots}, "groups": [{..., "params": names}]}``.

        Raises:
            ConfigError: nothing says which number is which parameter.
        """
        keys = [key for group in state["param_groups"] for key in group["params"]]
        names = self._names(state, keys)
        unknown = [name for name in names if name not in self._weights]
        if unknown:
            raise ConfigError(
                f"the optimizer in {self._wanted.file} trains what is no weight in it: "
                + shown(unknown),
                fix=nearest(unknown[0], self._weights),
            )
        name_of = dict(zip(keys, names, strict=True))
        groups = [
            {
                **{k: v for k, v in group.items() if k not in ("params", "param_names")},
                "params": [name_of[key] for key in group["params"]],
            }
            for group in state["param_groups"]
        ]
        slots = {name_of[k]: _slots(v) for k, v in state["state"].items() if k in name_of}
        return {"state": slots, "groups": groups}

    def _names(self, state: Mapping[str, Any], keys: Sequence[Any]) -> list[str]:
        strip = self._wanted.strip
        if self._given is not None:
            self._used += len(keys)
            return self._given[self._used - len(keys) : self._used]
        if all(isinstance(key, str) for key in keys):
            return [key.removeprefix(strip) for key in keys]
        groups = state["param_groups"]
        if all(len(group.get("param_names") or ()) == len(group["params"]) for group in groups):
            return [str(n).removeprefix(strip) for group in groups for n in group["param_names"]]
        return self._by_order(state, keys)

    def _by_order(self, state: Mapping[str, Any], keys: Sequence[Any]) -> list[str]:
        names = _trainable(self._weights)
        if len(state["param_groups"]) > 1 or self._total != len(keys):
            raise self._unknown("and has several groups, in an order of their own")
        if len(names) != len(keys):
            raise self._unknown(f"{len(keys)} of them, and {len(names)} weights could be meant")
        for key, name in zip(keys, names, strict=True):
            for slot in state["state"].get(key, {}).values():
                ours = self._weights[name].shape
                if isinstance(slot, Tensor) and slot.numel() > 1 and slot.shape != ours:
                    raise self._unknown(
                        f"and the state of number {key} has shape {list(slot.shape)}, "
                        f"while {name} has {list(ours)}"
                    )
        return names

    def _unknown(self, why: str) -> ConfigError:
        return ConfigError(
            f"the optimizer in {self._wanted.file} knows its parameters by number, {why}",
            fix="name them in that order, one a line, with --parameters FILE",
        )


def _names_in(path: Path | None, total: int, weights: Mapping[str, Tensor]) -> list[str] | None:
    if path is None:
        return None
    check_plain(path)
    try:
        names = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"--parameters {path}: {why}", fix="correct the path") from error
    if len(names) != total or len(set(names)) != total:
        raise ConfigError(
            f"--parameters {path} has {len(set(names))} names for {total} parameters",
            fix="write each once: for g in optimizer.param_groups for p in g['params']",
        )
    unknown = next((name for name in names if name not in weights), None)
    if unknown is not None:
        raise ConfigError(
            f"--parameters {path}: there is no weight {unknown}", fix=nearest(unknown, weights)
        )
    return names


def _trainable(weights: Mapping[str, Tensor]) -> list[str]:
    """The weights that are parameters, as far as names and types tell; of tied ones the first."""
    names = []
    places: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in weights.items():
        place = tensor.data_ptr(), tuple(tensor.shape)
        tied = tensor.numel() > 0 and place in places
        places.add(place)
        if tensor.is_floating_point() and not tied and name.split(".")[-1] not in _BUFFERS:
            names.append(name)
    return names


def _slots(slots: Mapping[str, Any]) -> dict[str, Any]:
    """As torch's optimizers hold them today: ``step`` is a tensor."""
    step = slots.get("step")
    if isinstance(step, int | float):
        return {**slots, "step": torch.tensor(float(step), dtype=torch.float32)}
    return dict(slots)


# -- counters and schedules -----------------------------------------------------------------------


def _step(wanted: Import, read: _Read) -> int:
    """Updates made: as asked, as the file says, else as its optimizer counts them."""
    if wanted.step is not None:
        return wanted.step
    for key in _STEP_KEYS:
        count = _count(read, key)
        if count is not None:
            return count
    steps = [
        int(slots["step"])
        for state in read.optimizers.values()
        for slots in state["state"].values()
        if isinstance(slots.get("step"), Tensor)
    ]
    updates = max(steps, default=0)
    if updates < 0:
        raise ConfigError(f"its optimizer counts {updates} steps", fix="give --step N")
    return updates


def _attempts(wanted: Import, read: _Read, updates: int) -> int:
    """Steps, those included that overflowed and were skipped."""
    return updates if wanted.step is not None else int(read.counts.get("steps", updates))


def _count(read: _Read, key: str) -> int | None:
    """The count that the file keeps under ``key``; None where it keeps none.

    Raises:
        ConfigError: what it keeps there counts nothing.
    """
    value = read.counts.get(key)
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None or isinstance(value, bool):
        return None
    if not isinstance(value, int) or not 0 <= value < 2**53:
        raise ConfigError(
            f"{key} in the file is {shortened(str(value), 40)}, which counts nothing",
            fix="save it with a whole number there"
            + (f", or give --{_SAID_BY[key]} N" if key in _SAID_BY else ""),
        )
    return value


def _schedule(read: _Read) -> tuple[dict[str, Any], list[str]]:
    """Base rates, and the state of torch's schedulers where there is one for each optimizer."""
    groups = [group for state in read.optimizers.values() for group in state["groups"]]
    base = read.counts.get("base_lrs")
    if not isinstance(base, list) or len(base) != len(groups):
        base = [group.get("initial_lr", group.get("lr", 0.0)) for group in groups]
    schedule: dict[str, Any] = {"base": [float(rate) for rate in base]}
    if not read.schedulers or len(read.schedulers) != len(read.optimizers):
        return schedule, []
    running = {
        "schedulers": dict(zip(read.optimizers, read.schedulers, strict=True)),
        "groups": {
            name: [_settings(group) for group in state["groups"]]
            for name, state in read.optimizers.items()
        },
    }
    try:
        encode(running)
    except ConfigError as error:
        return schedule, [f"the state of its learning-rate schedule is left out: {error.sentence}"]
    return {**schedule, "running": running}, []


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: list(map(float, value)) if isinstance(value, tuple | list) else float(value)
        for key in SETTINGS
        if (value := group.get(key)) is not None
    }
