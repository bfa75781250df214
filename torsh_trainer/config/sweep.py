"""Sweeps: what each job leaves behind, and the table at the end.

A job may run in any process, on any machine that shares the sweep's folder; it tells its outcome
through a file there.
"""

from __future__ import annotations

import contextlib
import csv
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from torsh_trainer.errors import ConfigError, TorshError, nearest
from torsh_trainer.utils.files import write_file
from torsh_trainer.utils.masking import mask_override, mask_text, mask_tree

RECORD = Path(".hydra", "job.json")
TABLE = "sweep.csv"
COMPOSITION = "multirun.yaml"

Mode = Literal["min", "max"]


@dataclass(frozen=True)
class JobRecord:
    """The outcome of one job: ``objective`` is None when it failed or has none."""

    number: int
    overrides: list[str]
    run_dir: str
    objective: float | None = None
    objective_name: str | None = None
    mode: Mode = "min"
    error: str | None = None
    exit_code: int = 0
    wall_s: float = 0.0
    job: str | None = None
    """The scheduler's number, of a job that was submitted and has not been waited for."""
    awaited: bool = False
    """Whether the sweep waits for it, once all of its jobs have been submitted."""

    @property
    def status(self) -> str:
        """In one word."""
        return "failed" if self.error else "done" if self.job is None else "submitted"

    def with_job(self, job: str, trainer: Mapping[str, Any], *, awaited: bool) -> JobRecord:
        """This job as it was submitted; ``trainer`` are the knobs that name the objective."""
        names = {"objective_name": trainer["objective"], "mode": trainer["objective_mode"]}
        return replace(self, job=job, awaited=awaited, **names)

    def with_result(
        self, objective: float | None, trainer: Mapping[str, Any], *, wall_s: float
    ) -> JobRecord:
        """This job as it ended well; ``trainer`` are the knobs that name the objective."""
        return replace(
            self,
            job=None,
            objective=objective,
            objective_name=trainer["objective"],
            mode=trainer["objective_mode"],
            wall_s=wall_s,
        )

    def with_error(self, error: TorshError, *, wall_s: float) -> JobRecord:
        """This job as it failed."""
        code = getattr(error, "cause_exit_code", error.exit_code)
        words = mask_text(str(error))
        return replace(self, job=None, error=words, exit_code=code, wall_s=wall_s)

    def write(self) -> None:
        """Tells the process that started the sweep."""
        path = Path(self.run_dir) / RECORD
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


class SweepCallback(Callback):
    """Remembers where the sweep of this process lies, which Hydra tells its callbacks alone."""

    folders: ClassVar[list[Path]] = []
    compositions: ClassVar[dict[Path, bytes | None]] = {}
    """multirun.yaml as it lay in these folders before: None where there was none."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """See ``hydra.experimental.Callback``."""
        folder = Path(config.hydra.sweep.dir)
        SweepCallback.folders.append(folder)
        path = folder / COMPOSITION
        SweepCallback.compositions[folder] = path.read_bytes() if path.is_file() else None

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        """See ``hydra.experimental.Callback``; by now a sweeper has written what it sweeps over."""
        if config.hydra.get("mode") is RunMode.MULTIRUN and config.hydra.job.get("num") == 0:
            mask_composition(Path(config.hydra.sweep.dir))


def mask_composition(folder: Path) -> None:
    """Takes the secrets out of ``multirun.yaml``, which Hydra writes into the folder of a sweep."""
    path = folder / COMPOSITION
    if path.is_file():
        content = OmegaConf.to_container(OmegaConf.load(path))
        shown = mask_tree(content, text=mask_override)
        if shown != content:
            write_file(path, OmegaConf.to_yaml(OmegaConf.create(shown)).encode())


@dataclass
class SweepOutcome:
    """How a sweep ended: 0, or the exit code of its first failed job."""

    exit_code: int = 0


@contextlib.contextmanager
def report_sweep(mode: Mode | None = None) -> Iterator[SweepOutcome]:
    """Around a sweep: writes its table, however it ends. ``mode`` None: what the jobs say."""
    outcome, began = SweepOutcome(), time.time()
    failure = None
    try:
        yield outcome
    except Exception as error:  # noqa: BLE001 - told below, unless the table tells it already
        failure = error
    finally:
        records = [
            record for folder in SweepCallback.folders for record in read(folder, since=began)
        ]
        if records:
            folder = SweepCallback.folders[-1]
            write_csv(rank_jobs(records, mode), folder / TABLE)
            print_table(rank_jobs(records, mode), folder)
        elif failure is None:
            _forget_compositions()
        SweepCallback.folders.clear()
        SweepCallback.compositions.clear()
        outcome.exit_code = next((record.exit_code for record in records if record.error), 0)
    # A sweeper that is left without any result gives up in words of its own.
    if failure is not None and not (records and all(record.error for record in records)):
        raise failure


def _forget_compositions() -> None:
    """Puts multirun.yaml back as it was: jobs that were only planned leave nothing."""
    for folder, before in SweepCallback.compositions.items():
        with contextlib.suppress(OSError):
            if before is not None:
                write_file(folder / COMPOSITION, before)
                continue
            (folder / COMPOSITION).unlink()
            for empty in (folder, *folder.parents):
                if empty == Path.cwd():
                    break
                empty.rmdir()


WaitFunction = Callable[[Path], Mapping[str, Any]]
"""Waits for the job of a run's folder; returns the content of result.json."""


def is_awaited(launcher: Mapping[str, Any] | None, sweeper: DictConfig) -> bool:
    """Whether jobs that ``launcher`` submits are waited for at the end of the sweep, all at once.

    Raises:
        ConfigError: the sweeper chooses by results, and the launcher does not wait for them.
    """
    asks = "BasicSweeper" not in str(sweeper.get("_target_"))
    knobs = launcher or {}
    if asks and not knobs.get("dry_run") and knobs.get("wait_for_end") is False:
        raise ConfigError(
            "this sweeper chooses by what jobs came to, and launcher.wait_for_end=false tells it "
            "nothing",
            fix="set launcher.wait_for_end=true",
        )
    return not asks and knobs.get("wait_for_end") is True


def wait_for_jobs(*, since: float, wait: WaitFunction, in_words: InWords) -> None:
    """Waits for the jobs of this process's sweeps that were submitted, and writes what they came
    to."""
    for folder in SweepCallback.folders:
        for record in read(folder, since=since):
            if not record.awaited or record.job is None:
                continue
            began = time.time()
            try:
                content = wait(Path(record.run_dir))
                names = {"objective": record.objective_name, "objective_mode": record.mode}
                value = objective({"trainer": names}, content)
                done = record.with_result(value, names, wall_s=content["wall_s"] or 0.0)
            except Exception as error:  # noqa: BLE001 - told in the table
                done = record.with_error(in_words(error), wall_s=time.time() - began)
                print(f"job {record.number} failed: {done.error}", file=sys.stderr)
            done.write()


InWords = Callable[[Exception], TorshError]
"""Any failure as one that speaks to the user."""


def objective(settings: Mapping[str, Any], content: Mapping[str, Any]) -> float | None:
    """The number that a sweep looks at: ``trainer.objective`` of a run's result.json.

    Raises:
        ConfigError: the run has no metric of that name.
    """
    name = settings["trainer"]["objective"]
    value = content["train_loss"] if name is None else content["metrics"].get(name)
    if value is None and name is not None:
        raise ConfigError(
            f"trainer.objective={name}: the run has no such metric",
            fix=nearest(name, content["metrics"]) or "it evaluated nothing: see trainer.eval_every",
        )
    return None if value is None else float(value)


def read(folder: Path, *, since: float = 0.0) -> list[JobRecord]:
    """The outcomes of the jobs in ``folder`` that ended after the time ``since``."""
    files = [path for path in folder.rglob(str(RECORD)) if path.stat().st_mtime >= since]
    return by_number([JobRecord(**json.loads(path.read_text(encoding="utf-8"))) for path in files])


def by_number(records: Sequence[JobRecord]) -> list[JobRecord]:
    """In the order in which the jobs were started."""
    return sorted(records, key=lambda record: record.number)


def rank_jobs(records: Sequence[JobRecord], mode: Mode | None = None) -> list[JobRecord]:
    """Best objective first; then jobs without one; then those that failed."""

    def key(record: JobRecord) -> tuple[int, float, int]:
        if record.objective is None or math.isnan(record.objective):
            return (2 if record.error else 1, 0.0, record.number)
        largest_first = (mode or record.mode) == "max"
        return (0, -record.objective if largest_first else record.objective, record.number)

    return sorted(records, key=key)


def write_csv(records: Sequence[JobRecord], path: Path) -> None:
    """One row a job, in the order given: objective, status, what it overrode, where it lies."""
    keys = find_overridden(records)
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(
            ["job", _objective_name(records), "status", *keys, "wall_s", "run_dir", "error"]
        )
        for record in records:
            values = assignments(record)
            rows.writerow(
                [
                    record.number,
                    "" if record.objective is None else record.objective,
                    record.status,
                    *(values.get(key, "") for key in keys),
                    f"{record.wall_s:.3f}",
                    record.run_dir,
                    record.error or "",
                ]
            )


def print_table(records: Sequence[JobRecord], folder: Path) -> None:
    """The same for the eye, then the failures in full."""
    # Imported late: a single run, which also loads this module, need not wait for it.
    from rich.console import Console
    from rich.table import Table

    keys = find_overridden(records)
    table = Table(title=f"{len(records)} jobs", title_justify="left")
    for name in ("job", _objective_name(records), *_short(keys)):
        table.add_column(name, justify="right" if name == "job" else "left", overflow="fold")
    table.add_column("time", justify="right")
    for record in records:
        values = assignments(record)
        shown = _number(record.objective) if record.status == "done" else record.status
        shown += f" {record.job}" if record.job else ""
        cells = [_shorten_number(values.get(key, "")) for key in keys]
        table.add_row(
            str(record.number),
            shown,
            *cells,
            f"{record.wall_s:.1f} s",
            style="red" if record.error else None,
        )
    console = Console()
    if not console.is_terminal:  # a file is as wide as it needs to be
        console.width = max(console.width, 120)
    console.print(table)
    for record in by_number(records):
        if record.error:
            words = " ".join(record.overrides)
            console.print(
                f"job {record.number} ({words}) failed: {record.error}",
                soft_wrap=True,
                markup=False,
            )
    console.print(f"{shortest(folder)}/{TABLE}", soft_wrap=True, highlight=False)


def find_overridden(records: Sequence[JobRecord]) -> list[str]:
    """Every key that some job overrides, in order of appearance."""
    return list(dict.fromkeys(key for record in records for key in assignments(record)))


def assignments(record: JobRecord) -> dict[str, str]:
    """Key -> value of a job's overrides; a file is shown by its name."""
    pairs = (text.lstrip("+").partition("=") for text in record.overrides)
    return {key: value for key, _, value in pairs}


def complete_sweeper(sweeper: DictConfig, overrides: Sequence[str], mode: Mode) -> list[str]:
    """Overrides that make ``sweeper`` agree with our objective, where the user left them out.

    Optuna is told the direction, and goes on after a failed job.

    Raises:
        ConfigError: it optimises several objectives; a run has one.
    """
    if "direction" not in sweeper:
        return []
    given = {text.partition("=")[0].lstrip("+") for text in overrides}
    extra = []
    if "hydra.sweeper.max_failure_rate" not in given and "max_failure_rate" in sweeper:
        extra.append("hydra.sweeper.max_failure_rate=1.0")
    if "hydra.sweeper.direction" not in given:
        extra.append(f"hydra.sweeper.direction={mode}imize")
    elif not isinstance(sweeper.direction, str) and not hasattr(sweeper.direction, "name"):
        raise ConfigError(
            "hydra.sweeper.direction lists several objectives, and a run has one",
            fix="set trainer.objective=METRIC and hydra.sweeper.direction=maximize or minimize",
        )
    return extra


def direction(sweeper: DictConfig) -> Mode | None:
    """min or max as the sweeper understands it; None when it has no such notion."""
    chosen = sweeper.get("direction")
    name = str(getattr(chosen, "name", chosen))
    return None if chosen is None else "max" if name.startswith("max") else "min"


def answer_sweeper(failure: TorshError, sweeper: DictConfig) -> float | TorshError:
    """What a job that failed gives its sweeper: NaN, or to Optuna what is no number.

    Where Optuna is to end after too many failures, it has to be raised.
    """
    if "max_failure_rate" not in sweeper:
        return math.nan
    if sweeper.max_failure_rate < 1.0:
        raise failure
    return failure


@contextlib.contextmanager
def without_trials_of_optuna() -> Iterator[None]:
    """Keeps the words of Optuna's sweeper about jobs that failed, which have been told, away."""
    logger = logging.getLogger("hydra_plugins.hydra_optuna_sweeper._impl")

    def is_news(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("Failed ")

    logger.addFilter(is_news)
    try:
        yield
    finally:
        logger.removeFilter(is_news)


def shortest(path: Path) -> str:
    """``path`` relative to the current directory when it is below it."""
    absolute = path.absolute()
    return os.path.relpath(absolute) if absolute.is_relative_to(Path.cwd()) else str(absolute)


def _objective_name(records: Sequence[JobRecord]) -> str:
    names = {record.objective_name or "train_loss" for record in records if not record.error}
    return names.pop() if len(names) == 1 else "objective"


def _short(keys: Sequence[str]) -> list[str]:
    """``lr`` for ``optimizer.lr``, where no other key ends so."""
    last = [key.rpartition(".")[2] for key in keys]
    return [short if last.count(short) == 1 else key for key, short in zip(keys, last, strict=True)]


def _shorten_number(value: str) -> str:
    """A sampled number in six digits; sweep.csv has them all."""
    try:
        return f"{float(value):.6g}" if len(value) > 8 else value
    except ValueError:
        return value


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
