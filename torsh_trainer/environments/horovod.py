"""horovodrun (with Gloo; with MPI it is mpirun that sets the variables)."""

from __future__ import annotations

from collections.abc import Mapping

from torsh_trainer.environments.base import Environment
from torsh_trainer.environments.reading import Reading, is_set, missing
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError

_MARKS = ("HOROVOD_RANK", "HOROVOD_SIZE")
_LOCAL = ("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
_JOB = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")


class Horovod(Environment):
    """Processes started by horovodrun.

    Horovod's own rendezvous server speaks HTTP, so its port is not where we meet; its host is,
    on several nodes and without MASTER_ADDR: horovodrun is usually started on rank 0's host.
    """

    name = "horovod"
    priority = 80
    steady = (
        "set strategy=horovod; or start horovodrun without --min-np and --host-discovery-script"
    )
    variables = (
        *_MARKS,
        *_LOCAL,
        "HOROVOD_CROSS_RANK",
        "HOROVOD_CROSS_SIZE",
        "HOROVOD_ELASTIC",
        *_JOB,
        "MASTER_ADDR",
        "MASTER_PORT",
    )

    def world(self, env: Mapping[str, str]) -> World | None:
        if not all(is_set(env, name) for name in _MARKS):
            return None
        read = Reading(env, self.name)
        rank = read.integer("HOROVOD_RANK", means="rank") or 0
        size = read.integer("HOROVOD_SIZE", means="size") or 0
        local_rank = read.integer("HOROVOD_LOCAL_RANK", means="local rank")
        local_size = read.integer("HOROVOD_LOCAL_SIZE", means="local size")
        if local_rank is None or not local_size:
            raise ConfigError(
                f"HOROVOD_RANK={rank} is set, but {missing(env, *_LOCAL)}",
                fix="pass horovodrun's variables on unchanged, or unset HOROVOD_RANK",
            )
        node = read.integer("HOROVOD_CROSS_RANK", means="node")
        nodes = read.integer("HOROVOD_CROSS_SIZE", means="nodes")
        elastic = read.text("HOROVOD_ELASTIC", means="processes come and go")
        driver = None
        if local_size != size and "MASTER_ADDR" not in read:
            driver = read.text("HOROVOD_GLOO_RENDEZVOUS_ADDR", means="rank 0's host taken to be")
        return World(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            node_rank=rank // local_size if node is None else node,
            nodes=-(-size // local_size) if nodes is None else nodes,
            rendezvous=read.rendezvous(one_node=local_size == size, host=driver, job=_JOB),
            source=self.name,
            reasons=tuple(read.reasons),
            elastic=elastic == "1",
        )

    def absence(self, env: Mapping[str, str]) -> str:
        return missing(env, *_MARKS)
