"""ZeRO stages become DDP and FSDP2; offload becomes FSDP2's."""

from __future__ import annotations

from typing import Any

from torsh_trainer.translate.deepspeed import job
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


@rule("zero.stage", "Stage 0 is ddp, 1 ddp with a sharded optimizer, 2 and 3 are fsdp.")
def _stage(source: Source, leaf: Leaf) -> Outcome:
    stage = job.stage(source)
    if job.strategy(source) == "ddp":
        why = "every process holds the whole model"
        why += "; the optimizer state is sharded" if stage == 1 else ""
        values: dict[str, Any] = {"strategy.zero1": stage == 1}
        values["strategy.find_unused_parameters"] = True
        if job.compresses(source):
            values["strategy.overlap"] = False  # what is owed to an unused parameter would be lost
        return _with_unused(source, why, "ddp", values)
    values = {"strategy.reshard_after_forward": stage == 3}
    why = {
        1: "with the optimizer offloaded: parameters stay gathered between forward and backward",
        2: "parameters stay gathered between forward and backward",
        3: "parameters are gathered block by block",
    }[stage]
    if stage >= 2 and (job.accumulates(source) or job.holds_low(source)):
        values["strategy.reduce_every_micro_batch"] = True
        why += "; every micro-batch is reduced, as DeepSpeed does"
    return _with_unused(source, why, "fsdp", values)


def _with_unused(source: Source, why: str, option: str, values: dict[str, Any]) -> Outcome:
    """The strategy, and what becomes of parameters that no forward reaches."""
    why += "; parameters that no forward reaches are stepped as if their gradient were zero"
    values["strategy.zero_unused"] = True
    if job.precision(source) == "fp32" and job.stage(source) > 0:
        why += "; a step with gradients that are not finite is skipped"
        values["trainer.on_nonfinite"] = "skip"
    return Outcome("emulated", why, {"strategy": option}, values)


def _short_form(source: Source, leaf: Leaf) -> Outcome:
    if isinstance(leaf.value, bool):
        return _stage(source, leaf)
    return exact("an empty block: every default")


rule("zero.short-form", "`zero_optimization: true` is stage 1.")(_short_form)


@rule("zero.reduce-bucket", "Elements of gradients that travel together.")
def _reduce_bucket(source: Source, leaf: Leaf) -> Outcome:
    if leaf.value is None:
        return faster("fsdp communicates unit by unit, ddp in buckets of 25 MiB")
    if job.strategy(source) == "fsdp":
        return faster("fsdp communicates unit by unit: there are no buckets")
    bytes_each = 2 if job.precision(source) in ("bf16", "fp16") else 4
    return faster(
        f"elements of {bytes_each} bytes",
        strategy__bucket_cap_mb=max(0.001, round(leaf.value * bytes_each / 2**20, 3)),
    )


@rule("zero.contiguous", "Gradients lie next to one another.")
def _contiguous(source: Source, leaf: Leaf) -> Outcome:
    if job.strategy(source) == "fsdp":
        return faster("fsdp always holds them so")
    return faster("gradients live in the buckets", strategy__gradient_as_bucket_view=leaf.value)


@rule("zero.reduce-scatter", "Reduce-scatter instead of an all-reduce and a slice.")
def _reduce_scatter(source: Source, leaf: Leaf) -> Outcome:
    if leaf.value or job.precision(source) == "fp32" or job.stage(source) == 0:
        return faster("the same sum; fsdp always reduce-scatters, ddp always all-reduces")
    return approximate("the same sum in another order, which half precision rounds elsewhere")


@rule("zero.overlap", "Communication during backward.")
def _overlap(source: Source, leaf: Leaf) -> Outcome:
    if job.compresses(source):
        return faster("compressed gradients travel after backward")
    if job.strategy(source) == "ddp" and leaf.value is not None:
        return faster("ddp communicates during backward, or after it", strategy__overlap=leaf.value)
    return faster("fsdp always communicates during backward")


@rule("zero.unused", "Parameters without a gradient.")
def _judge_unused(source: Source, leaf: Leaf) -> Outcome:
    if not leaf.value and job.stage(source) == 2:
        return approximate("DeepSpeed raises on them in stage 2; fsdp passes over them")
    return Outcome(
        "emulated",
        "stepped as if their gradient were zero",
        values={"strategy.zero_unused": True},
    )


@rule("zero.mics", "MiCS: shards within groups, replicas over them.")
def _mics(source: Source, leaf: Leaf) -> Outcome:
    if leaf.value <= 0:
        return dead("off")
    if job.stage(source) != 3:
        return dead("is read in stage 3 alone")
    if source.world_size is not None and source.world_size % leaf.value:
        return refuse(f"{source.world_size} processes do not divide into groups of {leaf.value}")
    return approximate(
        "shards within groups of so many processes, and replicas over them: the same mean, summed "
        "in two parts; it is proved against no engine, since 0.19.8 has removed MiCS",
        strategy__shard_size=leaf.value,
    )


@rule("zero.secondary-shard", "ZeRO++'s second shard within a node.")
def _secondary(source: Source, leaf: Leaf) -> Outcome:
    if leaf.value <= 1:
        return dead("off")
    return faster("gathers go over all processes: the same numbers, more traffic between nodes")


@rule("zero.leaf", "Modules that are gathered as a whole.")
def _leaf(source: Source, leaf: Leaf) -> Outcome:
    if leaf.path[-1] != "classes" or job.strategy(source) != "fsdp":
        return faster("which modules are gathered as a whole moves no number")
    names = [name.rpartition(".")[2] for name in leaf.value]
    return faster(
        "fsdp gathers these as units; add the other blocks to strategy.wrap_modules, or leave it "
        f"empty for all repeated blocks: {', '.join(names)}"
    )


@rule("zero.linear", "At stage 3, linear layers round the product before they add the bias.")
def _linear(source: Source, leaf: Leaf) -> Outcome:
    if job.stage(source) != 3 or not leaf.value:
        return faster("torch's own linear layers")
    if job.precision(source) not in ("bf16", "fp16"):
        return exact("the same linear layers, a rounding of fp32 apart")
    why = "DeepSpeed rounds the product of a linear layer before it adds the bias"
    if not source.reproduces:
        return approximate(f"{why}; here it is rounded once")
    return Outcome(
        "emulated",
        f"{why}, and so do torch.nn.Linear here",
        values={"precision.rounded_products": True},
    )


switch_rule(
    "zero.legacy",
    "The first implementation of stage 1.",
    on=dead("DeepSpeed refuses it: stage 1 has one implementation", engine_takes=False),
)
constant_rule(
    "zero.norm",
    "Leaving out the norm of the gradients.",
    faster("the norm is measured where something wants it"),
)
refuse_unless(
    "zero.quantized",
    (False,),
    "ZeRO++'s quantised communication; compression=int8 with strategy=ddp is the nearest",
)
fixed_rule("zero.zenflow", "refused", "not in this release: ZenFlow updates weights asynchronously")
fixed_rule("zero.loco", "refused", "not in this release: error feedback of quantised gradients")
fixed_rule(
    "zero.buckets", "performance-only", "the native strategies cut their messages themselves"
)
fixed_rule("zero.tiles", "performance-only", "the native optimizer step is not tiled")
fixed_rule(
    "zero.prefetch", "performance-only", "fsdp gathers ahead by unit: strategy.prefetch_depth"
)
fixed_rule("zero.layout", "performance-only", "the layout of shards moves no number")
fixed_rule("zero.inherent", "performance-only", "the native strategies need no switch for it")


def _offload(source: Source, what: str, *, active: bool, stages: str) -> Outcome:
    if not active:
        return dead(f"DeepSpeed offloads {what} in {stages} alone")
    why = "FSDP2 offloads parameters, gradients and optimizer state together"
    if not job.own_kernel(source):
        return faster(f"{why}; torch steps them on both sides", strategy__cpu_offload=True)
    return approximate(
        f"{why}; DeepSpeed's kernel for the host and torch's round an update differently",
        strategy__cpu_offload=True,
    )


_NO_FILES = (
    "FSDP2 keeps nothing in files; device cpu is translated, and strategy=deepspeed takes this file"
)


@rule("offload.optimizer", "Optimizer state on the host: FSDP2 offloads all or nothing.")
def _offload_optimizer(source: Source, leaf: Leaf) -> Outcome:
    if leaf.value == "cpu":
        active = job.offloads_optimizer(source)
        return _offload(source, "optimizer state", active=active, stages="stages 1 to 3")
    if leaf.value == "nvme":
        return refuse(f"optimizer state on NVMe: {_NO_FILES}")
    return dead("nothing is offloaded")


@rule("offload.parameters", "Parameters on the host.")
def _offload_parameters(source: Source, leaf: Leaf) -> Outcome:
    if leaf.value == "cpu":
        active = job.offloads_parameters(source)
        return _offload(source, "parameters", active=active, stages="stage 3")
    if leaf.value == "nvme":
        return refuse(f"parameters on NVMe: {_NO_FILES}")
    return dead("nothing is offloaded")


@rule("offload.optimizer-deprecated", "The older name of offload_optimizer.device.")
def _offload_optimizer_old(source: Source, leaf: Leaf) -> Outcome:
    if not leaf.value:
        return dead("nothing is offloaded")
    active = job.offloads_optimizer(source)
    return _offload(source, "optimizer state", active=active, stages="stages 1 to 3")


@rule("offload.parameters-deprecated", "The older name of offload_param.device.")
def _offload_parameters_old(source: Source, leaf: Leaf) -> Outcome:
    if not leaf.value:
        return dead("nothing is offloaded")
    active = job.offloads_parameters(source)
    return _offload(source, "parameters", active=active, stages="stage 3")


@rule("offload.ratio", "The share of the parameters that the host updates.")
def _ratio(source: Source, leaf: Leaf) -> Outcome:
    if leaf.value == 1.0 or not job.offloads_optimizer(source):
        return dead("everything is updated in one place")
    return approximate("FSDP2 updates everything on the host: other kernels, and slower")


constant_rule("offload.none", "No block: nothing is offloaded.", dead("nothing is offloaded"))
fixed_rule("offload.tuning", "performance-only", "FSDP2 pins the memory of what it offloads")
fixed_rule("offload.nvme", "performance-only", "the size of buffers moves no number")
fixed_rule("offload.aio", "dead", "is read for NVMe alone, which offload_*.device names or not")
