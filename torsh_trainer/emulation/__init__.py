"""What reproduces the habits of other engines, and nothing else; see docs/architecture.md."""

from torsh_trainer.emulation.base import NONE, Emulation, Growth, combine

__all__ = ["NONE", "Emulation", "Growth", "combine"]
