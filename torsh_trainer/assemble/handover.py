"""What a submitted run is made of, as files in its folder; written at submit, read within the job.

The job composes nothing: it finds plain values. A value that an environment variable gave is
written as the reference that it was, and asked for again there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from torsh_trainer.assemble import RunRequest
from torsh_trainer.checkpoint.store.places import parse_storage_path
from torsh_trainer.checkpoint.store.retention import complete
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError
from torsh_trainer.launchers.job_folder import FOLDER
from torsh_trainer.launchers.plan import JobRequest, PlannedFile
from torsh_trainer.rundir import MARKER, RunDir
from torsh_trainer.utils.files import disk_error
from torsh_trainer.utils.masking import mask_override, mask_tree

REQUEST = "run.yaml"
AGAIN = "--again"
INSIDE = "torsh_trainer.launchers.inline.Inline"
"""The launcher within a job, whose scheduler has started the processes."""

_STARTING = "torsh_trainer.launchers.local.Local"
"""Where what began the job tells a node's place only, and its processes are still to be started."""

_DRY_RUN = "launcher.dry_run="
_HEADER = "# What the job runs; written when it was submitted.\n"


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
    the node's processes. ``again`` goes on from the checkpoints of an earlier attempt, whatever
    ``checkpoint.resume`` began from.

    Raises:
        ConfigError: there is no job, or a variable that it asks for is not set.
    """
    content = read_request(run_dir)
    config = _resolve(content["config"], content["references"])
    starts = found is not None and found.told == "node" and found.local_size > 1
    config["launcher"] = {"_target_": _STARTING if starts else INSIDE}
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
    if not node or not find_checkpoints(node, run_dir):
        return config
    return {**config, "checkpoint": {**node, "resume": "auto"}}


def find_checkpoints(node: Mapping[str, Any], run_dir: Path) -> bool:
    """Whether a run in ``run_dir``, whose group ``checkpoint`` is ``node``, has saved before."""
    named = node.get("dir")
    folder = (
        RunDir(run_dir).checkpoints
        if named is None
        else parse_storage_path(str(named), node.get("storage_options"))
    )
    return bool(complete(folder))
