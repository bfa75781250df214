"""A run is submitted: shown, checked, handed over, waited for; and submitted again."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torsh_trainer import environments
from torsh_trainer.assemble import RunRequest, import_from, launcher_of, plan_run
from torsh_trainer.assemble.handover import (
    INSIDE,
    REQUEST,
    find_checkpoints,
    make_request,
    read_request,
    repeat_request,
)
from torsh_trainer.errors import ConfigError, ResourceError, TorshError, TrainingError
from torsh_trainer.launchers.base import LaunchContext, Launcher
from torsh_trainer.launchers.job_folder import FOLDER, JOB, JobHandle, JobStatus
from torsh_trainer.launchers.plan import write_plan
from torsh_trainer.launchers.submission import SubmissionPlan, SubmitLauncher
from torsh_trainer.utils.foreign import escape_controls

_DISK_LAG_S = 60.0


def show_plan(order: RunRequest, launcher: Launcher, env: Mapping[str, str]) -> dict[str, Any]:
    """Prints what ``launcher`` would write and run for ``order``, and does nothing of it."""
    context = LaunchContext(env=env, found=environments.detect(env))
    if order.run_dir is None:  # another process of a cluster's leads, and shows it
        return {}
    text = write_plan(launcher.plan_launch(make_request(order), context=context))
    print(escape_controls(text) if sys.stdout.isatty() else text, end="")
    return {}


def hand_over(order: RunRequest, launcher: Launcher, env: Mapping[str, str]) -> dict[str, Any]:
    """Submits ``order``, once it has been checked; waits where the launcher is told to.

    Returns result.json's content, or the handle as ``job`` where it does not wait.

    Raises:
        ConfigError: the configuration, or what is asked of the scheduler, cannot be honoured;
            nothing is left, which ``facts["unsent"]`` says.
        ResourceError: there is no scheduler.
        TrainingError: it was waited for, and has failed.
    """
    assert isinstance(launcher, SubmitLauncher)
    try:
        launcher.check_place(LaunchContext(env=env, found=environments.detect(env)))
        _check_folder(order)
        request = make_request(order)
        _check_run(order, launcher)
        _note_unsaved(order.config)
        handle = launcher.submit(launcher.plan(request))
    except TorshError as error:
        error.facts["unsent"] = True
        raise
    print(f"submitted: {launcher.name} job {handle.id}, {handle.run_dir}", flush=True)
    if not launcher.wait_for_end:
        return {"job": asdict(handle)}
    return take_result(launcher, handle)


def wait_for_result(run_dir: Path) -> dict[str, Any]:
    """As ``take_result``, of the job that was submitted from ``run_dir``."""
    job = find_job(run_dir)
    return take_result(job.launcher, job.handle)


def take_result(launcher: SubmitLauncher, handle: JobHandle) -> dict[str, Any]:
    """Waits for the end of a job, and returns the content of its result.json.

    Raises:
        TrainingError: it has not succeeded; ``facts`` has the exit code.
    """
    try:
        status = launcher.wait(handle)
    except KeyboardInterrupt:
        words = f"job {handle.id} goes on; jobs cancel {handle.run_dir} ends it"
        print(words, file=sys.stderr)
        raise
    if status.state == "succeeded":
        result = _see_result(launcher, handle)
        if result is None:
            raise ResourceError(
                f"job {handle.id} has succeeded, and {handle.run_dir}/result.json is not seen here",
                fix="wait until the disk shows it, or look at it on a node",
            )
        print(f"succeeded: {launcher.name} job {handle.id}", flush=True)
        return result
    raise JobError(
        f"{launcher.name} job {handle.id} is {status}",
        fix=f"python -m torsh_trainer jobs logs {handle.run_dir}",
        cause_exit_code=exit_code_of(status),
    )


def _see_result(launcher: SubmitLauncher, handle: JobHandle) -> dict[str, Any] | None:
    """result.json, once a disk that is shared shows it; None where it does not."""
    end = time.monotonic() + _DISK_LAG_S
    while (result := launcher.result(handle)) is None and time.monotonic() < end:
        time.sleep(launcher.poll_s / 2)
    return result


class JobError(TrainingError):
    """A job that was waited for has not succeeded; ``facts["cause_exit_code"]`` is its own."""

    @property
    def cause_exit_code(self) -> int:
        """The job's exit code, which the command takes over."""
        return int(self.facts["cause_exit_code"])


def exit_code_of(status: JobStatus) -> int:
    """What a command that waited for a job ends with."""
    if status.state == "succeeded":
        return 0
    return status.exit_code or {"cancelled": 130, "preempted": 143, "lost": 1}.get(status.state, 3)


# -- checks ---------------------------------------------------------------------------------------


def _check_folder(order: RunRequest) -> None:
    """Refuses a folder in which a job is queued or runs, or whose checkpoints a new one would mix.

    Raises:
        ConfigError: names the job.
    """
    assert order.run_dir is not None, "a job has a folder from the start"
    elsewhere = "or choose another folder (hydra.run.dir)"
    if (order.run_dir / JOB).exists():
        earlier = find_job(order.run_dir)
        status = earlier.status
        if not status.ended:
            raise ConfigError(
                f"{order.run_dir} has a job already: {earlier.handle.id} is {status}",
                fix=f"jobs cancel {order.run_dir} ends it, {elsewhere}",
            )
    node = order.config.get("checkpoint") or {}
    if node.get("resume") == "never" and find_checkpoints(node, order.run_dir):
        raise ConfigError(
            f"{order.run_dir} holds checkpoints, and a job with checkpoint.resume=never that is "
            "begun again would go on from them",
            fix=f"leave checkpoint.resume=auto, {elsewhere}",
        )


def _check_run(order: RunRequest, launcher: SubmitLauncher) -> None:
    """Everything that can be known of a run without its data: bad input never waits in a queue."""
    # torch loads here: a run is made of what it defines.
    from torsh_trainer.tasks.base import Task

    import_from(order.import_paths)
    inside = {**order.config, "launcher": {"_target_": INSIDE}}
    try:
        plan_run(replace(order, config=inside), task=Task()).check_bounded()
    except ResourceError as error:
        if not launcher.elsewhere:
            raise
        print(f"note: not checked here, the job runs elsewhere: {error}", file=sys.stderr)


def _note_unsaved(config: Mapping[str, Any]) -> None:
    node = config.get("checkpoint") or {}
    if not any(node.get(name) for name in ("at_end", "every_steps", "every_epochs")):
        print(
            "note: this run saves nothing, so that a job that is begun again starts anew "
            "(checkpoint.at_end, checkpoint.every_steps)",
            file=sys.stderr,
        )


class SubmittedJob:
    """A job that lies in a run's folder, with the launcher that knows it."""

    def __init__(self, handle: JobHandle, launcher: SubmitLauncher) -> None:
        self.handle = handle
        self.launcher = launcher

    @property
    def status(self) -> JobStatus:
        """Where it is now."""
        return self.launcher.status(self.handle)


def find_job(run_dir: Path) -> SubmittedJob:
    """The job that was submitted from ``run_dir``.

    Raises:
        ConfigError: there is none, or its launcher is not installed.
    """
    handle = JobHandle.read(run_dir)
    launcher = launcher_of(read_request(run_dir)["config"])
    if not isinstance(launcher, SubmitLauncher) or launcher.name != handle.launcher:
        raise ConfigError(
            f"{run_dir}/{JOB} is of launcher={handle.launcher}, and {FOLDER}/{REQUEST} of another",
            fix="put right which of them is wrong",
        )
    return SubmittedJob(handle, launcher)


def submit_again(run_dir: Path) -> JobHandle:
    """Submits the run of ``run_dir`` once more, to go on from its checkpoints.

    Raises:
        ConfigError: its job has not ended, or has succeeded.
    """
    job = find_job(run_dir)
    status = job.status
    if not status.ended or status.state == "succeeded":
        raise ConfigError(
            f"job {job.handle.id} of {run_dir} is {status}",
            fix="jobs resume goes on after one that was stopped or has failed",
        )
    plan: SubmissionPlan = job.launcher.plan(repeat_request(run_dir))
    return job.launcher.submit(plan)
