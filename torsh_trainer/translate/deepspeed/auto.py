"""Values that stand as "auto": filled as Hugging Face fills them, or by ``--set``.

Source: ``HfTrainerDeepSpeedConfig.trainer_config_process`` and ``trainer_config_finalize`` of
transformers 4.57, ``Accelerator._prepare_deepspeed`` of accelerate 1.10.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torsh_trainer.errors import ConfigError, nearest
from torsh_trainer.translate import lenient_json

AUTO = "auto"

ARGUMENTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0,
    "learning_rate": 5e-5,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "fp16": False,
    "bf16": False,
    "warmup_steps": 0,
    "max_steps": None,
    "hidden_size": None,
}
"""Arguments of Hugging Face's Trainer (and the model's hidden size) with their defaults."""


@dataclass(frozen=True)
class Filling:
    """What "auto" becomes, by dotted key; ``stated`` are those that the user gave by ``--set``."""

    arguments: Mapping[str, Any]
    keys: Mapping[str, Any]
    stated: frozenset[str] = frozenset()
    hugging_face: bool = True
    world_size: int | None = None

    def value(self, key: str) -> Any:
        """The value for ``key``, or None where nothing fills it."""
        if key in self.keys:
            return self.keys[key]
        fill = _HUGGING_FACE.get(key)
        if fill is None:
            return None
        needed, make = fill
        if not self.hugging_face and not needed <= self.stated:
            return None
        if any(self.arguments[name] is None for name in needed):
            return None
        return make(self.arguments, self.world_size)

    def where(self, key: str) -> str:
        """Words for where the value comes from."""
        if key in self.keys:
            return "--set"
        needed = _HUGGING_FACE[key][0]
        names = ", ".join(sorted(needed)) or "a constant"
        origin = "--set" if needed and needed <= self.stated else "TrainingArguments' default"
        return f"{origin} of {names}"


Maker = Callable[[Mapping[str, Any], int | None], Any]


def _argument(name: str) -> tuple[frozenset[str], Maker]:
    return frozenset({name}), lambda a, world: a[name]


_HUGGING_FACE: Mapping[str, tuple[frozenset[str], Maker]] = {
    "train_micro_batch_size_per_gpu": _argument("per_device_train_batch_size"),
    "gradient_accumulation_steps": _argument("gradient_accumulation_steps"),
    "train_batch_size": (
        frozenset({"per_device_train_batch_size", "gradient_accumulation_steps"}),
        lambda a, world: (
            None
            if world is None
            else world * a["per_device_train_batch_size"] * a["gradient_accumulation_steps"]
        ),
    ),
    "gradient_clipping": _argument("max_grad_norm"),
    "optimizer.params.lr": _argument("learning_rate"),
    "optimizer.params.betas": (
        frozenset({"adam_beta1", "adam_beta2"}),
        lambda a, world: [a["adam_beta1"], a["adam_beta2"]],
    ),
    "optimizer.params.eps": _argument("adam_epsilon"),
    "optimizer.params.weight_decay": _argument("weight_decay"),
    "scheduler.params.warmup_min_lr": (frozenset(), lambda a, world: 0),
    "scheduler.params.warmup_max_lr": _argument("learning_rate"),
    "scheduler.params.warmup_num_steps": _argument("warmup_steps"),
    "scheduler.params.total_num_steps": _argument("max_steps"),
    "fp16.enabled": _argument("fp16"),
    "bf16.enabled": _argument("bf16"),
    "zero_optimization.reduce_bucket_size": (
        frozenset({"hidden_size"}),
        lambda a, world: a["hidden_size"] ** 2,
    ),
    "zero_optimization.stage3_prefetch_bucket_size": (
        frozenset({"hidden_size"}),
        lambda a, world: int(0.9 * a["hidden_size"] ** 2),
    ),
    "zero_optimization.stage3_param_persistence_threshold": (
        frozenset({"hidden_size"}),
        lambda a, world: 10 * a["hidden_size"],
    ),
}

UNMATTERING = frozenset(
    {
        "train_batch_size",
        "scheduler.params.total_num_steps",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
    }
)
"""Keys that may stay "auto": the value follows from others or from the run, or moves no number."""


def filling(
    settings: Mapping[str, str], *, context: str, world_size: int | None, known: Mapping[str, Any]
) -> Filling:
    """What ``--set NAME=VALUE`` and the context fill in; ``known`` are the keys of the schema.

    A name is a dotted key of DeepSpeed or an argument of Hugging Face's Trainer.

    Raises:
        ConfigError: a name is neither.
    """
    arguments, keys, stated = dict(ARGUMENTS), {}, set()
    for name, text in settings.items():
        value = lenient_json.parse(f"{{value: {text}\n}}", name=f"--set {name}").plain()["value"]
        if name in ARGUMENTS:
            _check_argument(name, value)
            arguments[name] = value
            stated.add(name)
        if name in known:
            keys[name] = value
        elif name not in ARGUMENTS:
            raise ConfigError(
                f"--set {name}: neither a key of DeepSpeed nor an argument of Hugging Face's",
                fix=nearest(name, {*known, *ARGUMENTS}),
            )
    if context == "accelerate" and "max_grad_norm" not in stated:
        arguments["max_grad_norm"] = 1.0  # whatever the script clips to later
    return Filling(
        arguments, keys, frozenset(stated), context in ("hf-trainer", "accelerate"), world_size
    )


def list_needs(key: str) -> frozenset[str]:
    """The arguments of Hugging Face's Trainer that fill ``key`` where it is "auto"."""
    return frozenset() if key in UNMATTERING else _HUGGING_FACE.get(key, (frozenset(), None))[0]


_WHOLE = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "warmup_steps",
    "max_steps",
    "hidden_size",
)


def _check_argument(name: str, value: Any) -> None:
    if name in ("fp16", "bf16"):
        fine, wanted = isinstance(value, bool), "true or false"
    elif name not in _WHOLE:
        fine, wanted = isinstance(value, int | float) and not isinstance(value, bool), "a number"
    else:
        fine, wanted = type(value) is int and value >= 0, "a whole number, 0 or more"
    if not fine:
        raise ConfigError(f"--set {name}={value!r} is not {wanted}", fix="correct it")
