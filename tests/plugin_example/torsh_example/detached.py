"""Jobs of this machine that outlive the terminal: the smallest scheduler that there is."""

from __future__ import annotations

import os
import shlex
import signal
from dataclasses import dataclass
from pathlib import Path

from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.launchers.batch.script import begin_script
from torsh_trainer.launchers.job_folder import FOLDER, OUTPUT, JobHandle, JobStatus
from torsh_trainer.launchers.plan import JobRequest, PlannedFile
from torsh_trainer.launchers.submission import SubmissionPlan, SubmitLauncher


@dataclass(frozen=True)
class Detached(SubmitLauncher):
    """Starts the run in a session of its own; its number is that of the process."""

    name = "detached"
    client = "bash"

    wait_for_end: bool = False
    dry_run: bool = False

    def plan(self, request: JobRequest) -> SubmissionPlan:
        folder = request.run_dir / FOLDER
        work = [
            *begin_script(request),
            f'{shlex.join([request.python, *request.arguments])} "${{again[@]}}"',
            "code=$?",
            f'echo $code > "$run/{FOLDER}/code.$$"',
        ]
        start = [
            f"run={shlex.quote(str(request.run_dir))}",
            f'setsid bash "$run/{FOLDER}/work.sh" < /dev/null >> "$run/{OUTPUT}" 2>&1 &',
            "echo $!",
        ]
        files = (
            PlannedFile(folder / "work.sh", "\n".join(work) + "\n"),
            PlannedFile(folder / "start.sh", "\n".join(start) + "\n"),
        )
        return SubmissionPlan(
            files=(*request.files, *files),
            commands=(("bash", str(folder / "start.sh")),),
            run_dir=request.run_dir,
        )

    def read_id(self, output: str) -> str:
        return output.strip()

    def explain_refusal(self, said: str) -> ConfigError | ResourceError:
        return ResourceError(f"bash: {said}", fix="see the limits of this machine (ulimit -a)")

    def ask(self, handle: JobHandle) -> JobStatus | None:
        told = handle.home / FOLDER / f"code.{handle.id}"
        if Path(f"/proc/{handle.id}").exists() and not told.exists():
            return JobStatus("running")
        if not told.exists():
            return None
        code = int(told.read_text() or 0)
        return JobStatus("failed" if code else "succeeded", exit_code=code)

    def end(self, handle: JobHandle) -> None:
        self._send(handle, signal.SIGKILL)
        (handle.home / FOLDER / f"code.{handle.id}").write_text("137\n")

    def ask_to_save(self, handle: JobHandle) -> None:
        self._send(handle, signal.SIGTERM)

    def _send(self, handle: JobHandle, number: int) -> None:
        try:
            os.killpg(int(handle.id), number)
        except ProcessLookupError as error:
            fix = f"jobs status {handle.run_dir} tells how it went"
            raise ResourceError(f"process {handle.id} has just ended", fix=fix) from error
