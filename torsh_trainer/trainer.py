"""The trainer: what a run is made of, and the verbs that start it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torsh_trainer.callbacks.base import Callback
from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.comm.base import CommOptions
from torsh_trainer.comm.compression.base import Compression, NoCompression
from torsh_trainer.data.loading import Loading
from torsh_trainer.launchers.base import Launcher
from torsh_trainer.precision import Precision
from torsh_trainer.schedule.base import Schedule
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.task import Task


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Everything a run is made of.

    The objects come first; the knobs below them are the ``trainer`` group of the configuration
    under the same names. ``strategy`` may be a name (``"fsdp"``). ``run_dir`` None makes
    ``runs/<time>`` under the current directory. ``config`` is the resolved configuration, kept
    for config.yaml.
    """

    task: Task
    strategy: Strategy | str = "auto"
    loading: Loading = Loading()
    schedule: Schedule | None = None
    precision: Precision = Precision()
    compression: Compression = NoCompression()
    comm: CommOptions = CommOptions()
    launcher: Launcher | None = None
    checkpoint: CheckpointOptions = CheckpointOptions()
    callbacks: Sequence[Callback] = ()
    run_dir: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    stages: tuple[Literal["fit", "evaluate", "test", "predict"], ...] = ("fit",)
    max_steps: int | None = None
    max_epochs: int | None = None
    max_time: str | float | None = None  # seconds, or "1h30m"
    accumulate: int | None = None
    max_grad_norm: float | None = None
    max_grad_value: float | None = None
    log_every: int = 50
    eval_every: int | None = None  # steps
    eval_every_epochs: int | None = 1
    eval_batches: int | None = None
    seed: int = 0
    deterministic: bool = False
    on_nonfinite: Literal["stop", "skip", "continue"] = "stop"
    compile: bool = False
    compile_options: Mapping[str, Any] = field(default_factory=dict)
    activation_checkpointing: bool = False
    checkpoint_modules: tuple[str, ...] = ()
    sync_batchnorm: bool = False
    ema_decay: float | None = None
    pretrained: str | None = None
    pretrained_strict: bool = True
    frozen: tuple[str, ...] = ()  # name patterns of parameters that do not train
    fast_dev_run: bool = False
    overfit_batches: int | None = None
    objective: str | None = None  # metric that a sweep optimises
