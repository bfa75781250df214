"""A backend of torch.distributed under a name of its own: ``comm.backend=example``."""

from __future__ import annotations

from typing import Any

from torsh_trainer.environments.world import World


def register(world: World, store: Any) -> None:
    """Tells torch of the backend; it is gloo's."""
    # Imported here: a process that asks for another backend has no use for it.
    import torch.distributed as dist

    if "example" in dist.Backend.backend_list:
        return

    def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend("example", make, devices=["cpu"])
