"""``deepspeed.zero``: what scripts use around the parameters of stage 3."""

from torsh_trainer.dropin.missing import refuse_unknown
from torsh_trainer.dropin.zero.gathering import GatheredParameters as GatheredParameters
from torsh_trainer.dropin.zero.gathering import Init as Init
from torsh_trainer.dropin.zero.gathering import (
    register_external_parameter as register_external_parameter,
)

__getattr__ = refuse_unknown(__name__)
