"""How the processes of one job exchange values."""

from torsh_trainer.comm.start import create

__all__ = ["create"]
