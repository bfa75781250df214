"""One run of a Hydra application: what Hydra calls with a composed configuration."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from torsh_trainer import environments
from torsh_trainer.checkpoint.store.lock import check_free
from torsh_trainer.config import asking, interrupts, sweep, tracebacks
from torsh_trainer.config.overrides import bare_key
from torsh_trainer.config.wording import as_failure, plain
from torsh_trainer.config.written import as_written
from torsh_trainer.errors import ConfigError, DryRun, Interrupted, TorshError, nearest
from torsh_trainer.rundir import RunDir
from torsh_trainer.utils.masking import mask_override, mask_tree
from torsh_trainer.utils.registry import GROUPS, SETTINGS

HYDRA_FOLDER = ".hydra"


class RunFunction(Protocol):
    """Runs a resolved configuration; returns the content of result.json (assemble.run)."""

    def __call__(
        self,
        config: dict[str, Any],
        *,
        run_dir: Path | None,
        command: Sequence[str],
        env: Mapping[str, str],
        import_paths: Sequence[str],
        said: Mapping[str, Any],
        written: Mapping[str, Any],
    ) -> dict[str, Any]: ...


@dataclass(frozen=True)
class HydraJob:
    """Runs one composed configuration, in the directory that Hydra chose for it.

    Hydra's launchers send it to other processes, so it holds plain values and ``run`` by name.
    ``given`` are the overrides of the whole command line, ``fixed`` the keys that they do not
    sweep over, ``recipes`` the names to offer.
    """

    run: RunFunction
    given: tuple[str, ...]
    fixed: frozenset[str]
    recipes: tuple[str, ...]
    config_dir: str | None = None

    def __call__(self, config: DictConfig) -> float | Exception | None:
        """The objective of a sweep's job, NaN when it failed; a single run's failure, or None.

        A failure is returned: Hydra would print one that is raised, in words of its own.
        """
        hydra = HydraConfig.get()
        run_dir = Path(hydra.runtime.output_dir)
        if hydra.mode is RunMode.MULTIRUN:
            return self._job_of_a_sweep(config, run_dir)
        try:
            self._lead(config, run_dir)
        except Exception as error:  # noqa: BLE001 - the door tells it
            return _failure(error, config)
        return None

    def follow(self, config: DictConfig) -> dict[str, Any]:
        """Runs as a process that writes nothing: another one leads the job."""
        said = {} if HydraConfig.initialized() else asking.put_marks(config)
        settings = plain(config)
        return self._run(settings, None, self.given, said, as_written(config, settings))

    def _lead(self, config: DictConfig, run_dir: Path) -> dict[str, Any]:
        """Runs as the process that speaks for the job."""
        settings = plain(config)
        try:
            self._check_task(settings)
            RunDir.check(run_dir)
            check_free(RunDir(run_dir).checkpoints)
        except TorshError:
            _remove_empty(run_dir)
            raise
        began, is_new = time.time(), not any(run_dir.glob("*"))
        try:
            _keep_composition(config, run_dir / HYDRA_FOLDER)
            shown = as_written(config, settings)
            return self._run(settings, run_dir, _overrides(), self._answer_others(config), shown)
        except Exception as error:
            failure = as_failure(error)
            asked = isinstance(failure, DryRun)
            refused = is_new and (asked or _is_refusal_in_own_folder(failure, run_dir))
            if refused and RunDir(run_dir).take_back():
                _remove_empty(run_dir.parent)
            elif not asked:
                _leave_result(failure, run_dir, since=began)
            raise

    def _answer_others(self, config: DictConfig) -> dict[str, Any]:
        """What the others of a cluster's processes, which Hydra does not run, ask this one."""
        found = environments.detect(os.environ)
        follows = HydraConfig.get().mode is RunMode.RUN and found is not None and found.size > 1
        return asking.answers(config) if follows else {}

    def _run(
        self,
        settings: dict[str, Any],
        run_dir: Path | None,
        overrides: Sequence[str],
        said: Mapping[str, Any],
        shown: Mapping[str, Any],
    ) -> dict[str, Any]:
        flags = () if self.config_dir is None else ("--config-dir", self.config_dir)
        return self.run(
            settings,
            run_dir=run_dir,
            command=("python", "-m", "torsh_trainer", *flags, *overrides),
            env=dict(os.environ),
            import_paths=import_paths(self.config_dir),
            said=said,
            written=shown,
        )

    def _check_task(self, settings: Mapping[str, Any]) -> None:
        # A misspelt group says more; assemble names it.
        if settings.get("task") is None and {*settings} <= {*GROUPS, *SETTINGS}:
            raise ConfigError(
                "nothing says what to train",
                fix=f"add +recipe=NAME, one of {', '.join(self.recipes)}; or +recipe=FILE.yaml",
            )

    # -- sweeps ---------------------------------------------------------------------------------

    def _job_of_a_sweep(self, config: DictConfig, run_dir: Path) -> float | Exception | None:
        hydra = HydraConfig.get()
        if interrupts.earlier_stop():
            _remove_empty(run_dir)
            return interrupts.earlier_stop()
        own = [mask_override(text) for text in _overrides() if bare_key(text) not in self.fixed]
        print(f"job {hydra.job.num}: {' '.join(own)}", file=sys.stderr)
        found = environments.detect(os.environ)
        if found is not None and found.rank > 0:
            return objective(plain(config), self.follow(config))
        began = time.perf_counter()
        record = sweep.JobRecord(number=hydra.job.num, overrides=own, run_dir=str(run_dir))
        try:
            settings = plain(config)
            value = objective(settings, self._lead(config, run_dir))
        except Interrupted as error:
            print(f"job {hydra.job.num}: {error}", file=sys.stderr)
            if interrupts.side_by_side(hydra.launcher):
                return interrupts.remember(error)
            raise SystemExit(error.cause_exit_code) from error
        except Exception as error:  # noqa: BLE001 - the sweeper is told of it
            failure = _failure(error, config)
            record.with_error(failure, wall_s=time.perf_counter() - began).write()
            print(f"job {hydra.job.num} failed: {failure}", file=sys.stderr)
            return sweep.answer_sweeper(failure, hydra.sweeper)
        record.with_result(value, settings["trainer"], wall_s=time.perf_counter() - began).write()
        return value


def import_paths(config_dir: str | None) -> tuple[str, ...]:
    """Where user code is found: the current directory, and beside the user's conf folder.

    A project's `src/` counts as well, as it would after `pip install -e`.
    """
    folders = [Path.cwd()]
    if config_dir is not None:
        folders.append(Path(config_dir).absolute().parent)
    sources = [folder / "src" for folder in folders if _is_a_project(folder)]
    return tuple(str(folder) for folder in (*folders, *sources) if folder.is_dir())


def _is_a_project(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("pyproject.toml", "setup.py", "setup.cfg"))


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


def _failure(error: Exception, config: DictConfig) -> TorshError:
    """``error`` in words; its traceback is shown where the run's configuration asks for it."""
    failure = as_failure(error)
    if failure is not error:
        failure.__cause__ = error
    if config.get("debug") is True:
        tracebacks.show(failure)
    return failure


def _is_refusal_in_own_folder(failure: TorshError, run_dir: Path) -> bool:
    """Whether the user's input was at fault, in a folder that nobody looks for.

    One that the command line names, or that belongs to a sweep, is where a program reads the error.
    """
    hydra = HydraConfig.get()
    named = any(bare_key(text) == "hydra.run.dir" for text in hydra.overrides.hydra)
    code = getattr(failure, "cause_exit_code", failure.exit_code)
    said = run_dir.name in str(failure)
    alone = hydra.mode is RunMode.RUN and not named and not said
    return bool(alone and code == ConfigError.exit_code)


def _remove_empty(run_dir: Path) -> None:
    """Takes back the folders that Hydra made for a run that never began."""
    with contextlib.suppress(OSError):  # not empty, or not ours to remove
        for folder in (run_dir, *run_dir.parents):
            if folder == Path.cwd():
                return
            folder.rmdir()


def _keep_composition(config: DictConfig, folder: Path) -> None:
    """What Hydra itself would keep, and ``rerun`` reads; written once the directory is ours."""
    hydra = OmegaConf.to_container(HydraConfig.instance().cfg or OmegaConf.create())
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(
        OmegaConf.create(mask_tree(OmegaConf.to_container(config))), folder / "config.yaml"
    )
    OmegaConf.save(OmegaConf.create(mask_tree(hydra, text=mask_override)), folder / "hydra.yaml")
    overrides = [mask_override(text) for text in _overrides()]
    OmegaConf.save(OmegaConf.create(overrides), folder / "overrides.yaml")


def _overrides() -> list[str]:
    """Those of this job as they were typed: iterating would resolve ``${oc.env:NAME}`` in them."""
    return [str(text) for text in OmegaConf.to_container(HydraConfig.get().overrides.task) or []]


def _leave_result(error: TorshError, run_dir: Path, *, since: float) -> None:
    """result.json with the error, of a run that failed before it could write one."""
    result = run_dir / "result.json"
    if result.exists() and result.stat().st_mtime >= since:
        return
    with contextlib.suppress(TorshError):  # the first error is the one to tell
        RunDir.create(run_dir).write_error(error)
