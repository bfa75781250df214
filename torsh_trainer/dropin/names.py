"""What the modules of ours that stand for another engine's hold, by name; without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torsh_trainer.dropin import names_deepspeed

ROOT = "torsh_trainer.dropin.horovod"
"""The package that a script sees as ``horovod``."""

_MPI_OPS = (
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
)
_FUNCTIONS = (
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
)
PUBLIC: dict[str, tuple[str, ...]] = {
    "": ("__version__", "common", "run", "torch"),
    "torch": (
        *_MPI_OPS,
        *_FUNCTIONS,
        "Compression",
        "DistributedOptimizer",
        "SyncBatchNorm",
        "compression",
        "elastic",
        "functions",
        "mpi_ops",
        "optimizer",
        "sync_batch_norm",
    ),
    "torch.mpi_ops": (*_MPI_OPS, "Compression", "is_homogeneous", "gpu_available"),
    "torch.functions": _FUNCTIONS,
    "torch.optimizer": ("DistributedOptimizer",),
    "torch.compression": ("Compression", "Compressor", "FP16Compressor", "NoneCompressor"),
    "torch.sync_batch_norm": ("SyncBatchNorm",),
    "torch.elastic": ("ElasticSampler", "TorchState", "run", "sampler", "state"),
    "torch.elastic.state": (
        "ModelStateHandler",
        "OptimizerStateHandler",
        "SamplerStateHandler",
        "StateHandler",
        "TorchState",
        "get_handler_registry",
        "set_handler_registry",
    ),
    "torch.elastic.sampler": ("ElasticSampler",),
    "common": ("elastic", "exceptions", "process_sets", "util"),
    "common.elastic": ("ObjectState", "State", "run_fn"),
    "common.exceptions": ("HorovodInternalError", "HostsUpdatedInterrupt"),
    "common.process_sets": (
        "ProcessSet",
        "add_process_set",
        "global_process_set",
        "remove_process_set",
    ),
    "common.util": (
        "ccl_built",
        "ddl_built",
        "gloo_built",
        "gpu_available",
        "is_iterable",
        "mpi_built",
        "nccl_built",
        "num_rank_is_power_2",
        "split_list",
    ),
}
"""Module of Horovod's, without ``horovod.``, and the names in it that a script may use."""

OTHERS = {
    "tensorflow": "TensorFlow",
    "keras": "Keras",
    "_keras": "Keras",
    "mxnet": "MXNet",
    "spark": "Spark",
    "ray": "Ray",
    "runner": "Horovod's own launcher from Python",
    "data": "Horovod's loaders",
}
"""Parts of Horovod that no module of ours stands for."""


def explain_missing(module: str, name: str) -> str:
    """Why ``name`` is not in Horovod's module ``module``, and what to do, as a sentence."""
    whole = ".".join(filter(None, ("horovod", module, name)))
    part = whole.split(".")[1]
    if part in OTHERS:
        return (
            f"{whole} is for {OTHERS[part]}, and drop-in has horovod.torch alone; run this script "
            "with Horovod itself"
        )
    return (
        f"{whole} is not there under drop-in; see docs/migrate/drop-in.md for what is, or run this "
        "script with Horovod itself"
    )


@dataclass(frozen=True)
class StoodFor:
    """An engine that modules of ours stand for: ``name`` is what scripts import.

    ``public`` has the names of each module; ``others`` are parts that no module stands for.
    ``explain(module, name)`` says why a name is not there. With ``late`` a module that is not there
    can be imported, and its names, like those of ``others`` under a condition or in a function, are
    refused where they are used.
    """

    name: str
    root: str
    public: Mapping[str, tuple[str, ...]]
    others: Mapping[str, str]
    explain: Callable[[str, str], str]
    late: bool = False


ENGINES = {
    "horovod": StoodFor("horovod", ROOT, PUBLIC, OTHERS, explain_missing),
    "deepspeed": StoodFor(
        "deepspeed",
        names_deepspeed.ROOT,
        names_deepspeed.PUBLIC,
        names_deepspeed.OTHERS,
        names_deepspeed.explain_missing,
        late=True,
    ),
}
"""Every engine that modules of ours stand for."""


def engine_of(root: str) -> StoodFor:
    """The engine whose modules of ours lie under ``root``."""
    return next(one for one in ENGINES.values() if one.root == root)
