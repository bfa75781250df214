"""What a submitted job leaves in the folder of its run: its handle, its states, its failures."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from torsh_trainer.errors import ConfigError
from torsh_trainer.launchers.failures import Failure, failure_of
from torsh_trainer.utils.files import disk_error, parse_json, set_aside, strict_json, write_file

JobState = Literal["queued", "running", "succeeded", "failed", "cancelled", "preempted", "lost"]
STATES: tuple[JobState, ...] = (
    *("queued", "running"),
    *("succeeded", "failed", "cancelled", "preempted", "lost"),
)
JOB = "job.json"
FOLDER = "job"
"""Below the run's folder: what was handed over (``run.yaml``), and the launcher's own files."""

CANCELLED = "cancelled"
"""In that folder: somebody has asked for the end, so that nothing starts it again."""

PREEMPTED = "preempted"
"""There too: the job's script has seen that the scheduler, and nobody else, stopped the run."""

BEGUN = "begun"
"""There too: the job's script has run before, so that this attempt goes on from checkpoints."""

OUTPUT = Path("logs", "job.out")
_FAILURE = "failure-{}.json"


@dataclass(frozen=True)
class JobHandle:
    """A submitted job: ``id`` is the scheduler's, ``host`` where it was submitted."""

    launcher: str
    id: str
    run_dir: str
    host: str

    @property
    def home(self) -> Path:
        """The run's folder."""
        return Path(self.run_dir)

    def write(self) -> None:
        """Writes job.json; that of an earlier submission is kept as job.1.json.

        Raises:
            OSError: the disk refused.
        """
        set_aside(self.home / JOB)
        write_file(self.home / JOB, strict_json(asdict(self)).encode())

    @classmethod
    def read(cls, run_dir: Path) -> JobHandle:
        """The handle in ``run_dir``, wherever that lies now.

        Raises:
            ConfigError: no job was submitted from there, or the file is damaged.
            ResourceError: it cannot be read.
        """
        path = run_dir / JOB
        try:
            told = parse_json(path.read_text(encoding="utf-8"))
            return cls(**{**told, "run_dir": str(run_dir.absolute())})
        except FileNotFoundError as error:
            raise ConfigError(
                f"{run_dir} holds no job: there is no {JOB}",
                fix="give the folder of a run that was submitted; jobs list shows those below runs",
            ) from error
        except OSError as error:
            raise disk_error(error, "read", path) from error
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{path} is not as it was written",
                fix='it holds {"launcher", "id", "run_dir", "host"}: put it right',
            ) from error


@dataclass(frozen=True)
class JobStatus:
    """Where a job is. ``reason`` says why it waits, or what ended it; ``restarts`` how often the
    scheduler has begun it again."""

    state: JobState
    reason: str = ""
    exit_code: int | None = None
    restarts: int = 0

    @property
    def ended(self) -> bool:
        """Whether nothing more comes."""
        return self.state not in ("queued", "running")

    def __str__(self) -> str:
        code = f" (exit code {self.exit_code})" if self.exit_code else ""
        again = f"; restarted {self.restarts} times" if self.restarts else ""
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.state}{code}{reason}{again}"


def note_failure(run_dir: Path, error: BaseException, *, rank: int) -> None:
    """Leaves word of how a process of the job of ``run_dir`` failed; never raises."""
    failure = replace(failure_of(error, rank=rank, time_s=time.time()), cause_facts={})
    with contextlib.suppress(OSError):
        path = run_dir / FOLDER / _FAILURE.format(rank)
        write_file(path, strict_json(asdict(failure)).encode())


def forget_failure(run_dir: Path, *, rank: int) -> None:
    """Takes away what ``note_failure`` has left of an earlier attempt."""
    with contextlib.suppress(OSError):
        (run_dir / FOLDER / _FAILURE.format(rank)).unlink(missing_ok=True)


def read_failures(run_dir: Path) -> list[Failure]:
    """What ``note_failure`` has left since job.json was written, of any rank."""
    found: list[Failure] = []
    with contextlib.suppress(OSError, ValueError, TypeError):
        since = (run_dir / JOB).stat().st_mtime_ns
        files = sorted((run_dir / FOLDER).glob(_FAILURE.format("*")))
        fresh = [path for path in files if path.stat().st_mtime_ns >= since]
        found += [Failure(**parse_json(path.read_text(encoding="utf-8"))) for path in fresh]
    return found
