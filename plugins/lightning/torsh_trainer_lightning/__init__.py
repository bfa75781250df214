"""Lightning in both directions: its modules in our loop, and our engines in its Trainer.

To import this package is to make ``torsh_ddp``, ``torsh_fsdp`` and the others known to Lightning.
"""

from torsh_trainer.errors import ResourceError

try:
    import lightning.pytorch  # noqa: F401 - whether it is there
except ImportError as error:
    raise ResourceError(
        f"torsh-trainer-lightning needs Lightning, which this Python cannot import ({error})",
        fix="pip install 'lightning>=2.6,<2.7'",
    ) from error

from torsh_trainer_lightning.fabric import TorshFabricStrategy
from torsh_trainer_lightning.names import register
from torsh_trainer_lightning.strategy import TorshStrategy

register()

__all__ = ["TorshFabricStrategy", "TorshStrategy"]
