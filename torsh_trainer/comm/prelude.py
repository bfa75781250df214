"""Every public name of ``torsh_trainer.comm``: ``from torsh_trainer.comm.prelude import *``."""

from torsh_trainer.comm import *  # noqa: F403 - all of them is the point
from torsh_trainer.comm import __all__ as __all__
