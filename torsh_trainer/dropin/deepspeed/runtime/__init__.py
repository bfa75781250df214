"""``deepspeed.runtime``."""

from torsh_trainer.dropin.deepspeed.runtime import (
    activation_checkpointing as activation_checkpointing,
)
from torsh_trainer.dropin.deepspeed.runtime import config as config
from torsh_trainer.dropin.deepspeed.runtime import dataloader as dataloader
from torsh_trainer.dropin.deepspeed.runtime import engine as engine
from torsh_trainer.dropin.deepspeed.runtime import zero as zero
from torsh_trainer.dropin.missing import refuse_unknown

__getattr__ = refuse_unknown(__name__)
