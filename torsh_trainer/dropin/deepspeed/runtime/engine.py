"""``deepspeed.runtime.engine``."""

from torsh_trainer.dropin.missing import refuse_unknown
from torsh_trainer.dropin.zero.engine import DeepSpeedEngine as DeepSpeedEngine

__getattr__ = refuse_unknown(__name__)
