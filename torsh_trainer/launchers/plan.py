"""What a launcher would do, as values: files to write, and commands as lists of arguments.

``launcher.dry_run=true`` prints what ``Launcher.plan_launch`` gives, and does nothing of it. Every
launcher that plans shares this: what is shown is what is used.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class JobRequest:
    """A run that is to be started somewhere: plain values, without secrets.

    ``arguments`` are the words after Python that every process of the job runs in ``folder``;
    ``files`` are what these words read, below ``run_dir``. All paths are absolute. ``python`` is
    the interpreter of this process.
    """

    run_dir: Path
    folder: Path
    arguments: tuple[str, ...]
    python: str
    files: tuple[PlannedFile, ...] = ()


@dataclass(frozen=True)
class PlannedFile:
    """A file as it is to be written, and its mode."""

    path: Path
    content: str
    mode: int = 0o644


@dataclass(frozen=True)
class LaunchPlan:
    """Files to write, then commands to run, in their order."""

    files: tuple[PlannedFile, ...] = ()
    commands: tuple[tuple[str, ...], ...] = ()


def write_plan(plan: LaunchPlan) -> str:
    """``plan`` to be read, and to be cut up again: each file whole, each command for a shell."""
    parts = []
    for file in plan.files:
        size = len(file.content.encode())
        parts.append(f"--- {shlex.quote(str(file.path))} ({size} bytes)\n{file.content}")
    parts += [f"--- command\n{shlex.join(command)}\n" for command in plan.commands]
    return "".join(parts)
