"""What a run is made of: objects and knobs, checked, and nothing that starts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torsh_trainer.callbacks.base import Callback
from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.comm.base import CommOptions
from torsh_trainer.comm.compression.base import Compression, NoCompression
from torsh_trainer.data.loading import Loading
from torsh_trainer.emulation.knobs import StartKnobs
from torsh_trainer.errors import ConfigError, Unsupported, nearest
from torsh_trainer.launchers.base import Launcher
from torsh_trainer.launchers.inline import Inline
from torsh_trainer.mesh import MeshOptions
from torsh_trainer.optim.precision import AUTO, Precision
from torsh_trainer.optim.schedule.base import Schedule, StatefulSchedule
from torsh_trainer.randomness import Randomness, check_randomness
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.tasks.base import Task
from torsh_trainer.training.attention import Attention, kernels_of
from torsh_trainer.training.uncalled import refuse_uncalled
from torsh_trainer.utils import registry
from torsh_trainer.utils.duration import seconds

_INLINE = Inline()
_MESH = MeshOptions()
STAGES = ("fit", "evaluate", "test", "predict")
"""The stages that every task has; others are plugins of the kind ``registry.STAGES``."""


@dataclass(frozen=True, kw_only=True)
class RunSpec(StartKnobs):
    """Everything a run is made of, as the processes of a run get it.

    The fields are those of ``Trainer``, where they are described.

    Raises:
        ConfigError: a knob is out of range, or two contradict each other.
    """

    task: Task
    strategy: Strategy | str = "auto"
    loading: Loading = Loading()
    schedule: Schedule | StatefulSchedule | None = None
    precision: Precision = AUTO
    compression: Compression = NoCompression()
    comm: CommOptions = CommOptions()
    mesh: MeshOptions = _MESH
    launcher: Launcher | str = _INLINE
    checkpoint: CheckpointOptions = CheckpointOptions()
    callbacks: Sequence[Callback] = ()
    run_dir: Path | str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    command: Sequence[str] = ()
    log_level: str = "info"

    stages: tuple[str, ...] = ("fit",)
    max_steps: int | None = None
    max_epochs: int | None = None
    max_time: str | float | None = None
    accumulate: int | None = None
    max_grad_norm: float | None = None
    max_grad_value: float | None = None
    log_every: int = 50
    eval_every: int | None = None
    eval_every_epochs: int | None = 1
    eval_batches: int | None = None
    seed: int = 0
    randomness: Randomness = "by_sample"
    deterministic: bool = False
    cudnn_benchmark: bool | Literal["auto"] = "auto"
    attention: Attention = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    peak_tflops: float | None = None
    on_nonfinite: Literal["stop", "skip", "continue"] = "stop"
    compile: bool | Literal["auto"] = "auto"
    compile_options: Mapping[str, Any] = field(default_factory=dict)
    activation_checkpointing: bool | Literal["selective"] = False
    checkpoint_modules: tuple[str, ...] = ()
    sync_batchnorm: bool = False
    ema_decay: float | None = None
    pretrained: str | None = None
    pretrained_strict: bool = True
    frozen: tuple[str, ...] = ()
    fast_dev_run: bool = False
    overfit_batches: int | None = None
    objective: str | None = None
    objective_mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(
                    f"trainer.{name}={value} is below 1", fix="give 1 or more, or null for none"
                )
        if self.ema_decay is not None and not 0.0 < self.ema_decay < 1.0:
            raise ConfigError(
                f"trainer.ema_decay={self.ema_decay} is not between 0 and 1", fix="0.999 is usual"
            )
        if self.peak_tflops is not None and not self.peak_tflops > 0:
            raise ConfigError(
                f"trainer.peak_tflops={self.peak_tflops} is not a positive number",
                fix="give the dense TFLOP/s of one device, or null for the table's",
            )
        if self.activation_checkpointing not in (True, False, "selective"):
            raise ConfigError(
                f"trainer.activation_checkpointing={self.activation_checkpointing} is unknown",
                fix="choose false, true or selective",
            )
        if self.compile not in (True, False, "auto"):
            raise ConfigError(
                f"trainer.compile={self.compile} is unknown", fix="choose auto, true or false"
            )
        check_randomness(self.randomness)
        kernels_of(self.attention)
        if self.cudnn_benchmark is True and self.deterministic:
            raise ConfigError(
                "trainer.cudnn_benchmark=true takes the kernels that were fastest in this run, and "
                "trainer.deterministic=true the same ones in every run",
                fix="leave one of them out",
            )
        refuse_uncalled(self.task, self.callbacks)
        seconds(self.max_time, option="trainer.max_time")
        self._check_stages()

    def _check_stages(self) -> None:
        known = [*STAGES, *registry.STAGES.registrations()]
        for number, stage in enumerate(self.stages):
            if stage not in known:
                raise ConfigError(
                    f"trainer.stages[{number}]={stage} names no work that exists",
                    fix=nearest(str(stage), known),
                )
        if not self.stages:
            raise ConfigError(
                "trainer.stages=[] names no work", fix="choose from " + ", ".join(known)
            )
        own = (*STAGES, *registry.STAGES.builtin)
        others = [stage for stage in self.stages if stage not in own]
        if others and getattr(self.task, "brings_program", False):
            raise Unsupported(
                f"{type(self.task).__name__} trains in a loop of its own, which cannot honour "
                f"trainer.stages=[{others[0]}]",
                fix="leave it out",
            )

    def check_bounded(self) -> None:
        """Makes sure that a training ends.

        Raises:
            ConfigError: nothing says when.
        """
        unbounded = self.max_steps is None and self.max_epochs is None and self.max_time is None
        if "fit" in self.stages and unbounded and not self.fast_dev_run:
            raise ConfigError(
                "nothing says when training ends",
                fix="set trainer.max_steps, trainer.max_epochs or trainer.max_time",
            )

    @property
    def max_time_s(self) -> float | None:
        """``max_time`` in seconds."""
        return seconds(self.max_time, option="trainer.max_time")


def rehearse(spec: RunSpec) -> RunSpec:
    """``fast_dev_run``: one step, one batch of each split, nothing saved."""
    if not spec.fast_dev_run:
        return spec
    quiet = replace(
        spec.checkpoint, every_steps=None, every_epochs=None, at_end=False, resume="never"
    )
    return replace(
        spec,
        max_steps=1,
        max_epochs=None,
        max_time=None,
        eval_every=None,
        eval_every_epochs=1,
        eval_batches=1,
        log_every=1,
        checkpoint=quiet,
    )


_COUNTS = (
    "max_steps",
    "max_epochs",
    "accumulate",
    "log_every",
    "eval_every",
    "eval_every_epochs",
    "eval_batches",
    "overfit_batches",
)
