"""Every public name of ``torsh_trainer.distributed``, for who imports ``*``."""

from torsh_trainer.distributed import *  # noqa: F403 - all of them is the point
from torsh_trainer.distributed import __all__ as __all__
