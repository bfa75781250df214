"""What a script under drop-in sees as ``horovod.common``."""

from torsh_trainer.dropin.missing import refuse_unknown

__getattr__ = refuse_unknown(__name__)
