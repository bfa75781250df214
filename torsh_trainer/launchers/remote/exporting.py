"""Which variables of this process the workers on other hosts have."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torsh_trainer.errors import ConfigError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?", re.ASCII)
_OF_A_PLACE = frozenset(
    [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    ]
)


def check_names(names: Sequence[str]) -> None:
    """Refuses what is no name of a variable (with ``*`` at its end: the beginning of names).

    Raises:
        ConfigError: one is none, is a value, or is the launcher's own to say.
    """
    for name in names:
        if name in _OF_A_PLACE:
            raise ConfigError(
                f"launcher.export: {name} is what the launcher tells each process",
                fix="leave it out",
            )
        if _NAME.fullmatch(name) is None:
            shown = name.partition("=")[0]
            raise ConfigError(
                f"launcher.export: {shown!r} is no name of a variable",
                fix="give names alone, as in [HF_TOKEN, 'NCCL_*']: values are taken from here, and "
                "stand in no command line",
            )


def find_exported(names: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """The variables of ``env`` that ``names`` name.

    Raises:
        ConfigError: one that is named whole is not set.
    """
    found: dict[str, str] = {}
    for name in names:
        if name.endswith("*"):
            start = name[:-1]
            found |= {key: value for key, value in env.items() if key.startswith(start)}
        elif name in env:
            found[name] = env[name]
        else:
            raise ConfigError(
                f"launcher.export names {name}, which is not set here",
                fix=f"export {name}=..., or leave it out",
            )
    return {key: value for key, value in found.items() if key not in _OF_A_PLACE}
