"""The run directory: what a run leaves behind, written by rank 0.

Needs no torch, so that the process that starts the workers can use it too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, TorshError
from torsh_trainer.rundir.logs import setup_logging
from torsh_trainer.rundir.output import outliving_stdout
from torsh_trainer.rundir.provenance import gather_provenance
from torsh_trainer.utils.files import disk_error, set_aside, strict_json, write_file
from torsh_trainer.utils.masking import mask_override, mask_text, mask_tree

log = logging.getLogger(__name__)

MARKER = ".torsh_run"
RESULT_KEYS = (
    "strategy",
    "comm",
    "world_size",
    "steps",
    "samples",
    "train_loss",
    "metrics",
    "wall_s",
    "samples_per_s",
    "peak_memory_bytes",
    "checkpoint",
)
"""What result.json always holds; null where the run did not come so far."""

_ELSEWHERE = "choose another run directory (hydra.run.dir, run_dir)"
PROVENANCE = "provenance"
"""The name of the thread that gathers it."""

_BEFORE_THE_START = {MARKER, "config.yaml", "provenance.json", "result.json", "logs", ".hydra"}
_BY_LOGGERS = {"metrics.jsonl", "metrics.csv", "tensorboard"}
"""What loggers open beside it; nothing stands in them yet where the first is empty."""

_MADE_JUST_BEFORE = re.compile(r"\.hydra|logs|.*\.log")
"""What Hydra and the launcher put there before rank 0 comes."""


@dataclass(frozen=True)
class RunDir:
    """A run directory that exists and is ours."""

    path: Path

    @classmethod
    def create(cls, path: Path | None = None, *, base: Path = Path("runs")) -> RunDir:
        """Makes ``path`` the directory of this run; None makes ``BASE/<time>``. Rank 0 only.

        A directory of an earlier run may be used again, to go on from its checkpoints: its
        config.yaml, provenance.json and result.json are kept as config.1.yaml and so on.

        Raises:
            ConfigError: the directory exists, is not empty, and no run made it.
            ResourceError: it cannot be written.
        """
        path = fresh_name(base) if path is None else path
        cls.check(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / MARKER).touch()
            for name in ("config.yaml", "provenance.json", "result.json"):
                set_aside(path / name)
        except OSError as error:
            raise _write_error(error, path) from error
        return cls(path)

    @staticmethod
    def check(path: Path) -> None:
        """Makes sure that ``path`` may become the directory of a run; changes nothing.

        Raises:
            ConfigError: it exists, is not empty, and no run made it.
            ResourceError: it cannot be read.
        """
        try:
            if path.exists() and not path.is_dir():
                raise ConfigError(f"{path} is a file", fix=_ELSEWHERE, path=str(path))
            if path.exists() and not _is_ours(path):
                _refuse_strangers(path)
        except OSError as error:
            raise disk_error(error, "read", path) from error

    def take_back(self) -> bool:
        """Removes what was written for a run that is refused before its first step.

        Returns whether it was one: nothing lies there that a run which began would leave.
        """
        metrics = self.path / "metrics.jsonl"
        opened = _BY_LOGGERS if metrics.is_file() and not metrics.stat().st_size else set()
        if any(path.name not in _BEFORE_THE_START | opened for path in self.path.iterdir()):
            return False
        wait_for_provenance()
        shutil.rmtree(self.path, ignore_errors=True)
        return True

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go unless ``checkpoint.dir`` says otherwise."""
        return self.path / "checkpoints"

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Writes the resolved configuration as config.yaml; secrets are masked.

        Raises:
            ResourceError: the disk refused.
        """
        text = yaml.safe_dump(mask_tree(_plain(config)), sort_keys=False, allow_unicode=True)
        self._write("config.yaml", text)

    def start_provenance(
        self,
        *,
        command: Sequence[str],
        threads: int | None = None,
        devices: Sequence[str] = (),
        folder: Path | None = None,
    ) -> threading.Thread:
        """Writes provenance.json on a thread, and returns the thread.

        ``command`` is the command line, ``threads`` the number of threads of each process,
        ``devices`` name the accelerators, ``folder`` (None: the current one) is where the user's
        code lies. That the disk refuses is logged, no more: the run itself can still succeed.
        """
        now, folder = datetime.now().astimezone(), folder or Path.cwd()
        home = RunDir(self.path.absolute())  # the thread may outlive the current folder

        def write() -> None:
            facts = gather_provenance(
                command=[mask_override(word) for word in command],
                threads=threads,
                devices=devices,
                folder=folder,
                now=now,
            )
            try:
                home._write("provenance.json", strict_json(facts))
            except TorshError as error:
                log.warning("%s", error)

        thread = threading.Thread(target=write, name=PROVENANCE)
        thread.start()
        return thread

    def add_provenance(self, facts: Mapping[str, Any]) -> threading.Thread:
        """Adds what is known later to provenance.json, on a thread, and returns the thread."""
        before, home = _provenance_threads(), RunDir(self.path.absolute())

        def write() -> None:
            for thread in before:
                thread.join()
            path = home.path / "provenance.json"
            try:
                known = json.loads(path.read_text(encoding="utf-8"))
                home._write(path.name, strict_json({**known, **facts}))
            except (OSError, ValueError, TorshError) as error:
                log.warning("%s", error)

        thread = threading.Thread(target=write, name=PROVENANCE)
        thread.start()
        return thread

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Writes result.json: ``RESULT_KEYS``, then whatever else ``result`` holds.

        NaN and infinities become null, secrets are masked.

        Raises:
            ResourceError: the disk refused.
        """
        content = mask_tree({**dict.fromkeys(RESULT_KEYS), **result}, text=mask_text)
        self._write("result.json", strict_json(content))

    def write_error(self, error: BaseException, result: Mapping[str, Any] | None = None) -> None:
        """Writes result.json of a run that failed: what is known of it, and the error.

        Raises:
            ResourceError: the disk refused.
        """
        self.write_result({**(result or {}), "error": _as_json(error)})

    def leave_error(self, error: BaseException, *, since: float) -> None:
        """``write_error``, where nothing was written after the time ``since``; never raises."""
        result = self.path / "result.json"
        if result.exists() and result.stat().st_mtime >= since:
            return
        with contextlib.suppress(TorshError):  # the first error is the one to tell
            RunDir.create(self.path).write_error(error)

    @contextlib.contextmanager
    def logging(self, world: World, level: str) -> Iterator[None]:
        """Within the block, this rank logs as ``setup_logging`` says, and outlives its stdout."""
        close = setup_logging(self.path, world, level)
        try:
            with outliving_stdout():
                yield
        finally:
            close()

    def _write(self, name: str, text: str) -> None:
        try:
            write_file(self.path / name, text.encode())
        except OSError as error:
            raise _write_error(error, self.path / name) from error


def wait_for_provenance() -> None:
    """Waits until provenance.json holds all that this process has begun to write to it."""
    for thread in _provenance_threads():
        thread.join()


def _provenance_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == PROVENANCE]


def fresh_name(base: Path) -> Path:
    """A new, empty directory in ``base`` named by the time, such as ``runs/2031-01-31_18-30-05``.

    Making it is what claims the name: two jobs that start in one second get two directories.

    Raises:
        ResourceError: it cannot be made.
    """
    name = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    attempt = 1
    while True:
        path = base / (name if attempt == 1 else f"{name}_{attempt}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            attempt += 1
        except OSError as error:
            raise _write_error(error, path) from error
        else:
            return path


def _is_ours(path: Path) -> bool:
    return (path / MARKER).exists() or all(
        (path / name).exists() for name in ("config.yaml", "provenance.json")
    )


def _refuse_strangers(path: Path) -> None:
    names = (entry.name for entry in path.iterdir())
    strangers = sorted(name for name in names if not _MADE_JUST_BEFORE.fullmatch(name))
    if strangers:
        more = f" and {len(strangers) - 3} more" if len(strangers) > 3 else ""
        raise ConfigError(
            f"{path} exists and is no run directory: it holds {', '.join(strangers[:3])}{more}",
            fix=_ELSEWHERE,
            path=str(path),
        )


def _as_json(error: BaseException) -> dict[str, Any]:
    if isinstance(error, TorshError):
        message, fix, facts = error.sentence, error.fix, error.facts
    else:
        message, fix, facts = str(error), "", {}
    return {"type": type(error).__name__, "message": message, "fix": fix, "facts": facts}


def _write_error(error: OSError, path: Path) -> TorshError:
    return disk_error(error, "write", path, setting="hydra.run.dir, run_dir")


def _plain(value: Any) -> Any:
    """What YAML can hold: other objects become their text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    # Exact types: yaml refuses subclasses such as an enum of strings.
    if type(value) in (bool, int, float, str) or value is None:
        return value
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
