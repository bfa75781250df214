"""``deepspeed.runtime.zero.partition_parameters``: what scripts ask of parameters of stage 3."""

from torsh_trainer.dropin.deepspeed.zero import GatheredParameters as GatheredParameters
from torsh_trainer.dropin.deepspeed.zero import Init as Init
from torsh_trainer.dropin.missing import refuse_unknown
from torsh_trainer.dropin.zero.gathering import ZeroParamStatus as ZeroParamStatus

__getattr__ = refuse_unknown(__name__)
