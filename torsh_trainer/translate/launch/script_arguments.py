"""Arguments of scripts other than the Trainer's that are known by their families.

Megatron-LM and Megatron-DeepSpeed (``megatron/training/arguments.py``), and the training scripts of
diffusers and of accelerate's examples, whose arguments go by the same names everywhere.
"""

from __future__ import annotations

from torsh_trainer.translate.launch import meshes, trainer_arguments
from torsh_trainer.translate.launch.flags import (
    FlagRow,
    FlagTable,
    StatedFlag,
    fix_row,
    fix_rows,
    judge_row,
    table_of_rows,
)
from torsh_trainer.translate.launch.job import LaunchJob
from torsh_trainer.translate.outcomes import Outcome, dead, exact, faster, refuse


def _knob(names: str, key: str, why: str, *, whole: bool = False, family: str) -> FlagRow:
    def judge(job: LaunchJob, said: StatedFlag) -> Outcome:
        value: float = job.whole(said) if whole else job.number(said)
        return Outcome("exact", why, values={key: value})

    return judge_row(names, judge, rule=f"{family}.knob")


# -- Megatron --------------------------------------------------------------------------------------


def _megatron_style(job: LaunchJob, said: StatedFlag) -> Outcome:
    kind = job.text(said).lower()
    if kind in ("cosine", "linear", "constant"):
        return Outcome("exact", "the same curve, down to --min-lr", {"schedule": kind})
    if kind == "wsd":
        return Outcome("approximate", "its decay is set here", {"schedule": "warmup_stable_decay"})
    return refuse(f"not in this release: --lr-decay-style {kind[:40]}")


def _least_rate(job: LaunchJob, said: StatedFlag) -> Outcome:
    rate = job.argument("lr")
    if rate is None:
        return refuse("a share of --lr, which the line does not say: schedule.final=SHARE")
    style = job.argument("lr_decay_style")
    if style is not None and style.text == "constant":
        return dead("a constant rate does not fall")
    base = job.number(rate)
    share = job.number(said) / base if base else 0.0
    return exact("as a share of the base rate", schedule__final=share)


def _megatron_half(job: LaunchJob, said: StatedFlag) -> Outcome:
    if job.is_configured:
        return exact("DeepSpeed's file says how")
    return Outcome(
        "exact",
        "forward and backward in it, over fp32 masters",
        {"precision": f"{said.name}_true"},
    )


def _zero(job: LaunchJob, said: StatedFlag) -> Outcome:
    if job.is_configured:
        return exact("DeepSpeed's file says which: its row stands below")
    stage = job.whole(said)
    if stage >= 2:
        return Outcome(
            "exact",
            "sharded",
            {"strategy": meshes.name_strategy(job, "fsdp")},
            {"strategy.reshard_after_forward": stage == 3},
        )
    if meshes.read_axes(job):
        return faster(_SHARDED) if stage else meshes.choose_replicas(job, "whole")
    return Outcome(
        "exact",
        "ZeRO-1" if stage else "whole",
        {"strategy": "ddp"},
        {"strategy.zero1": bool(stage)},
    )


_SHARDED = "the optimizer's state is sharded, and parameters with it, over mesh.dp_shard"


def _judge_distributed_optimizer(job: LaunchJob, said: StatedFlag) -> Outcome:
    if meshes.read_axes(job):
        return faster(_SHARDED)
    return exact("strategy.zero1=true shards the optimizer's state")


def _judge_experts(job: LaunchJob, said: StatedFlag) -> Outcome:
    if job.text(said) in ("0", "1"):
        return dead("one: no mixture")
    return refuse("not in this release: experts of a mixture")


def _samples(job: LaunchJob, said: StatedFlag) -> Outcome:
    return refuse("a number of samples: state trainer.max_steps, the updates of so many")


MEGATRON = table_of_rows(
    _knob(
        "--micro-batch-size --batch-size",
        "data.micro_batch_size",
        "samples of one forward of one process",
        whole=True,
        family="megatron",
    ),
    _knob(
        "--global-batch-size",
        "data.batch_size",
        "samples of one step, over all processes",
        whole=True,
        family="megatron",
    ),
    _knob(
        "--train-iters", "trainer.max_steps", "updates of the run", whole=True, family="megatron"
    ),
    judge_row(
        "--train-samples --lr-decay-samples --lr-warmup-samples --train-tokens --lr-"
        "decay-tokens --lr-warmup-tokens",
        _samples,
        rule="megatron.samples",
    ),
    _knob("--lr", "optimizer.lr", "the base rate of the schedule", family="megatron"),
    judge_row("--min-lr", _least_rate, rule="megatron.least-rate"),
    judge_row("--lr-decay-style", _megatron_style, rule="megatron.schedule"),
    _knob(
        "--lr-decay-iters",
        "schedule.total_steps",
        "updates that the schedule spans",
        whole=True,
        family="megatron",
    ),
    _knob(
        "--lr-warmup-iters",
        "schedule.warmup_steps",
        "updates of the rise",
        whole=True,
        family="megatron",
    ),
    _knob(
        "--lr-warmup-fraction --warmup",
        "schedule.warmup_ratio",
        "a share of the schedule",
        family="megatron",
    ),
    _knob(
        "--weight-decay",
        "optimizer.weight_decay",
        "norms and biases are left out there, too",
        family="megatron",
    ),
    judge_row("--adam-beta1 --adam-beta2", trainer_arguments.judge_betas, rule="megatron.betas"),
    _knob("--adam-eps", "optimizer.eps", "the same", family="megatron"),
    judge_row(
        "--clip-grad",
        lambda job, said: (
            dead("DeepSpeed clips as its own file says")
            if job.is_configured
            else exact("the same formula", trainer__max_grad_norm=job.number(said) or None)
        ),
        rule="megatron.clipping",
    ),
    judge_row("--fp16", _megatron_half, takes=0, rule="megatron.precision"),
    judge_row("--bf16", _megatron_half, takes=0, rule="megatron.precision"),
    judge_row("--seed", trainer_arguments.judge_seed, rule="megatron.seed"),
    judge_row("--zero-stage", _zero, rule="megatron.zero"),
    _knob(
        "--log-interval",
        "trainer.log_every",
        "steps between reports",
        whole=True,
        family="megatron",
    ),
    _knob(
        "--eval-interval",
        "trainer.eval_every",
        "steps between evaluations",
        whole=True,
        family="megatron",
    ),
    _knob(
        "--eval-iters",
        "trainer.eval_batches",
        "batches of an evaluation",
        whole=True,
        family="megatron",
    ),
    _knob(
        "--save-interval",
        "checkpoint.every_steps",
        "steps between checkpoints",
        whole=True,
        family="megatron",
    ),
    _knob("--num-workers", "data.num_workers", "loader processes", whole=True, family="megatron"),
    judge_row(
        "--optimizer",
        lambda job, said: (
            Outcome(
                "exact",
                "the same optimizer",
                {"optimizer": {"adam": "adamw"}.get(job.text(said), said.text)},
            )
            if said.text in ("adam", "sgd")
            else refuse(f"not in this release: {said.text[:40]}")
        ),
        rule="megatron.optimizer",
    ),
    judge_row(
        "--tensor-model-parallel-size --model-parallel-size --pipeline-model-parallel-size "
        "--pipe-parallel-size --context-parallel-size --expert-model-parallel-size "
        "--ds-sequence-parallel-size",
        meshes.judge_model_axis,
        rule="megatron.mesh",
    ),
    judge_row(
        "--virtual-pipeline-model-parallel-size --num-layers-per-virtual-pipeline-stage",
        meshes.judge_chunks,
        rule="megatron.mesh",
    ),
    judge_row("--num-experts --expert-tensor-parallel-size", _judge_experts, rule="megatron.mesh"),
    judge_row(
        "--sequence-parallel --sequence-parallelism",
        meshes.judge_sequence_parallel,
        takes=0,
        rule="megatron.mesh",
    ),
    fix_row("--no-pipeline-parallel", "exact", "not divided", takes=0, rule="megatron.mesh"),
    judge_row(
        "--rampup-batch-size",
        lambda job, said: refuse("not in this release: a batch that grows"),
        takes=3,
        rule="megatron.rampup",
    ),
    *fix_rows(
        "--recompute-activations --checkpoint-activations --deepspeed-activation-checkpointing",
        "exact",
        "trainer.activation_checkpointing=true computes activations again",
        takes=0,
        rule="megatron.recompute",
    ),
    *fix_rows(
        "--recompute-granularity --recompute-method --recompute-num-layers --checkpoint-num-layers",
        "approximate",
        "trainer.activation_checkpointing: true, or selective",
        rule="megatron.recompute",
    ),
    judge_row(
        "--use-distributed-optimizer", _judge_distributed_optimizer, takes=0, rule="megatron.zero"
    ),
    *fix_rows(
        "--overlap-grad-reduce --overlap-param-gather --tp-comm-overlap --use-flash-attn "
        "--use-flash-attn-v2 --use-mcore-models --no-async-tensor-model-parallel-"
        "allreduce --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-"
        "bias-gelu-fusion --no-bias-dropout-fusion --use-cpu-initialization",
        "performance-only",
        "speed alone",
        takes=0,
        rule="megatron.speed",
    ),
    judge_row(
        "--deepspeed --deepspeed_config --deepspeed-config",
        lambda job, said: (
            exact("read together with this line")
            if said.values
            else exact("DeepSpeed is switched on")
        ),
        rule="megatron.deepspeed",
    ),
    *fix_rows(
        "--save --load --tensorboard-dir",
        "exact",
        "places: the run directory, checkpoint.dir, checkpoint.resume",
        rule="megatron.places",
    ),
    fix_row("--distributed-backend", "exact", "comm.backend", rule="megatron.comm"),
    *fix_rows(
        "--local_rank --local-rank",
        "exact",
        "each process finds its place in the environment",
        rule="hf.place",
    ),
)
"""Arguments of Megatron whose meaning is ours, or which wait."""

MEGATRON_MARKS = frozenset(
    (
        *("micro_batch_size", "global_batch_size", "tensor_model_parallel_size", "clip_grad"),
        *("lr_decay_style", "lr_warmup_fraction", "train_iters", "pipeline_model_parallel_size"),
        *("num_attention_heads", "ffn_hidden_size", "seq_length", "vocab_file", "lr_decay_iters"),
        *("num_layers", "hidden_size", "max_position_embeddings", "split", "model_parallel_size"),
        *("context_parallel_size", "expert_model_parallel_size"),
    )
)
"""Names that tell a script of Megatron's; four of them do."""


# -- diffusers, accelerate's examples --------------------------------------------------------------


def _judge_mixed(job: LaunchJob, said: StatedFlag) -> Outcome:
    kind = job.text(said).lower()
    if kind in ("no", "fp32"):
        return Outcome("exact", "fp32 throughout", {"precision": "fp32"})
    if job.is_configured:
        return exact("DeepSpeed's file computes as it says")
    if kind in ("bf16", "fp16"):
        return Outcome("exact", "autocast over fp32 parameters", {"precision": f"{kind}_mixed"})
    return refuse("not in this release: fp8")


def _rename(name: str, judge_as: str) -> FlagRow:
    """The row of the Trainer's argument ``judge_as`` under another name."""
    row = trainer_arguments.TABLE[f"--{judge_as}"]
    return FlagRow((f"--{name}",), 1, row.judge, f"diffusers.{judge_as}")


DIFFUSERS = table_of_rows(
    _knob(
        "--train_batch_size",
        "data.micro_batch_size",
        "samples of one forward of one process",
        whole=True,
        family="diffusers",
    ),
    _knob(
        "--per_device_train_batch_size",
        "data.micro_batch_size",
        "samples of one forward of one process",
        whole=True,
        family="diffusers",
    ),
    _rename("gradient_accumulation_steps", "gradient_accumulation_steps"),
    _knob(
        "--max_train_steps",
        "trainer.max_steps",
        "updates of the run",
        whole=True,
        family="diffusers",
    ),
    judge_row(
        "--num_train_epochs",
        lambda job, said: (
            dead("--max_train_steps counts before it")
            if job.argument("max_train_steps")
            else exact("epochs of the run", trainer__max_epochs=job.whole(said, least=1))
        ),
        rule="diffusers.length",
    ),
    _rename("learning_rate", "learning_rate"),
    judge_row(
        "--lr_scheduler --lr_scheduler_type",
        trainer_arguments.judge_schedule,
        rule="diffusers.schedule",
    ),
    judge_row(
        "--lr_warmup_steps --num_warmup_steps",
        trainer_arguments.judge_warmup,
        rule="diffusers.warmup",
    ),
    judge_row("--adam_beta1 --adam_beta2", trainer_arguments.judge_betas, rule="diffusers.betas"),
    _knob("--adam_epsilon", "optimizer.eps", "the same", family="diffusers"),
    judge_row(
        "--adam_weight_decay --weight_decay",
        lambda job, said: Outcome(
            "exact",
            "over all parameters, norms and biases too",
            {},
            {"optimizer.weight_decay": job.number(said), "optimizer.no_decay": False},
        ),
        rule="diffusers.decay",
    ),
    _rename("max_grad_norm", "max_grad_norm"),
    judge_row("--mixed_precision", _judge_mixed, rule="diffusers.precision"),
    _rename("gradient_checkpointing", "gradient_checkpointing"),
    judge_row("--seed", trainer_arguments.judge_seed, rule="diffusers.seed"),
    _knob(
        "--checkpointing_steps",
        "checkpoint.every_steps",
        "steps between checkpoints",
        whole=True,
        family="diffusers",
    ),
    _knob(
        "--checkpoints_total_limit",
        "checkpoint.keep_last",
        "checkpoints that stay",
        whole=True,
        family="diffusers",
    ),
    _knob(
        "--dataloader_num_workers",
        "data.num_workers",
        "loader processes",
        whole=True,
        family="diffusers",
    ),
    judge_row(
        "--use_8bit_adam",
        lambda job, said: Outcome(
            "approximate",
            "its state is held in fp32 here: no rounding, more memory",
            {"optimizer": "adamw"},
        ),
        takes=0,
        rule="diffusers.optimizer",
    ),
    _rename("report_to", "report_to"),
    _rename("resume_from_checkpoint", "resume_from_checkpoint"),
    judge_row(
        "--use_ema",
        lambda job, said: (
            exact("trainer.ema_decay=0.9999 keeps an average of the weights")
            if said.is_on
            else dead("switched off")
        ),
        takes=0,
        rule="diffusers.ema",
    ),
    judge_row(
        "--allow_tf32",
        lambda job, said: (
            exact("products of fp32 in TF32", precision__matmul="high")
            if said.is_on
            else dead("switched off")
        ),
        takes=0,
        rule="diffusers.precision",
    ),
    judge_row(
        "--scale_lr",
        lambda job, said: (
            exact("optimizer.lr_scaling=linear", optimizer__lr_scaling="linear")
            if said.is_on
            else dead("switched off")
        ),
        takes=0,
        rule="diffusers.scaling",
    ),
    *fix_rows(
        "--output_dir --logging_dir",
        "exact",
        "the run directory: hydra.run.dir=DIR",
        rule="hf.places",
    ),
    *fix_rows(
        "--local_rank", "exact", "each process finds its place in the environment", rule="hf.place"
    ),
)
"""Arguments of the training scripts of diffusers, and of examples without the Trainer."""

DIFFUSERS_MARKS = frozenset(
    (
        *("train_batch_size", "max_train_steps", "lr_scheduler", "lr_warmup_steps"),
        *("checkpointing_steps", "adam_weight_decay", "num_warmup_steps", "use_8bit_adam"),
        *("per_device_train_batch_size", "lr_scheduler_type", "gradient_accumulation_steps"),
        *("learning_rate", "num_train_epochs", "mixed_precision", "gradient_checkpointing"),
    )
)
"""Names that such scripts take; three of them make one likely."""

DIFFUSERS_OWN_MARKS = frozenset(
    (
        *("max_train_steps", "lr_warmup_steps", "num_warmup_steps", "checkpointing_steps"),
        *("lr_scheduler", "adam_weight_decay"),
    )
)
"""Of these one at least."""

_CONFIGURED: FlagTable = table_of_rows(
    judge_row(
        "--deepspeed --deepspeed_config --deepspeed-config --ds_config",
        lambda job, said: (
            exact("read together with this line")
            if said.values
            else exact("DeepSpeed is switched on")
        ),
        rule="script.deepspeed",
    ),
    fix_row(
        "--deepscale", "dead", "an older name of --deepspeed", takes=0, rule="script.deepspeed"
    ),
    *fix_rows(
        "--local_rank --local-rank",
        "exact",
        "each process finds its place in the environment",
        rule="script.place",
    ),
)
"""What ``deepspeed.add_config_arguments`` gives to any script."""


def table_of_family(family: str) -> FlagTable:
    """The arguments that scripts of a family take; those that any script may take for none."""
    return {
        "hugging-face": trainer_arguments.TABLE,
        "megatron": MEGATRON,
        "diffusers": DIFFUSERS,
    }.get(family, _CONFIGURED)


FAMILIES = {
    "hugging-face": "arguments of Hugging Face's Trainer",
    "megatron": "Megatron's arguments",
    "diffusers": "arguments as the training scripts of diffusers and accelerate take them",
}
"""Family -> how a sentence calls its arguments."""


def find_family(names: set[str]) -> str:
    """Whose arguments these are, by their names; empty where nothing tells."""
    if len(names & MEGATRON_MARKS) >= 4:
        return "megatron"
    if names & DIFFUSERS_OWN_MARKS and len(names & DIFFUSERS_MARKS) >= 3:
        return "diffusers"
    likely = names & trainer_arguments.OWN_MARKS and not names & trainer_arguments.OTHERS_MARKS
    if likely and len(names & trainer_arguments.MARKS) >= 3:
        return "hugging-face"
    return ""
