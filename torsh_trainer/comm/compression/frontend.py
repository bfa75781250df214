"""Compression said in a chain of calls, for those who write Python rather than YAML."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torsh_trainer.comm.compression.base import Compressing, Compression, NoCompression
from torsh_trainer.comm.compression.elementwise import BF16, FP16
from torsh_trainer.comm.compression.powersgd import PowerSGD
from torsh_trainer.comm.compression.quantised import Int4, Int8
from torsh_trainer.comm.compression.signs import OneBit, SignSGD
from torsh_trainer.comm.compression.sparse import RandomK, Threshold, TopK
from torsh_trainer.errors import ConfigError


@dataclass(frozen=True)
class Residual:
    """Keeps what was not sent and adds it to the next gradient."""

    word = "residual"


@dataclass(frozen=True)
class NoMemory:
    """Drops what was not sent."""

    word = "none"


class CompressionAlgorithm:
    """The methods under one name: ``CompressionAlgorithm.TopK(0.1)``."""

    NoCompression = NoCompression  # None is a word of Python
    FP16 = FP16
    BF16 = BF16
    TopK = TopK
    RandomK = RandomK
    Threshold = Threshold
    Int8 = Int8
    Int4 = Int4
    SignSGD = SignSGD
    OneBit = OneBit
    PowerSGD = PowerSGD


class CompressorMemory:
    """The memories under one name: ``CompressorMemory.Residual()``."""

    Residual = Residual
    NoMemory = NoMemory


@dataclass(frozen=True)
class GradientCompressor:
    """``GradientCompressor().algorithm(TopK(0.1)).memory(Residual())``; each call gives a new one.

    ``compression`` is the ``Compression`` that it comes to: give it to a ``Trainer``, or the whole
    to ``attach`` and ``with_compression``.
    """

    compression: Compression = NoCompression()

    def algorithm(self, algorithm: Compression) -> GradientCompressor:
        """With this method and its own knobs."""
        return GradientCompressor(algorithm)

    def memory(self, memory: Residual | NoMemory | type[Residual | NoMemory]) -> GradientCompressor:
        """With this memory.

        Raises:
            ConfigError: there is no algorithm yet.
        """
        return self._with(memory=memory.word)

    def warmup_steps(self, steps: int) -> GradientCompressor:
        """With so many steps that send gradients as they are.

        Raises:
            ConfigError: there is no algorithm yet.
        """
        return self._with(warmup_steps=steps)

    def exclude(self, *patterns: str) -> GradientCompressor:
        """Without the parameters whose names match (fnmatch).

        Raises:
            ConfigError: there is no algorithm yet.
        """
        return self._with(exclude=patterns)

    def _with(self, **knobs: object) -> GradientCompressor:
        if not isinstance(self.compression, Compressing):
            raise ConfigError(
                "a GradientCompressor without an algorithm compresses nothing",
                fix="call algorithm(TopK(0.01)) first",
            )
        changed: Compression = replace(self.compression, **knobs)  # type: ignore[arg-type]
        return GradientCompressor(changed)
