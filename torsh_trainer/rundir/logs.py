"""Where each rank's log messages go."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, nearest
from torsh_trainer.utils.files import disk_error
from torsh_trainer.utils.foreign import escape_controls
from torsh_trainer.utils.masking import mask_text

LEVELS = ("debug", "info", "warning", "error")
_OURS = "torsh_trainer"


def setup_logging(run_dir: Path, world: World, level: str) -> Callable[[], None]:
    """Sends log messages of ``level`` and above to ``RUN_DIR/logs/rank-N.log``.

    Other libraries' messages go there too, but none below info. Rank 0 also writes to standard
    error, unless the application (Hydra, pytest) has given the root logger a handler already.
    Returns a function that puts everything back.

    Raises:
        ConfigError: an unknown level.
        ResourceError: the log file cannot be written.
    """
    threshold = _number(level)
    path = run_dir / "logs" / f"rank-{world.rank}.log"
    root, ours = logging.getLogger(), logging.getLogger(_OURS)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Appended to: a launcher may send the rank's output to the same file.
        handlers: list[logging.Handler] = [logging.FileHandler(path, encoding="utf-8")]
    except OSError as error:
        raise disk_error(error, "write", path) from error
    if world.is_rank_zero and not root.handlers:
        handlers.append(logging.StreamHandler(sys.stderr))
    before = (root.level, ours.level)
    for handler in handlers:
        handler.setLevel(threshold)
        handler.setFormatter(_formatter(world))
        root.addHandler(handler)
    root.setLevel(max(threshold, logging.INFO))
    ours.setLevel(threshold)

    def close() -> None:
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(before[0])
        ours.setLevel(before[1])

    return close


def _number(level: str) -> int:
    if level.lower() not in LEVELS:
        raise ConfigError(f"unknown log_level={level}", fix=nearest(level.lower(), LEVELS))
    return int(getattr(logging, level.upper()))


class _Masked(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(mask_text(super().format(record)))


def _formatter(world: World) -> logging.Formatter:
    rank = f" [rank {world.rank}]" if world.is_distributed else ""
    return _Masked(f"%(asctime)s{rank} %(levelname)s %(name)s: %(message)s")
