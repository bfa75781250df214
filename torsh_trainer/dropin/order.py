"""What is to be run, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Order:
    """A script, its arguments, and how many processes run it; ``remarks`` are told before.

    ``passes_local_rank`` gives it ``--local_rank=N``, as DeepSpeed's launcher does; None: where a
    script that imports DeepSpeed has such an argument.
    """

    script: Path
    arguments: tuple[str, ...] = ()
    processes: int | None = None
    backend: str = "auto"
    log_dir: Path | None = None
    network_interface: str | None = None
    startup_timeout_s: float = 300.0
    stall_warning_s: float = 60.0
    stall_shutdown_s: float = 0.0
    passes_local_rank: bool | None = None
    remarks: tuple[str, ...] = ()

    def change(self, **changes: Any) -> Order:
        """The same with other values."""
        return replace(self, **changes)
