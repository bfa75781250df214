"""What several rules need to know of the job as a whole."""

from __future__ import annotations

from typing import Literal

from torsh_trainer.translate.deepspeed.source import Source

Precision = Literal["fp32", "bf16", "fp16", "autocast"]

TORCH_OPTIMIZERS = {
    "adam": "adam",
    "adamw": "adamw",
    "adagrad": "adagrad",
    "Adadelta": "adadelta",
    "Adafactor": "adafactor",
    "Adamax": "adamax",
    "ASGD": "asgd",
    "NAdam": "nadam",
    "RAdam": "radam",
    "RMSprop": "rmsprop",
    "Rprop": "rprop",
    "SGD": "sgd",
    "SparseAdam": "sparseadam",
}
"""``optimizer.type`` -> option of the group optimizer: DeepSpeed's names in lower case, torch's
case-sensitively, as the engine looks them up."""

DEFAULT_LR = {
    "adadelta": 1.0,
    "adafactor": 1e-2,
    "adagrad": 1e-2,
    "adamax": 2e-3,
    "asgd": 1e-2,
    "nadam": 2e-3,
    "rmsprop": 1e-2,
    "rprop": 1e-2,
}
"""Option -> the rate of an optimizer that is given none; 1e-3 for all others."""

DEEPSPEED_NAMES = {
    "adagrad",
    "adam",
    "adamw",
    "lamb",
    "muadam",
    "muadamw",
    "musgd",
    "lion",
    "muon",
    "onebitadam",
    "onebitlamb",
    "zerooneadam",
}
"""Names that DeepSpeed takes in any case."""


def stage(source: Source) -> int:
    """The ZeRO stage; the short form ``zero_optimization: true`` is stage 1."""
    short = source.found.get(("zero_optimization",))
    if short is not None and isinstance(short.value, bool):
        return int(short.value)
    return int(source.get("zero_optimization.stage"))


def precision(source: Source) -> Precision:
    """In which precision the engine computes."""
    if source.get("bf16.enabled") is True:
        return "bf16"
    if source.get("fp16.enabled") is True:
        return "fp16"
    return "autocast" if source.get("torch_autocast.enabled") is True else "fp32"


def optimizer_name(source: Source) -> str:
    """``optimizer.type`` as the engine folds it; empty where there is none."""
    name = source.get("optimizer.type")
    if not isinstance(name, str):
        return ""
    return name.lower() if name.lower() in DEEPSPEED_NAMES else name


def offloads_optimizer(source: Source) -> bool:
    """Optimizer states live on the host."""
    return (
        source.get("zero_optimization.offload_optimizer.device") == "cpu"
        or source.get("zero_optimization.cpu_offload") is True
    ) and stage(source) > 0


def offloads_parameters(source: Source) -> bool:
    """Parameters live on the host: stage 3 alone does so."""
    return (
        source.get("zero_optimization.offload_param.device") == "cpu"
        or source.get("zero_optimization.cpu_offload_param") is True
    ) and stage(source) == 3


def own_kernel(source: Source) -> bool:
    """An optimizer that is offloaded is stepped by a kernel of DeepSpeed's, not by torch."""
    name = optimizer_name(source)
    adam = name in ("adam", "adamw") and not source.get("optimizer.params.torch_adam")
    return offloads_optimizer(source) and (adam or name in ("adagrad", ""))


def offloads(source: Source) -> bool:
    """Anything lives on the host."""
    return offloads_optimizer(source) or offloads_parameters(source)


def strategy(source: Source) -> Literal["ddp", "fsdp"]:
    """The native strategy: FSDP2 from stage 2 on, and wherever something is offloaded."""
    return "fsdp" if stage(source) >= 2 or offloads(source) else "ddp"


def phantom_lr(source: Source, *, share: float) -> tuple[float | None, str]:
    """The rate of the step that stage 0 takes while it starts, and what is in doubt about it.

    Weights decay by it. DeepSpeed's forward sees the decayed ones from the second step on, ours
    from the first: the same as long as none decays by more than ``share`` of itself.
    """
    name = optimizer_name(source)
    if not name:
        return None, "the script builds the optimizer, whose rate this step takes: left out"
    lr = source.get("optimizer.params.lr")
    if lr is None:
        lr = DEFAULT_LR.get(TORCH_OPTIMIZERS.get(name, ""), 1e-3)
    decay = source.get("optimizer.params.weight_decay") or 0.0
    if lr * decay > share:
        return lr, "weights decay so fast that the first forward sees it"
    return lr, ""


def holds_low(source: Source) -> bool:
    """Gradients are held in half precision, and the translation is to hold them so."""
    own = precision(source)
    sums = source.get("data_types.grad_accum_dtype")
    return source.reproduces and own in ("bf16", "fp16") and sums in (None, own)


def compresses(source: Source) -> bool:
    """1-bit Adam where our compression takes its place: unsharded, under ddp."""
    return optimizer_name(source) == "onebitadam" and stage(source) == 0


def accumulates(source: Source) -> bool:
    """More than one micro-batch a step, as far as the file alone says."""
    steps = source.get("gradient_accumulation_steps")
    if steps is not None:
        return bool(steps > 1)
    total, micro = source.get("train_batch_size"), source.get("train_micro_batch_size_per_gpu")
    if total is None or micro is None:
        return False
    return source.world_size is None or total // micro // source.world_size > 1
