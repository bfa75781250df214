"""``deepspeed.runtime.config``: the names of optimizers, by which scripts ask for them."""

from torsh_trainer.dropin.missing import refuse_unknown

ADAGRAD_OPTIMIZER = "adagrad"
ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
LAMB_OPTIMIZER = "lamb"
LION_OPTIMIZER = "lion"
MUADAM_OPTIMIZER = "muadam"
MUADAMW_OPTIMIZER = "muadamw"
MUON_OPTIMIZER = "muon"
MUSGD_OPTIMIZER = "musgd"

__getattr__ = refuse_unknown(__name__)
