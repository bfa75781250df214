"""A Horovod job in a script of one's own, trained natively: no engine is installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torsh_trainer.comm.compression import FP16, TopK
from torsh_trainer.comm.compression.base import Compression, NoCompression
from torsh_trainer.distributed.data_parallel import BucketConfig
from torsh_trainer.errors import ConfigError, Unsupported
from torsh_trainer.translate.horovod.job import Options
from torsh_trainer.translate.horovod.translator import translate
from torsh_trainer.translate.plan import Plan

_EACH_ALONE = 2.0**-20
"""MiB: a bucket of a byte, so that each gradient is one of its own."""


@dataclass(frozen=True)
class HorovodConfig:
    """How gradients are reduced.

    ``fusion_threshold_mb`` MiB travel together (0: each alone). Gradients are the mean over
    ``gradient_accumulation_steps`` backward passes and the sum over ``backward_passes_per_step``.
    ``find_unused_parameters`` allows parameters without a gradient. ``plan`` is the translation
    that this came from, if any.
    """

    fusion_threshold_mb: float = 64.0
    gradient_accumulation_steps: int = 1
    backward_passes_per_step: int = 1
    find_unused_parameters: bool = False
    compression: Compression = NoCompression()
    plan: Plan | None = None

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        *,
        command: str | None = None,
        world_size: int | None = None,
        settings: Mapping[str, str] | None = None,
        lenient: bool = False,
    ) -> HorovodConfig:
        """What a job says: whatever the verb ``translate`` reads, with its options.

        Raises:
            ConfigError: it is invalid.
            ResourceError: it cannot be read.
            Unsupported: something of it has no translation here.
        """
        options = Options(
            world_size=world_size, lenient=lenient, settings=settings or {}, command=command
        )
        plan = translate(path, options)
        for finding in plan.findings:
            if finding.verdict == "refused":
                raise Unsupported(f"{finding.key}: {finding.why}", fix="take it out of the job")
        return cls.of(plan)

    @classmethod
    def of(cls, plan: Plan) -> HorovodConfig:
        """What the translation ``plan`` says of gradients.

        Raises:
            Unsupported: it adds gradients up over processes.
        """
        values: Mapping[str, Any] = plan.values
        if values.get("strategy.op", "average") != "average":
            raise Unsupported(
                "op=Sum: DistributedDataParallel averages",
                fix="multiply the loss by the number of processes, or train with Trainer",
            )
        passes = values.get("strategy.backward_passes_per_step", 1)
        half = values.get("precision.reduce") == "fp16"
        return cls(
            fusion_threshold_mb=values.get("strategy.bucket_cap_mb", cls.fusion_threshold_mb),
            gradient_accumulation_steps=values.get("trainer.accumulate", 1) // passes,
            backward_passes_per_step=passes,
            find_unused_parameters=values.get("strategy.find_unused_parameters", False),
            compression=FP16() if half else NoCompression(),
            plan=plan,
        )


class HorovodIntegration:
    """``HorovodIntegration(HorovodConfig.from_file("run.sh")).to_ddp_config()``."""

    def __init__(self, config: HorovodConfig) -> None:
        self.config = config
        self.is_initialized = False

    @staticmethod
    def default_config() -> HorovodConfig:
        """Gradients travel in 64 MiB."""
        return HorovodConfig()

    @staticmethod
    def config_with_topk_compression(k: float) -> HorovodConfig:
        """The share ``k`` of each gradient travels, its largest elements; the rest follows later.

        Raises:
            ConfigError: ``k`` is not in (0, 1].
        """
        return HorovodConfig(compression=TopK(k))

    def initialize(self, rank: int, size: int, local_rank: int, local_size: int) -> None:
        """Checks that this process is ``rank`` of ``size``, and ``local_rank`` on its node.

        Raises:
            ConfigError: torch.distributed says otherwise, or it was called before.
        """
        if self.is_initialized:
            raise ConfigError(
                "this HorovodIntegration is initialized already", fix="call initialize once"
            )
        joined = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if (rank, size) != joined or not 0 <= local_rank < local_size <= size:
            raise ConfigError(
                f"this process is rank {joined[0]} of {joined[1]}, not {rank} of {size}, "
                f"{local_rank} of {local_size} on its node",
                fix="call torch.distributed.init_process_group first",
            )
        self.is_initialized = True

    def to_ddp_config(self) -> BucketConfig:
        """What ``comm.DistributedDataParallel(model, config)`` takes.

        Raises:
            ConfigError: a number is out of range.
        """
        config = self.config
        if config.fusion_threshold_mb < 0:
            raise ConfigError(
                f"fusion_threshold_mb={config.fusion_threshold_mb} is negative",
                fix="0 sends each gradient alone",
            )
        return BucketConfig(
            bucket_size_mb=config.fusion_threshold_mb or _EACH_ALONE,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            backward_passes_per_step=config.backward_passes_per_step,
            find_unused_parameters=config.find_unused_parameters,
            gradient_compression=not isinstance(config.compression, NoCompression),
        )

    def to_compression_config(self) -> Compression:
        """What the wrapper's ``with_compression`` takes, and ``Trainer(compression=...)``."""
        return self.config.compression
