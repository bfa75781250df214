"""Collectives as functions, with torch's names, for scripts; see docs/collectives.md."""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "torsh_trainer.distributed.process_group": (
        "BackendType",
        "ProcessGroup",
        "ReduceOp",
        "destroy_process_group",
    ),
    "torsh_trainer.distributed.groups": (
        "InitMethod",
        "Rank",
        "WorldSize",
        "get_backend",
        "get_rank",
        "get_world_size",
        "init_process_group",
        "is_available",
        "is_gloo_available",
        "is_initialized",
        "is_mpi_available",
        "is_nccl_available",
        "new_group",
    ),
    "torsh_trainer.comm.failures": (
        "BackendError",
        "BackendNotInitialized",
        "CollectiveArgumentError",
        "CommunicationError",
        "MismatchError",
        "RendezvousError",
    ),
    "torsh_trainer.distributed.checking": ("set_check",),
    "torsh_trainer.distributed.collective_run": ("CollectiveWork",),
    "torsh_trainer.distributed.collectives": (
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_varsize",
        "all_reduce",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "gather",
        "irecv",
        "isend",
        "nccl_all_gather",
        "nccl_all_reduce",
        "nccl_all_to_all",
        "nccl_broadcast",
        "nccl_reduce",
        "nccl_reduce_scatter",
        "recv",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
        "send",
    ),
    "torsh_trainer.distributed.algorithms": (
        "hierarchical_all_reduce",
        "ring_all_reduce",
        "tree_all_reduce",
    ),
    "torsh_trainer.distributed.batch": ("CollectiveBatch", "NcclBatch"),
    "torsh_trainer.distributed.scheduler": ("CommunicationScheduler", "NcclScheduler", "Priority"),
    "torsh_trainer.distributed.tuning": ("AlgorithmTable",),
    "torsh_trainer.distributed.averaging": ("DistributedOptimizer", "average_gradients"),
    "torsh_trainer.distributed.data_parallel": ("BucketConfig", "DistributedDataParallel"),
    "torsh_trainer.comm.compression": (
        "CompressionAlgorithm",
        "CompressorMemory",
        "GradientCompressor",
    ),
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}
_MODULE_OF["Backend"] = (
    "torsh_trainer.distributed.process_group"  # BackendType, as one of the guides calls it
)
__all__ = [*sorted(_MODULE_OF)]


def __getattr__(name: str) -> Any:
    """Public names load on first use: what only asks for a part does not wait for torch."""
    if name == "Backend":
        name = "BackendType"
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
