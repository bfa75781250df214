"""What a run takes of Lightning from a checkpoint of ours, and who is told of it."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.trainer import call

from torsh_trainer.checkpoint.marks import resolve_marks
from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError
from torsh_trainer_lightning.loop.facade import Facade
from torsh_trainer_lightning.loop.hooked import LOAD, OPTIMIZERS, WEIGHTS, Whole, is_hooked
from torsh_trainer_lightning.loop.saved import hyper_parameters


def lightning_state(state: Mapping[str, Any], *, trusted: bool | None = None) -> dict[str, Any]:
    """What a checkpoint of ours, or its plain parts, holds of Lightning, with marks.

    ``trusted``: with what was saved as code; None leaves that out.

    Raises:
        ConfigError: there is code, and it is not trusted.
    """
    own, objects = state["task"]["lightning"], state["task"].get("objects")
    held: dict[str, Any] = torch.load(io.BytesIO(own), map_location="cpu", weights_only=True)
    if objects is None or trusted is None:
        return held
    if not trusted:
        raise ConfigError(
            "the checkpoint holds objects, which were saved under task.trust_ckpt=true: reading "
            "them would run code",
            fix="where you trust its author, set task.trust_ckpt=true",
        )
    more = torch.load(io.BytesIO(objects), map_location="cpu", weights_only=False)
    return {**held, **more}


def tell_of_load(
    facade: Facade, comm: Communicator, state: Mapping[str, Any], *, trusted: bool, trains: bool
) -> dict[str, Any]:
    """What a checkpoint has of Lightning, once the hooks of module and callbacks had it.

    States of optimizers are in it only where a hook has changed them. Collective.

    Raises:
        ConfigError: it is not trusted, or what the hooks leave does not fit.
    """
    held = lightning_state(state, trusted=trusted)
    changed = held["torsh_trainer"].get("changed_weights", False)
    hooked = changed or is_hooked(facade, LOAD)
    whole = Whole(facade, comm, everywhere=True) if hooked else None
    found = complete_state(held, facade, whole)
    connector = facade._checkpoint_connector
    connector._loaded_checkpoint = found
    call._call_lightning_module_hook(facade, LOAD, found)
    if whole is not None and (changed or whole.keep(found.get(WEIGHTS)) is not None):
        load_weights(facade, found)
    connector.restore_datamodule()
    connector.restore_callbacks()
    connector._loaded_checkpoint = {}
    if whole is None or whole.is_own(found.get(OPTIMIZERS)):
        found.pop(OPTIMIZERS, None)
    elif OPTIMIZERS not in found and trains:
        raise ConfigError(
            f"a hook {LOAD} has taken {OPTIMIZERS!r} out of the checkpoint",
            fix="leave it in; to begin with fresh optimizers, start a new run",
        )
    return found


def complete_state(held: dict[str, Any], facade: Facade, whole: Whole | None) -> dict[str, Any]:
    """The dictionary that hooks are given after a load: as Lightning's, where there is a whole.

    Hyperparameters that could not be saved are those of today's module.
    """
    own = held["torsh_trainer"]
    entries = {WEIGHTS: {}} if whole is None else dict(whole.entries)
    found = resolve_marks(held, dict(entries[WEIGHTS]).get)
    if own.get("changed_weights"):
        entries.pop(WEIGHTS)
    found = {**found, **entries, "torsh_trainer": own}
    for holder in filter(None, (facade.lightning_module, facade.datamodule)):
        for key, value in hyper_parameters(holder).items():
            found.setdefault(key, value)
    return found


def load_weights(facade: Facade, found: Mapping[str, Any]) -> None:
    """Takes the weights that hooks have left, as strictly as the module wants it.

    Raises:
        ConfigError: names differ, or shapes.
    """
    module, strategy = facade.lightning_module, facade.strategy
    try:
        strategy.load_model_state_dict(found, strict=module.strict_loading)
    except (ConfigError, KeyError, RuntimeError) as error:
        said = error.sentence if isinstance(error, ConfigError) else str(error)
        raise ConfigError(
            "what the checkpoint hooks have left as 'state_dict' does not fit the module: "
            + " ".join(said.split()),
            fix="put back in on_load_checkpoint what on_save_checkpoint takes out, or set "
            "self.strict_loading = False",
        ) from error


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
