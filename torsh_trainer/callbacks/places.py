"""Names that a callback's knobs give to files: they stay in the run directory."""

from __future__ import annotations

from pathlib import PurePath

from torsh_trainer.errors import ConfigError

TAKEN = (
    ".hydra",
    ".torsh_run",
    "checkpoints",
    "config.yaml",
    "logs",
    "provenance.json",
    "result.json",
)
"""What the run itself writes there."""


def in_run_directory(name: str, *, knob: str) -> str:
    """``name``, which lies within the run directory and takes the place of nothing of the run's.

    Raises:
        ConfigError: it leads out of the directory, is none, or is the name of a file of the run.
    """
    parts = PurePath(name).parts
    if not parts or ".." in parts or PurePath(name).is_absolute() or not name.isprintable():
        raise ConfigError(
            f"{knob}={name!r} names nothing in the run directory, where it belongs",
            fix="give a name without .. that does not begin with /; hydra.run.dir moves the whole "
            "directory",
        )
    if parts[0] in TAKEN:
        raise ConfigError(
            f"{knob}={name}: the run itself writes {parts[0]}", fix="give another name"
        )
    return name
