"""Checkpoints of a DeepSpeed script under drop-in: ``save_dir/tag`` with one file a process.

They are ours; DeepSpeed's own are refused.
"""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torsh_trainer.comm.base import Communicator
from torsh_trainer.dropin.zero.gathering import GatheredParameters
from torsh_trainer.errors import ConfigError, Unsupported
from torsh_trainer.strategies.base import Engine, FlatShard

log = logging.getLogger(__name__)

COUNTS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
LATEST = "latest"


def state_of(scheduler: Any) -> Any:
    """What a scheduler remembers; None without one."""
    return None if scheduler is None else scheduler.state_dict()


def save(
    folder: str,
    tag: str,
    engine: Engine,
    comm: Communicator,
    *,
    beside: Mapping[str, Any],
    latest: bool,
) -> None:
    """Writes this process's part; ``latest`` names the tag once all have. Collective."""
    target = Path(folder) / tag
    target.mkdir(parents=True, exist_ok=True)
    state = {"engine": _hold(engine.state_dict()), "beside": dict(beside), "size": comm.size}
    part = target / _name(comm.rank)
    draft = part.with_suffix(".draft")
    torch.save(state, draft)
    draft.replace(part)
    comm.barrier()
    if latest and comm.rank == 0:
        (Path(folder) / LATEST).write_text(tag, encoding="utf-8")
    comm.barrier()


def find(folder: str, tag: str | None) -> Path | None:
    """The folder of ``tag``, else of the one that ``latest`` names; None where there is none."""
    if tag is None:
        pointer = Path(folder) / LATEST
        if not pointer.is_file():
            log.warning("%s has no checkpoint: there is no file %s", folder, LATEST)
            return None
        tag = pointer.read_text(encoding="utf-8").strip()
    found = Path(folder) / str(tag)
    if not found.is_dir():
        log.warning("%s is not there: nothing is loaded", found)
        return None
    if not (found / _name(0)).is_file():
        raise Unsupported(
            f"{found} is no checkpoint of drop-in's",
            fix="a checkpoint of DeepSpeed's goes on under DeepSpeed itself",
        )
    return found


def load(
    path: Path, engine: Engine, comm: Communicator, *, model_alone: bool = False
) -> dict[str, Any]:
    """Puts what ``save`` wrote into ``engine``, and gives what stood beside. Collective.

    Raises:
        ConfigError: it was saved by another number of processes, or holds more than plain values.
    """
    part = path / _name(comm.rank)
    if not part.is_file():
        raise ConfigError(f"{path} lacks {part.name}", fix="load with as many processes as saved")
    try:
        saved = torch.load(part, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise ConfigError(
            f"{part} holds {found[1] if found else 'more than tensors and plain values'}, which "
            "only running code of the file would make",
            fix="put plain values and tensors into client_state, and save anew",
        ) from error
    if saved["size"] != comm.size:
        raise ConfigError(
            f"{path} was saved by {saved['size']} processes, and here are {comm.size}",
            fix="start as many",
        )
    state = saved["engine"]
    engine.expect(state)
    template = engine.state_template()
    filled = _fill(template, state)
    if model_alone:
        filled = {**engine.state_dict(), "model": filled["model"]}
    engine.load_state_dict(filled)
    beside: dict[str, Any] = saved["beside"]
    return beside


def save_model(path: Path, state: Mapping[str, Any] | None, comm: Communicator) -> None:
    """``state`` as a file of rank 0's, which alone has it. Collective."""
    if state is not None and comm.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path)
    comm.barrier()


def consolidate(
    model: nn.Module, dtype: torch.dtype, *, leads: bool, trained_alone: bool
) -> dict[str, Any] | None:
    """Whole parameters in ``dtype`` and buffers as they are, on the CPU, by their names in
    ``state_dict()``, on the process that ``leads``; None on the others. Collective where stage 3
    has cut them.

    ``trained_alone`` leaves out what does not require gradients.
    """
    state: dict[str, Any] = {}
    copies: dict[int, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        held = list(module.named_parameters(recurse=False))
        with GatheredParameters([parameter for _, parameter in held]):
            for name, parameter in held if leads else ():
                if trained_alone and not parameter.requires_grad:
                    continue
                if id(parameter) not in copies:
                    copies[id(parameter)] = _copy_low(parameter.detach(), dtype)
                state[f"{prefix}.{name}".lstrip(".")] = copies[id(parameter)]
        for name, buffer in module.named_buffers(recurse=False) if leads else ():
            if name not in module._non_persistent_buffers_set:
                state[f"{prefix}.{name}".lstrip(".")] = buffer.detach().cpu().clone()
    return state if leads else None


def _copy_low(value: Tensor, dtype: torch.dtype) -> Tensor:
    low = value.to(dtype) if value.is_floating_point() else value
    return low.cpu().clone()


def _name(rank: int) -> str:
    return f"rank-{rank}.pt"


def _hold(value: Any) -> Any:
    """What this process holds, as plain tensors on the CPU."""
    if isinstance(value, FlatShard):
        return value.tensor.detach().cpu().clone()
    if isinstance(value, DTensor):
        return value.to_local().detach().cpu().clone()
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {key: _hold(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_hold(entry) for entry in value]
    return value


@torch.no_grad()
def _fill(template: Any, saved: Any) -> Any:
    """``template`` with the values of ``saved``, tensors in place."""
    if isinstance(template, FlatShard):
        template.tensor.copy_(saved)
    elif isinstance(template, DTensor):
        template.to_local().copy_(saved)
    elif isinstance(template, Tensor):
        template.copy_(saved)
    elif isinstance(template, Mapping) and isinstance(saved, Mapping):
        # What the template lacks is whatever the engine reads back as it was.
        return {
            key: _fill(template[key], value) if key in template else value
            for key, value in saved.items()
        }
    else:
        return saved
    return template
