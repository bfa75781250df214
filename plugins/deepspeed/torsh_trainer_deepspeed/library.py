"""The deepspeed package, loaded when the first engine is made: where, for what, and how told."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError, ResourceError

log = logging.getLogger(__name__)

MISSING = "pip install torsh-trainer-deepspeed"


def load(comm: Communicator) -> Any:
    """The package, on the accelerator that ``comm`` is on.

    DeepSpeed chooses its accelerator once, when it is imported, and by what it finds installed. A
    run without an accelerator says so beforehand: ``DS_ACCELERATOR=cpu``. It also looks up its
    device in LOCAL_RANK, now and later, which a launcher of ours does not set.

    Raises:
        ResourceError: it is not installed.
        ConfigError: it was imported before, for another kind of device.
    """
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(extensions_dir()))
    os.environ["LOCAL_RANK"] = str(comm.world.local_rank)
    device = comm.device
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        # Imported here: it takes seconds, and chooses its accelerator.
        import deepspeed
        from deepspeed.accelerator import get_accelerator
    except ImportError as error:
        raise ResourceError(f"DeepSpeed cannot be imported: {error}", fix=MISSING) from error
    # torch's names for collectives have changed, and DeepSpeed uses the old ones.
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning
    )
    chosen = get_accelerator().device_name()
    if chosen != device.type:
        raise ConfigError(
            f"DeepSpeed drives {chosen} in this process, and the run is on {device.type}",
            fix=f"set DS_ACCELERATOR={device.type}, or trainer.device={chosen}",
        )
    return deepspeed


def extensions_dir() -> Path:
    """Where operators are compiled and kept: the user's cache directory, by Python and torch."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    build = f"{sysconfig.get_config_var('SOABI')}-torch-{torch.__version__}"
    return Path(home) / "torsh-trainer" / "torch_extensions" / build


@contextlib.contextmanager
def building(operators: tuple[str, ...], comm: Communicator) -> Iterator[None]:
    """Tells of a compilation that is due within, and what is missing for it.

    Raises:
        ResourceError: it failed; the message has the compiler's last line.
    """
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    due = [name for name in operators if not (folder / name / f"{name}.so").exists()]
    if due and comm.world.is_main:
        log.warning(
            "DeepSpeed compiles %s, once: a minute or two; it stays in %s",
            " and ".join(due),
            folder,
        )
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # every rank would say that it has it
            yield
    except (RuntimeError, OSError) as error:
        if due and not all((folder / name / f"{name}.so").exists() for name in due):
            last = str(error.__cause__ or error).strip().splitlines()[-1]
            raise ResourceError(
                f"DeepSpeed could not compile {' and '.join(due)}: {last}",
                fix="it takes a C++ compiler (apt-get install g++) and room in "
                "TORCH_EXTENSIONS_DIR",
            ) from error
        raise
