"""Asks the live engine: DeepSpeedConfig of the installed version, for a world of eight.

Run as a program: its argument names a file with a JSON list of [name, text]; it writes
{name: [verdict, words]} to stdout. "auto" is filled as Hugging Face's Trainer fills it. Verdicts:
takes, removed (only for keys that the version has dropped), malformed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

WORLD = 8
HIDDEN = 768
FILLED = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 1,
    "train_batch_size": 8 * WORLD,
    "gradient_clipping": 1.0,
    "optimizer.params.lr": 5e-5,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_max_lr": 5e-5,
    "scheduler.params.warmup_num_steps": 10,
    "scheduler.params.total_num_steps": 100,
    "fp16.enabled": False,
    "bf16.enabled": False,
    "zero_optimization.reduce_bucket_size": HIDDEN**2,
    "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * HIDDEN**2),
    "zero_optimization.stage3_param_persistence_threshold": 10 * HIDDEN,
}


class World:
    """What DeepSpeed asks for the number of data-parallel processes."""

    def get_data_parallel_world_size(self) -> int:
        return WORLD


def filled(config: Any) -> Any:
    """The configuration as Hugging Face's Trainer hands it on."""
    for dotted, value in FILLED.items():
        *parents, name = dotted.split(".")
        node = config
        for key in parents:
            node = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, dict) and node.get(name) == "auto":
            node[name] = value
    return config


def verdict(text: str) -> tuple[str, str]:
    import hjson
    from deepspeed.runtime import config as engine
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

    try:
        config = filled(hjson.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys))
        removed = drop_removed(engine, config)
        engine.DeepSpeedConfig(config, mpu=World())
    except Exception as error:  # noqa: BLE001 - whatever the engine raises is its verdict
        return "malformed", f"{type(error).__name__}: {error}"[:500]
    return ("removed", ", ".join(removed)) if removed else ("takes", "")


def drop_removed(engine: Any, config: Any) -> list[str]:
    removed = [
        key for key in engine._REMOVED_TOP_LEVEL_CONFIG_KEYS if config.pop(key, None) is not None
    ]
    zero = config.get("zero_optimization")
    if isinstance(zero, dict):
        removed += [k for k in engine._REMOVED_ZERO_CONFIG_KEYS if zero.pop(k, None) is not None]
    return removed


def main() -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    answers = os.dup(1)
    os.dup2(2, 1)  # the engine logs to stdout
    # Imported here: importing DeepSpeed chooses its accelerator.
    import torch.distributed
    from torsh_trainer_deepspeed import library, operators

    from torsh_trainer.comm.local import LocalCommunicator

    comm = LocalCommunicator(torch.device("cpu"))
    library.load(comm)
    operators.compile_operators(
        ["deepspeed_shm_comm"], comm
    )  # in the cache of runs, and never locked there
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "gloo", init_method=Path(folder, "meet").as_uri(), rank=0, world_size=1
        )
        import deepspeed.comm

        deepspeed.comm.init_distributed("gloo", verbose=False)
        found = {name: verdict(text) for name, text in json.loads(Path(sys.argv[1]).read_text())}
    with os.fdopen(answers, "w") as out:
        json.dump(found, out)


if __name__ == "__main__":
    main()
