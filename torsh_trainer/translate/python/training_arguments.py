"""``TrainingArguments`` of transformers as scripts read them: types, and defaults that are steady.

What is not here, or whose default hangs on the version, is asked for where a knob hangs on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

UNSTEADY: Any = object()
"""The default of a field that differs from version to version, or is computed."""

_BY_TYPE: Mapping[str, Mapping[str, Any]] = {
    "int": {
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "max_steps": -1,
        "seed": 42,
        "local_rank": UNSTEADY,
        "ddp_timeout": 1800,
        "dataloader_num_workers": 0,
    },
    "float": {
        "num_train_epochs": 3.0,
        "learning_rate": 5e-5,
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "max_grad_norm": 1.0,
        "label_smoothing_factor": 0.0,
        "warmup_steps": 0,
        "warmup_ratio": UNSTEADY,
        "logging_steps": 500,
        "save_steps": 500,
    },
    "bool": {
        "bf16": False,
        "fp16": False,
        "bf16_full_eval": False,
        "fp16_full_eval": False,
        "torch_compile": False,
        "dataloader_drop_last": False,
        "dataloader_pin_memory": True,
        "remove_unused_columns": True,
        "logging_first_step": False,
        "load_best_model_at_end": False,
        "do_train": False,
        "do_eval": False,
        "do_predict": False,
        "push_to_hub": False,
        "gradient_checkpointing": UNSTEADY,
        "overwrite_output_dir": UNSTEADY,
        "group_by_length": UNSTEADY,
    },
    "str": {
        "deepspeed": None,
        "resume_from_checkpoint": None,
        "run_name": None,
        "output_dir": UNSTEADY,
        "lr_scheduler_type": "linear",
        "save_strategy": "steps",
        "logging_strategy": "steps",
        "eval_strategy": "no",
        "optim": UNSTEADY,
        "fsdp": UNSTEADY,
        "report_to": UNSTEADY,
    },
}

TRAINING_ARGUMENTS: Mapping[str, tuple[str, Any]] = MappingProxyType(
    {name: (kind, default) for kind, fields in _BY_TYPE.items() for name, default in fields.items()}
)
"""Field -> the type that its words are read as, and its default."""
