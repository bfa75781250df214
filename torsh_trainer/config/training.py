"""A command line that trains: once, in a sweep, or as one of a cluster's processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hydra import compose
from hydra.types import RunMode

from torsh_trainer import environments
from torsh_trainer.config import sweep
from torsh_trainer.config.app import CONFIG, App, open_app
from torsh_trainer.config.command_line import CommandLine
from torsh_trainer.config.interrupts import jobs_save_first
from torsh_trainer.config.job import HydraJob, RunFunction
from torsh_trainer.config.overrides import bare_key, parse_override
from torsh_trainer.config.roots import Roots
from torsh_trainer.errors import ConfigError
from torsh_trainer.rundir.output import outliving_stdout
from torsh_trainer.utils.signals import ends_with_its_run


def train(line: CommandLine, roots: Roots, *, run: RunFunction, env: Mapping[str, str]) -> int:
    """Trains or sweeps as ``line`` says; returns the exit code.

    Of the processes that a cluster has started, only the one that speaks for the job makes
    directories; every other composes and trains.

    Raises:
        TorshError: what went wrong, in words.
    """
    found = environments.detect(env)
    if line.multirun and found is not None and found.size > 1:
        raise ConfigError(
            f"-m starts a job of its own for each combination, and {found.source} has started "
            f"this process as one of {found.size}",
            fix="start the sweep from one process, with launcher.num_processes=N for each job",
        )
    if found is not None and not line.multirun:
        ends_with_its_run()
    with outliving_stdout(), open_app(line, roots) as app:
        job = HydraJob(
            run=run,
            given=tuple(app.overrides),
            fixed=frozenset(
                bare_key(text)
                for text in app.overrides
                if not parse_override(text).is_sweep_override()
            ),
            recipes=tuple(roots.recipes()),
            config_dir=line.config_dir and str(Path(line.config_dir).absolute()),
        )
        if line.multirun:
            return _sweep(app, job)
        if found is not None and found.rank > 0:
            job.follow(compose(CONFIG, app.overrides))
            return 0
        failure = app.hydra.run(CONFIG, job, [*app.overrides, "hydra.mode=RUN"]).return_value
        if failure is not None:
            raise failure
        return 0


def _sweep(app: App, job: HydraJob) -> int:
    overrides = [*app.overrides, "hydra.mode=MULTIRUN"]
    config = app.hydra.compose_config(CONFIG, overrides, RunMode.MULTIRUN)
    if (config.get("launcher") or {}).get("dry_run") is True:
        raise ConfigError(
            "launcher.dry_run=true shows what one run would start, and -m asks for several",
            fix="leave -m out",
        )
    given = any(bare_key(text) == "hydra.sweeper.direction" for text in overrides)
    mode = sweep.direction(config.hydra.sweeper) if given else None
    overrides += sweep.complete_sweeper(
        config.hydra.sweeper, overrides, config.trainer.objective_mode
    )
    launcher = config.hydra.launcher
    with (
        sweep.report_sweep(mode) as outcome,
        sweep.without_trials_of_optuna(),
        jobs_save_first(launcher),
    ):
        app.hydra.multirun(CONFIG, job, overrides)
    return outcome.exit_code
