"""Which call of a script makes the engine that trains, and whether there is one at all."""

from __future__ import annotations

import ast

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.deepspeed.script.calls import DEEPSPEED
from torsh_trainer.translate.python.events import Event, ScriptReading
from torsh_trainer.translate.python.parsing import find_imports

CALL = r"(?<!amp\.)(?<!hydra\.)\binitialize$"
"""How the call that makes an engine is written; those of amp and hydra are others."""


def is_deepspeed_script(text: str) -> bool:
    """Whether Python text makes an engine of DeepSpeed's: it names what makes one, and not in
    comments or in texts alone. What is no Python is taken for one by its words."""
    if "deepspeed.initialize" not in text and "deepspeed import" not in text:
        return False
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "deepspeed.initialize" in text
    return any(map(_names_initialize, ast.walk(tree)))


def _names_initialize(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom) and node.module == DEEPSPEED:
        return any(alias.name == "initialize" for alias in node.names)
    is_named = isinstance(node, ast.Attribute) and node.attr == "initialize"
    return is_named and ast.unparse(node) == "deepspeed.initialize"


def choose_engine(
    tree: ast.Module, reading: ScriptReading, *, name: str
) -> tuple[Event, list[Event]]:
    """The call that makes the engine that trains, and the others.

    Raises:
        ConfigError: there is none.
    """
    events = reading.all("initialize")
    if events:
        trains = [e for e in events if e.facts.get("model_parameters") or e.facts.get("optimizer")]
        chosen = trains[0] if trains else events[0]
        return chosen, [event for event in events if event is not chosen]
    imported = set(find_imports(tree))
    if any(event.what == "deepspeed.init_inference" for event in reading.events):
        raise ConfigError(
            f"{name} only infers: it calls deepspeed.init_inference and trains nothing",
            fix="name the script that trains",
        )
    if any(one.startswith(("transformers.Trainer", "trl.")) for one in imported):
        raise ConfigError(
            f"{name} trains by Hugging Face's Trainer, which makes the engine itself",
            fix="translate the line that starts it, with its arguments: translate --command "
            "'deepspeed train.py --deepspeed ds.json ...'",
        )
    if any(one.startswith("accelerate") for one in imported):
        raise ConfigError(
            f"{name} trains by accelerate, which makes the engine itself",
            fix="translate the line that starts it: --command 'accelerate launch ...'",
        )
    what = "deepspeed.initialize is called where reading does not get to"
    if not any(map(_names_initialize, ast.walk(tree))):
        what = "it speaks of DeepSpeed, and never calls deepspeed.initialize"
    raise ConfigError(
        f"{name} makes no engine: {what}",
        fix="name the script that trains, or translate its configuration file alone",
    )
