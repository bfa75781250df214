"""A resolved configuration, handed over to a scheduler; and taken up again within the job.

What the job runs lies in the run's folder as plain values: the job composes nothing. A value that
an environment variable gave is written as the reference that it was, and asked for again there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from torsh_trainer import environments
from torsh_trainer.assemble import RunRequest, import_from, launcher_of, plan_run
from torsh_trainer.checkpoint.store.places import parse_storage_path
from torsh_trainer.checkpoint.store.retention import complete
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, ResourceError, TorshError, TrainingError
from torsh_trainer.launchers.base import LaunchContext, Launcher
from torsh_trainer.launchers.job_folder import FOLDER, JOB, JobHandle, JobStatus
from torsh_trainer.launchers.plan import JobRequest, PlannedFile, write_plan
from torsh_trainer.launchers.submission import SubmissionPlan, SubmitLauncher
from torsh_trainer.rundir import MARKER, RunDir
from torsh_trainer.utils.files import disk_error
from torsh_trainer.utils.foreign import escape_controls
from torsh_trainer.utils.masking import mask_override, mask_tree

REQUEST = "run.yaml"
AGAIN = "--again"
_INSIDE = "torsh_trainer.launchers.inline.Inline"
_STARTING = "torsh_trainer.launchers.local.Local"
"""Where what began the job tells a node's place only, and its processes are still to be started."""
_DRY_RUN = "launcher.dry_run="
_HEADER = "# What the job runs; written when it was submitted.\n"


def show_plan(order: RunRequest, launcher: Launcher, env: Mapping[str, str]) -> dict[str, Any]:
    """Prints what ``launcher`` would write and run for ``order``, and does nothing of it."""
    context = LaunchContext(env=env, found=environments.detect(env))
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
    result = launcher.result(handle)
    if status.state == "succeeded" and result is not None:
        print(f"succeeded: {launcher.name} job {handle.id}", flush=True)
        return result
    raise JobError(
        f"{launcher.name} job {handle.id} is {status}",
        fix=f"python -m torsh_trainer jobs logs {handle.run_dir}",
        cause_exit_code=exit_code_of(status),
    )


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


# -- what travels ---------------------------------------------------------------------------------


def make_request(order: RunRequest, *, again: bool = False) -> JobRequest:
    """``order`` as files and words, without secrets. ``again`` has it go on from its checkpoints.

    Raises:
        ConfigError: a secret would have to be written down.
    """
    assert order.run_dir is not None, "a job has a folder from the start"
    run_dir = order.run_dir.absolute()
    config, shown = map(_without_dry_run, (order.config, order.written or mask_tree(order.config)))
    references = [list(place) for place in _find_references(config, shown)]
    content = {
        "folder": str(Path.cwd()),
        "command": [mask_override(word) for word in order.command if _DRY_RUN not in word],
        "import_paths": list(order.import_paths),
        "references": references,
        "config": shown,
    }
    text = _HEADER + yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    return _request(run_dir, Path.cwd(), text, again=again)


def _without_dry_run(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` as it is submitted: what a dry run shows is that."""
    node = config.get("launcher") or {}
    return {**config, "launcher": {**node, "dry_run": False}} if "dry_run" in node else {**config}


def _request(run_dir: Path, folder: Path, content: str, *, again: bool) -> JobRequest:
    more = (AGAIN,) if again else ()
    return JobRequest(
        run_dir=run_dir,
        folder=folder,
        arguments=("-m", "torsh_trainer", "jobs", "run", str(run_dir), *more),
        python=sys.executable,
        files=(
            PlannedFile(run_dir / MARKER, ""),
            PlannedFile(run_dir / FOLDER / REQUEST, content),
        ),
    )


def _find_references(
    value: Any, shown: Any, place: tuple[Any, ...] = ()
) -> Iterator[tuple[Any, ...]]:
    """Where ``shown`` has a reference in the place of what the environment gave."""
    if isinstance(value, Mapping) and isinstance(shown, Mapping):
        for key, item in value.items():
            yield from _find_references(item, shown[key], (*place, key))
    elif isinstance(value, list | tuple) and isinstance(shown, list):
        for number, item in enumerate(value):
            yield from _find_references(item, shown[number], (*place, number))
    elif isinstance(shown, str) and shown != value:
        name = ".".join(map(str, place))
        if "${" not in shown:
            raise ConfigError(
                f"{name} holds a secret, which would have to be written down for the job",
                fix=f"put it into a variable of the environment: {name}='${{oc.env:NAME}}'",
            )
        yield place


def read_request(run_dir: Path) -> dict[str, Any]:
    """What was handed over to the job of ``run_dir``, as it was written.

    Raises:
        ConfigError: there is nothing, or it is damaged.
    """
    path = run_dir / FOLDER / REQUEST
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{run_dir} holds no job: there is no {FOLDER}/{REQUEST}",
            fix="give the folder of a run that was submitted",
        ) from error
    except OSError as error:
        raise disk_error(error, "read", path) from error
    except (yaml.YAMLError, ValueError) as error:
        raise _damage_error(path) from error
    keys = ("folder", "command", "import_paths", "references", "config")
    if not isinstance(content, dict) or any(key not in content for key in keys):
        raise _damage_error(path)
    return content


def _damage_error(path: Path) -> ConfigError:
    return ConfigError(f"{path} is not as it was written", fix="submit the run once more")


def repeat_request(run_dir: Path) -> JobRequest:
    """The request of an earlier submission, to go on from its checkpoints."""
    path = run_dir / FOLDER / REQUEST
    content = read_request(run_dir)
    text = path.read_text(encoding="utf-8")
    return _request(run_dir.absolute(), Path(content["folder"]), text, again=True)


# -- within the job -------------------------------------------------------------------------------


def order_within(run_dir: Path, *, found: World | None, again: bool) -> RunRequest:
    """What one process of the job runs, in the place that its environment has ``found``.

    Of the processes, the first writes the run's folder. One that was told a node's place starts
    the node's processes. ``again`` goes on from the
    checkpoints of an earlier attempt, whatever ``checkpoint.resume`` began from.

    Raises:
        ConfigError: there is no job, or a variable that it asks for is not set.
    """
    content = read_request(run_dir)
    config = _resolve(content["config"], content["references"])
    starts = found is not None and found.told == "node" and found.local_size > 1
    config["launcher"] = {"_target_": _STARTING if starts else _INSIDE}
    if again:
        config = _go_on(config, run_dir)
    return RunRequest(
        config=config,
        run_dir=run_dir if found is None or found.rank == 0 else None,
        command=tuple(content["command"]),
        import_paths=tuple(content["import_paths"]),
        written=content["config"],
    )


def _resolve(config: Mapping[str, Any], references: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """``config`` with its references resolved, and every other text as it stands."""
    if not references:
        return dict(config)
    places, kept = {tuple(place) for place in references}, list[str]()

    def mark(value: Any, place: tuple[Any, ...]) -> Any:
        if isinstance(value, Mapping):
            return {key: mark(item, (*place, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [mark(item, (*place, number)) for number, item in enumerate(value)]
        if isinstance(value, str) and "${" in value and place not in places:
            kept.append(value)
            return f"\0{len(kept) - 1}\0"
        return value

    def unmark(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: unmark(item) for key, item in value.items()}
        if isinstance(value, list):
            return [unmark(item) for item in value]
        if isinstance(value, str) and value.startswith("\0"):
            return kept[int(value.strip("\0"))]
        return value

    resolved = OmegaConf.to_container(OmegaConf.create(mark(config, ())), resolve=True)
    content: dict[str, Any] = unmark(resolved)
    return content


def _go_on(config: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    node = config.get("checkpoint")
    if not node or not _find_checkpoints(node, run_dir):
        return config
    return {**config, "checkpoint": {**node, "resume": "auto"}}


def _find_checkpoints(node: Mapping[str, Any], run_dir: Path) -> bool:
    named = node.get("dir")
    folder = (
        RunDir(run_dir).checkpoints
        if named is None
        else parse_storage_path(str(named), node.get("storage_options"))
    )
    return bool(complete(folder))


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
    if node.get("resume") == "never" and _find_checkpoints(node, order.run_dir):
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
    inside = {**order.config, "launcher": {"_target_": _INSIDE}}
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
