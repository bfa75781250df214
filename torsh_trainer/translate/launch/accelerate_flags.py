"""Flags of ``accelerate launch`` 1.15, and the same names as keys of its ``--config_file``."""

from __future__ import annotations

from torsh_trainer.translate.launch import meshes
from torsh_trainer.translate.launch.flags import (
    FlagRow,
    Judge,
    StatedFlag,
    fix_row,
    fix_rows,
    judge_row,
    table_of_rows,
)
from torsh_trainer.translate.launch.job import AUTO, LaunchJob, Link, WorldShape
from torsh_trainer.translate.outcomes import Outcome, approximate, dead, exact, faster, refuse

_MEETING = "one machine meets by itself; several keep it in the command below"
_OFF = ("none", "no", "false", "null", "")

FSDP = "fsdp"
DEEPSPEED = "deepspeed"


def find_engine(job: LaunchJob) -> str:
    """What accelerate would wrap the model in: ``deepspeed``, ``fsdp``, ``megatron`` or nothing."""
    for flag, engine in (
        ("use_deepspeed", DEEPSPEED),
        ("use_fsdp", FSDP),
        ("use_megatron_lm", "megatron"),
    ):
        said = job.option(flag)
        if said is not None and said.is_on:
            return engine
    kind = job.option("distributed_type")
    named = "" if kind is None else kind.text.upper()
    return {"DEEPSPEED": DEEPSPEED, "FSDP": FSDP, "MEGATRON_LM": "megatron"}.get(named, "")


# -- processes ------------------------------------------------------------------------------------


def _judge_processes(job: LaunchJob, said: StatedFlag) -> Outcome:
    if not job.starts_here:
        return exact("processes of all machines: in the command below")
    return exact("processes on this machine", launcher__num_processes=job.count(said))


def _judge_machines(job: LaunchJob, said: StatedFlag) -> Outcome:
    if job.world.is_one_machine:
        return exact("this machine")
    return exact("machines: in the command below")


def _judge_multi_gpu(job: LaunchJob, said: StatedFlag) -> Outcome:
    if not said.is_on:
        return dead("switched off")
    return meshes.choose_replicas(job, "every process holds the model")


def _judge_kind(job: LaunchJob, said: StatedFlag) -> Outcome:
    kind = job.text(said).upper()
    if kind in ("MULTI_GPU", "MULTI_CPU", "MULTI_NPU", "MULTI_XPU"):
        return meshes.choose_replicas(job, "every process holds the model")
    if kind == "NO":
        return exact("one process")
    if kind == "DEEPSPEED":
        return exact("the configuration of DeepSpeed says how")
    if kind == "FSDP":
        strategy = meshes.name_strategy(job, "fsdp")
        return Outcome("exact", "sharded, as the fsdp keys say", {"strategy": strategy})
    if kind == "MEGATRON_LM":
        return _cut_by_megatron(job)
    return refuse(f"not in this release: {kind}")


def _cut_by_megatron(job: LaunchJob) -> Outcome:
    """Megatron-LM makes the model anew; here the task's own is cut."""
    why = "the model of transformers is cut as it stands, not made anew as Megatron-LM's"
    chosen = meshes.choose_replicas(job, why)
    return Outcome("approximate", why, chosen.choices, chosen.values)


def _judge_gpus(job: LaunchJob, said: StatedFlag) -> Outcome:
    if job.text(said).lower() == "all":
        return exact("all GPUs")
    return exact(f"set CUDA_VISIBLE_DEVICES={said.text} around the command, as it stands below")


def _judge_cpu(job: LaunchJob, said: StatedFlag) -> Outcome:
    return exact("no GPU", trainer__device="cpu") if said.is_on else dead("switched off")


def _judge_precision(job: LaunchJob, said: StatedFlag) -> Outcome:
    kind = job.text(said).lower()
    if kind in ("no", "fp32"):
        return Outcome("exact", "fp32 throughout", {"precision": "fp32"})
    if kind not in ("bf16", "fp16"):
        is_known = kind == "fp8"
        return refuse(
            "not in this release: fp8" if is_known else f"no precision is called {kind!r}"
        )
    if find_engine(job) == DEEPSPEED:
        return exact("the configuration of DeepSpeed computes in it")
    if find_engine(job) == FSDP:
        return Outcome(
            "approximate",
            "FSDP casts parameters and gradients, here autocast and fp32 gradients: less rounding",
            {"precision": f"{kind}_mixed"},
        )
    return Outcome("exact", "autocast over fp32 parameters", {"precision": f"{kind}_mixed"})


def _judge_threads(job: LaunchJob, said: StatedFlag) -> Outcome:
    if said.hole is not None:
        return faster("cores of a process: launcher.threads_per_process")
    return faster("cores of a process", launcher__threads_per_process=job.whole(said, least=1))


def _judge_compile(job: LaunchJob, said: StatedFlag) -> Outcome:
    if job.text(said).lower() in _OFF:
        return faster("nothing is compiled", trainer__compile=False)
    return faster("the model is compiled", trainer__compile=True)


# -- DeepSpeed ------------------------------------------------------------------------------------


def _judge_accumulation(job: LaunchJob, said: StatedFlag) -> Outcome:
    if find_engine(job) == DEEPSPEED and job.holds("gradient_accumulation_steps"):
        return exact("the configuration of DeepSpeed holds it")
    return exact(
        "micro-batches of a step and process", trainer__accumulate=job.whole(said, least=1)
    )


def _judge_plugin(job: LaunchJob, said: StatedFlag) -> Outcome:
    if find_engine(job) != DEEPSPEED:
        return dead("DeepSpeed is not switched on (--use_deepspeed)")
    if job.option("deepspeed_config_file") is not None:
        return dead("accelerate reads the file of --deepspeed_config_file instead")
    return exact("part of the configuration of DeepSpeed: its row stands below")


def _judge_plugin_file(job: LaunchJob, said: StatedFlag) -> Outcome:
    if find_engine(job) != DEEPSPEED:
        return dead("DeepSpeed is not switched on (--use_deepspeed)")
    return exact("read together with this line")


# -- FSDP -----------------------------------------------------------------------------------------


def _fsdp(judge: object) -> object:
    """The verdict of a flag that only a sharded job heeds."""

    def judge_heeded(job: LaunchJob, said: StatedFlag) -> Outcome:
        if find_engine(job) != FSDP:
            return dead("FSDP is not switched on (--use_fsdp)")
        return judge(job, said)  # type: ignore[operator]

    return judge_heeded


def judge_sharding(job: LaunchJob, said: StatedFlag) -> Outcome:
    """FSDP's sharding strategy by its name, or by its number."""
    kind = job.text(said).upper()
    kinds = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
    if kind in "12345" and len(kind) == 1:
        kind = kinds[int(kind) - 1]
    if kind == "NO_SHARD":
        return meshes.choose_replicas(job, "every process holds the model")
    whole = kind in ("FULL_SHARD", "HYBRID_SHARD")
    values = {"strategy.reshard_after_forward": whole}
    if kind.startswith("HYBRID"):
        each = job.world.per_node
        if meshes.read_axes(job):
            return refuse("shards within a machine: mesh.dp_shard says how many share one copy")
        if not isinstance(each, int):
            return refuse("shards within a machine: strategy.shard_size=GPUS_OF_A_MACHINE does it")
        values["strategy.shard_size"] = each  # type: ignore[assignment]
        return Outcome("exact", "shards within a machine", {"strategy": "fsdp"}, values)
    if kind not in kinds:
        return refuse(f"FSDP knows no sharding strategy {kind[:40]}")
    why = "sharded" if whole else "parameters stay gathered between forward and backward"
    return Outcome("exact", why, {"strategy": meshes.name_strategy(job, "fsdp")}, values)


def _judge_offload(job: LaunchJob, said: StatedFlag) -> Outcome:
    return exact("parameters and their gradients in host memory", strategy__cpu_offload=said.is_on)


def _judge_reshard(job: LaunchJob, said: StatedFlag) -> Outcome:
    text = job.text(said)
    if text.upper() in ("FULL_SHARD", "SHARD_GRAD_OP"):
        return judge_sharding(job, said)
    return exact(
        "free gathered parameters after forward", strategy__reshard_after_forward=said.is_on
    )


def _judge_wrapped(job: LaunchJob, said: StatedFlag) -> Outcome:
    names = [name.strip() for name in job.text(said).split(",") if name.strip()]
    return exact("classes of modules that are sharded as units", strategy__wrap_modules=names)


def _judge_smallest(job: LaunchJob, said: StatedFlag) -> Outcome:
    policy = job.option("fsdp_auto_wrap_policy")
    if policy is None or policy.text.upper() != "SIZE_BASED_WRAP":
        return dead("SIZE_BASED_WRAP alone reads it")
    return exact(
        "modules of so many parameters are sharded as units",
        strategy__wrap_min_parameters=job.whole(said, least=1),
    )


def _judge_policy(job: LaunchJob, said: StatedFlag) -> Outcome:
    kind = job.text(said).upper()
    if kind == "TRANSFORMER_BASED_WRAP":
        named = job.option("fsdp_transformer_layer_cls_to_wrap")
        if named is None:
            return approximate(
                "the model says which blocks it repeats; here the repeated blocks are found"
            )
        return exact("the classes that are named")
    if kind == "SIZE_BASED_WRAP":
        return exact("by the number of parameters")
    return approximate("the whole model is one unit; here repeated blocks are units: less memory")


def judge_prefetch(job: LaunchJob, said: StatedFlag) -> Outcome:
    """Gathering the next unit ahead in forward."""
    if not said.is_on:
        return faster("FSDP2 decides")
    return faster("gather one unit ahead", strategy__prefetch_depth=1)


def judge_recompute(job: LaunchJob, said: StatedFlag) -> Outcome:
    """Recomputing activations in backward."""
    if not said.is_on:
        return exact("activations are kept")
    return exact("activations are computed again", trainer__activation_checkpointing=True)


def _judge_state_dict(job: LaunchJob, said: StatedFlag) -> Outcome:
    return exact(
        "a checkpoint holds shards and loads on any number of processes; checkpoint export writes "
        "whole weights"
    )


_FSDP_ROWS: tuple[FlagRow, ...] = tuple(
    judge_row(name, _fsdp(judge), rule=rule)  # type: ignore[arg-type]
    for name, judge, rule in (
        ("--fsdp_sharding_strategy", judge_sharding, "fsdp.sharding"),
        ("--fsdp_offload_params", _judge_offload, "fsdp.offload"),
        ("--fsdp_reshard_after_forward", _judge_reshard, "fsdp.reshard"),
        ("--fsdp_transformer_layer_cls_to_wrap", _judge_wrapped, "fsdp.units"),
        ("--fsdp_min_num_params", _judge_smallest, "fsdp.units"),
        ("--fsdp_auto_wrap_policy", _judge_policy, "fsdp.units"),
        ("--fsdp_forward_prefetch", judge_prefetch, "fsdp.prefetch"),
        ("--fsdp_activation_checkpointing", judge_recompute, "fsdp.recompute"),
        ("--fsdp_state_dict_type", _judge_state_dict, "fsdp.saving"),
        (
            "--fsdp_version",
            lambda job, said: exact("the same shards; here FSDP2 makes them"),
            "fsdp.version",
        ),
        (
            "--fsdp_backward_prefetch",
            lambda job, said: faster("FSDP2 gathers ahead in backward"),
            "fsdp.prefetch",
        ),
        (
            "--fsdp_backward_prefetch_policy",
            lambda job, said: faster("an older name"),
            "fsdp.prefetch",
        ),
        (
            "--fsdp_use_orig_params",
            lambda job, said: exact("FSDP2 keeps the original parameters"),
            "fsdp.version",
        ),
        (
            "--fsdp_cpu_ram_efficient_loading",
            lambda job, said: faster("weights are read shard by shard"),
            "fsdp.loading",
        ),
        (
            "--fsdp_sync_module_states",
            lambda job, said: exact("all processes begin with the same weights"),
            "fsdp.loading",
        ),
        (
            "--fsdp_activation_checkpointing_offload",
            lambda job, said: (
                refuse("not in this release: activations in host memory")
                if said.is_on
                else dead("switched off")
            ),
            "fsdp.recompute",
        ),
    )
)

MEGATRON = (
    "recompute_granularity recompute_method recompute_num_layers attention_backend "
    "attention_dropout hidden_dropout attention_softmax_in_fp32 expert_tensor_parallel_size "
    "calculate_per_token_loss use_rotary_position_embeddings use_custom_fsdp no_load_optim "
    "eod_mask_loss overlap_cpu_optimizer_d2h_h2d no_save_optim optimizer_cpu_offload "
    "use_precision_aware_optimizer decoder_last_pipeline_num_layers"
)
"""Flags of Megatron-LM through accelerate that are its own, without ``--megatron_lm_``."""


def _judge_mesh(job: LaunchJob, said: StatedFlag) -> Outcome:
    if not said.is_on:
        return dead("switched off")
    version = job.option("fsdp_version")
    if find_engine(job) != FSDP or version is None or version.text != "2":
        return refuse("accelerate itself refuses it without --use_fsdp and --fsdp_version 2")
    return exact("its sizes have rows of their own")


def _megatron_only(judge: Judge) -> Judge:
    def judge_heeded(job: LaunchJob, said: StatedFlag) -> Outcome:
        if not meshes.uses_megatron(job):
            return dead("Megatron-LM is not switched on (--use_megatron_lm)")
        return judge(job, said)

    return judge_heeded


def _judge_megatrons_optimizer(job: LaunchJob, said: StatedFlag) -> Outcome:
    if not said.is_on:
        return dead("switched off")
    if meshes.read_axes(job):
        return faster("the optimizer's state is sharded, and parameters with it, by mesh.dp_shard")
    return exact("the optimizer's state is sharded", strategy__zero1=True)


_MEGATRON_JUDGES: dict[str, Judge] = {
    "num_micro_batches": lambda job, said: exact(
        "micro-batches of a step", trainer__accumulate=job.whole(said, least=1)
    ),
    "sequence_parallelism": meshes.judge_sequence_parallel,
    "recompute_activations": lambda job, said: (
        exact("activations are computed again", trainer__activation_checkpointing=True)
        if said.is_on
        else dead("switched off")
    ),
    "gradient_clipping": lambda job, said: exact(
        "the same formula", trainer__max_grad_norm=job.number(said) or None
    ),
    "use_distributed_optimizer": _judge_megatrons_optimizer,
}


TABLE = table_of_rows(
    fix_row("--config_file", "exact", "read together with this line", rule="accelerate.file"),
    judge_row("--num_processes", _judge_processes, rule="accelerate.processes"),
    judge_row("--num_machines", _judge_machines, rule="accelerate.machines"),
    judge_row("--multi_gpu", _judge_multi_gpu, takes=0, rule="accelerate.kind"),
    judge_row("--distributed_type", _judge_kind, rule="accelerate.kind"),
    judge_row("--gpu_ids", _judge_gpus, rule="accelerate.gpus"),
    judge_row("--cpu --use_cpu", _judge_cpu, takes=0, rule="accelerate.cpu"),
    judge_row("--mixed_precision", _judge_precision, rule="accelerate.precision"),
    judge_row("--num_cpu_threads_per_process", _judge_threads, rule="accelerate.threads"),
    fix_row(
        "--enable_cpu_affinity",
        "performance-only",
        "type numactl before the command",
        takes=0,
        rule="launch.cores",
    ),
    *fix_rows(
        "--machine_rank --main_process_ip --main_process_port --rdzv_backend --rdzv_conf",
        "exact",
        _MEETING,
        rule="launch.meeting",
    ),
    fix_row("--same_network", "exact", _MEETING, takes=0, rule="launch.meeting"),
    fix_row(
        "--max_restarts",
        "approximate",
        "launcher=local starts once; the run goes on from its last checkpoint",
        rule="torchrun.restarts",
    ),
    fix_row("--monitor_interval", "dead", "here a failure is seen at once", rule="launch.watch"),
    fix_row("--role", "dead", "a name in torchrun's log", rule="launch.logs"),
    *fix_rows(
        "-t --tee --log_dir",
        "performance-only",
        "each process writes logs/rank-N.log of the run directory",
        rule="launch.logs",
    ),
    fix_row("-q --quiet", "performance-only", "less is printed", takes=0, rule="launch.logs"),
    fix_row(
        "--debug", "performance-only", "debug=true shows tracebacks", takes=0, rule="launch.logs"
    ),
    fix_row("-m --module", "exact", "the script is a module", takes=0, rule="launch.script"),
    fix_row("--no_python", "exact", "a program, not a script", takes=0, rule="launch.script"),
    judge_row("--dynamo_backend", _judge_compile, rule="accelerate.compile"),
    fix_row(
        "--dynamo_mode",
        "performance-only",
        "trainer.compile_options={mode: ...}",
        rule="accelerate.compile",
    ),
    *fix_rows(
        "--dynamo_use_fullgraph --dynamo_use_dynamic --dynamo_use_regional_compilation",
        "performance-only",
        "trainer.compile_options takes arguments of torch.compile",
        takes=0,
        rule="accelerate.compile",
    ),
    judge_row(
        "--use_deepspeed",
        lambda job, said: (
            exact("the configuration of DeepSpeed says how") if said.is_on else dead("switched off")
        ),
        takes=0,
        rule="accelerate.kind",
    ),
    judge_row("--deepspeed_config_file", _judge_plugin_file, rule="accelerate.deepspeed"),
    judge_row("--gradient_accumulation_steps", _judge_accumulation, rule="accelerate.accumulation"),
    *(
        judge_row(f"--{name}", _judge_plugin, rule="accelerate.deepspeed")
        for name in (
            "zero_stage",
            "offload_optimizer_device",
            "offload_param_device",
            "offload_optimizer_nvme_path",
            "offload_param_nvme_path",
            "gradient_clipping",
            "zero3_init_flag",
            "zero3_save_16bit_model",
        )
    ),
    *fix_rows(
        "--deepspeed_hostfile --deepspeed_exclusion_filter --deepspeed_inclusion_filter "
        "--deepspeed_multinode_launcher",
        "dead",
        "the recipe is started on each machine, or by srun or mpirun: no ssh is used",
        rule="deepspeed.backend",
    ),
    fix_row(
        "--deepspeed_moe_layer_cls_names",
        "refused",
        "not in this release: experts of a mixture",
        rule="accelerate.deepspeed",
    ),
    judge_row(
        "--use_fsdp",
        lambda job, said: (
            Outcome(
                "exact",
                "sharded, as the fsdp flags say",
                {"strategy": meshes.name_strategy(job, "fsdp")},
            )
            if said.is_on
            else dead("switched off")
        ),
        takes=0,
        rule="accelerate.kind",
    ),
    *_FSDP_ROWS,
    judge_row(
        "--use_megatron_lm",
        lambda job, said: _cut_by_megatron(job) if said.is_on else dead("switched off"),
        takes=0,
        rule="accelerate.kind",
    ),
    *(
        judge_row(f"--megatron_lm_{name}", _megatron_only(judge), rule="accelerate.megatron")
        for name, judge in _MEGATRON_JUDGES.items()
    ),
    *(
        judge_row(
            f"--megatron_lm_{name}",
            _megatron_only(lambda job, said: refuse("Megatron-LM's own: nothing here reads it")),
            rule="accelerate.megatron",
        )
        for name in MEGATRON.split()
    ),
    *(
        judge_row(f"--{name}", judge, rule="accelerate.megatron")
        for name, judge in meshes.JUDGES.items()
        if name.startswith("megatron_lm_")
    ),
    judge_row("--use_parallelism_config", _judge_mesh, takes=0, rule="accelerate.mesh"),
    *(
        judge_row(f"--{name}", judge, rule="accelerate.mesh")
        for name, judge in meshes.JUDGES.items()
        if name.startswith("parallelism_config_")
    ),
    *fix_rows(
        "--parallelism_config_cp_backend --parallelism_config_cp_comm_strategy "
        "--parallelism_config_sp_backend --parallelism_config_sp_seq_length "
        "--parallelism_config_sp_seq_length_is_variable "
        "--parallelism_config_sp_attn_implementation",
        "dead",
        "read where a sequence is divided alone",
        rule="accelerate.mesh",
    ),
    *fix_rows(
        "--fp8_backend --fp8_margin --fp8_interval --fp8_format --fp8_amax_history_len "
        "--fp8_amax_compute_algo --fp8_override_linear_precision --fp8_opt_level "
        "--fp8_enable_fsdp_float8_all_gather --fp8_pad_inner_dim",
        "dead",
        "read with --mixed_precision fp8 alone, which is refused",
        rule="accelerate.fp8",
    ),
    fix_row(
        "--fp8_use_autocast_during_eval",
        "dead",
        "read with --mixed_precision fp8 alone, which is refused",
        takes=0,
        rule="accelerate.fp8",
    ),
    *fix_rows(
        "--tpu --use_mps_device --tpu_cluster --no_tpu_cluster --tpu_use_sudo --tpu_use_cluster "
        "--downcast_bf16",
        "dead",
        "about TPUs and Apple's GPUs, which nothing here trains on",
        takes=0,
        rule="accelerate.tpu",
    ),
    *fix_rows(
        "--vm --env --main_training_function --tpu_name --tpu_zone --commands --command_file "
        "--tpu_env --compute_environment --aws_access_key_id --aws_secret_access_key",
        "dead",
        "how accelerate reaches rented machines",
        rule="accelerate.cloud",
    ),
    fix_row("--mpirun_hostfile", "dead", "type mpirun around the recipe", rule="accelerate.cloud"),
)
"""Every flag of ``accelerate launch``, with ``_``; it takes ``-`` as well."""


def shape_world(job: LaunchJob, link: Link) -> WorldShape:
    """How many processes the command starts; accelerate counts those of all machines."""
    machines = job.option("num_machines")
    nodes = 1
    if machines is not None:
        if machines.hole is not None:
            return WorldShape(None, None)
        nodes = job.whole(machines, least=1)
    said = job.option("num_processes")
    if said is None:
        return WorldShape(AUTO, nodes)
    count = job.count_known(said)
    if not isinstance(count, int):
        return WorldShape(count, nodes)
    return WorldShape(max(1, count // nodes), nodes, count)
