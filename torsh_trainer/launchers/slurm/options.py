"""Knobs of the Slurm launcher, checked; and options that belong to a knob."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from torsh_trainer.errors import ConfigError
from torsh_trainer.launchers.batch.options import check_long_options, check_text

PASSED_ON = (
    *("gpus_per_node", "mem", "time", "partition", "account", "qos", "constraint", "signal"),
)
"""Knobs that are an option of sbatch under their own name, where they are set."""

_PLACES = {
    "nodes": "launcher.nodes",
    "ntasks": "launcher.nodes and launcher.ntasks_per_node",
    "ntasks-per-node": "launcher.ntasks_per_node",
    "cpus-per-task": "launcher.cpus_per_task",
}
OWNED_BY_SBATCH: Mapping[str, str] = {
    **_PLACES,
    **{knob.replace("_", "-"): f"launcher.{knob}" for knob in PASSED_ON},
    "job-name": "launcher.job_name",
    "output": "launcher.output",
    "requeue": "launcher.requeue",
    "no-requeue": "launcher.requeue",
    "chdir": "",
    "parsable": "",
    "open-mode": "",
    "test-only": "",
    "wait": "launcher.wait_for_end",
    "wrap": "",
    "array": "",
}
OWNED_BY_SRUN: Mapping[str, str] = {
    **_PLACES,
    "kill-on-bad-exit": "",
    "container-image": "launcher.container_image",
    "container-mounts": "launcher.container_mounts",
    "container-workdir": "",
    "multi-prog": "",
    "pty": "",
}
_WHY = {
    "array": "each job of a sweep is a submission of its own: -m launcher=slurm",
    "het-group": "a heterogeneous job has groups of nodes that differ, and the processes of a run "
    "are alike; leave it out",
}
_WHOLE = {"gpus", "no-kill", "mem-bind"}
"""Options of Slurm's that are the beginning of another one's name, or look so."""

_SIGNAL = re.compile(r"USR1@([1-9]\d*)")
_TIME = re.compile(r"(?:(\d+)-(\d+)(?::(\d+))?(?::(\d+))?|(?:(\d+):)?(\d+):(\d+)|UNLIMITED)", re.I)


def check_time(value: int | str | None, signal: str | None) -> None:
    """Refuses a time that might mean something else, and a warning that comes too late or early."""
    warned = None if signal is None else _SIGNAL.fullmatch(signal)
    if signal is not None and warned is None:
        raise ConfigError(
            f"launcher.signal={signal} cannot be honoured: a run that is to save and wait again is "
            "told by USR1, sent to its tasks (B: reaches the script alone)",
            fix="write USR1@120, or null for no warning ahead of the limit",
        )
    if value is None:
        return
    found = _TIME.fullmatch(str(value))
    if found is None or isinstance(value, int):
        raise ConfigError(
            f"launcher.time={value} has no unit, and YAML reads 12:00:00 as 43200",
            fix="write it with a colon or a dash, and in YAML in quotation marks: '12:00:00', "
            "'30:00' (minutes), '1-0' (days)",
        )
    limit = _seconds(found)
    if limit is not None and warned is not None and limit <= int(warned[1]) + 60:
        raise ConfigError(
            f"launcher.time={value} leaves nothing to train before launcher.signal={signal}, which "
            "Slurm sends up to a minute early",
            fix="give more time, or a shorter warning",
        )


def _seconds(found: re.Match[str]) -> int | None:
    if found[0].upper() == "UNLIMITED":
        return None
    days, of_days, minutes, seconds, hours, first, second = (int(x or 0) for x in found.groups())
    if "-" in found[0]:
        return ((days * 24 + of_days) * 60 + minutes) * 60 + seconds
    return (hours * 60 + first) * 60 + second


def check_output(value: str | None) -> None:
    """Refuses what ``jobs logs`` could not find again."""
    if value is not None and ("\\" in value or "%" in value.replace("%j", "")):
        raise ConfigError(
            f"launcher.output={value}: of Slurm's patterns only %j, the job's number, is known",
            fix="leave the others out; a relative path begins in the run's folder",
        )


def write_output(run_dir: Path, output: str) -> str:
    """``launcher.output`` below ``run_dir`` as Slurm reads it: a ``%`` of a folder is doubled.

    Raises:
        ConfigError: the folder holds a backslash, by which Slurm reads a whole name otherwise.
    """
    if "\\" in str(run_dir):
        raise ConfigError(
            f"{run_dir} holds a backslash, which Slurm drops from the names of outputs",
            fix="choose another folder (hydra.run.dir)",
        )
    folder = str(run_dir).replace("%", "%%")
    return output if output.startswith("/") else f"{folder}/{output}"


def check_container(image: str | None, mounts: Sequence[str]) -> None:
    """Refuses mounts without an image, and those that pyxis would take apart."""
    check_text("container_image", image)
    if mounts and image is None:
        raise ConfigError(
            "launcher.container_mounts has nothing to mount into",
            fix="set launcher.container_image",
        )
    for mount in mounts:
        if "," in mount or not mount.isprintable() or not mount:
            raise ConfigError(
                f"launcher.container_mounts: {mount!r} is no SOURCE:TARGET[:FLAGS]",
                fix="write each as an item of the list, without commas",
            )


def check_further(knob: str, words: Sequence[str], owned: Mapping[str, str]) -> None:
    """Refuses further options that are no long ones, or that a knob sets."""
    for word in words:
        if word.startswith(("--het", "--pack")):
            raise ConfigError(f"launcher.{knob}: {word} is not possible", fix=_WHY["het-group"])
    check_long_options(knob, words, owned, why=_WHY, whole=_WHOLE)
