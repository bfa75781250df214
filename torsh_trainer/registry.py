"""Names of things that are installed, as strings: nothing here is imported until it is chosen.

Entry-point groups that a plugin distribution may use:

``torsh_trainer.plugins``     NAME = package      its ``conf/`` and ``recipes/`` join the search
``torsh_trainer.strategies``  NAME = module:Class usable as ``Trainer(strategy="NAME")``
``torsh_trainer.verbs``       NAME = module:func  a word of the command line; argv -> exit code
``torsh_trainer.backends``    NAME = module:func  tells torch.distributed of the backend NAME
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torsh_trainer.errors import ConfigError, nearest
from torsh_trainer.importing import collector_at_rest

STRATEGIES = {
    "auto": "torsh_trainer.strategies.auto:Auto",
    "single": "torsh_trainer.strategies.single:Single",
    "dp": "torsh_trainer.strategies.dp:DP",
    "ddp": "torsh_trainer.strategies.ddp:DDP",
    "fsdp": "torsh_trainer.strategies.fsdp:FSDP",
    "nccl": "torsh_trainer.strategies.builtin:NCCL",
    "gloo": "torsh_trainer.strategies.builtin:Gloo",
    "mpi": "torsh_trainer.strategies.builtin:MPI",
}
DISTRIBUTIONS = {
    ("comm", "mpi"): "torsh-trainer-mpi",
    ("launcher", "mpi"): "torsh-trainer-mpi",
    ("strategy", "horovod"): "torsh-trainer-horovod",
    ("strategy", "deepspeed"): "torsh-trainer-deepspeed",
    ("task", "lightning"): "torsh-trainer-lightning",
}
"""Options that a plugin of ours brings: what to install where one is asked for and missing."""
VERBS = {
    "checkpoint": "torsh_trainer.checkpoint.door.command:main",
    "comm": "torsh_trainer.bench.command:main",
    "rerun": "torsh_trainer.__main__:rerun",
    "report": "torsh_trainer.__main__:report",
    "verify": "torsh_trainer.__main__:verify",
    "translate": "torsh_trainer.__main__:translate",
}


@cache
def strategies() -> dict[str, str]:
    """Strategy name -> ``module:Class``, the built-in ones and those of installed plugins."""
    return {**STRATEGIES, **_installed("torsh_trainer.strategies")}


@cache
def verbs() -> dict[str, str]:
    """Verb -> ``module:function``."""
    return {**VERBS, **_installed("torsh_trainer.verbs")}


@cache
def backends() -> dict[str, str]:
    """Backend that a plugin brings -> ``module:function``, called as ``function(world, store)``.

    It is called in every process of a job that asks for the backend, and in no other, once the
    processes have met in ``store``; it raises a TorshError where it cannot serve.
    """
    return _installed("torsh_trainer.backends")


@cache
def plugin_folders() -> dict[str, Path]:
    """Plugin name -> folder of its package; found without importing the package.

    One whose package is gone is said to be, and left out: who does not use it goes on.
    """
    folders = {}
    for name, package in sorted(_installed("torsh_trainer.plugins").items()):
        spec = find_spec(package.split(".")[0])
        if spec is None or not spec.submodule_search_locations:
            print(
                f"note: plugin {name!r} is registered, but its package {package!r} cannot be "
                f"found; reinstall the distribution that registers it, or uninstall it ({name})",
                file=sys.stderr,
            )
            continue
        folders[name] = Path(next(iter(spec.submodule_search_locations)), *package.split(".")[1:])
    return folders


def load(reference: str) -> Any:
    """The object behind ``package.module:name``."""
    module, _, name = reference.partition(":")
    with collector_at_rest():
        return getattr(importlib.import_module(module), name)


def strategy_class(name: str) -> Any:
    """The Strategy class called ``name``.

    Raises:
        ConfigError: nothing of that name is installed; the nearest names are offered.
    """
    known = strategies()
    if name not in known:
        raise ConfigError(f"unknown strategy {name!r}", fix=nearest(name, known), name=name)
    return load(known[name])


def _installed(group: str) -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group=group)}
