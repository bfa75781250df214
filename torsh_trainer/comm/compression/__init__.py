"""Gradient compression: knobs, and what runs them; see docs/compression.md."""

from torsh_trainer.comm.compression.base import Compressing, Compression, NoCompression
from torsh_trainer.comm.compression.elementwise import BF16, FP16
from torsh_trainer.comm.compression.frontend import (
    CompressionAlgorithm,
    CompressorMemory,
    GradientCompressor,
    NoMemory,
    Residual,
)
from torsh_trainer.comm.compression.hook import attach, with_compression
from torsh_trainer.comm.compression.powersgd import PowerSGD
from torsh_trainer.comm.compression.quantised import Int4, Int8
from torsh_trainer.comm.compression.reducer import GradientReducer, Slot
from torsh_trainer.comm.compression.signs import OneBit, SignSGD
from torsh_trainer.comm.compression.sparse import RandomK, Threshold, TopK

__all__ = [
    "BF16",
    "FP16",
    "Compressing",
    "Compression",
    "CompressionAlgorithm",
    "CompressorMemory",
    "GradientCompressor",
    "GradientReducer",
    "Int4",
    "Int8",
    "NoCompression",
    "NoMemory",
    "OneBit",
    "PowerSGD",
    "RandomK",
    "Residual",
    "SignSGD",
    "Slot",
    "Threshold",
    "TopK",
    "attach",
    "with_compression",
]
