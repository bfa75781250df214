"""Batch systems in whose jobs mpirun starts the processes: what their launchers share."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.launchers.batch import options
from torsh_trainer.launchers.batch.script import begin_script
from torsh_trainer.launchers.job_folder import FOLDER, OUTPUT, JobHandle
from torsh_trainer.launchers.plan import JobRequest, PlannedFile
from torsh_trainer.launchers.submission import SubmissionPlan, SubmitLauncher, run_client

_TIME = re.compile(r"\d+:[0-5]\d:[0-5]\d")
_CONTROLLER = re.compile(r"cannot connect|connection refused|unreachable|not responding", re.I)
_NAME_LENGTH = 15
"""PBS takes no longer names of jobs."""


@dataclass(frozen=True)
class MpirunBatch(SubmitLauncher):
    """``nodes`` times ``ntasks_per_node`` processes, which ``mpirun`` starts in a job's script.

    ``ntasks_per_node`` auto is ``gpus_per_node``, else 1; a single process needs no mpirun.
    ``mpirun`` are the words before ``-n NUMBER``. What is None is left to the scheduler. ``time``
    is HH:MM:SS. ``requeue`` lets the scheduler begin the job again, which then goes on from its
    checkpoint. ``python`` is the interpreter on the nodes; None is this one's path.

    Raises:
        ConfigError: a knob makes no sense.
    """

    name: ClassVar[str]
    refusals: ClassVar[Mapping[str, str]]
    """Words of a refusal (a pattern) and the knob that they are about."""

    nodes: int = 1
    ntasks_per_node: int | str = "auto"
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    time: str | None = None
    queue: str | None = None
    project: str | None = None
    job_name: str | None = None
    requeue: bool = True
    mpirun: tuple[str, ...] = ("mpirun",)
    python: str | None = None
    wait_for_end: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node", "cpus_per_task"):
            options.check_count(name, getattr(self, name))
        if self.ntasks_per_node != "auto":
            options.check_count("ntasks_per_node", self.ntasks_per_node)
        options.check_memory(self.mem)
        for name in ("queue", "project", "job_name", "python"):
            options.check_text(name, getattr(self, name))
        if self.time is not None and _TIME.fullmatch(self.time) is None:
            raise ConfigError(
                f"launcher.time={self.time} is not HH:MM:SS",
                fix="write '12:00:00', in YAML in quotation marks",
            )
        if not self.mpirun:
            raise ConfigError("launcher.mpirun is empty", fix="leave it at [mpirun]")

    @property
    def elsewhere(self) -> bool:
        return self.python is not None

    @property
    def tasks_per_node(self) -> int:
        """Processes on each node."""
        if self.ntasks_per_node != "auto":
            return int(self.ntasks_per_node)
        return self.gpus_per_node or 1

    def plan_script(self, request: JobRequest, *, address: str) -> PlannedFile:
        """The script; ``address`` is bash for the first host of the job."""
        size = self.nodes * self.tasks_per_node
        words = shlex.join([self.python or request.python, *request.arguments])
        lines = [
            *begin_script(request),
            # Not by the scheduler, which takes names of files apart and writes them at the end.
            f'exec >> "$run/{OUTPUT}" 2>&1',
        ]
        if self.cpus_per_task is not None:
            lines.append(f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{self.cpus_per_task}}}"')
        if size == 1:
            lines.append(f'{words} "${{again[@]}}"')
        else:
            lines += [
                f"first={address}",
                # By env: not every mpirun passes variables on to other hosts.
                f"{shlex.join([*self.mpirun, '-n', str(size)])} \\",
                '    env MASTER_ADDR="$first" PYTHONPATH="${PYTHONPATH:-}" \\',
                f'    {words} "${{again[@]}}"',
            ]
        lines += ["code=$?", "exit $code"]  # not what the trap comes to
        path = request.run_dir / FOLDER / "submit.sh"
        return PlannedFile(path, "\n".join(lines) + "\n", 0o755)

    def plan_name(self, request: JobRequest) -> str:
        """The name of the job: letters, digits, dots and dashes, a letter first."""
        name = self.job_name or "_".join(request.run_dir.parts[-2:])
        plain = re.sub(r"[^0-9A-Za-z_.-]", "_", name)
        return (plain if plain[0].isalpha() else f"j{plain}")[:_NAME_LENGTH]

    def make_plan(self, request: JobRequest, *command: str, script: PlannedFile) -> SubmissionPlan:
        """The plan that submits ``script`` by ``command``."""
        return SubmissionPlan(
            files=(*request.files, script), commands=(command,), run_dir=request.run_dir
        )

    def explain_refusal(self, said: str) -> ConfigError | ResourceError:
        words = " ".join(said.split())[:400]
        if _CONTROLLER.search(words):
            return ResourceError(
                f"{self.client} does not reach the scheduler: {words}",
                fix="submit from a login node of the cluster",
            )
        for pattern, knob in self.refusals.items():
            if re.search(pattern, words, re.I):
                value = getattr(self, knob)
                return ConfigError(
                    f"launcher.{knob}={value}: {self.client} says {words}",
                    fix=f"ask the cluster which {knob} there is",
                )
        return ConfigError(
            f"{self.client} refuses the job: {words}",
            fix="look at the knobs of the launcher; launcher.dry_run=true shows the command",
        )

    def signal(self, handle: JobHandle, *command: str) -> None:
        """Runs a program that ends a job or sends it a signal."""
        done = run_client((*command, handle.id))
        if done.returncode:
            raise ResourceError(
                f"{command[0]}: {' '.join(done.stderr.split())}",
                fix=f"jobs status {handle.run_dir} tells whether it has ended",
            )
