"""What the modules of ours that stand for DeepSpeed's hold, by name; without torch."""

from __future__ import annotations

ROOT = "torsh_trainer.dropin.deepspeed"
"""The package that a script sees as ``deepspeed``."""

COLLECTIVES = (
    "ReduceOp",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)
"""Functions of torch.distributed that deepspeed.comm has under the same name."""

_COMM = (
    *COLLECTIVES,
    "destroy_process_group",
    "get_all_ranks_from_group",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "init_distributed",
    "is_available",
    "is_initialized",
    "log_summary",
    "new_group",
)
_ZERO = ("GatheredParameters", "Init", "register_external_parameter")
_CHECKPOINTING = ("checkpoint", "configure", "is_configured", "reset")
_UTILS = (
    "RepeatingLoader",
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
)
PUBLIC: dict[str, tuple[str, ...]] = {
    "": (
        "DeepSpeedEngine",
        "__version__",
        "accelerator",
        "add_config_arguments",
        "checkpointing",
        "comm",
        "dist",
        "get_accelerator",
        "init_distributed",
        "initialize",
        "log_dist",
        "logger",
        "ops",
        "runtime",
        "utils",
        "version",
        "zero",
    ),
    "accelerator": ("get_accelerator",),
    "checkpointing": _CHECKPOINTING,
    "comm": (*_COMM, "comm"),
    "comm.comm": _COMM,
    "ops": ("adam",),
    "ops.adam": ("DeepSpeedCPUAdam", "FusedAdam"),
    "runtime": ("activation_checkpointing", "config", "dataloader", "engine", "zero"),
    "runtime.activation_checkpointing": ("checkpointing",),
    "runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "runtime.config": (
        "ADAGRAD_OPTIMIZER",
        "ADAMW_OPTIMIZER",
        "ADAM_OPTIMIZER",
        "LAMB_OPTIMIZER",
        "LION_OPTIMIZER",
        "MUADAMW_OPTIMIZER",
        "MUADAM_OPTIMIZER",
        "MUON_OPTIMIZER",
        "MUSGD_OPTIMIZER",
    ),
    "runtime.dataloader": ("RepeatingLoader",),
    "runtime.engine": ("DeepSpeedEngine",),
    "runtime.zero": (*_ZERO, "partition_parameters"),
    "runtime.zero.partition_parameters": ("GatheredParameters", "Init", "ZeroParamStatus"),
    "utils": (*_UTILS, "logging"),
    "utils.logging": ("log_dist", "logger"),
    "zero": _ZERO,
}
"""Module of DeepSpeed's, without ``deepspeed.``, and the names in it that a script may use."""

OTHERS = {
    "pipe": "pipelines",
    "PipelineModule": "pipelines",
    "PipelineEngine": "pipelines",
    "moe": "mixtures of experts",
    "inference": "inference",
    "init_inference": "inference",
    "InferenceEngine": "inference",
    "compression": "compression of models",
    "autotuning": "autotuning",
    "launcher": "DeepSpeed's own launcher from Python",
    "profiling": "profiling",
    "sequence": "sequence parallelism",
    "module_inject": "tensor parallelism",
    "tp_model_init": "tensor parallelism",
    "checkpointing.get_cuda_rng_tracker": "the random numbers of models that are cut",
    "checkpointing.model_parallel_cuda_manual_seed": "the random numbers of models that are cut",
    "ops.sparse_attention": "DeepSpeed's own sparse attention",
    "ops.transformer": "DeepSpeed's own kernel of a layer",
    "runtime.data_pipeline": "curricula and random token dropping",
    "runtime.pipe": "pipelines",
}
"""Parts of DeepSpeed that no module of ours stands for."""


def explain_missing(module: str, name: str) -> str:
    """Why ``name`` is not in DeepSpeed's module ``module``, and what to do, as a sentence."""
    whole = ".".join(filter(None, ("deepspeed", module, name)))
    within = whole.replace("runtime.activation_checkpointing.", "").split(".")[1:]
    for count in range(len(within)):
        part = ".".join(within[: count + 1])
        if part in OTHERS:
            return (
                f"{whole} is for {OTHERS[part]}, which drop-in does not have; run this script with "
                "DeepSpeed itself"
            )
    return (
        f"{whole} is not there under drop-in; see docs/migrate/drop-in.md for what is, or run this "
        "script with DeepSpeed itself"
    )
