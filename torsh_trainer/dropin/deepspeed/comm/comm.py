"""``deepspeed.comm.comm``: the same as ``deepspeed.comm``."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    # Looked up late: the package imports this module.
    return getattr(importlib.import_module("torsh_trainer.dropin.deepspeed.comm"), name)
