"""Arguments of Hugging Face's Trainer behind a script: ``TrainingArguments`` of transformers 5.23.

Older names are listed as well. Where DeepSpeed's file holds a key that an argument fills, the
argument's row says so, and the file's own row sets the knob.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.launch import accelerate_flags
from torsh_trainer.translate.launch.flags import (
    FlagRow,
    Judge,
    StatedFlag,
    fix_row,
    fix_rows,
    judge_row,
    table_of_rows,
)
from torsh_trainer.translate.launch.job import LaunchJob
from torsh_trainer.translate.outcomes import Outcome, approximate, dead, exact, faster, refuse

FILLS: Mapping[str, tuple[str, ...]] = {
    "per_device_train_batch_size": ("train_micro_batch_size_per_gpu", "train_batch_size"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", "train_batch_size"),
    "max_grad_norm": ("gradient_clipping",),
    "learning_rate": ("optimizer.params.lr", "scheduler.params.warmup_max_lr"),
    "adam_beta1": ("optimizer.params.betas",),
    "adam_beta2": ("optimizer.params.betas",),
    "adam_epsilon": ("optimizer.params.eps",),
    "weight_decay": ("optimizer.params.weight_decay",),
    "fp16": ("fp16.enabled",),
    "bf16": ("bf16.enabled",),
    "warmup_steps": ("scheduler.params.warmup_num_steps",),
    "warmup_ratio": ("scheduler.params.warmup_num_steps",),
    "max_steps": ("scheduler.params.total_num_steps",),
}
"""Argument -> the keys of DeepSpeed's file that hold the same."""

BLOCKS: Mapping[str, str] = {
    "learning_rate": "optimizer",
    "adam_beta1": "optimizer",
    "adam_beta2": "optimizer",
    "adam_epsilon": "optimizer",
    "weight_decay": "optimizer",
    "optim": "optimizer",
    "warmup_steps": "scheduler",
    "warmup_ratio": "scheduler",
    "lr_scheduler_type": "scheduler",
}
"""Argument -> the block of DeepSpeed's file that takes its place."""

_SCHEDULES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "linear": ("linear", {}),
    "cosine": ("cosine", {}),
    "constant": ("constant", {}),
    "constant_with_warmup": ("constant", {}),
    "polynomial": ("polynomial", {}),
    "inverse_sqrt": ("inverse_sqrt", {}),
}
_ADAMW = {
    "adamw_torch": "exact",
    "adamw_torch_fused": "exact",
    "adamw_hf": "exact",
    "adamw_apex_fused": "exact",
    "adamw_torch_npu_fused": "exact",
    "adamw_torch_xla": "exact",
}
_EIGHT_BIT = (
    "adamw_bnb_8bit",
    "adamw_8bit",
    "paged_adamw_32bit",
    "paged_adamw_8bit",
    "paged_adamw",
)
_OTHERS = {"sgd": "sgd", "adagrad": "adagrad", "rmsprop": "rmsprop", "adafactor": "adafactor"}
_OURS = "a run of its own: by this name its meaning is ours"


def _unless_in_file(judge: Judge) -> Judge:
    """The verdict where DeepSpeed's file does not hold the same; else that it fills the file."""

    def judge_file_first(job: LaunchJob, said: StatedFlag) -> Outcome:
        job.text(said)
        if job.lacks_file and (said.name in FILLS or said.name in BLOCKS):
            return refuse("the configuration that is asked for below may decide")
        keys = [key for key in FILLS.get(said.name, ()) if key in job.configured]
        if keys:
            filled = [key for key in keys if job.configured[key] == "auto"]
            if filled:
                return exact(f'fills {" and ".join(filled)}, which is "auto" in the file')
            if keys[0] == "train_batch_size":
                return judge(job, said)
            if not _agrees(said.text, job.configured[keys[0]]):
                what = f"{keys[0]} {job.configured[keys[0]]} of DeepSpeed's file"
                named = job.argument("deepspeed")
                if job.family == "hugging-face" and named is not None and named.values:
                    raise ConfigError(
                        f"{job.source}:{said.place}: {said.key} {said.text} contradicts {what}, "
                        "which the Trainer refuses",
                        fix='make them agree, or let the file say "auto"',
                        line=said.place.line,
                        column=said.place.column,
                    )
                return refuse(f"{what} says otherwise: keep one of them")
            return exact(f"the file says the same: {keys[0]}")
        block = BLOCKS.get(said.name)
        if block is not None and job.holds(f"{block}.type"):
            return dead(f"the {block} of DeepSpeed's file takes its place")
        return judge(job, said)

    return judge_file_first


def _agrees(text: str, value: Any) -> bool:
    """An argument and a value of the file mean the same, as far as one number can tell."""
    if isinstance(value, bool):
        return (text.lower() in ("true", "1", "yes")) is value
    try:
        return (isinstance(value, int | float) and float(text) == float(value)) or value != value
    except (ValueError, OverflowError):
        return not isinstance(value, int | float)


def _row(names: str, judge: Judge, rule: str) -> FlagRow:
    return judge_row(names, _unless_in_file(judge), rule=f"hf.{rule}")


def _knob(
    names: str, key: str, why: str, rule: str, *, whole: bool = True, least: int = 0
) -> FlagRow:
    """A row whose number is that of a knob."""

    def judge(job: LaunchJob, said: StatedFlag) -> Outcome:
        value: float = job.whole(said, least=least) if whole else job.number(said)
        return Outcome("exact", why, values={key: value})

    return _row(names, judge, rule)


def _switch(names: str, key: str, why: str, rule: str, *, on: Any = True) -> FlagRow:
    """A row that sets a knob where it is on, and nothing where it is off."""

    def judge(job: LaunchJob, said: StatedFlag) -> Outcome:
        job.text(said)
        return Outcome("exact", why, values={key: on}) if said.is_on else dead("switched off")

    return _row(names, judge, rule)


def judge_betas(job: LaunchJob, said: StatedFlag) -> Outcome:
    """The two smoothing factors of Adam, together."""
    betas = []
    for name, default in (("adam_beta1", 0.9), ("adam_beta2", 0.999)):
        other = job.argument(name)
        betas.append(default if other is None else job.number(other))
    return exact("the same", optimizer__betas=betas)


def _optimizer(job: LaunchJob, said: StatedFlag) -> Outcome:
    name = job.text(said).lower()
    if name in _ADAMW:
        return Outcome("exact", "the same optimizer", {"optimizer": "adamw"})
    if name in _EIGHT_BIT:
        why = "its state is held in fp32 here: no rounding, more memory"
        if "32bit" in name or name == "paged_adamw":
            why = "its state stays on the device here: the same numbers, more memory"
        return Outcome("approximate", why, {"optimizer": "adamw"})
    if name == "adafactor":
        why = "torch's Adafactor has other defaults than transformers' own"
        return Outcome("approximate", why, {"optimizer": "adafactor"})
    if name in _OTHERS:
        return Outcome("exact", "the same optimizer", {"optimizer": _OTHERS[name]})
    return refuse(
        f"not in this release: {name[:40]}; optimizer=custom takes a class of yours, or state "
        "optimizer=adamw"
    )


def judge_schedule(job: LaunchJob, said: StatedFlag) -> Outcome:
    """The curve of the learning rate."""
    name = job.text(said).lower()
    if name in _SCHEDULES:
        option, values = _SCHEDULES[name]
        why = "the same curve"
        if name == "polynomial":
            return Outcome("approximate", "it ends at 0 here, there at 1e-7", {"schedule": option})
        if name == "inverse_sqrt":
            return Outcome(
                "approximate",
                "the same curve where the warm-up is its timescale",
                {"schedule": option},
            )
        return Outcome("exact", why, {"schedule": option}, values)
    kwargs = job.argument("lr_scheduler_kwargs")
    more: dict[str, Any] = {}
    if kwargs is not None and kwargs.hole is None:
        try:
            more = json.loads(kwargs.text)
        except ValueError:
            more = {}
    if name == "cosine_with_restarts" and more.get("num_cycles", 1) == 1:
        return Outcome("exact", "one cycle, which is a cosine", {"schedule": "cosine"})
    if name in ("cosine_with_min_lr", "cosine_warmup_with_min_lr"):
        rate = more.get("min_lr_rate")
        if isinstance(rate, int | float):
            values = {"schedule.final": float(rate)}
            return Outcome("exact", "the same curve", {"schedule": "cosine"}, values)
    if name == "reduce_lr_on_plateau":
        return Outcome("approximate", "its patience is set here", {"schedule": "reduce_on_plateau"})
    return refuse(
        f"not in this release: the schedule {name[:40]} as it stands; choose schedule= and knobs"
    )


def find_schedule(job: LaunchJob) -> str:
    """The schedule of the script: its argument, else the Trainer's default; empty: unknown."""
    said = job.argument("lr_scheduler_type") or job.argument("lr_scheduler")
    if said is None or said.hole is not None:
        return "linear" if job.family == "hugging-face" else ""
    return said.text.lower()


def judge_warmup(job: LaunchJob, said: StatedFlag) -> Outcome:
    """Updates of the rise, or a share of the run."""
    value = job.number(said)
    if not value:
        return exact("no warm-up", schedule__warmup_steps=0)
    if find_schedule(job) == "constant":
        return dead("lr_scheduler_type=constant has no warm-up")
    if 0 < value < 1:
        return approximate(
            "a share of the run: rounded up there, to the nearest update here",
            schedule__warmup_ratio=value,
        )
    if not find_schedule(job):
        return approximate(
            "updates of the rise from 0; the curve after it is the script's: set schedule=",
            schedule__warmup_steps=job.whole(said),
        )
    return exact("updates of the rise from 0", schedule__warmup_steps=job.whole(said))


def _warmup_ratio(job: LaunchJob, said: StatedFlag) -> Outcome:
    value = job.number(said)
    steps = job.argument("warmup_steps")
    if steps is not None and steps.text not in ("0", "0.0"):
        return dead("--warmup_steps counts before it")
    if not value:
        return exact("no warm-up")
    if find_schedule(job) == "constant":
        return dead("lr_scheduler_type=constant has no warm-up")
    return approximate(
        "a share of the run: rounded up there, to the nearest update here: one update at most",
        schedule__warmup_ratio=value,
    )


def _epochs(job: LaunchJob, said: StatedFlag) -> Outcome:
    value = job.number(said)
    steps = job.argument("max_steps")
    if steps is not None and steps.hole is None and steps.text not in ("-1", "0"):
        return dead("--max_steps counts before it")
    if value != math.floor(value) or value < 1:
        return refuse(f"{value:g} epochs: state trainer.max_steps, the updates of so many epochs")
    return exact("epochs of the run", trainer__max_epochs=int(value))


def _steps(job: LaunchJob, said: StatedFlag) -> Outcome:
    value = job.number(said)
    if value <= 0:
        return dead("-1: the epochs count")
    return exact("updates of the run", trainer__max_steps=job.whole(said))


def _clip(job: LaunchJob, said: StatedFlag) -> Outcome:
    value = job.number(said)
    return exact("the same formula", trainer__max_grad_norm=value or None)


def _half(job: LaunchJob, said: StatedFlag) -> Outcome:
    job.text(said)
    if not said.is_on:
        return dead("switched off")
    if job.is_configured:
        return approximate(
            f"DeepSpeed's file has no {said.name} block: it computes as its file says"
        )
    return Outcome("exact", "autocast over fp32 parameters", {"precision": f"{said.name}_mixed"})


def _tf32(job: LaunchJob, said: StatedFlag) -> Outcome:
    if not said.is_on:
        return exact("fp32 products", precision__matmul="highest")
    return exact("products of fp32 in TF32", precision__matmul="high")


def _recompute(job: LaunchJob, said: StatedFlag) -> Outcome:
    job.text(said)
    return accelerate_flags.judge_recompute(job, said)


def judge_seed(job: LaunchJob, said: StatedFlag) -> Outcome:
    """The number that random draws begin with."""
    if said.hole is not None and said.hole.name == "RANDOM":
        return approximate(
            "drawn anew at every start there; here trainer.seed is 0, or what you set"
        )
    value = job.whole(said)
    return approximate("the same number draws other orders and weights", trainer__seed=value)


def _every(key: str, strategy: str, default: str) -> Judge:
    """Steps between two of something, where its strategy is ``steps``."""

    def judge(job: LaunchJob, said: StatedFlag) -> Outcome:
        how = job.argument(strategy) or job.argument(strategy.replace("eval_", "evaluation_"))
        named = default if how is None or how.hole is not None else how.text
        value = job.number(said)
        if named not in ("steps", "best"):
            return dead(f"--{strategy} {named} counts, not steps")
        if 0 < value < 1:
            return refuse("a share of the run: state the steps of it")
        return exact("steps between two", **{key.replace(".", "__"): job.whole(said, least=1)})

    return judge


def _strategy(epochs: str, what: str) -> Judge:
    def judge(job: LaunchJob, said: StatedFlag) -> Outcome:
        kind = job.text(said).lower()
        if kind == "epoch":
            return exact("after each epoch", **{epochs.replace(".", "__"): 1})
        if kind == "no":
            off = {"trainer.eval_every_epochs": None} if what == "eval" else {}
            return Outcome("exact", "never", values=off)
        return exact("by steps")

    return judge


def _fsdp(job: LaunchJob, said: StatedFlag) -> Outcome:
    words = job.text(said).replace(",", " ").lower().split()
    if not words or words in (["false"], ["none"]):
        return dead("switched off")
    kinds = {
        "full_shard": "FULL_SHARD",
        "shard_grad_op": "SHARD_GRAD_OP",
        "no_shard": "NO_SHARD",
        "hybrid_shard": "HYBRID_SHARD",
        "hybrid_shard_zero2": "HYBRID_SHARD_ZERO2",
        "true": "FULL_SHARD",
    }
    kind = next((kinds[word] for word in words if word in kinds), "FULL_SHARD")
    found = accelerate_flags.judge_sharding(job, StatedFlag(said.key, _one(kind, said), said.place))
    if found.verdict == "refused" or "offload" not in words:
        return found
    return Outcome(
        found.verdict,
        f"{found.why}; parameters in host memory",
        found.choices,
        {**found.values, "strategy.cpu_offload": True},
    )


def _one(text: str, said: StatedFlag) -> tuple[Any, ...]:
    return (type(said.values[0])(text, said.place),) if said.values else ()


def judge_units(job: LaunchJob, said: StatedFlag) -> Outcome:
    """Classes of modules that are sharded as units, by name."""
    names = [name for word in said.values for name in job.text(said).replace(",", " ").split()]
    return exact(
        "classes that are sharded as units", strategy__wrap_modules=list(dict.fromkeys(names))
    )


def _fsdp_file(job: LaunchJob, said: StatedFlag) -> Outcome:
    return exact("its keys stand below")


def _file(job: LaunchJob, said: StatedFlag) -> Outcome:
    if not said.values:
        return exact("DeepSpeed is switched on")
    if said.is_empty:
        return dead("empty: no DeepSpeed")
    return exact("read together with this line")


def _logging(job: LaunchJob, said: StatedFlag) -> Outcome:
    value = job.number(said)
    if 0 < value < 1:
        return refuse("a share of the run: state the steps of it")
    return faster("steps between reports", trainer__log_every=job.whole(said, least=1))


def _report(job: LaunchJob, said: StatedFlag) -> Outcome:
    names = job.text(said).replace(",", " ").lower().split()
    values = {f"logger.{name}.enabled": True for name in names if name in _LOGGERS}
    others = [name for name in names if name not in (*_LOGGERS, "none", "all")]
    if others:
        return approximate(
            f"not in this release: {', '.join(others)[:60]}; +logger.NAME takes yours"
        )
    return Outcome("performance-only", "where reports go", values=values)


_LOGGERS = ("tensorboard", "wandb", "mlflow")


def _resume(job: LaunchJob, said: StatedFlag) -> Outcome:
    if said.text.lower() in ("false", "none", ""):
        return dead("switched off")
    return approximate(
        "a run goes on from its own checkpoints (checkpoint.resume); those of another engine come "
        "in by checkpoint import"
    )


def _find_unused(job: LaunchJob, said: StatedFlag) -> Outcome:
    if not said.is_on or job.is_configured:
        return dead("DDP alone reads it" if job.is_configured else "switched off")
    return exact("parameters without a gradient", strategy__find_unused_parameters=True)


def _buckets(job: LaunchJob, said: StatedFlag) -> Outcome:
    if job.is_configured:
        return dead("DDP alone reads it")
    return faster("MiB of gradients that travel together", strategy__bucket_cap_mb=job.number(said))


def _average(job: LaunchJob, said: StatedFlag) -> Outcome:
    return approximate("the loss of a step is weighted by what the task says, over all processes")


def _grouping(job: LaunchJob, said: StatedFlag) -> Outcome:
    if not said.is_on and said.text.lower() != "group_by_length":
        return dead("samples are drawn at random")
    return approximate(
        "samples of one length together: here the order is random, with more padding"
    )


def _refuse_when_on(what: str) -> Judge:
    def judge(job: LaunchJob, said: StatedFlag) -> Outcome:
        if said.text.lower() in ("0", "0.0", "false", "none", "no", ""):
            return dead("switched off")
        return refuse(f"not in this release: {what}")

    return judge


TABLE = table_of_rows(
    _knob(
        "--per_device_train_batch_size",
        "data.micro_batch_size",
        "samples of one forward of one process",
        "micro-batch",
        least=1,
    ),
    _knob(
        "--per_gpu_train_batch_size",
        "data.micro_batch_size",
        "an older name: samples of one forward of one process",
        "micro-batch",
        least=1,
    ),
    _knob(
        "--per_device_eval_batch_size",
        "data.eval_batch_size",
        "samples of one forward in evaluation",
        "micro-batch",
        least=1,
    ),
    _knob(
        "--gradient_accumulation_steps",
        "trainer.accumulate",
        "micro-batches of a step and process",
        "accumulation",
        least=1,
    ),
    _row("--num_train_epochs", _epochs, "length"),
    _row("--max_steps", _steps, "length"),
    _knob("--learning_rate", "optimizer.lr", "the base rate of the schedule", "rate", whole=False),
    _knob(
        "--weight_decay",
        "optimizer.weight_decay",
        "norms and biases are left out there, too (optimizer.no_decay)",
        "decay",
        whole=False,
    ),
    _row("--adam_beta1", judge_betas, "betas"),
    _row("--adam_beta2", judge_betas, "betas"),
    _knob("--adam_epsilon", "optimizer.eps", "the same", "eps", whole=False),
    _row("--max_grad_norm", _clip, "clipping"),
    _row("--optim", _optimizer, "optimizer"),
    _row("--lr_scheduler_type", judge_schedule, "schedule"),
    _row("--warmup_steps", judge_warmup, "warmup"),
    _row("--warmup_ratio", _warmup_ratio, "warmup"),
    _row("--bf16", _half, "precision"),
    _row("--fp16", _half, "precision"),
    _row("--tf32", _tf32, "precision"),
    _row("--gradient_checkpointing --activation_checkpointing", _recompute, "recompute"),
    judge_row("--seed", judge_seed, rule="hf.seed"),
    _row("--logging_steps", _logging, "logging"),
    _row("--eval_steps", _every("trainer.eval_every", "eval_strategy", "no"), "evaluation"),
    _row("--eval_strategy", _strategy("trainer.eval_every_epochs", "eval"), "evaluation"),
    _row("--evaluation_strategy", _strategy("trainer.eval_every_epochs", "eval"), "evaluation"),
    _row("--save_steps", _every("checkpoint.every_steps", "save_strategy", "steps"), "saving"),
    _row("--save_strategy", _strategy("checkpoint.every_epochs", "save"), "saving"),
    _knob("--save_total_limit", "checkpoint.keep_last", "checkpoints that stay", "saving", least=1),
    _row("--report_to", _report, "logging"),
    _row("--resume_from_checkpoint", _resume, "resume"),
    _knob("--dataloader_num_workers", "data.num_workers", "loader processes", "loading"),
    _switch("--dataloader_drop_last", "data.drop_last", "the ragged tail is left out", "loading"),
    _switch("--dataloader_pin_memory", "data.pin_memory", "page-locked batches", "loading"),
    _knob("--dataloader_prefetch_factor", "data.prefetch_factor", "batches kept ready", "loading"),
    _row("--ddp_find_unused_parameters", _find_unused, "ddp"),
    _row("--ddp_bucket_cap_mb", _buckets, "ddp"),
    _switch("--torch_compile", "trainer.compile", "the model is compiled", "compile"),
    _switch("--full_determinism", "trainer.deterministic", "deterministic kernels alone", "seed"),
    _row("--fsdp", _fsdp, "fsdp"),
    _row("--fsdp_transformer_layer_cls_to_wrap", judge_units, "fsdp"),
    _row("--fsdp_config", _fsdp_file, "fsdp"),
    judge_row("--deepspeed --deepspeed_config", _file, rule="hf.deepspeed"),
    _row("--average_tokens_across_devices", _average, "loss"),
    _row("--train_sampling_strategy --group_by_length", _grouping, "loading"),
    _row("--label_smoothing_factor", _refuse_when_on("smoothed labels: your task's loss"), "loss"),
    _row("--neftune_noise_alpha", _refuse_when_on("noise on embeddings"), "loss"),
    _row(
        "--auto_find_batch_size",
        _refuse_when_on("a smaller batch after an error; the stage find_batch_size finds one"),
        "micro-batch",
    ),
    fix_row(
        "--use_liger_kernel --use_liger",
        "performance-only",
        "kernels of Liger: the same layers, here by torch",
        rule="hf.kernels",
    ),
    _row("--push_to_hub", _refuse_when_on("uploads; checkpoint export writes the files"), "hub"),
    _row("--load_best_model_at_end", _refuse_when_on("checkpoint.keep_best keeps it"), "saving"),
    fix_row("--output_dir", "exact", "the run directory: hydra.run.dir=DIR", rule="hf.places"),
    fix_row("--logging_dir", "exact", "in the run directory", rule="hf.places"),
    *fix_rows(
        "--run_name --project",
        "exact",
        "a name for loggers: logger.wandb.name, logger.wandb.project",
        rule="hf.logging",
    ),
    *fix_rows(
        "--do_train --do_eval --do_predict",
        "exact",
        "trainer.stages=[fit] trains and evaluates on its way",
        rule="hf.stages",
    ),
    *fix_rows(
        "--overwrite_output_dir",
        "exact",
        "every run has a folder of its own",
        rule="hf.places",
    ),
    *fix_rows(
        "--gradient_checkpointing_kwargs --activation_checkpointing_kwargs "
        "--lr_scheduler_kwargs --optim_args --optim_target_modules --accelerator_config",
        "approximate",
        "details by keyword: compare them with the knobs of the same part",
        rule="hf.details",
    ),
    fix_row(
        "--parallelism_config",
        "refused",
        "an object of the script: state its sizes as mesh.dp_shard, mesh.tp and so on",
        rule="hf.mesh",
    ),
    *fix_rows(
        "--ddp_broadcast_buffers --ddp_static_graph --ddp_timeout --ddp_backend",
        "performance-only",
        "strategy.broadcast_buffers, strategy.static_graph, comm.timeout_s, comm.backend",
        rule="hf.ddp",
    ),
    *fix_rows(
        "--save_safetensors --save_only_model --save_on_each_node --enable_jit_checkpoint "
        "--restore_callback_states_from_checkpoint --save_vocab",
        "dead",
        "how the Trainer writes its files; here a checkpoint holds all that a resume needs",
        rule="hf.saving",
    ),
    *fix_rows(
        "--metric_for_best_model --greater_is_better",
        "approximate",
        "checkpoint.monitor and checkpoint.monitor_mode name it",
        rule="hf.saving",
    ),
    *fix_rows(
        "--logging_strategy --logging_first_step --log_on_each_node --logging_nan_inf_filter "
        "--log_level --log_level_replica --disable_tqdm --include_num_input_tokens_seen "
        "--include_tokens_per_second --trackio_space_id --trackio_bucket_id "
        "--trackio_static_space_id --skip_memory_metrics",
        "performance-only",
        "what is told; rank 0 tells it here",
        rule="hf.logging",
    ),
    *fix_rows(
        "--eval_delay --eval_on_start --prediction_loss_only --eval_do_concat_batches "
        "--eval_use_gather_object --eval_accumulation_steps --include_for_metrics "
        "--include_inputs_for_metrics --batch_eval_metrics --use_legacy_prediction_loop",
        "approximate",
        "how the Trainer evaluates; here the task's metrics do",
        rule="hf.evaluation",
    ),
    *fix_rows(
        "--fp16_full_eval --bf16_full_eval --fp16_opt_level --fp16_backend "
        "--half_precision_backend",
        "dead",
        "evaluation computes as training does; apex is not used",
        rule="hf.precision",
    ),
    *fix_rows(
        "--torch_compile_backend --torch_compile_mode --torchdynamo",
        "performance-only",
        "trainer.compile_options takes them",
        rule="hf.compile",
    ),
    *fix_rows(
        "--remove_unused_columns --label_names --length_column_name",
        "dead",
        "what the Trainer hands to the model; here the task does",
        rule="hf.loading",
    ),
    *fix_rows(
        "--dataloader_persistent_workers --dataloader_multiprocessing_context "
        "--dataloader_in_order --ignore_data_skip --data_seed --dispatch_batches --split_batches",
        "approximate",
        "the order of samples is drawn from trainer.seed alone, and a resume finds its place",
        rule="hf.loading",
    ),
    *fix_rows(
        "--hub_token --hub_private_repo --hub_model_id --hub_strategy --hub_always_push "
        "--hub_revision --push_to_hub_model_id --push_to_hub_token --push_to_hub_organization",
        "dead",
        "read with --push_to_hub alone",
        rule="hf.hub",
    ),
    *fix_rows(
        "--use_cpu --no_cuda --use_mps_device --jit_mode_eval --use_ipex",
        "performance-only",
        "trainer.device chooses the device",
        rule="hf.device",
    ),
    *fix_rows(
        "--torch_empty_cache_steps --liger_kernel_config --use_cache --debug --past_index "
        "--sharded_ddp --xpu_backend --tpu_num_cores --tpu_metrics_debug --mp_parameters "
        "--ray_scope --fsdp_min_num_params",
        "dead",
        "nothing here reads it",
        rule="hf.others",
    ),
    *fix_rows(
        "--local_rank --local-rank",
        "exact",
        "each process finds its place in the environment",
        rule="hf.place",
    ),
)
"""Every argument of ``TrainingArguments``, and older ones."""

MARKS = frozenset(
    (
        *("num_train_epochs", "learning_rate", "gradient_accumulation_steps", "warmup_ratio"),
        *("bf16", "fp16", "output_dir", "save_steps", "logging_steps", "do_train", "report_to"),
        *("dataloader_num_workers", "weight_decay", "max_steps", "warmup_steps"),
        *("per_device_train_batch_size", "lr_scheduler_type", "evaluation_strategy"),
        *("eval_strategy", "save_strategy", "save_total_limit", "per_device_eval_batch_size"),
    )
)
"""Names that scripts of the Trainer's take; three of them make one likely."""

OWN_MARKS = frozenset(
    (
        *("per_device_train_batch_size", "lr_scheduler_type", "evaluation_strategy"),
        *("eval_strategy", "save_strategy", "save_total_limit", "per_gpu_train_batch_size"),
        *("ddp_find_unused_parameters", "dataloader_num_workers", "logging_steps"),
    )
)
"""Of these one at least."""

OTHERS_MARKS = frozenset(
    (
        *("train_batch_size", "batch_size", "num_warmup_steps", "max_train_steps", "lr"),
        *("lr_warmup_steps", "lr_scheduler", "zero_stage", "epochs", "train_micro_batch_size"),
    )
)
"""Where one of these stands, the script has a parser of its own."""

DEFAULTS: Mapping[str, Outcome] = {
    "per_device_train_batch_size": Outcome(
        "exact", "the Trainer's default", values={"data.micro_batch_size": 8}
    ),
    "learning_rate": Outcome("exact", "the Trainer's default", values={"optimizer.lr": 5e-5}),
    "optim": Outcome(
        "exact",
        "the Trainer's default is AdamW",
        {"optimizer": "adamw"},
    ),
    "weight_decay": Outcome(
        "exact", "the Trainer's default", values={"optimizer.weight_decay": 0.0}
    ),
    "lr_scheduler_type": Outcome("exact", "the Trainer's default", {"schedule": "linear"}),
    "max_grad_norm": Outcome(
        "exact", "the Trainer's default", values={"trainer.max_grad_norm": 1.0}
    ),
    "num_train_epochs": Outcome("exact", "the Trainer's default", values={"trainer.max_epochs": 3}),
}
"""What the Trainer takes where the line says nothing, and which decides on numbers."""
