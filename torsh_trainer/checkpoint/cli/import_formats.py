"""Formats of ``checkpoint import``: torch, safetensors, Lightning, Hugging Face and others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from torsh_trainer.checkpoint.cli import zero
from torsh_trainer.checkpoint.cli.imported import Import, Imported, ImportFormat
from torsh_trainer.checkpoint.cli.parameter_order import ParameterOrder, count_parameters
from torsh_trainer.errors import ConfigError, nearest
from torsh_trainer.tasks.weight_files import find_weights, open_weights, read_torch
from torsh_trainer.utils.lookup import list_first

OPTIMIZER_KEYS = ("optimizer_states", "optimizer", "optimizer_state_dict", "optim", "optimizers")
"""Keys under which training scripts and Lightning keep the state of optimizers."""

_SCHEDULER_KEYS = ("lr_schedulers", "lr_scheduler", "scheduler", "scheduler_state_dict")
_NAMES = ("main", "others")  # as OptimizerSpec.build_all calls them
_LIGHTNING = "pytorch-lightning_version"

Kept = TypeVar("Kept", bound=Mapping[str, Any])


class DeepSpeedImport(ImportFormat):
    """What DeepSpeed saved: a folder of any ZeRO stage, or the universal format."""

    name = "deepspeed"
    priority = 40

    def recognises(self, file: Path) -> bool:
        return zero.folder_of(file) is not None

    def read(self, wanted: Import, file: Path) -> Imported:
        folder = zero.folder_of(file)
        assert folder is not None, "recognised before it is read"
        return _read_deepspeed(wanted, folder)


class SafetensorsImport(ImportFormat):
    """Weights alone: a file of safetensors, or the index of several."""

    name = "safetensors"
    priority = 30

    def recognises(self, file: Path) -> bool:
        # What is not there is opened as well: whoever opens it says so.
        return not file.is_dir() and (
            file.suffix in (".safetensors", ".json") or not file.is_file()
        )

    def read(self, wanted: Import, file: Path) -> Imported:
        weights = {name: found.read() for name, found in open_weights(file).items()}
        _refuse_options(wanted, "a file of weights")
        return Imported(self.name, _strip_prefix(weights, wanted.strip, file), {}, [], {})


class HuggingFaceImport(SafetensorsImport):
    """A folder of Hugging Face's."""

    name = "hf"

    def recognises(self, file: Path) -> bool:
        return file.is_dir() and zero.folder_of(file) is None


class TorchImport(ImportFormat):
    """A file of torch.save, whoever wrote it."""

    name = "torch"
    priority = 10

    def recognises(self, file: Path) -> bool:
        return True

    def read(self, wanted: Import, file: Path) -> Imported:
        return _read_torch(wanted, file)


class LightningImport(TorchImport):
    """A .ckpt of Lightning's, which only its content tells from another file of torch.save."""

    name = "lightning"

    def recognises(self, file: Path) -> bool:
        return False


class Horovod(TorchImport):
    """What a script on Horovod saves, which is what any script on torch does."""

    name = "horovod"

    def recognises(self, file: Path) -> bool:
        return False

    def accepts(self, kind: str) -> bool:
        return kind.split()[0] == TorchImport.name


def _read_deepspeed(wanted: Import, folder: Path) -> Imported:
    saved = zero.read(folder)
    weights = _strip_prefix(saved.weights, wanted.strip, folder)
    optimizers: dict[str, dict[str, Any]] = {}
    if saved.optimizer is not None:
        if wanted.parameters is not None:
            raise ConfigError(
                f"--parameters is about numbered parameters, and {folder} names them",
                fix="leave --parameters out",
            )
        optimizers = {_NAMES[0]: _without_prefix(saved.optimizer, wanted.strip)}
    elif saved.numbered is not None:
        order = ParameterOrder(weights, wanted, total=count_parameters(saved.numbered))
        optimizers = {_NAMES[0]: order.name_parameters(saved.numbered)}
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
    return Imported(
        kind, weights, _rename_optimizers(optimizers, wanted), [], saved.counts, tuple(notes)
    )


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


def _read_torch(wanted: Import, file: Path) -> Imported:
    content = read_torch(file)
    weights = find_weights(content)
    if not weights:
        keys = list_first([str(key) for key in content]) if isinstance(content, Mapping) else ""
        raise ConfigError(
            f"{file} holds no weights" + (f", but {keys}" if keys else ""),
            fix="save the model's state_dict in it, by itself or under 'model' or 'state_dict'",
        )
    weights = _strip_prefix(weights, wanted.strip, file)
    found = _find_optimizers(content)
    if not found:
        _refuse_options(wanted, "a file without an optimizer")
    found = _rename_optimizers(found, wanted)
    kind = "lightning" if _LIGHTNING in content else "torch"
    order = ParameterOrder(
        weights, wanted, total=sum(count_parameters(state) for state in found.values())
    )
    named = {name: order.name_parameters(state) for name, state in found.items()}
    held: Any = next((content[key] for key in _SCHEDULER_KEYS if content.get(key)), [])
    schedulers = list(held) if isinstance(held, list | tuple) else [held]
    return Imported(kind, weights, named, schedulers, content if found else {})


def _refuse_options(wanted: Import, what: str) -> None:
    for option in ("parameters", "optimizers"):
        if getattr(wanted, option):
            raise ConfigError(
                f"--{option} is about an optimizer, and {wanted.file} is {what}",
                fix=f"leave --{option} out",
            )


def _strip_prefix(weights: Mapping[str, Tensor], strip: str, file: Path) -> dict[str, Tensor]:
    found = {k.removeprefix(strip): v for k, v in weights.items() if k.startswith(strip)}
    if not found:
        heads = {name.split(".")[0] + "." for name in weights}
        raise ConfigError(
            f"--strip {strip}: no name in {file} begins so", fix=nearest(strip, heads)
        )
    return found


def _find_optimizers(content: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Optimizer name -> its state_dict, as it lies in the file."""
    held = next((content[key] for key in OPTIMIZER_KEYS if content.get(key)), None)
    states: dict[str, Mapping[str, Any]] = {}
    if _is_state(held):
        assert isinstance(held, Mapping)
        states = _split_optimizers(held, content.get("optimizer_names"))
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


def _rename_optimizers(states: dict[str, Kept], wanted: Import) -> dict[str, Kept]:
    if not wanted.optimizers:
        return states
    if len(wanted.optimizers) != len(states):
        raise ConfigError(
            f"--optimizers names {len(wanted.optimizers)}, and {wanted.file} holds {len(states)}",
            fix="give one name for each, in their order",
        )
    return dict(zip(wanted.optimizers, states.values(), strict=True))


def _split_optimizers(state: Mapping[str, Any], names: Any) -> dict[str, Mapping[str, Any]]:
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
