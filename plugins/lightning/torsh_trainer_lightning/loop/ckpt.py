"""Reading a ``.ckpt`` of Lightning: data first, code only where the user says so."""

from __future__ import annotations

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.migration import pl_legacy_patch
from lightning.pytorch.utilities.migration.utils import _pl_migrate_checkpoint

from torsh_trainer.errors import ConfigError


def read_ckpt(path: str, *, trusted: bool) -> dict[str, Any]:
    """The content of the ``.ckpt`` at ``path``, as Lightning of today would have written it.

    ``trusted`` unpickles whatever it holds, which runs the code that it names.

    Raises:
        ConfigError: there is no such file, it is no checkpoint of Lightning, or it holds more than
            data and is not trusted.
    """
    if not Path(path).is_file():
        raise ConfigError(
            f"there is no checkpoint file {path}", fix="give the path of a .ckpt file of Lightning"
        )
    try:
        with pl_legacy_patch():
            found = torch.load(path, map_location="cpu", weights_only=not trusted)
    except pickle.UnpicklingError as error:
        if not zipfile.is_zipfile(path):
            raise _not_one(path, "it is no file of torch.save") from error
        raise ConfigError(
            f"{path} holds more than data: reading it would run code{_find_refused_name(error)}",
            fix="where you trust its author, set task.trust_ckpt=true",
            path=path,
        ) from error
    except Exception as error:  # whatever torch.load makes of a file that is something else
        raise _not_one(path, f"{type(error).__name__}: {_first_line(error)}") from error
    if not isinstance(found, dict) or "state_dict" not in found:
        raise _not_one(path, "it has no state_dict")
    if "pytorch-lightning_version" not in found:
        raise _not_one(path, "it does not say which Lightning has written it")
    migrated: dict[str, Any] = _pl_migrate_checkpoint(found, path)
    return migrated


def _not_one(path: str, why: str) -> ConfigError:
    return ConfigError(
        f"{path} is no checkpoint of Lightning: {why}",
        fix="give a .ckpt file that trainer.save_checkpoint or ModelCheckpoint has written",
        path=path,
    )


def _find_refused_name(error: Exception) -> str:
    """What a file names that torch does not take for data."""
    found = re.search(r"GLOBAL (\S+)", str(error))
    return f" ({found[1]})" if found else ""


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")
