"""A DeepSpeed configuration in a script of one's own: model and optimizer stay the script's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torsh_trainer.errors import ConfigError
from torsh_trainer_deepspeed.config import DeepSpeedConfig


class DeepSpeedIntegration:
    """``DeepSpeedIntegration(DeepSpeedConfig.from_file("ds_config.json"))``."""

    def __init__(self, config: DeepSpeedConfig) -> None:
        self.config = config
        self.is_initialized = False

    @classmethod
    def from_file(cls, path: str | Path) -> DeepSpeedIntegration:
        """Of a file; see ``DeepSpeedConfig.from_file``."""
        return cls(DeepSpeedConfig.from_file(path))

    def initialize(self, rank: int, world_size: int) -> None:
        """Checks the file, and that this process is ``rank`` of ``world_size`` joined ones.

        Raises:
            ConfigError: the file has keys that DeepSpeed ignores, or torch.distributed says
                otherwise about rank or size.
        """
        # Imported here: a configuration is read without torch.
        import torch.distributed as dist

        if not 0 <= rank < world_size:
            raise ConfigError(f"there is no rank {rank} of {world_size}", fix="ranks count from 0")
        for place, offer in self.config.unknown_keys():
            raise ConfigError(f"{place} is no key of DeepSpeed's", fix=offer)
        joined: tuple[Any, Any] = (0, 1)
        if dist.is_initialized():
            joined = (dist.get_rank(), dist.get_world_size())
        if (rank, world_size) != joined:
            raise ConfigError(
                f"this process is rank {joined[0]} of {joined[1]}, not {rank} of {world_size}",
                fix="call torch.distributed.init_process_group first",
            )
        self.is_initialized = True
