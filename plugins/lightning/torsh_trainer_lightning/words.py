"""What an error says, in the words of who reads it.

Errors are written in the words of our configuration and of a task. A module has other methods, in
our loop too; a script with a Trainer or Fabric has constructors and flags instead of YAML.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from torsh_trainer.errors import TorshError

_VALUE = r"-?[\w\[\]]+(?:\.\w+)*"
_CHOICE = re.compile(rf"(?:set )?strategy=(\w+)((?:,? (?:and |with )?strategy\.\w+={_VALUE})*)")
_KNOB = re.compile(rf"(set )?strategy\.(\w+)(?:=({_VALUE}))?")
_METHODS = {
    "task.loss": "training_step",
    "task.evaluate": "validation_step",
    "task.predict": "predict_step",
    "task.forward": "forward",
    "task.build_optimizers": "configure_optimizers",
    "task.build_model": "the module's constructor",
}
_METHOD = re.compile(r"(?<![\w.])(" + "|".join(map(re.escape, _METHODS)) + r")(?!\w)")
_FLAGS = (
    (re.compile(r" \(trainer\.frozen\)"), ""),
    (re.compile(r"(?:set )?trainer\.max_grad_norm instead"), "give Trainer(gradient_clip_val=...)"),
    (re.compile(r"trainer\.max_grad_norm"), "gradient_clip_val"),
    (
        re.compile(r"trainer\.max_grad_value=([\w.]+)"),
        r'gradient_clip_val=\1 with gradient_clip_algorithm="value"',
    ),
    (re.compile(r"trainer\.max_grad_value"), 'gradient_clip_algorithm="value"'),
    (re.compile(r"trainer\.accumulate"), "accumulate_grad_batches"),
    (re.compile(r"precision\.(\w+)=(\w+)"), r'precision=Precision(\1="\2")'),
    (re.compile(r"launcher\.num_processes"), "devices"),
    (re.compile(r", or check the module's constructor"), ""),
)
_VALUES = {"true": "True", "false": "False", "null": "None"}


def reword(error: BaseException, *, kind: str = "", name: str = "") -> None:
    """Has an error of ours speak of a module's methods.

    With ``kind`` it speaks of ``kind("NAME", knob=value)``, too, where it speaks of our YAML.
    ``kind`` is the class that the script has made, ``name`` that of its strategy.
    """
    if not isinstance(error, TorshError):
        return
    name = str(error.facts.get("strategy", name))
    error.sentence = reword_text(error.sentence, kind=kind, name=name)
    error.fix = reword_text(error.fix, kind=kind, name=name)
    error.args = (error.sentence,)


@contextlib.contextmanager
def reword_errors(kind: str, name: str) -> Iterator[None]:
    """Within, errors are reworded."""
    try:
        yield
    except TorshError as error:
        reword(error, kind=kind, name=name)
        raise


def reword_text(text: str, *, kind: str = "", name: str = "") -> str:
    """``text`` in those words."""
    text = _METHOD.sub(lambda found: _METHODS[found[1]], text)
    if not kind:
        return text
    for pattern, flag in _FLAGS:
        text = pattern.sub(flag, text)

    def name_chosen(found: re.Match[str]) -> str:
        knobs = [_knob(knob, value) for _, knob, value in _KNOB.findall(found[2])]
        return f"{kind}({', '.join([_quote(found[1]), *knobs])})"

    def name_given(found: re.Match[str]) -> str:
        if found[3] is None:
            return f"{kind}'s {found[2]}"
        made = f"{kind}({_quote(name)}, {_knob(found[2], found[3])})"
        return f"give {made}" if found[1] else made

    return _KNOB.sub(name_given, _CHOICE.sub(name_chosen, text))


def _knob(knob: str, value: str) -> str:
    value = _VALUES.get(value, value)
    plain = value in _VALUES.values() or not value[:1].isalpha()
    return f"{knob}={value if plain else _quote(value)}"


def _quote(word: str) -> str:
    return f'"{word}"'
