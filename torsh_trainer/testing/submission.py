"""The contract of a launcher that submits as a test suite, with jobs that do without torch."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle

from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError
from torsh_trainer.launchers.base import LaunchContext
from torsh_trainer.launchers.job_folder import FOLDER, JOB, PREEMPTED, STATES, JobHandle, JobStatus
from torsh_trainer.launchers.plan import JobRequest, PlannedFile, write_plan
from torsh_trainer.launchers.submission import SubmitLauncher
from torsh_trainer.testing.environment import watch_outside

HOSTILE = (
    "two words",
    "it's",
    '"',
    "$HOME",
    "$(id)",
    "`id`",
    "a\nb",
    "*",
    ";",
    "\\",
    "-n",
    "%j",
    "",
)
"""Words that a shell, or a scheduler, would make something else of."""

_PATIENCE_S = 240.0


class SubmitLauncherContract:
    """What every submit launcher must do; a plugin's test is one class that inherits this one.

    ``launcher`` reaches a scheduler that runs a job of one process within seconds. Folders that the
    suite makes must be visible to jobs.
    """

    launcher: ClassVar[SubmitLauncher]

    # -- plans -----------------------------------------------------------------------------------

    def test_a_plan_looks_at_nothing_and_is_the_same_twice(self) -> None:
        with self._request("pass") as request:
            self.launcher.plan(request)  # imports what it needs
            with watch_outside() as seen:
                first = self.launcher.plan(request)
                second = self.launcher.plan(request)
            assert seen == [], "it looked outside"
            assert first == second
            assert {*request.files} <= {*first.files}, "it leaves out what the job reads"
            assert first.run_dir == request.run_dir
            assert [*request.run_dir.iterdir()] == [], "it has written something"

    def test_what_a_dry_run_shows_is_what_is_written(self) -> None:
        with self._request("pass") as request:
            context = LaunchContext(env={})
            shown = write_plan(self.launcher.plan_launch(request, context=context))
            plan = self.launcher.plan(request)
            self.launcher.wait(self.launcher.submit(plan), timeout_s=_PATIENCE_S)
            assert shown == write_plan(plan)
            for file in plan.files:
                assert file.path.read_text() == file.content
                assert file.path.stat().st_mode & 0o777 == file.mode

    def test_it_is_not_submitted_from_each_process_of_a_job(self) -> None:
        context = LaunchContext(env={}, found=World(0, 2, 0, 2, source="srun"))
        with self._request("pass") as request:
            error = self._error(lambda: self.launcher.plan_launch(request, context=context))
        assert "srun" in str(error)

    def test_it_starts_no_function_of_this_process(self) -> None:
        error = self._error(lambda: self.launcher.launch(print, context=LaunchContext(env={})))
        assert error.fix

    def test_a_launcher_is_a_frozen_value_that_travels(self) -> None:
        copy = pickle.loads(cloudpickle.dumps(self.launcher))
        assert copy == self.launcher
        assert hash(copy) == hash(self.launcher)

    # -- jobs ------------------------------------------------------------------------------------

    def test_words_and_folder_arrive_as_they_are(self) -> None:
        script = "import json, os, sys; json.dump([sys.argv[1:], os.getcwd()], open('told', 'w'))"
        with self._request(script, *HOSTILE, folder='it\'s $HOME "%j" a\nb') as request:
            handle, status = self._run(request)
            assert status.state == "succeeded", self._output(handle)
            told, folder = json.loads((request.folder / "told").read_text())
            assert tuple(told) == HOSTILE
            assert folder == str(request.folder)

    def test_the_handle_lies_in_the_folder_of_the_run(self) -> None:
        with self._request("print('hello from the job')") as request:
            handle, status = self._run(request)
            assert handle == JobHandle.read(request.run_dir)
            assert handle.launcher == self.launcher.name
            assert {*json.loads((request.run_dir / JOB).read_text())} == {
                *("launcher", "id", "run_dir", "host")
            }
            assert status == JobStatus("succeeded", exit_code=0)
            assert "hello from the job" in self._output(handle)
            assert self.launcher.result(handle) is None

    def test_a_job_that_fails_has_its_exit_code_and_the_cause_that_the_run_told(self) -> None:
        told = {"error": {"type": "TrainingError", "message": "the loss is nan", "fix": "less lr"}}
        script = (
            f"import json, pathlib, sys; run = pathlib.Path(sys.argv[1]); "
            f"(run / 'result.json').write_text(json.dumps({told!r})); sys.exit(3)"
        )
        with self._request(script, "{run}") as request:
            handle, status = self._run(request)
            assert (status.state, status.exit_code) == ("failed", 3)
            assert status.reason == "the loss is nan; less lr"
            assert self.launcher.result(handle) == told

    def test_a_job_that_is_cancelled_may_save_first(self) -> None:
        script = (
            "import pathlib, signal, sys, time\n"
            "run = pathlib.Path(sys.argv[1])\n"
            "def leave(*_): (run / 'saved').touch(); sys.exit(143)\n"
            "signal.signal(signal.SIGTERM, leave)\n"
            "(run / 'running').touch()\n"
            "time.sleep(3600)"
        )
        with self._request(script, "{run}") as request:
            handle = self.launcher.submit(self.launcher.plan(request))
            _wait_for(request.run_dir / "running")
            assert self.launcher.status(handle).state == "running"
            status = self.launcher.cancel(handle, grace_s=_PATIENCE_S)
            assert status.state == "cancelled"
            assert (request.run_dir / "saved").exists()
            assert self.launcher.status(handle).state == "cancelled"
            error = self._error(lambda: self.launcher.cancel(handle, grace_s=0))
            assert "has ended" in str(error)

    def test_a_job_that_does_not_leave_is_ended(self) -> None:
        script = (
            "import pathlib, signal, sys, time\n"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "(pathlib.Path(sys.argv[1]) / 'running').touch()\n"
            "time.sleep(3600)"
        )
        with self._request(script, "{run}") as request:
            handle = self.launcher.submit(self.launcher.plan(request))
            _wait_for(request.run_dir / "running")
            assert self.launcher.cancel(handle, grace_s=0.5).state == "cancelled"

    def test_what_the_scheduler_forgets_the_result_knows(self) -> None:
        with self._request("pass") as request:
            handle, _ = self._run(request)
            forgotten = JobHandle(handle.launcher, "999999999", handle.run_dir, handle.host)
            assert self.launcher.status(forgotten).state == "lost"
            result = request.run_dir / "result.json"
            for told, state in (
                ({"error": None}, "succeeded"),
                ({"error": {"type": "ConfigError", "message": "odd"}}, "failed"),
                ({"error": {"type": "Interrupted", "facts": {"signal": 15}}}, "failed"),
            ):
                result.write_text(json.dumps(told))
                assert self.launcher.status(forgotten).state == state
            (request.run_dir / FOLDER / PREEMPTED).touch()  # the job's script knew who stopped it
            assert self.launcher.status(forgotten).state == "preempted"
            os.utime(result, (0, 0))  # of an earlier run in this folder
            assert self.launcher.status(forgotten).state == "lost"

    def test_logs_are_followed_until_the_job_ends(self) -> None:
        script = (
            "import pathlib, sys, time\n"
            "run = pathlib.Path(sys.argv[1])\n"
            "print('first', flush=True)\n"
            "while not (run / 'go').exists(): time.sleep(0.05)\n"
            "print('last')"
        )
        with self._request(script, "{run}") as request:
            handle = self.launcher.submit(self.launcher.plan(request))
            pieces = self.launcher.logs(handle, follow=True)
            text = ""
            while "first" not in text:
                text += next(pieces)
            assert "last" not in text
            (request.run_dir / "go").touch()
            assert "last" in text + "".join(pieces)
            error = self._error(lambda: list(self.launcher.logs(handle, rank=7)))
            assert "rank-7.log" in str(error)

    # -- how it is done ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def _request(self, script: str, *words: str, folder: str = "here") -> Iterator[JobRequest]:
        """A job that runs ``script``; ``{run}`` among its words is the run's folder."""
        with tempfile.TemporaryDirectory() as name:
            home = Path(name).resolve() / folder
            run_dir = home / "run"
            run_dir.mkdir(parents=True)
            told = [str(run_dir) if word == "{run}" else word for word in words]
            yield JobRequest(
                run_dir=run_dir,
                folder=home,
                arguments=("-c", script, *told),
                python=sys.executable,
                files=(PlannedFile(run_dir / FOLDER / "run.yaml", "{}\n"),),
            )

    def _run(self, request: JobRequest) -> tuple[JobHandle, JobStatus]:
        handle = self.launcher.submit(self.launcher.plan(request))
        status = self.launcher.wait(handle, timeout_s=_PATIENCE_S)
        assert status.ended, f"it has not ended: {status}"
        assert status.state in STATES
        return handle, status

    def _output(self, handle: JobHandle) -> str:
        return "".join(self.launcher.logs(handle))

    def _error(self, call: Any) -> ConfigError:
        try:
            call()
        except ConfigError as error:
            return error
        raise AssertionError("it was not refused")


def _wait_for(path: Path) -> None:
    end = time.monotonic() + _PATIENCE_S
    while not path.exists():
        assert time.monotonic() < end, f"there is no {path}"
        time.sleep(0.05)
