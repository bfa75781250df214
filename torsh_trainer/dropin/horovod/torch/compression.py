"""What gradients are cast to on their way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torsh_trainer.dropin.missing import refuse_unknown

__getattr__ = refuse_unknown(__name__)


class Compressor:
    """The contract: what is sent, and how it becomes again what it was."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """What is sent, and what ``decompress`` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The inverse."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Sends floating-point tensors in 16 bits."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        halved = tensor.to(torch.float16) if tensor.is_floating_point() else tensor
        return halved, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class Compression:
    """Those that there are."""

    none = NoneCompressor
    fp16 = FP16Compressor
