"""The contract of a launcher: how the processes of a job come to be."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torsh_trainer import environments
from torsh_trainer.environments.world import ALONE, World
from torsh_trainer.errors import ConfigError
from torsh_trainer.launchers.plan import JobRequest, LaunchPlan


@dataclass(frozen=True)
class LaunchContext:
    """What a launcher needs of the outside world, read once at the door.

    ``found`` is the place that an environment (torchrun, SLURM, ...) already gave this process,
    or None when the process stands alone. ``log_dir`` is where all workers but rank 0, whose output
    goes where the parent's goes, write ``rank-N.log``; None is a temporary folder, which stays (and
    is named) only if the job fails.
    """

    env: Mapping[str, str]
    found: World | None = None
    log_dir: Path | None = None


class Launcher(abc.ABC):
    """Starts the processes of a job; subclasses are frozen dataclasses of knobs.

    ``submits`` says that it hands the run to a scheduler and returns (``SubmitLauncher``).
    ``dry_run`` is a knob of those that plan: what ``plan_launch`` gives is printed, and no more.
    """

    name: ClassVar[str]
    submits: ClassVar[bool] = False
    dry_run: bool = False

    @abc.abstractmethod
    def launch(self, entry: Callable[..., Any], *args: Any, context: LaunchContext) -> Any:
        """Calls ``entry(world, *args)`` in every process of the job; returns rank 0's answer.

        The answer is plain data (it crosses processes). Arguments must pickle (cloudpickle).

        Raises:
            WorkerError: a worker raised, was killed or did not start; all others are stopped.
            Interrupted: a signal asked the job to stop; all workers are stopped.
        """

    def plan_launch(self, request: JobRequest, *, context: LaunchContext) -> LaunchPlan:
        """What would be written and run for ``request``; looks at nothing, and changes nothing.

        Raises:
            ConfigError: this launcher has no plan, or its knobs contradict each other.
        """
        raise ConfigError(f"launcher={self.name} plans nothing", fix="leave launcher.dry_run=false")

    def size(self, context: LaunchContext) -> int:
        """How many processes the job will have; nothing is started."""
        return (context.found or ALONE).size


def print_explanation(context: LaunchContext, plan: str = "runs in this process") -> None:
    """Prints, on one process of the job, which variables decided and what will be started."""
    if context.found is None or context.found.is_rank_zero:
        print(f"{environments.explain(context.env)}\nthe launcher {plan}", flush=True)
