"""Scripts that no translator reads: what they train by, and the next move, in one sentence."""

from __future__ import annotations

import re
from pathlib import Path

from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.translate.python.parsing import read_source

_TORCH = r"torch"
_KINDS = (
    (
        r"(pytorch_)?lightning",
        "trains by Lightning",
        (
            "give its Trainer strategy=TorshStrategy(...), of torsh_trainer_lightning "
            "(docs/lightning.md)"
        ),
    ),
    (
        r"transformers\b.*\bTrainer|from\s+trl",
        "trains by Hugging Face's Trainer",
        "translate the line that starts it, with its arguments: translate --command '...'",
    ),
    (
        r"accelerate",
        "trains by accelerate",
        "translate the line that starts it: translate --command 'accelerate launch ...'",
    ),
    (
        r"(tensorflow|keras|mxnet|pyspark)",
        "does not train torch",
        "only scripts that train torch are translated",
    ),
    (
        _TORCH,
        "trains plain torch, without an engine to translate",
        (
            "write it as a task (docs/user_code.md), or translate the line that starts it: "
            "translate --command 'torchrun ...'"
        ),
    ),
)
"""What is imported -> what the script is, and what to do; the first that fits."""


def explain_script(path: Path) -> ConfigError | None:
    """The error for a Python file that is nobody's; None where it is no Python file."""
    if path.suffix.lower() not in (".py", ".ipynb"):
        return None
    try:
        text = read_source(path)
    except (ConfigError, ResourceError):
        return None
    for pattern, what, fix in _KINDS:
        if pattern == _TORCH and (error := _explain_torch(path, text)) is not None:
            return error
        if re.search(rf"^\s*(?:from|import)\s+(?:[^#\n]*,\s*)?{pattern}", text, re.MULTILINE):
            return ConfigError(f"{path} {what}", fix=fix)
    return ConfigError(
        f"{path} imports no engine that is known here", fix="name the script that trains"
    )


def _explain_torch(path: Path, text: str) -> ConfigError | None:
    """Words for a file with torch that is no plain script; None where it trains by torch alone."""
    engine = re.search(r"\b(horovod|deepspeed)\b", text)
    if engine is not None:
        return ConfigError(
            f"{path} speaks of {engine[1]}, and imports it in no way that reading follows",
            fix="name the script that trains, or the line that starts it: translate --command "
            "'...'",
        )
    if "torch" in text and ".backward(" not in text:
        return ConfigError(
            f"{path} calls no backward: what trains, if anything, stands in other files",
            fix="name the script that trains, or the folder of the project",
        )
    return None
