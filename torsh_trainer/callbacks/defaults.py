"""What a run has without being asked, from Python as on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from torsh_trainer.callbacks.base import Callback
from torsh_trainer.callbacks.console import Console
from torsh_trainer.callbacks.jsonl import Jsonl
from torsh_trainer.callbacks.tensorboard import TensorBoard

DEFAULTS: tuple[type[Callback], ...] = (Console, Jsonl, TensorBoard)
"""Those that are enabled in conf/callbacks and conf/logger."""


def with_defaults(callbacks: Sequence[Callback]) -> list[Callback]:
    """``callbacks`` after the defaults: each once, where its library is installed.

    One of ``callbacks`` takes the place of the default of its class.
    """
    missing = [
        kind
        for kind in DEFAULTS
        if not any(isinstance(callback, kind) for callback in callbacks)
        and (kind.requires is None or find_spec(kind.requires) is not None)
    ]
    return [*(kind() for kind in missing), *callbacks]
