"""``deepspeed.comm.comm``: the same as ``deepspeed.comm``."""

from typing import Any

from torsh_trainer.dropin.deepspeed import comm


def __getattr__(name: str) -> Any:
    return getattr(comm, name)
