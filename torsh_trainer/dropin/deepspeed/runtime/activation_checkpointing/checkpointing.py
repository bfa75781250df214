"""The same as ``deepspeed.checkpointing``."""

from torsh_trainer.dropin.deepspeed.checkpointing import checkpoint as checkpoint
from torsh_trainer.dropin.deepspeed.checkpointing import configure as configure
from torsh_trainer.dropin.deepspeed.checkpointing import is_configured as is_configured
from torsh_trainer.dropin.deepspeed.checkpointing import reset as reset
from torsh_trainer.dropin.missing import refuse_unknown

__getattr__ = refuse_unknown(__name__)
