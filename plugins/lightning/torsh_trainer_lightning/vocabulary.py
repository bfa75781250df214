"""Errors in the words of who reads them.

They are written in the words of our configuration (``strategy.find_unused_parameters=true``). A
``Vocabulary`` says the same to somebody who has a Trainer of Lightning's, or a module in our loop,
in the one place where an error leaves: ``on_exception`` of a strategy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torsh_trainer.errors import TorshError

_STEPS = {
    "task.loss": "training_step",
    "task.evaluate": "validation_step",
    "task.predict": "predict_step",
    "task.forward": "forward",
    "task.build_optimizers": "configure_optimizers",
    "task.build_model": "the module's constructor",
}
_FLAGS = {
    "accumulate": "accumulate_grad_batches",
    "device": "accelerator",
    "max_grad_norm": "gradient_clip_val",
    "num_processes": "devices",
}
_BY_VALUE = 'gradient_clip_algorithm="value"'
_VALUES = {"true": "True", "false": "False", "null": "None"}
_SETTING = re.compile(
    r"(?<![\w./])(strategy|trainer|launcher|compression|precision)(?:\.(\w+))?(?:=([\w.-]+))?"
)


@dataclass(frozen=True)
class Vocabulary:
    """``words`` stand for others; with ``flags`` a setting is named as Lightning's Trainer does."""

    words: Mapping[str, str] = field(default_factory=dict)
    flags: bool = False

    def say(self, text: str) -> str:
        """``text`` in these words."""
        for word, other in self.words.items():
            text = re.sub(rf"(?<![\w.]){re.escape(word)}(?!\w)", other, text)
        return _SETTING.sub(_flag, text) if self.flags else text

    def translate(self, error: BaseException) -> None:
        """Has an error of ours say so; another one stays as it is."""
        if isinstance(error, TorshError):
            error.sentence, error.fix = self.say(error.sentence), self.say(error.fix)
            error.args = (error.sentence,)


def _flag(found: re.Match[str]) -> str:
    """A setting of ours, as an argument of the Trainer's or of a strategy's."""
    group, name, value = found.groups()
    said = _said(value)
    if group == "strategy" and name:
        return f"TorshStrategy(..., {name}={said})" if value else f"{name} of TorshStrategy"
    if group == "strategy" and value:
        return f"TorshStrategy({said})"
    if (group, name) == ("trainer", "max_grad_value"):
        return f"gradient_clip_val={said} with {_BY_VALUE}" if value else _BY_VALUE
    if group in ("trainer", "launcher") and name and (value or name in _FLAGS):
        flag = _FLAGS.get(name, name)
        return f"{flag}={said}" if value else flag
    if group == "precision" and value and not name:
        return f'precision="{value.replace("_", "-")}"'
    if group in ("compression", "precision") and (name or value):
        return f"{found[0]} (of TorshStrategy)"
    return found[0]


def _said(value: Any) -> str:
    if value is None:
        return ""
    plain = re.fullmatch(r"-?\d+(\.\d+)?", value)
    return _VALUES.get(value) or (value if plain else f'"{value}"')


OF_A_MODULE = Vocabulary(_STEPS)
OF_THE_TRAINER = Vocabulary({**_STEPS, "trainer.frozen": "requires_grad"}, flags=True)
