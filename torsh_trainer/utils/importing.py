"""Libraries that take seconds to import, imported sooner.

What an import makes is a great many objects, all of which stay: the garbage collector that walks
them again and again takes a fifth of the time that torch needs, and finds nothing.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def collector_at_rest() -> Iterator[None]:
    """No garbage is looked for within the block; afterwards it is as before."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def load_for_good(*names: str) -> None:
    """Imports modules, and takes all that there is then out of the collector's sight for good.

    For a process that is the trainer's own: later collections, amid training, walk only what came
    later. What goes out of use by its count is freed all the same.
    """
    if all(name in sys.modules for name in names):
        return
    with collector_at_rest():
        for name in names:
            importlib.import_module(name)
    gc.freeze()
