"""The launcher that starts nothing: this process is the job, or already one of its processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torsh_trainer.environments.world import ALONE
from torsh_trainer.errors import ConfigError
from torsh_trainer.launchers.base import LaunchContext, Launcher, print_explanation


@dataclass(frozen=True)
class Inline(Launcher):
    """Calls the entry here, in the place that the environment gave, or alone.

    ``explain`` prints which variables decided.
    """

    name = "inline"

    explain: bool = False

    def launch(self, entry: Callable[..., Any], *args: Any, context: LaunchContext) -> Any:
        """See ``Launcher.launch``; errors of the entry come through as they are.

        Raises:
            ConfigError: the environment told only a node's place.
        """
        world = context.found or ALONE
        if self.explain:
            print_explanation(context)
        if world.told == "node" and world.local_size > 1:
            raise ConfigError(
                f"{world.source} tells the place of a node with {world.local_size} processes, and "
                "launcher=inline starts none",
                fix="launcher=local starts them; or set RANK and LOCAL_RANK for each process",
            )
        return entry(world, *args)
