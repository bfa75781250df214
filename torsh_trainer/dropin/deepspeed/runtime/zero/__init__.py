"""``deepspeed.runtime.zero``: the same as ``deepspeed.zero``."""

from torsh_trainer.dropin.deepspeed.runtime.zero import (
    partition_parameters as partition_parameters,
)
from torsh_trainer.dropin.deepspeed.zero import GatheredParameters as GatheredParameters
from torsh_trainer.dropin.deepspeed.zero import Init as Init
from torsh_trainer.dropin.deepspeed.zero import (
    register_external_parameter as register_external_parameter,
)
from torsh_trainer.dropin.missing import refuse_unknown

__getattr__ = refuse_unknown(__name__)
