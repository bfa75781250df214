"""Registered names: ``Trainer(strategy="torsh_fsdp")``."""

from __future__ import annotations

from functools import partial

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from torsh_trainer_lightning import other
from torsh_trainer_lightning.fabric import TorshFabricStrategy
from torsh_trainer_lightning.strategy import TorshStrategy

NAMES = ("single", "ddp", "fsdp", "mpi", "gloo", "nccl", "deepspeed", "horovod")


def register() -> None:
    """Makes each strategy known to Trainer and Fabric as ``torsh_NAME``; again changes nothing."""
    for known, made in (
        (StrategyRegistry, TorshStrategy),
        (STRATEGY_REGISTRY, TorshFabricStrategy),
    ):
        for name in NAMES:
            known.register(
                f"torsh_{name}",
                partial(made.named, name),
                description=f"strategy={name} of ToRSh Trainer",
                override=True,
            )
    other.register(NAMES)
