"""Processes that the scheduler of an imaginary site has started."""

from __future__ import annotations

from collections.abc import Mapping

from torsh_trainer.environments.base import Environment
from torsh_trainer.environments.reading import is_set
from torsh_trainer.environments.world import Rendezvous, World
from torsh_trainer.errors import ConfigError


class Site(Environment):
    """``SITE_TASK=3/8@node01:29500``: task 3 of 8 on one host, meeting there."""

    name = "site"
    priority = 95  # it starts torchrun's variables anew, so it is asked before torchrun
    variables = ("SITE_TASK",)

    def world(self, env: Mapping[str, str]) -> World | None:
        if not is_set(env, "SITE_TASK"):
            return None
        text = env["SITE_TASK"]
        try:
            place, _, meeting = text.partition("@")
            rank, size = map(int, place.split("/"))
            address, port = meeting.rsplit(":", 1)
            rendezvous = Rendezvous(address, int(port))
        except ValueError as error:
            raise ConfigError(
                f"SITE_TASK={text} is not RANK/SIZE@HOST:PORT",
                fix="let the site's scheduler set it",
            ) from error
        if not 0 <= rank < size:
            raise ConfigError(
                f"SITE_TASK={text}: there is no task {rank} of {size}",
                fix="let the site's scheduler set it",
            )
        return World(
            rank=rank,
            size=size,
            local_rank=rank,
            local_size=size,
            rendezvous=rendezvous,
            source=self.name,
            reasons=(f"SITE_TASK={text} -> rank {rank} of {size}",),
        )

    def absence(self, env: Mapping[str, str]) -> str:
        return "SITE_TASK is not set"
