"""DeepSpeed as a strategy of ToRSh Trainer; the library itself is loaded when it is asked for.

``DeepSpeed`` are the knobs of ``strategy=deepspeed``, ``DeepSpeedConfig`` is a ds_config.json as
its author wrote it, ``DeepSpeedIntegration`` brings one to a script of one's own.
"""

from torsh_trainer_deepspeed.config import DeepSpeedConfig
from torsh_trainer_deepspeed.integration import DeepSpeedIntegration
from torsh_trainer_deepspeed.strategy import DeepSpeed

__all__ = ["DeepSpeed", "DeepSpeedConfig", "DeepSpeedIntegration"]
