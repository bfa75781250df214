"""What stands around training: logs, checkpoints, parallelism beyond data, curricula."""

from __future__ import annotations

from torsh_trainer.translate.deepspeed.rules import (
    Outcome,
    approximate,
    constant_rule,
    dead,
    exact,
    faster,
    fixed_rule,
    refuse,
    refuse_unless,
    rule,
    switch_rule,
)
from torsh_trainer.translate.deepspeed.source import Leaf, Source

fixed_rule("dead.unused", "dead", "DeepSpeed stores it and does nothing with it")
fixed_rule("dead.permission", "dead", "a permission that the native optimizers do not need")
fixed_rule("unknown", "dead", "no key of DeepSpeed, which passes over it in silence")
fixed_rule("elsewhere", "dead", "no key of DeepSpeed: a tool around it reads it")
fixed_rule("remark", "dead", "a remark")
fixed_rule("block.empty", "exact", "an empty block: every default")
fixed_rule("block.off", "dead", "its block is switched off")
fixed_rule("mismatch", "refused", "a value of a type that DeepSpeed takes and stumbles over")


@rule("neox.argument", "Arguments of GPT-NeoX beside DeepSpeed's keys.")
def _neox(source: Source, leaf: Leaf) -> Outcome:
    name = leaf.path[0].replace("_", "-")
    if name in ("pipe-parallel-size", "model-parallel-size") and leaf.value not in (0, 1):
        return refuse(f"not in this release: {name}")
    return dead("GPT-NeoX reads it, not DeepSpeed: it is outside this translation")


@rule("log.every", "Steps between reports.")
def _every(source: Source, leaf: Leaf) -> Outcome:
    if not leaf.value:
        return Outcome(
            "performance-only",
            "off; DeepSpeed divides by a 0 and stops" if leaf.value == 0 else "off",
            engine_takes=leaf.value != 0,
        )
    return faster("steps between reports", trainer__log_every=leaf.value)


@rule("log.level", "How much is logged.")
def _level(source: Source, leaf: Leaf) -> Outcome:
    known = {"debug": "debug", "info": "info", "warning": "warning", "error": "error"}
    level = known.get(str(leaf.value).lower())
    return faster("the same level", log_level=level) if level else faster("left at info")


fixed_rule("log.state", "performance-only", "config.yaml of the run directory holds it")
fixed_rule("log.phases", "performance-only", "timers; callbacks.profiler shows where time goes")
fixed_rule("log.communication", "performance-only", "a log that stops at every operation: left out")
fixed_rule("log.throughput", "performance-only", "throughput is always reported")
fixed_rule("log.flops", "performance-only", "a count of one step: left out")
fixed_rule("speed.gc", "performance-only", "Python's garbage collector stays as it is")
fixed_rule("speed.graphs", "performance-only", "trainer.compile=true is the nearest")

fixed_rule(
    "checkpoint.asynchronous", "performance-only", "checkpoint.mode=async writes beside training"
)
fixed_rule(
    "checkpoint.layout", "performance-only", "the layout of files; ours load at any world size"
)
fixed_rule("checkpoint.tags", "performance-only", "ranks always agree on a checkpoint")
fixed_rule(
    "checkpoint.gathered",
    "performance-only",
    "`checkpoint export` writes whole weights",
)
refuse_unless("checkpoint.universal", (False,), "loading a universal checkpoint of DeepSpeed")
switch_rule(
    "checkpoint.masters",
    "Masters from a checkpoint, or from the rounded weights in it.",
    on=exact("a checkpoint holds fp32 masters, and a run goes on from them"),
    off=approximate("a run goes on from fp32 masters, DeepSpeed from the rounded weights"),
)
fixed_rule(
    "activations.tuning", "dead", "configures deepspeed.checkpointing, and switches nothing on"
)
constant_rule(
    "activations.partition",
    "Saved activations cut over tensor-parallel ranks.",
    dead("configures deepspeed.checkpointing, which the model's code calls or not"),
)
switch_rule(
    "activations.offload",
    "Saved activations on the host.",
    on=faster("activations stay on the device; trainer.activation_checkpointing recomputes them"),
)
fixed_rule(
    "parallel.pipeline-unread", "dead", "the script's PipelineModule says it; this copy is unread"
)
fixed_rule(
    "parallel.pipeline", "dead", "is read by the pipeline engine alone, which the script starts"
)
fixed_rule("parallel.rank-order", "performance-only", "the order of ranks moves no number")
fixed_rule("parallel.sequence-dtype", "dead", "is read with sequence parallelism alone")
refuse_unless("parallel.sequence", (None, 1), "sequence parallelism")
refuse_unless("parallel.tensor", (0, 1), "tensor parallelism")
refuse_unless("parallel.expert", (False,), "expert parallelism")
fixed_rule("parallel.expert-tuning", "refused", "not in this release: expert parallelism")


@rule("parallel.tensor-tuning", "Details of tensor parallelism.")
def _tensor_tuning(source: Source, leaf: Leaf) -> Outcome:
    if source.get("tensor_parallel.autotp_size") in (0, 1):
        return dead("tensor parallelism is off")
    return refuse("not in this release: tensor parallelism")


switch_rule(
    "compile.deepcompile",
    "DeepCompile becomes torch.compile.",
    on=approximate("torch.compile without DeepCompile's passes", trainer__compile=True),
)


@rule("compile.passes", "Passes of DeepCompile.")
def _passes(source: Source, leaf: Leaf) -> Outcome:
    changing = sorted({"autosp", "autotp"} & set(leaf.value or ()))
    if changing:
        return refuse(f"not in this release: {', '.join(changing)}")
    return faster("torch.compile chooses its own passes")


fixed_rule("compile.tuning", "performance-only", "torch.compile chooses for itself")

_AXIS = "steps, not samples, on the x axis, and names of our own"


switch_rule(
    "monitor.tensorboard", "Event files.", on=approximate(_AXIS, logger__tensorboard__enabled=True)
)
switch_rule("monitor.csv", "A table of numbers.", on=approximate(_AXIS, logger__csv__enabled=True))
switch_rule(
    "monitor.wandb", "Weights & Biases.", on=approximate(_AXIS, logger__wandb__enabled=True)
)


@rule("monitor.wandb-name", "Project, group and team.")
def _wandb_name(source: Source, leaf: Leaf) -> Outcome:
    knob = {"team": "entity"}.get(leaf.path[-1], leaf.path[-1])
    return exact("the same", **{f"logger__wandb__{knob}": leaf.value})


fixed_rule("monitor.where", "performance-only", "logs go to the run directory")
refuse_unless("monitor.comet", (False,), "logging to Comet")
fixed_rule("monitor.comet-tuning", "refused", "not in this release: logging to Comet")

refuse_unless("tuning.block", (False,), "DeepSpeed's autotuner; hydra sweeps knobs")
fixed_rule("tuning.knob", "refused", "not in this release: DeepSpeed's autotuner")

fixed_rule("curriculum.tuning", "refused", "not in this release: curricula and token dropping")
fixed_rule("curriculum.block", "dead", "switches what stands below it")
refuse_unless("curriculum.sampling", (False,), "curricula and dynamic batches")
refuse_unless("curriculum.routing", (False,), "random token dropping")
refuse_unless("curriculum.legacy", (False,), "curriculum learning")

fixed_rule("model.layer-drop", "refused", "not in this release: progressive layer dropping")
refuse_unless("model.hybrid", (False,), "DeepSpeed's hybrid engine")
fixed_rule("model.hybrid-tuning", "refused", "not in this release: DeepSpeed's hybrid engine")
fixed_rule(
    "model.quantized", "refused", "not in this release: quantised weights, made for inference"
)
fixed_rule(
    "model.compression", "refused", "not in this release: compression and quantisation in training"
)
fixed_rule(
    "model.sparse-attention", "refused", "not in this release: sparse attention is the model's"
)
