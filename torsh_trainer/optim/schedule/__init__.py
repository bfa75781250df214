"""Learning-rate schedules: factors on every group's base learning rate."""

from torsh_trainer.optim.schedule.base import RunningSchedule, Schedule, StatefulSchedule
from torsh_trainer.optim.schedule.deepspeed import (
    DeepSpeedOneCycle,
    DeepSpeedRangeTest,
    DeepSpeedWarmup,
)
from torsh_trainer.optim.schedule.plateau import ReduceOnPlateau
from torsh_trainer.optim.schedule.shapes import (
    Constant,
    Cosine,
    InverseSqrt,
    Linear,
    OneCycle,
    Polynomial,
    Step,
    WarmupStableDecay,
)
from torsh_trainer.optim.schedule.torch_scheduler import TorchSchedule

__all__ = [
    "Constant",
    "Cosine",
    "DeepSpeedOneCycle",
    "DeepSpeedRangeTest",
    "DeepSpeedWarmup",
    "InverseSqrt",
    "Linear",
    "OneCycle",
    "Polynomial",
    "ReduceOnPlateau",
    "RunningSchedule",
    "Schedule",
    "StatefulSchedule",
    "Step",
    "TorchSchedule",
    "WarmupStableDecay",
]
