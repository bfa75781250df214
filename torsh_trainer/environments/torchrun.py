"""torchrun, and ``python -m torch.distributed.run``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torsh_trainer.environments.base import Environment
from torsh_trainer.environments.reading import Reading, is_set, missing
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError

_MARKS = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE")


class Torchrun(Environment):
    """Processes started by torch's own launcher; its agent usually serves the store itself."""

    name = "torchrun"
    priority = 90
    variables = (
        "TORCHELASTIC_RUN_ID",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_RESTART_COUNT",
    )

    def world(self, env: Mapping[str, str]) -> World | None:
        if not all(is_set(env, name) for name in _MARKS):
            return None
        read = Reading(env, self.name)
        run = read.text("TORCHELASTIC_RUN_ID", means="torchrun's run")
        rank = read.integer("RANK", means="rank") or 0
        size = read.integer("WORLD_SIZE", means="size") or 0
        local_rank = read.integer("LOCAL_RANK", means="local rank")
        local_size = read.integer("LOCAL_WORLD_SIZE", means="local size")
        if local_rank is None or not local_size:
            raise ConfigError(
                f"torchrun's run {run} is set, but "
                f"{missing(env, 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')}",
                fix="pass torchrun's variables on unchanged, or unset TORCHELASTIC_RUN_ID",
            )
        node = read.integer("GROUP_RANK", means="node")
        nodes = read.integer("GROUP_WORLD_SIZE", means="nodes")
        agent = read.text("TORCHELASTIC_USE_AGENT_STORE", means="store served by the agent:")
        attempt = read.integer("TORCHELASTIC_RESTART_COUNT", means="restarts so far:")
        meeting = read.rendezvous(one_node=local_size == size, hosted=agent == "True")
        return World(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            node_rank=rank // local_size if node is None else node,
            nodes=-(-size // local_size) if nodes is None else nodes,
            rendezvous=replace(meeting, attempt=attempt or 0),
            source=self.name,
            reasons=tuple(read.reasons),
        )

    def absence(self, env: Mapping[str, str]) -> str:
        return missing(env, *_MARKS)
