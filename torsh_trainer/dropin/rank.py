"""One process of a drop-in job: the script runs in it as ``python SCRIPT`` would run it."""

from __future__ import annotations

import os
import sys
import types
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torsh_trainer.dropin import alias
from torsh_trainer.dropin.recorded import recording
from torsh_trainer.environments.world import World
from torsh_trainer.errors import TrainingError


@dataclass(frozen=True)
class ScriptJob:
    """What every process is given: the script, its arguments, and how the processes meet."""

    script: str
    arguments: tuple[str, ...]
    local_rank: bool = False
    backend: str = "auto"
    network_interface: str | None = None
    startup_timeout_s: float = 300.0
    stall_warning_s: float = 60.0
    stall_shutdown_s: float = 0.0


class ScriptExit(TrainingError):
    """The script has ended itself with an exit code that is not 0."""


def run_script(world: World, job: ScriptJob) -> None:
    """Runs it to its end.

    Raises:
        ScriptExit: it called ``sys.exit`` with something that means a failure.
    """
    # Imported in the processes that run: the parent has no use for torch.
    from torsh_trainer.comm.base import CommOptions
    from torsh_trainer.dropin.negotiation.connection import StallCheck
    from torsh_trainer.dropin.session import Seat, session

    stalls = StallCheck(job.stall_warning_s, job.stall_shutdown_s)
    options = CommOptions(
        backend=job.backend,
        network_interface=job.network_interface,
        startup_timeout_s=job.startup_timeout_s,
        timeout_s=_FOREVER_S,
    )
    session.set_place(Seat(world, options, stalls))
    _set_variables(world)
    alias.install()
    file = file_of(job.script)  # before the script goes elsewhere
    if job.local_rank:
        job = replace(job, arguments=(f"--local_rank={world.local_rank}", *job.arguments))
    try:
        try:
            _run(job, file)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        _check_saved()
    except SystemExit as end:
        session.abandon()
        words = f"exit code {end.code}" if isinstance(end.code, int) else str(end.code)
        raise ScriptExit(
            f"rank {world.rank}: {job.script} ended with {words}", fix="its own output says why"
        ) from None
    except BaseException as error:
        error.__traceback__ = _drop_own_frames(error.__traceback__, file)
        session.abandon()
        raise


def _check_saved() -> None:
    """Raises Unsupported: stage 3 has kept something from being saved."""
    gathering: Any = sys.modules.get("torsh_trainer.dropin.zero.gathering")
    if gathering is not None:
        gathering.check_saved()


_FOREVER_S = 30 * 24 * 3600.0
"""Horovod bounds no collective: one begins when all ranks have asked for it."""


def file_of(script: str) -> str:
    """What ``__file__`` is, and what a traceback says, where ``python SCRIPT`` runs it."""
    return str(Path.cwd() / script)


def _run(job: ScriptJob, file: str) -> None:
    """The script as ``__main__``, with its folder first on the path, and its own ``sys.argv``."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=file, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    sys.argv[:] = [job.script, *job.arguments]
    # Ours stands behind the script's folder; processes that the script starts find it there.
    sys.path[:] = [str(Path(file).resolve().parent), str(alias.SHIM), *_without_here(sys.path)]
    root = str(Path(__file__).parents[2])
    known = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(alias.SHIM), *known, root])
    recording.start(is_torch_here=True, leave=sys.exit)
    code = compile(Path(file).read_bytes(), file, "exec")
    exec(code, main.__dict__)  # the user's script is what this process is for


def _without_here(paths: list[str]) -> list[str]:
    """``python -m`` puts the current folder first, which ``python SCRIPT`` does not."""
    here = str(Path.cwd())
    return paths[1:] if paths and paths[0] in ("", here) else list(paths)


def _set_variables(world: World) -> None:
    """Those that Horovod's launcher sets, which scripts read."""
    place = {
        "RANK": world.rank,
        "SIZE": world.size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_SIZE": world.local_size,
        "CROSS_RANK": world.node_rank,
        "CROSS_SIZE": world.nodes,
    }
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in place.items()})


def _drop_own_frames(trace: types.TracebackType | None, file: str) -> types.TracebackType | None:
    """A traceback that begins in the script."""
    at = trace
    while at is not None and at.tb_frame.f_code.co_filename != file:
        at = at.tb_next
    return at or trace


def cut_traceback(text: str, file: str) -> str:
    """What the user wrote of a traceback that has been through other processes."""
    lines = text.splitlines()
    for at, line in enumerate(lines):
        if line.lstrip().startswith(f'File "{file}"'):
            return "\n".join(["Traceback (most recent call last):", *lines[at:]])
    return text
