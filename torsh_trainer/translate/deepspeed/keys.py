"""Every key that DeepSpeed knows: what it may be, its default, and the rule that takes it.

A line is ``name kind default rule``; a default is JSON, ``-`` for none. ``*`` is any name. Blocks
that pydantic checks (``strict``) are those in which the engine itself refuses an unknown key.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from torsh_trainer.translate.deepspeed.kinds import Kind, kind
from torsh_trainer.translate.rule_plugins import collect_additions

Path = tuple[str, ...]


@dataclass(frozen=True)
class Key:
    """One key. ``switch`` is the key that turns its block on, where there is one.

    ``checked``: a wrong type is refused by the engine when it reads the file. ``removed``: 0.19.8
    refuses the key by its mere presence.
    """

    path: Path
    kind: Kind
    default: Any
    rule: str
    strict: bool
    checked: bool
    switch: Path | None
    removed: bool

    @property
    def dotted(self) -> str:
        """``zero_optimization.stage``."""
        return ".".join(self.path)


@dataclass(frozen=True)
class KeyBlock:
    """Keys below one prefix, as lines of text."""

    prefix: str
    lines: str
    strict: bool = False
    switch: str = ""
    removed: bool = False


TOP = KeyBlock(
    "",
    """
    train_batch_size!                  int>0     -       batch.global
    train_micro_batch_size_per_gpu!    int>0     -       batch.micro
    gradient_accumulation_steps!       int>0     -       batch.accumulation
    managed_gradient_accumulation      bool      true    batch.managed
    steps_per_print                    int>=0?   -       log.every
    dump_state                         bool      false   log.state
    wall_clock_breakdown!              bool      false   log.phases
    memory_breakdown                   bool      false   log.phases
    log_level                          str?      -       log.level
    disable_allgather                  bool      false   dead.unused
    dataloader_drop_last               bool      false   data.drop-last
    vocabulary_size!                   int?      -       dead.unused
    communication_data_type!           sent-dtype? -    gradients.dtype
    seq_parallel_communication_data_type! sent-dtype? "fp32" parallel.sequence-dtype
    prescale_gradients                 bool      false   gradients.prescale
    gradient_predivide_factor          float>0   1.0     gradients.predivide
    gradient_allreduce_op!             MEAN|SUM  "mean"  gradients.op
    gradient_clipping                  float>=0  -       gradients.clipping|gradients.clipping-old
    zero_allow_untested_optimizer      bool      false   dead.permission
    zero_force_ds_cpu_optimizer        bool      true    dead.permission
    allgather_size                     int>=0    5e8     zero.buckets
    use_data_before_expert_parallelism bool      false   parallel.rank-order
    sequence_parallel_size             int>0     1       parallel.sequence
    data_parallel_size                 int>0?    -       parallel.sequence
    datastates_ckpt                    any       -       checkpoint.asynchronous
    disable_python_gc                  bool      false   speed.gc
    """,
)

REMOVED = KeyBlock(
    "",
    """
    sparse_gradients                   bool      false   gradients.sparse
    graph_harvesting                   bool      false   speed.graphs
    """,
    removed=True,
)

ZERO = KeyBlock(
    "zero_optimization",
    """
    stage                              int0..3   0       zero.stage
    contiguous_gradients               bool      true    zero.contiguous
    reduce_scatter                     bool      true    zero.reduce-scatter
    reduce_bucket_size                 int>0     5e8     zero.reduce-bucket
    use_multi_rank_bucket_allreduce    bool      true    zero.buckets
    allgather_partitions               bool      true    dead.unused
    allgather_bucket_size              int>=0    5e8     zero.buckets
    overlap_comm                       bool?     -       zero.overlap
    compute_grad_norm                  bool      true    zero.norm
    load_from_fp32_weights             bool      true    checkpoint.masters
    elastic_checkpoint                 bool      false   checkpoint.layout
    sub_group_size                     int>=0    1e9     zero.tiles
    cpu_offload                        bool?     -       offload.optimizer-deprecated
    cpu_offload_param                  bool?     -       offload.parameters-deprecated
    cpu_offload_use_pin_memory         bool?     -       offload.tuning
    stage3_prefetch_bucket_size        int>=0    5e7     zero.prefetch
    stage3_param_persistence_threshold int>=0    1e5     zero.prefetch
    stage3_model_persistence_threshold int>=0    9223372036854775807  zero.prefetch
    stage3_max_live_parameters         int>=0    1e9     zero.prefetch
    stage3_max_reuse_distance          int>=0    1e9     zero.prefetch
    stage3_module_granularity_threshold int      0       zero.prefetch
    stage3_use_all_reduce_for_fetch_params bool  false   zero.prefetch
    stage3_allgather_sequential        bool      false   zero.prefetch
    stage3_gather_16bit_weights_on_model_save bool false checkpoint.gathered
    stage3_gather_fp16_weights_on_model_save  bool false checkpoint.gathered
    ignore_unused_parameters           bool      true    zero.unused
    legacy_stage1                      bool      false   zero.legacy
    round_robin_gradients              bool      false   zero.layout
    parameter_alignment                bool      false   zero.layout
    zero_hpz_partition_size            int>=0    1       zero.secondary-shard
    zero_quantized_weights             bool      false   zero.quantized
    zero_quantized_nontrainable_weights bool     false   zero.quantized
    zero_quantized_gradients           bool      false   zero.quantized
    memory_efficient_linear            bool      true    zero.linear
    pipeline_loading_checkpoint        bool      false   checkpoint.layout
    override_module_apply              bool      true    zero.inherent
    log_trace_cache_warnings           bool      false   log.phases
    enable_sanity_checks               bool      false   log.phases
    save_muon_momentum_buffer_in_memory bool     false   zero.layout
    zenflow                            null?     -       zero.zenflow
    offload_param                      null?     -       offload.none
    offload_optimizer                  null?     -       offload.none
    leaf_module                        null?     -       zero.leaf
    offload_param.device               none|cpu|nvme "none" offload.parameters
    offload_param.nvme_path            str?      -       offload.nvme
    offload_param.buffer_count         int>=0    5       offload.nvme
    offload_param.buffer_size          int>=0    1e8     offload.nvme
    offload_param.max_in_cpu           int>=0    1e9     offload.nvme
    offload_param.pin_memory           bool      true    offload.tuning
    offload_optimizer.device           none|cpu|nvme "none" offload.optimizer
    offload_optimizer.nvme_path        str?      -       offload.nvme
    offload_optimizer.buffer_count     int>=0    4       offload.nvme
    offload_optimizer.pin_memory       bool      true    offload.tuning
    offload_optimizer.pipeline_read    bool      false   offload.nvme
    offload_optimizer.pipeline_write   bool      false   offload.nvme
    offload_optimizer.fast_init        bool      false   offload.nvme
    offload_optimizer.ratio            float0..1 1.0     offload.ratio
    offload_optimizer.super_offload    bool      false   offload.tuning
    offload_optimizer.cpuadam_cores_perc float0..1 0.8   offload.tuning
    zenflow.topk_ratio                 float0..1 0.1     zero.zenflow
    zenflow.select_strategy            auto|step|epoch "auto" zero.zenflow
    zenflow.select_interval            any       "auto"  zero.zenflow
    zenflow.update_interval            any       "auto"  zero.zenflow
    zenflow.overlap_step               bool      false   zero.zenflow
    zenflow.offload                    bool      false   zero.zenflow
    zenflow.auto_ratio                 float0..1 0.99    zero.zenflow
    zenflow.full_warm_up_rounds        int       0       zero.zenflow
    zenflow.pt_reserved_cores_perc     float0..1 0.5     zero.zenflow
    zenflow.steps_per_epoch            int?      -       zero.zenflow
    leaf_module.classes                names     -       zero.leaf
    leaf_module.names                  names     -       zero.leaf
    leaf_module.name_suffixes          names     -       zero.leaf
    """,
    strict=True,
)

ZERO_REMOVED = KeyBlock(
    "zero_optimization",
    """
    mics_shard_size                    int       -1      zero.mics
    mics_hierarchical_params_gather    bool      false   zero.inherent
    zeropp_loco_param.err_beta         float     0.8     zero.loco
    zeropp_loco_param.reset_T          int       1024    zero.loco
    """,
    strict=True,
    removed=True,
)

BF16 = KeyBlock(
    "bf16",
    """
    enabled                            bool      false   precision.bf16
    immediate_grad_update              bool      false   precision.bf16-update
    check_grad_overflow                bool      true    precision.bf16-overflow
    bf16_master_weights_and_grads      bool      false   precision.half-masters
    bf16_optimizer_states              bool      false   precision.half-masters
    """,
    strict=True,
    switch="enabled",
)

FP16 = KeyBlock(
    "fp16",
    """
    enabled                            bool      false   precision.fp16
    auto_cast                          bool      false   precision.inputs
    loss_scale                         float>=0  0       scale.fixed
    initial_scale_power                int       16      scale.initial
    loss_scale_window                  int       1000    scale.window
    hysteresis                         int       2       scale.hysteresis
    consecutive_hysteresis             bool      false   scale.refill
    min_loss_scale                     int       1       scale.floor
    fp16_master_weights_and_grads      bool      false   precision.half-masters
    """,
    strict=True,
    switch="enabled",
)

PRECISION = KeyBlock(
    "",
    """
    torch_autocast.enabled             bool      false   precision.autocast
    torch_autocast.dtype!              torch-dtype "bfloat16" precision.autocast-dtype
    torch_autocast.lower_precision_safe_modules! names - precision.autocast-modules
    data_types.grad_accum_dtype        fp32|fp16|bf16? - precision.accumulation
    data_types.param_dtype             fp32|fp16|bf16? - precision.parameters
    data_types.buffer_dtype            fp32|fp16|bf16? - precision.buffers
    data_types.keep_in_fp32_modules!   any       "auto"  precision.kept
    """,
)

OPTIMIZER = KeyBlock(
    "optimizer",
    """
    type!                              str       -       optimizer.type
    legacy_fusion                      bool      false   dead.unused
    params.lr                          float>=0  -       optimizer.lr
    params.betas                       betas     -       optimizer.betas
    params.eps                         float>=0  -       optimizer.eps
    params.weight_decay                float>=0  -       optimizer.weight-decay
    params.torch_adam                  any       false   optimizer.kernel
    params.adam_w_mode                 bool      true    optimizer.decoupled
    params.bias_correction             bool      true    optimizer.bias-correction
    params.amsgrad                     bool      false   optimizer.amsgrad
    params.max_grad_norm!              float>=0  -       optimizer.max-grad-norm
    params.freeze_step                 int>=0    100000  optimizer.freeze
    params.cuda_aware                  bool      false   optimizer.transport
    params.comm_backend_name           str       "nccl"  optimizer.transport
    params.*                           any       -       optimizer.other
    """,
)

SCHEDULER = KeyBlock(
    "scheduler",
    """
    type!                              str       -       schedule.type
    params.warmup_min_lr               number    -       schedule.warmup-range
    params.warmup_max_lr               number?   -       schedule.warmup-range
    params.warmup_num_steps            int       -       schedule.warmup-steps
    params.warmup_type                 str       -       schedule.warmup-type
    params.total_num_steps             int       -       schedule.total
    params.last_batch_iteration        int       -1      schedule.position
    params.*                           any       -       schedule.other
    """,
)

CHECKPOINTING = KeyBlock(
    "activation_checkpointing",
    """
    partition_activations              bool      false   activations.partition
    cpu_checkpointing                  bool      false   activations.offload
    number_checkpoints                 int?      -       activations.tuning
    contiguous_memory_optimization     bool      false   activations.tuning
    synchronize_checkpoint_boundary    bool      false   activations.tuning
    profile                            bool      false   activations.tuning
    """,
)

PARALLEL = KeyBlock(
    "",
    """
    pipeline.stages                    any       "auto"  parallel.pipeline-unread
    pipeline.partition                 any       "best"  parallel.pipeline-unread
    pipeline.seed_layers               bool      false   parallel.pipeline-unread
    pipeline.activation_checkpoint_interval int  0       parallel.pipeline
    pipeline.pipe_partitioned          bool      true    parallel.pipeline
    pipeline.grad_partitioned          bool      true    parallel.pipeline
    pipeline.use_reentrant             bool      true    parallel.pipeline
    """,
)

TENSOR = KeyBlock(
    "tensor_parallel",
    """
    autotp_size                        int>=0    0       parallel.tensor
    tp.tp_size                         int>0     1       parallel.tensor-tuning
    tp.tp_grain_size                   int>0     1       parallel.tensor-tuning
    tp.mpu                             any       -       parallel.tensor-tuning
    tp.tp_group                        any       -       parallel.tensor-tuning
    dtype                              any       "fp16"  parallel.tensor-tuning
    tp_overlap_comm                    bool      false   parallel.tensor-tuning
    injection_policy_tuple             any       -       parallel.tensor-tuning
    partition_config.*                 any       -       parallel.tensor-tuning
    preset_model                       str?      -       parallel.tensor-tuning
    keep_module_on_host                bool      false   parallel.tensor-tuning
    replace_with_kernel_inject         bool      false   parallel.tensor-tuning
    vocab_parallel_lm_head             bool?     -       parallel.tensor-tuning
    vocab_parallel_ce_backend          torch|liger "torch" parallel.tensor-tuning
    """,
    strict=True,
)

_EXPERT = (
    "autoep_size",
    "expert_tensor_parallel_size",
    "validate_folding_routing",
    "preset_model",
    "moe_layer_pattern",
    "expert_pattern",
    "router_pattern",
    "use_grouped_mm",
    "disable_triton_grouped_mm",
    "route_norm",
    "route_scale",
    "score_apply",
    "combine_impl",
    "num_expert_groups",
    "num_limited_groups",
    "score_func",
    "top_k",
    "load_balance_coeff",
    "routed_scaling_factor",
    "expert_w1",
    "expert_w2",
    "expert_w3",
    "num_experts_attr",
    "top_k_attr",
    "has_shared_experts",
    "shared_experts_pattern",
    "shared_experts_gate_pattern",
)

EXPERT = KeyBlock(
    "expert_parallel",
    "\n".join(
        ["enabled bool false parallel.expert"]
        + [f"{name} any - parallel.expert-tuning" for name in _EXPERT]
    ),
    switch="enabled",
)

COMPILE = KeyBlock(
    "compile",
    """
    deepcompile                        bool      false   compile.deepcompile
    autoep_non_moe                     bool      false   compile.tuning
    free_activation                    bool      false   compile.tuning
    free_activation_threshold          int       10485760 compile.tuning
    offload_activation                 bool      false   compile.tuning
    offload_activation_pin_memory      bool      true    compile.tuning
    offload_opt_states                 bool      false   compile.tuning
    double_buffer                      bool      true    compile.tuning
    symmetric_memory                   bool      false   compile.tuning
    debug_log                          bool      false   compile.tuning
    offload_parameters                 bool      false   compile.tuning
    sync_before_reduce                 bool      false   compile.tuning
    sync_after_reduce                  bool      false   compile.tuning
    sync_before_allgather              bool      false   compile.tuning
    sync_after_allgather               bool      false   compile.tuning
    keep_int_input_tensors             bool      true    compile.tuning
    keep_all_input_tensors             bool      false   compile.tuning
    passes                             names?    -       compile.passes
    """,
    strict=True,
    switch="deepcompile",
)

MONITORS = (
    KeyBlock(
        "tensorboard",
        """
        enabled                        bool      false   monitor.tensorboard
        output_path                    str       ""      monitor.where
        job_name                       str       "DeepSpeedJobName" monitor.where
        """,
        strict=True,
        switch="enabled",
    ),
    KeyBlock(
        "csv_monitor",
        """
        enabled                        bool      false   monitor.csv
        output_path                    str       ""      monitor.where
        job_name                       str       "DeepSpeedJobName" monitor.where
        """,
        strict=True,
        switch="enabled",
    ),
    KeyBlock(
        "wandb",
        """
        enabled                        bool      false   monitor.wandb
        group                          str?      -       monitor.wandb-name
        team                           str?      -       monitor.wandb-name
        project                        str       "deepspeed" monitor.wandb-name
        """,
        strict=True,
        switch="enabled",
    ),
    KeyBlock(
        "comet",
        """
        enabled                        bool      false   monitor.comet
        samples_log_interval           int       100     monitor.comet-tuning
        project                        str?      -       monitor.comet-tuning
        workspace                      str?      -       monitor.comet-tuning
        api_key                        str?      -       monitor.comet-tuning
        experiment_name                str?      -       monitor.comet-tuning
        experiment_key                 str?      -       monitor.comet-tuning
        online                         bool?     -       monitor.comet-tuning
        mode                           str?      -       monitor.comet-tuning
        """,
        strict=True,
        switch="enabled",
    ),
    KeyBlock(
        "comms_logger",
        """
        enabled                        bool      false   log.communication
        prof_all                       bool      true    log.communication
        prof_ops                       list      []      log.communication
        verbose                        bool      false   log.communication
        debug                          bool      false   log.communication
        """,
        strict=True,
        switch="enabled",
    ),
    KeyBlock(
        "flops_profiler",
        """
        enabled                        bool      false   log.flops
        recompute_fwd_factor           float     0.0     log.flops
        profile_step                   int       1       log.flops
        module_depth                   int       -1      log.flops
        top_modules                    int       1       log.flops
        detailed                       bool      true    log.flops
        output_file                    str?      -       log.flops
        """,
        switch="enabled",
    ),
    KeyBlock(
        "timers.throughput",
        """
        enabled                        bool      true    log.throughput
        synchronized                   bool      true    log.throughput
        """,
        strict=True,
        switch="enabled",
    ),
)

STORAGE = (
    KeyBlock(
        "checkpoint",
        """
        tag_validation!                WARN|IGNORE|FAIL "WARN" checkpoint.tags
        load_universal                 bool      false   checkpoint.universal
        use_node_local_storage         bool      false   checkpoint.layout
        parallel_write.pipeline_stage! bool      false   checkpoint.layout
        checkpoint_serialization       bool      true    checkpoint.layout
        writer                         null?     -       checkpoint.layout
        writer.type!                   FAST|PYTHON|MOCK? "FAST" checkpoint.layout
        writer.io_buffer_size          int       67108864 checkpoint.layout
        writer.io_buffer_double        bool      true    checkpoint.layout
        writer.show_statistics         bool      false   checkpoint.layout
        writer.data_parallel!          REPLICA|SOCKET|MACHINE? - checkpoint.layout
        writer.decoupled               bool      false   checkpoint.layout
        writer.io_multiplier           number    1       checkpoint.layout
        """,
    ),
    KeyBlock(
        "aio",
        """
        block_size                     int       1048576 offload.aio
        queue_depth                    int       8       offload.aio
        intra_op_parallelism           int       1       offload.aio
        single_submit                  bool      false   offload.aio
        overlap_events                 bool      true    offload.aio
        use_gds                        bool      false   offload.aio
        """,
    ),
    KeyBlock(
        "nebula",
        """
        enabled                        bool      false   checkpoint.asynchronous
        persistent_storage_path        str?      -       checkpoint.asynchronous
        persistent_time_interval       number    100     checkpoint.asynchronous
        num_of_version_in_retention    int       2       checkpoint.asynchronous
        enable_nebula_load             bool      true    checkpoint.asynchronous
        nebula_load_path               str?      -       checkpoint.asynchronous
        """,
        switch="enabled",
        removed=True,
    ),
)

DATA = (
    KeyBlock(
        "data_efficiency",
        """
        enabled                        bool      false   curriculum.block
        seed                           int       1234    curriculum.tuning
        data_sampling.enabled          bool      false   curriculum.sampling
        data_sampling.num_epochs       int       1000    curriculum.tuning
        data_sampling.num_workers      int       0       curriculum.tuning
        data_sampling.pin_memory       bool      false   curriculum.tuning
        data_sampling.curriculum_learning.enabled bool false curriculum.sampling
        data_sampling.curriculum_learning.data_cluster_path str? - curriculum.tuning
        data_sampling.curriculum_learning.curriculum_metrics.* any - curriculum.tuning
        data_sampling.dynamic_batching.enabled bool false  curriculum.sampling
        data_sampling.dynamic_batching.* any     -       curriculum.tuning
        data_routing.enabled           bool      false   curriculum.routing
        data_routing.random_ltd.enabled bool     false   curriculum.routing
        data_routing.random_ltd.*      any       -       curriculum.tuning
        """,
        switch="enabled",
    ),
    KeyBlock(
        "curriculum_learning",
        """
        enabled                        bool      false   curriculum.legacy
        curriculum_type                str       "seqlen" curriculum.tuning
        min_difficulty                 int       -       curriculum.tuning
        max_difficulty                 int       -       curriculum.tuning
        schedule_type                  str       -       curriculum.tuning
        schedule_config.*              any       -       curriculum.tuning
        """,
        switch="enabled",
        removed=True,
    ),
    KeyBlock(
        "progressive_layer_drop",
        """
        enabled                        bool      false   model.layer-drop
        theta                          float     1.0     model.layer-drop
        gamma                          float     0.001   model.layer-drop
        """,
        switch="enabled",
        removed=True,
    ),
)

ELASTIC = KeyBlock(
    "elasticity",
    """
    enabled                            bool      false   batch.elastic
    max_train_batch_size               int       2000    batch.elastic-tuning
    micro_batch_sizes                  list      [2,4,6] batch.elastic-tuning
    min_gpus                           int       1       batch.elastic-tuning
    max_gpus                           int       10000   batch.elastic-tuning
    min_time                           number    0       batch.elastic-tuning
    prefer_larger_batch                bool      true    batch.elastic-tuning
    prefer_larger_batch_size           bool      true    batch.elastic-tuning
    ignore_non_elastic_batch_info      bool      false   batch.elastic-tuning
    version                            number    0.2     batch.elastic-tuning
    num_gpus_per_node                  int       1       batch.elastic-tuning
    model_parallel_size                int       1       batch.elastic-tuning
    """,
    switch="enabled",
    removed=True,
)

_TUNING = (
    "fast",
    "results_dir",
    "exps_dir",
    "overwrite",
    "start_profile_step",
    "end_profile_step",
    "metric",
    "metric_path",
    "tuner_type",
    "tuner_early_stopping",
    "tuner_num_trials",
    "arg_mappings",
    "arg_mappings.*",
    "max_train_batch_size",
    "min_train_batch_size",
    "max_train_micro_batch_size_per_gpu",
    "min_train_micro_batch_size_per_gpu",
    "num_tuning_micro_batch_sizes",
    "mp_size",
    "model_info",
    "model_info_path",
)

TUNING = KeyBlock(
    "autotuning",
    "\n".join(
        ["enabled bool false tuning.block", "model_info.* any - tuning.knob"]
        + [f"{name} any - tuning.knob" for name in _TUNING]
    ),
    switch="enabled",
)

MODEL = (
    KeyBlock(
        "hybrid_engine",
        """
        enabled                        bool      false   model.hybrid
        max_out_tokens                 int>0     512     model.hybrid-tuning
        inference_tp_size              int       1       model.hybrid-tuning
        release_inference_cache        bool      false   model.hybrid-tuning
        pin_parameters                 bool      true    model.hybrid-tuning
        tp_gather_partition_size       int       8       model.hybrid-tuning
        enable_cuda_graph              bool      false   model.hybrid-tuning
        """,
        strict=True,
        switch="enabled",
    ),
    KeyBlock(
        "weight_quantization",
        """
        enabled                        bool      true    model.quantized
        num_bits                       int       8       model.quantized
        q_type                         any       -       model.quantized
        q_groups                       int       1       model.quantized
        quantized_initialization.*     any       -       model.quantized
        post_init_quant.*              any       -       model.quantized
        """,
        strict=True,
    ),
    KeyBlock(
        "",
        """
        amp.enabled                    bool      false   precision.apex
        amp.*                          any       -       precision.apex
        eigenvalue.*                   any       -       model.compression
        quantize_training.*            any       -       model.compression
        compression_training.*         any       -       model.compression
        sparse_attention.*             any       -       model.sparse-attention
        """,
        removed=True,
    ),
)

BLOCKS = (
    TOP,
    REMOVED,
    ZERO,
    ZERO_REMOVED,
    BF16,
    FP16,
    PRECISION,
    OPTIMIZER,
    SCHEDULER,
    CHECKPOINTING,
    PARALLEL,
    TENSOR,
    EXPERT,
    COMPILE,
    *MONITORS,
    *STORAGE,
    *DATA,
    ELASTIC,
    TUNING,
    *MODEL,
)

ALIASES: Mapping[Path, Path] = {
    ("bfloat16",): ("bf16",),
    **{
        ("zero_optimization", name): ("zero_optimization", f"stage3_{name}")
        for name in (
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "gather_16bit_weights_on_model_save",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
        )
    },
    ("tensor_parallel", "tensor_parallel"): ("tensor_parallel", "tp"),
    ("tensor_parallel", "kernel_inject"): ("tensor_parallel", "replace_with_kernel_inject"),
}
"""Other names under which the engine takes a key or a block."""

OPTIONAL_BLOCKS = {("aio",)}
"""Blocks for which the engine takes null."""


@cache
def schema() -> Mapping[Path, Key]:
    """Path -> key, for every key and every ``*``; a plugin's line takes the place of ours.

    Raises:
        ConfigError: two plugins add the same key.
    """
    own = {key.path: key for block in BLOCKS for key in _keys_of(block)}
    added = collect_additions(
        "BLOCKS", lambda blocks: ((key.dotted, key) for block in blocks for key in _keys_of(block))
    )
    return {**own, **{key.path: key for key in added.values()}}


@cache
def blocks() -> frozenset[Path]:
    """Every path that holds keys rather than a value."""
    return frozenset(path[:n] for path in schema() for n in range(1, len(path)))


def find(path: Path) -> Key | None:
    """The key at ``path``, or the ``*`` that takes it."""
    known = schema()
    if path in known:
        return known[path]
    for length in range(len(path) - 1, 0, -1):
        wild = known.get((*path[:length], "*"))
        if wild is not None:
            return wild
    return None


def _keys_of(block: KeyBlock) -> Iterator[Key]:
    prefix = tuple(block.prefix.split(".")) if block.prefix else ()
    for line in block.lines.strip().splitlines():
        name, kind_name, default, rule = line.split()
        path = (*prefix, *name.removesuffix("!").split("."))
        switch = (*prefix, block.switch) if block.switch else None
        yield Key(
            path,
            kind(kind_name),
            None if default == "-" else _default(default),
            rule,
            block.strict,
            block.strict or name.endswith("!"),
            None if switch == path else switch,
            block.removed,
        )


def _default(text: str) -> Any:
    value = json.loads(text)
    return int(value) if isinstance(value, float) and value >= 1e5 else value
