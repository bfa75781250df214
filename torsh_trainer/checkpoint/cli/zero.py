"""What DeepSpeed's engine saved, read without DeepSpeed: all ZeRO stages, and the universal format.

A stage keeps fp32 masters and the optimizer's slots in flat pieces, one a rank:

- stages 1 and 2 put the parameters of a group one after the other, pad the whole, and cut it among
  the ranks;
- stage 3 cuts every parameter among the ranks, padded, and puts a rank's pieces one after the
  other, group by group;
- stage 0 has the optimizer's own state_dict, with masters beside it where the model is not fp32.

The model's file says which names and shapes a group has, in that order. Classes of DeepSpeed in the
files become objects that do nothing: no code in them is run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from torsh_trainer.errors import ConfigError
from torsh_trainer.tasks.weight_files import UNREADABLE, check_archive, check_content
from torsh_trainer.utils.files import check_plain
from torsh_trainer.utils.foreign import in_words
from torsh_trainer.utils.lookup import list_first

LATEST = ("latest", "latest_universal")
_MODEL = "*_model_states.pt"
_OPTIMIZER = "*_optim_states.pt"
_UNIVERSAL = "zero"
_OTHER_PARALLEL = ("layer_*", "*mp_rank_0[1-9]*", "*mp_rank_[1-9]*", "*expert*")


@dataclass(frozen=True)
class ZeroCheckpoint:
    """What lies in a folder, put together.

    ``optimizer`` is ``{"state": {name: slots}, "groups": [{..., "params": names}]}``; where the
    files do not say which number is which name, it is ``numbered`` instead: torch's own
    state_dict, and ``masters`` the fp32 parameters in its order. ``loss_scale`` is the one that
    fp16 had come to.
    """

    kind: str
    weights: dict[str, Tensor]
    counts: Mapping[str, Any]
    optimizer: dict[str, Any] | None = None
    numbered: Mapping[str, Any] | None = None
    masters: tuple[Tensor, ...] = ()
    loss_scale: float | None = None


def folder_of(path: Path) -> Path | None:
    """The folder of one step that ``path`` leads to; None where DeepSpeed saved nothing there.

    Raises:
        ConfigError: the file ``latest`` names a folder that is not there.
    """
    if not path.is_dir():
        return None
    if any(path.glob(_MODEL)):
        return path
    for name in LATEST:
        if (path / name).is_file():
            tag = (path / name).read_text(encoding="utf-8", errors="replace").strip()
            within = tag.isprintable() and ".." not in Path(tag).parts and Path(tag) != Path()
            if not within or Path(tag).is_absolute() or not any((path / tag).glob(_MODEL)):
                raise ConfigError(
                    f"{path / name} names {tag!r}, and no model lies there",
                    fix=f"name the folder of a step: {path}/global_stepN",
                )
            return path / tag
    return None


def read(folder: Path) -> ZeroCheckpoint:
    """What DeepSpeed saved into ``folder``, which ``folder_of`` found.

    Raises:
        ConfigError: a file is missing or unreadable, or it was saved with parallelism within the
            model, or in a form whose parts cannot be told apart.
    """
    for pattern in _OTHER_PARALLEL:
        if found := sorted(folder.glob(pattern)):
            raise ConfigError(
                f"{found[0]} is of a model that was itself divided among processes (tensor, "
                "pipeline or expert parallel), which is not read in this release",
                fix="save a checkpoint without that, or export its weights with DeepSpeed",
            )
    with in_words(folder, "a checkpoint of DeepSpeed"):
        return _read(folder)


def _read(folder: Path) -> ZeroCheckpoint:
    models = [_load(path) for path in _find_rank_files(folder, _MODEL)]
    weights = _plain_weights(models)
    if (folder / _UNIVERSAL).is_dir():
        kind, groups, scale = "universal", *_universal(folder / _UNIVERSAL, models[0])
    elif paths := _find_rank_files(folder, _OPTIMIZER):
        kind, groups, scale = _stages(folder, paths, models[0])
    else:
        return _stage_0(models[0], weights)
    optimizer: dict[str, Any] = {"state": {}, "groups": []}
    for group in groups:
        optimizer["groups"].append({**group.settings, "params": list(group.slots)})
        for name, slots in group.slots.items():
            weights[name] = slots.pop("fp32")
            optimizer["state"][name] = slots
    _tie(weights, models[0])
    return ZeroCheckpoint(kind, weights, _counts(models[0]), optimizer, loss_scale=scale)


@dataclass
class _Group:
    """The parameters of an optimizer's group: their slots, the fp32 master among them."""

    settings: dict[str, Any]
    slots: dict[str, dict[str, Any]] = field(default_factory=dict)


# -- weights and counts ---------------------------------------------------------------------------


def _plain_weights(models: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Buffers, and what does not train; and all else as far as it is whole, in the model's order.

    Under stage 3 the tensors of a model are empty, and those that do not train lie in pieces.
    """
    first = models[0]
    weights: dict[str, Tensor] = {}
    seen: dict[tuple[int, torch.Size], Tensor] = {}
    for name, tensor in first["module"].items():  # what two names share stays shared
        weights[name] = seen.setdefault((tensor.data_ptr(), tensor.shape), _wide(tensor))
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        pieces = [model["frozen_param_fragments"][name].view(-1) for model in models]
        weights[name] = _wide(torch.cat(pieces)[: math.prod(shape)].view(tuple(shape)))
    return weights


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _tie(weights: dict[str, Tensor], model: Mapping[str, Any]) -> None:
    """A parameter with two names is there under both."""
    shared = model.get("shared_params") or {}
    for name, first in shared.items():
        if first in shared:
            raise ConfigError(
                f"shared_params says that {name} is {first}, and that {first} is {shared[first]}",
                fix="the model's file is damaged: copy it again",
            )
        if first in weights:
            weights[name] = weights[first]


def _counts(model: Mapping[str, Any]) -> dict[str, Any]:
    """Counters by the names that other programs give them; a step that overflowed is no update."""
    steps, skipped = _count(model, "global_steps"), _count(model, "skipped_steps")
    if skipped > steps:
        raise ConfigError(
            f"skipped_steps is {skipped} of {steps} steps in the model's file",
            fix="copy it again",
        )
    counts: dict[str, Any] = {"updates": steps - skipped, "steps": steps}
    for ours, theirs in (("samples", "global_samples"), ("epoch", "epoch")):
        if theirs in model:
            counts[ours] = _count(model, theirs)
    return counts


def _count(model: Mapping[str, Any], name: str) -> int:
    value = model.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(
            f"{name} is {str(value)[:40]} in the model's file, which counts nothing",
            fix="copy it again",
        )
    return value


def _names(model: Mapping[str, Any]) -> list[dict[str, tuple[int, ...]]]:
    """Shapes by name, group by group."""
    return [
        {name: tuple(shape) for name, shape in group.items()} for group in model["param_shapes"]
    ]


# -- stages 1 to 3 --------------------------------------------------------------------------------


def _stages(
    folder: Path, paths: Sequence[Path], model: Mapping[str, Any]
) -> tuple[str, list[_Group], float | None]:
    ranks = [_load(path)["optimizer_state_dict"] for path in paths]
    divided = ranks[0]["partition_count"]
    wanted = max(divided) if isinstance(divided, list) else divided
    if len(ranks) != wanted:
        raise ConfigError(
            f"{folder} has the optimizer of {len(ranks)} ranks, and {wanted} saved theirs",
            fix="copy the files of every rank into it",
        )
    scale = _scale(ranks[0])
    if "fp32_flat_groups" in ranks[0]:
        return "stage 3", _stage_3(ranks, _names(model)), scale
    if isinstance(ranks[0]["base_optimizer_state"], list):
        raise ConfigError(
            f"{folder} was saved with zero_optimization.elastic_checkpoint, which leaves out the "
            "settings of the optimizer",
            fix="save it once more without that option",
        )
    return "stage 1 or 2", list(_stages_1_and_2(ranks, _names(model))), scale


def _stages_1_and_2(
    ranks: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, tuple[int, ...]]]
) -> Iterator[_Group]:
    for number, named in enumerate(shapes):
        pieces = [
            {
                "fp32": rank["single_partition_of_fp32_groups"][number],
                **rank["base_optimizer_state"]["state"].get(number, {}),
            }
            for rank in ranks
        ]
        paddings = ranks[0].get("param_alignment_paddings")
        gaps = [0] * len(named) if paddings is None else paddings[number]
        if any(gap < 0 for gap in gaps):
            raise ConfigError(
                f"param_alignment_paddings has {min(gaps)} in it, which is no gap",
                fix="the optimizer's file is damaged: copy it again",
            )
        starts = [
            0,
            *accumulate(math.prod(s) + gap for s, gap in zip(named.values(), gaps, strict=True)),
        ]
        settings = ranks[0]["base_optimizer_state"]["param_groups"][number]
        group = _Group(_without_parameters(settings))
        for slot in pieces[0]:
            values = [piece[slot] for piece in pieces]
            if _is_flat(values[0], pieces[0]["fp32"]):
                flat = torch.cat(values)
                parts = {
                    name: _cut(flat, start, shape)
                    for (name, shape), start in zip(named.items(), starts, strict=False)
                }
            else:
                parts = dict.fromkeys(named, values[0])
            for name, part in parts.items():
                group.slots.setdefault(name, {})[slot] = part
        yield group


def _stage_3(
    ranks: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, tuple[int, ...]]]
) -> list[_Group]:
    """Every rank's pieces lie one after the other, whatever sub-groups they were stepped in."""
    states = [rank["optimizer_state_dict"]["state"] for rank in ranks]
    masters = [rank["fp32_flat_groups"] for rank in ranks]
    flats: dict[str, list[Tensor]] = {"fp32": [torch.cat(list(one)) for one in masters]}
    single: dict[str, Any] = {}
    for slot, value in states[0][min(states[0])].items() if states[0] else ():
        if _is_flat(value, masters[0][0]):
            flats[slot] = [torch.cat([state[k][slot] for k in sorted(state)]) for state in states]
        else:
            single[slot] = value
    groups, group_of = _groups(ranks[0]["optimizer_state_dict"]["param_groups"], len(shapes))
    start = 0
    for named, group in zip(shapes, group_of, strict=True):
        for name, shape in named.items():
            size = -(-math.prod(shape) // len(ranks))
            group.slots[name] = {
                slot: _cut(torch.cat([one[start : start + size] for one in pieces]), 0, shape)
                for slot, pieces in flats.items()
            } | single
            start += size
    return groups


def _groups(settings: Sequence[Mapping[str, Any]], parts: int) -> tuple[list[_Group], list[_Group]]:
    """The optimizer's groups; and of which each of the ``parts`` is that the model's file names.

    Stage 3 steps a large group in sub-groups, which are its parameters for the optimizer.
    """
    groups = [_Group(_without_parameters(one)) for one in settings]
    if parts == len(groups):
        return groups, groups
    of = {
        part: group for group, one in zip(groups, settings, strict=True) for part in one["params"]
    }
    if sorted(of) != list(range(parts)):
        raise ConfigError(
            f"the model's file has {parts} groups of parameters, and the optimizer's {len(of)}",
            fix="the files belong to different checkpoints, or are damaged",
        )
    return groups, [of[part] for part in range(parts)]


def _is_flat(value: Any, master: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == master.shape


def _cut(flat: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    size = math.prod(shape)
    if flat.numel() < start + size:
        raise ConfigError(
            f"a flat piece of {flat.numel()} numbers ends before a parameter of {list(shape)}",
            fix="the files of the ranks belong to different checkpoints, or are damaged",
        )
    return flat[start : start + size].clone().view(shape)


def _without_parameters(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in ("params", "param_names")}


def _scale(state: Mapping[str, Any]) -> float | None:
    """The loss scale, where it moves."""
    scaler = state.get("loss_scaler")
    value = getattr(scaler, "cur_scale", state.get("cur_scale"))
    return float(value) if state.get("dynamic_loss_scale") and value is not None else None


# -- stage 0, and the universal format ------------------------------------------------------------


def _stage_0(model: Mapping[str, Any], weights: dict[str, Tensor]) -> ZeroCheckpoint:
    state = model["optimizer"]
    if state is None:
        return ZeroCheckpoint("weights alone", weights, _counts(model))
    if "optimizer_state_dict" not in state:
        return ZeroCheckpoint("stage 0", weights, _counts(model), numbered=state)
    flat = state.get("fp32_groups_flat")
    if flat is not None:
        raise ConfigError(
            "this stage 0 checkpoint keeps fp32 masters of whole groups in one piece (a fused "
            "optimizer in fp16), without the names of their parameters",
            fix="save it once with zero_optimization.stage=1",
        )
    masters = tuple(_wide(master) for group in state["fp32_groups"] for master in group)
    inner = state["optimizer_state_dict"]
    scale = _scale(state)
    return ZeroCheckpoint(
        "stage 0", weights, _counts(model), numbered=inner, masters=masters, loss_scale=scale
    )


def _universal(folder: Path, model: Mapping[str, Any]) -> tuple[list[_Group], float | None]:
    """A folder for each parameter, with a file for each slot."""
    common = _load(folder / "optimizer_state.pt")
    inner = common.get("optimizer_state_dict", {}).get("state", {})
    steps = {k: v for k, v in inner.get(min(inner, default=None), {}).items() if _is_number(v)}
    shapes = _names(model)
    groups, group_of = _groups(common["param_groups"], len(shapes))
    for named, group in zip(shapes, group_of, strict=True):
        for name, shape in named.items():
            files = sorted((folder / name).glob("*.pt"))
            if not any(file.stem == "fp32" for file in files):
                raise ConfigError(
                    f"{folder / name}/fp32.pt is missing", fix="copy the whole folder again"
                )
            slots = {file.stem: _slot(_load(file), shape) for file in files}
            group.slots[name] = steps | slots
    return groups, _scale(common)


def _slot(content: Any, shape: tuple[int, ...]) -> Any:
    value = content["param"] if isinstance(content, Mapping) else content
    return value if _is_number(value) else _cut(value.reshape(-1), 0, shape)


def _is_number(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.dim() == 0


# -- files ----------------------------------------------------------------------------------------


class _Inert:
    """What an object of a class that is not known here becomes: its attributes alone."""

    def __init__(self, *values: object) -> None:
        self.values = values

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


def _load(path: Path) -> Any:
    """What ``path`` holds, tensors on the CPU and read when they are needed.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        check_plain(path)
        unknown = get_unsafe_globals_in_checkpoint(path)
        known: list[Any] = [(type(name.split(".")[-1], (_Inert,), {}), name) for name in unknown]
        check_archive(path)
        with safe_globals(known):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        check_content(content, path)
        return content
    except (OSError, *UNREADABLE) as error:
        if code := re.search(r"unsupported GLOBAL (\S+) whose module", str(error)):
            raise ConfigError(
                f"{path} would run {code.group(1)} when it is read",
                fix="do not read it at all, unless you know why it does",
            ) from error
        reason = (str(error).split(". ")[0].splitlines() or ["it is empty"])[0]
        raise ConfigError(
            f"{path} cannot be read as a file of torch.save: {reason}",
            fix="copy it again; the files of every rank are needed",
        ) from error


def _find_rank_files(folder: Path, pattern: str) -> list[Path]:
    """The files of all ranks, in their order.

    Raises:
        ConfigError: there are several checkpoints' files, or one between the others is missing.
    """
    paths = {_rank(path): path for path in folder.glob(pattern)}
    missing = sorted(set(range(len(paths))) - set(paths))
    if missing:
        raise ConfigError(
            f"{folder} has no {pattern} of rank {list_first([str(rank) for rank in missing])}",
            fix="copy the files of every rank into it",
        )
    return [paths[rank] for rank in sorted(paths)]


def _rank(path: Path) -> int:
    found = re.search(r"zero_pp_rank_(\d+)_", path.name)
    return int(found.group(1)) if found else 0
