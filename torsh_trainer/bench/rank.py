"""One process of a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torsh_trainer.comm.base import CommOptions
from torsh_trainer.comm.start import create
from torsh_trainer.distributed.bench import BenchPlan
from torsh_trainer.distributed.measuring import sweep
from torsh_trainer.distributed.process_group import ProcessGroup, destroy_process_group
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, ResourceError, TorshError
from torsh_trainer.utils import registry


def measure_backends(
    world: World, plan: BenchPlan, backends: Sequence[str], *, named: bool, timeout_s: float
) -> dict[str, Any] | None:
    """The records of every backend, on the first process; None elsewhere.

    A backend that is missing is left out and explained, or an error when it was ``named``.

    Raises:
        ConfigError: a backend has an unknown name.
        ResourceError: one that was named is not available.
        TrainingError: a collective failed.
    """
    records: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for name in backends:
        on_gpu = name == "nccl" and torch.cuda.is_available()
        device = torch.device("cuda" if on_gpu else "cpu")
        try:
            comm = create(world, CommOptions(backend=name, timeout_s=timeout_s), device)
        except (ConfigError, ResourceError) as error:
            if named:
                raise _of_option(name, error) from error
            left_out[name] = error.sentence
            if plugin := _not_installed(name):
                left_out[name] += f" (pip install {plugin})"
            continue
        group = ProcessGroup(comm.process_group, timeout_s=timeout_s, device=comm.device)
        records += sweep(group, plan)
        destroy_process_group(group)
    return {"records": records, "left_out": left_out} if world.is_rank_zero else None


def _of_option(name: str, error: TorshError) -> TorshError:
    """The same error for who wrote ``--backends``, and not ``comm.backend``."""
    sentence = error.sentence.replace(f"comm.backend={name}", f"--backends {name}")
    everything = "leave --backends out to measure what is available"
    if isinstance(error, ConfigError):
        return ConfigError(sentence, fix=error.fix)
    plugin = _not_installed(name)
    fix = f"pip install {plugin}, or {everything}" if plugin else everything
    return ResourceError(sentence, fix=fix)


def _not_installed(name: str) -> str | None:
    """The distribution of ours that brings the backend ``name``, where it is not installed."""
    return None if name in registry.BACKENDS else registry.DISTRIBUTIONS.get(("comm", name))
