"""What a checkpoint of ours holds of Lightning: its loops, and what the user's code keeps."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from lightning.pytorch.trainer import call
from omegaconf import Container, OmegaConf
from torch.optim import LBFGS, Optimizer

from torsh_trainer.checkpoint.marks import mark_tensors
from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError, Unsupported
from torsh_trainer.training.cadence import Cadence
from torsh_trainer_lightning.loop.facade import Facade
from torsh_trainer_lightning.loop.hooked import (
    NEEDED,
    OPTIMIZERS,
    SAVE,
    WEIGHTS,
    Whole,
    call_hooks,
    is_hooked,
    savers,
)

log = logging.getLogger(__name__)


class Saved(NamedTuple):
    """The part of a checkpoint that is Lightning's, and the weights that it does without."""

    parts: dict[str, bytes]
    left_out: frozenset[str] = frozenset()


def collect_state(
    facade: Facade,
    comm: Communicator,
    *,
    batches: int | None,
    freed: list[str],
    trusted: bool,
) -> Saved:
    """All that is beside weights, as Lightning's format has it: data, and marks (``marks``).

    ``batches`` are those of the epoch so far; None: none is under way. ``trusted``: what is no data
    is saved as code in a part of its own. ``freed`` are parameters that train, of a module that
    began with none. Collective where somebody has a hook.

    Raises:
        ConfigError: names the hook that has put in, or taken out, what no run could go on from.
    """
    connector = facade._logger_connector
    connector.settle()
    whole = Whole(facade, comm, everywhere=False) if is_hooked(facade, SAVE) else None
    state = _dictionary(facade, {} if whole is None else whole.entries)
    error: Exception | None = None
    saved = Saved({})
    try:
        by_key = {} if whole is None else call_hooks(facade, state)
        if whole is None or comm.world.is_rank_zero:
            own = {
                "world_size": comm.world.size,
                "batches": batches,
                "freed": freed,
                "order": facade.order.name,
                "data": facade.order.facts(facade.accumulate_grad_batches),
                "callback_metrics": dict(connector._callback_metrics),
                "logged_metrics": dict(connector._logged_metrics),
            }
            saved = _as_saved(facade, state, own, whole, by_key, trusted=trusted)
    except Exception as failed:  # noqa: BLE001 - raised below, once every rank has heard
        error = failed
    if whole is None:
        if error is not None:
            raise error
        return saved
    return _agree_on_state(comm, saved, error)


def _agree_on_state(comm: Communicator, saved: Saved, error: Exception | None) -> Saved:
    """What rank 0 saves; its error is raised on all ranks."""
    said = error
    if error is not None and not isinstance(error, ConfigError):
        sentence = f"a hook {SAVE} has failed on rank 0: {type(error).__name__}: {error}"
        said = ConfigError(sentence, fix="debug=true shows where")
    told = comm.broadcast_object((said, saved.left_out))
    if error is not None:
        raise error
    if told[0] is not None:
        raise told[0]
    return Saved(saved.parts, told[1])


def _dictionary(facade: Facade, entries: Mapping[str, Any]) -> dict[str, Any]:
    """What ``Trainer.save_checkpoint`` makes before it calls the hooks."""
    datamodule = facade.datamodule
    state: dict[str, Any] = {
        "epoch": facade.current_epoch,
        "global_step": facade.global_step,
        "pytorch-lightning_version": _version(),
        WEIGHTS: entries.get(WEIGHTS, {}),
        "loops": facade._checkpoint_connector._get_loops_state_dict(),
        "callbacks": call._call_callbacks_state_dict(facade),
    }
    if OPTIMIZERS in entries:
        state[OPTIMIZERS] = entries[OPTIMIZERS]
    state["lr_schedulers"] = [one.scheduler.state_dict() for one in facade.lr_scheduler_configs]
    for holder in (facade.lightning_module, datamodule):
        state.update(hyper_parameters(holder))
    if datamodule is not None:
        held = call._call_lightning_datamodule_hook(facade, "state_dict")
        if held:
            state[type(datamodule).__qualname__] = held
    return state


def hyper_parameters(holder: Any) -> dict[str, Any]:
    """Those of a module or a data module, as Lightning saves them."""
    if holder is None or not holder.hparams:
        return {}
    found: dict[str, Any] = {}
    if hasattr(holder, "_hparams_name"):
        found[holder.CHECKPOINT_HYPER_PARAMS_NAME] = holder._hparams_name
    if isinstance(holder.hparams, Container):
        found[holder.CHECKPOINT_HYPER_PARAMS_KEY] = holder.hparams
        found[holder.CHECKPOINT_HYPER_PARAMS_TYPE] = type(holder.hparams)
    else:
        found[holder.CHECKPOINT_HYPER_PARAMS_KEY] = dict(holder.hparams)
    return found


def _as_saved(
    facade: Facade,
    state: dict[str, Any],
    own: dict[str, Any],
    whole: Whole | None,
    by_key: Mapping[str, str],
    *,
    trusted: bool,
) -> Saved:
    """The dictionary after its hooks, as it is written."""
    left_out: frozenset[str] = frozenset()
    if whole is not None:
        left_out = _without_whole(facade, state, own, whole, by_key)
    settings = _plain_settings(facade, state)
    data, objects = {}, {}
    for key, value in state.items():
        try:
            held = mark_tensors(value, _no_weight if whole is None else whole.name_of)
        except ConfigError as part:
            raise _data_error(facade, key, part.sentence.removeprefix("it is "), by_key) from part
        why = _why_no_data({key: held})
        if why is None:
            data[key] = held
        elif trusted:
            objects[key] = value
        elif key in settings:
            log.warning(
                "the hyperparameters of %s are not in our checkpoints, which hold data alone: %s; "
                "leave such arguments out: save_hyperparameters(ignore=[...]), or set "
                "task.trust_ckpt=true",
                settings[key],
                why,
            )
        else:
            raise _data_error(facade, key, why, by_key)
    parts = {"lightning": _as_bytes({**data, "torsh_trainer": own})}
    if objects:
        parts["objects"] = _as_bytes(objects)
    return Saved(parts, left_out)


def _without_whole(
    facade: Facade,
    state: dict[str, Any],
    own: dict[str, Any],
    whole: Whole,
    by_key: Mapping[str, str],
) -> frozenset[str]:
    """Takes out of ``state`` what lies elsewhere, where that is still so; weights that nobody names
    any more.

    Raises:
        ConfigError: a hook has taken out, or changed, what a run that goes on needs.
    """
    gone = [key for key in (WEIGHTS, *NEEDED) if key not in state]
    if gone:
        raise ConfigError(
            f"{by_key.get(gone[0]) or savers(facade)} has taken {gone[0]!r} out of the checkpoint, "
            "and no run could go on from the rest",
            fix="leave it in",
        )
    if not whole.is_own(state.pop(OPTIMIZERS, None)):
        raise ConfigError(
            f"{by_key.get(OPTIMIZERS) or savers(facade)} has changed {OPTIMIZERS!r}, and our "
            "checkpoints hold the states of optimizers as the engine has them",
            fix="leave them as they are; for a file without them, add Lightning's "
            "ModelCheckpoint(save_weights_only=True) to task.callbacks",
        )
    left = whole.keep(state[WEIGHTS])
    if left is None:
        state[WEIGHTS] = {}
        return frozenset()
    own["changed_weights"] = True
    left_out = whole.missing_in(mark_tensors(state, whole.name_of))
    own["left_out"] = sorted(left_out)
    return left_out


def _plain_settings(facade: Facade, state: dict[str, Any]) -> dict[str, str]:
    """Makes data of OmegaConf's; whose hyperparameters lie under which key."""
    found = {}
    for holder in filter(None, (facade.lightning_module, facade.datamodule)):
        key = holder.CHECKPOINT_HYPER_PARAMS_KEY
        found[key] = type(holder).__name__
        if isinstance(state.get(key), Container):
            state[key] = OmegaConf.to_container(state[key], resolve=True)
            state.pop(holder.CHECKPOINT_HYPER_PARAMS_TYPE, None)
    return found


def _data_error(facade: Facade, key: str, what: str, by_key: Mapping[str, str]) -> ConfigError:
    who = by_key.get(key) or {
        "callbacks": "the state_dict of a callback",
        "lr_schedulers": "the state_dict of a scheduler",
    }.get(key, savers(facade))
    return ConfigError(
        f"{who} has put {what} into the checkpoint, as {key!r}, and our checkpoints hold data "
        "alone",
        fix="put in numbers, strings, tensors, and lists and dictionaries of them, or set "
        "task.trust_ckpt=true, which saves it as code that a resume runs",
    )


def _no_weight(tensor: Any) -> None:
    return None


def _as_bytes(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _why_no_data(state: Mapping[str, Any]) -> str | None:
    """What in ``state`` could not be read again without running code; None: nothing."""
    try:
        torch.load(io.BytesIO(_as_bytes(dict(state))), weights_only=True)
    except Exception as error:  # noqa: BLE001 - whatever a user's object makes of it
        named = re.search(r"GLOBAL (\S+)", str(error))
        return named[1] if named else next(iter(str(error).splitlines()), type(error).__name__)
    return None


def _version() -> str:
    import lightning

    return str(lightning.__version__)


def check_savable(optimizers: Mapping[str, Optimizer], cadence: Cadence) -> None:
    """Refuses before the first step what the first save could not hold.

    Raises:
        Unsupported: names the optimizer.
    """
    if not cadence.saves:
        return
    for optimizer in optimizers.values():
        if isinstance(optimizer, LBFGS):
            raise Unsupported(
                f"optimizer {type(optimizer).__name__} keeps lists of earlier steps, which a "
                "checkpoint of a run does not hold",
                fix="set checkpoint.at_end=false, and checkpoint.every_steps and every_epochs to "
                "null, and save by trainer.save_checkpoint; or take another optimizer",
            )
