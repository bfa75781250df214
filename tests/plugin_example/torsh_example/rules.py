"""A rule of translation: a key that a fork of DeepSpeed has, and what it is natively."""

from __future__ import annotations

from torsh_trainer.translate.deepspeed.keys import KeyBlock
from torsh_trainer.translate.deepspeed.rules import Outcome, approximate, exact, rule
from torsh_trainer.translate.deepspeed.source import Leaf, Source

BLOCKS = (
    KeyBlock(
        "fork",
        """
        label_smoothing    float>=0  0.0    fork.label-smoothing
        """,
    ),
)
"""The keys, in the lines of ``translate/deepspeed/keys.py``; the last word is their rule."""


@rule("fork.label-smoothing", "The fork smooths the labels of every cross entropy.")
def _smoothing(source: Source, leaf: Leaf) -> Outcome:
    if not leaf.value:
        return exact("off")
    return approximate("no knob here: give the loss of your task label_smoothing")
