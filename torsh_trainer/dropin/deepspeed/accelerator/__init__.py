"""``deepspeed.accelerator``."""

from torsh_trainer.dropin.missing import refuse_unknown
from torsh_trainer.dropin.zero.accelerator import get_accelerator as get_accelerator

__getattr__ = refuse_unknown(__name__)
