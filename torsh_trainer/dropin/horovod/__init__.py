"""What a script under drop-in sees as ``horovod``: the semantics of its release 0.28."""

from torsh_trainer.dropin.missing import refuse_unknown

__version__ = "0.28.1"
__getattr__ = refuse_unknown(__name__)
