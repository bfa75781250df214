"""Registered names: ``Trainer(strategy="torsh_fsdp")``."""

from __future__ import annotations

from functools import partial

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from torsh_trainer_lightning import other
from torsh_trainer_lightning.fabric import TorshFabricStrategy
from torsh_trainer_lightning.processes import Chosen, signature_of
from torsh_trainer_lightning.strategy import TorshStrategy

NAMES = ("single", "ddp", "fsdp", "mpi", "gloo", "nccl", "deepspeed", "horovod")
WITH_KNOBS = {
    f"ddp_find_unused_parameters_{str(finds).lower()}": ("ddp", {"find_unused_parameters": finds})
    for finds in (True, False)
}
"""Names that say a knob too, as Lightning's own do."""


def register() -> None:
    """Makes each strategy known to Trainer and Fabric as ``torsh_NAME``; again changes nothing.

    Their constructors name the knobs of all, so that LightningCLI takes them as options.
    """
    vars(Chosen.__init__)["__signature__"] = signature_of(Chosen, NAMES)
    names = {**{name: (name, {}) for name in NAMES}, **WITH_KNOBS}
    for known, made in (
        (StrategyRegistry, TorshStrategy),
        (STRATEGY_REGISTRY, TorshFabricStrategy),
    ):
        for name, (strategy, knobs) in names.items():
            known.register(
                f"torsh_{name}",
                partial(made.from_name, strategy, **knobs),
                description=f"strategy={strategy} of ToRSh Trainer",
                override=True,
            )
    other.register(NAMES)
