"""The traceback of a failure, for who asks for it with ``debug=true``."""

from __future__ import annotations

import sys
import traceback

from torsh_trainer.errors import TorshError

_SHOWN = "_torsh_traceback_shown"


def show(error: TorshError) -> None:
    """Prints the traceback of ``error``, and that of the worker in which it arose; once."""
    if getattr(error, _SHOWN, False):
        return
    setattr(error, _SHOWN, True)
    traceback.print_exception(error)
    inside = error.facts.get("traceback")
    if inside:
        print(inside, file=sys.stderr)
