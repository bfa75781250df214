"""What a checkpoint of ours holds of Lightning: its loops, and what the user's code keeps."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.trainer import call
from torch.optim import LBFGS, Optimizer

from torsh_trainer.course import Cadence
from torsh_trainer.errors import ConfigError, Unsupported
from torsh_trainer_lightning.loop.facade import Facade

log = logging.getLogger(__name__)


def saved_state(facade: Facade, *, world_size: int, batches: int | None) -> bytes:
    """All that is beside weights, as Lightning's format has it: data alone.

    ``batches`` are those of the epoch so far; None: none is under way.
    """
    connector = facade._logger_connector
    connector.settle()
    datamodule = facade.datamodule
    state: dict[str, Any] = {
        "pytorch-lightning_version": _version(),
        "epoch": facade.current_epoch,
        "global_step": facade.global_step,
        "state_dict": {},
        "loops": facade._checkpoint_connector._get_loops_state_dict(),
        "callbacks": call._call_callbacks_state_dict(facade),
        "lr_schedulers": [one.scheduler.state_dict() for one in facade.lr_scheduler_configs],
    }
    for holder in (facade.lightning_module, datamodule):
        state.update(_hyper_parameters(holder))
    if datamodule is not None:
        held = call._call_lightning_datamodule_hook(facade, "state_dict")
        if held:
            state[type(datamodule).__qualname__] = held
    call._call_callbacks_on_save_checkpoint(facade, state)
    call._call_lightning_module_hook(facade, "on_save_checkpoint", state)
    state["torsh_trainer"] = {
        "world_size": world_size,
        "batches": batches,
        "order": facade.order.name,
        "data": facade.order.facts(facade.accumulate_grad_batches),
        "callback_metrics": dict(connector._callback_metrics),
        "logged_metrics": dict(connector._logged_metrics),
    }
    _check_data(state)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _hyper_parameters(holder: Any) -> dict[str, Any]:
    """Those of a module or a data module, as Lightning saves them, where they are data."""
    if holder is None or not holder.hparams:
        return {}
    found = {holder.CHECKPOINT_HYPER_PARAMS_KEY: dict(holder.hparams)}
    if hasattr(holder, "_hparams_name"):
        found[holder.CHECKPOINT_HYPER_PARAMS_NAME] = holder._hparams_name
    why = _why_no_data(found)
    if why is not None:
        log.warning(
            "the hyperparameters of %s are not in our checkpoints, which hold data alone: %s; "
            "leave such arguments out: save_hyperparameters(ignore=[...])",
            type(holder).__name__,
            why,
        )
        return {}
    return found


def _why_no_data(state: Mapping[str, Any]) -> str | None:
    """What in ``state`` could not be read again without running code; None: nothing."""
    buffer = io.BytesIO()
    try:
        torch.save(dict(state), buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:  # noqa: BLE001 - whatever a user's object makes of it
        named = re.search(r"GLOBAL (\S+)", str(error))
        return named[1] if named else next(iter(str(error).splitlines()), type(error).__name__)
    return None


def _check_data(state: Mapping[str, Any]) -> None:
    """Refuses to write what a run that goes on could not read.

    Raises:
        ConfigError: names the entry, and what it holds.
    """
    if _why_no_data(state) is None:
        return
    for key, value in state.items():
        why = _why_no_data({key: value})
        if why is not None:
            raise ConfigError(
                f"a hook has put {why} into the checkpoint, as {key!r}, and our checkpoints hold "
                "data alone",
                fix="put in numbers, strings, tensors, and lists and dictionaries of them",
            )


def lightning_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint of ours, or its plain parts, holds of Lightning (see ``saved_state``)."""
    held: dict[str, Any] = torch.load(io.BytesIO(state["task"]["lightning"]), weights_only=True)
    return held


def check_processes(own: Mapping[str, Any], processes: int) -> None:
    """Makes sure that as many processes can go on from there; ``own`` is our part of that state.

    Raises:
        ConfigError: it lies in the middle of an epoch, of another number of them.
    """
    before = own["world_size"]
    if own["batches"] is not None and before != processes:
        many = f"{before} process{'es' * (before > 1)}"
        raise ConfigError(
            f"the checkpoint lies in the middle of an epoch of {many}, "
            f"and these are {processes}: Lightning's order of samples follows it",
            fix=f"go on with {many}, or from the end of an epoch",
        )


def set_restored(frame: Any) -> None:
    """Nothing is to be restarted: the state is that between two batches, or two epochs."""
    for loop in (frame, frame.epoch_loop, frame.epoch_loop.val_loop):
        loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    for loop in (frame.epoch_loop.automatic_optimization, frame.epoch_loop.manual_optimization):
        loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False


def _version() -> str:
    import lightning

    return str(lightning.__version__)


def check_savable(optimizers: Mapping[str, Optimizer], cadence: Cadence) -> None:
    """Refuses before the first step what the first save could not hold.

    Raises:
        Unsupported: names the optimizer.
    """
    if not (cadence.save_at_end or cadence.save_every or cadence.save_every_epochs):
        return
    for optimizer in optimizers.values():
        if isinstance(optimizer, LBFGS):
            raise Unsupported(
                f"optimizer {type(optimizer).__name__} keeps lists of earlier steps, which a "
                "checkpoint of a run does not hold",
                fix="set checkpoint.at_end=false, and checkpoint.every_steps and every_epochs to "
                "null, and save by trainer.save_checkpoint; or take another optimizer",
            )
