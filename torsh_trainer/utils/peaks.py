"""What a device could compute at most: the denominator of the model FLOPs utilisation.

All figures are dense peaks of matrix products with sums in fp32, as the vendors publish them; where
a sheet has only the figure with sparsity, it is half of that.
"""

from __future__ import annotations

import logging
import re
from typing import NamedTuple

import torch

log = logging.getLogger(__name__)


class Peak(NamedTuple):
    """TFLOP/s of one device by what it computes in; None where it has no such matrix product."""

    bf16: float | None
    fp16: float
    tf32: float | None
    fp32: float
    source: str


_HOPPER = "NVIDIA H100 Tensor Core GPU data sheet (halved: its figures are with sparsity)"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet (halved: its figures are with sparsity)"
_AMPERE = "NVIDIA A100 Tensor Core GPU data sheet"
_VOLTA = "NVIDIA V100 Tensor Core GPU data sheet"
_GA102 = "NVIDIA Ampere GA102 GPU architecture white paper, appendix A"
_ADA = "NVIDIA Ada GPU architecture white paper, appendix A"
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture white paper, appendix A"

_H100_SXM = Peak(989.4, 989.4, 494.7, 67.0, _HOPPER)
_HOPPER_NVL = (835.5, 835.5, 417.5, 60.0)
_A100 = Peak(312.0, 312.0, 156.0, 19.5, _AMPERE)
_V100_SXM = Peak(None, 125.0, None, 15.7, _VOLTA)
_MI250X = "AMD Instinct MI250X data sheet, halved: torch sees its two dies as two devices"

PEAKS: dict[str, Peak] = {
    "H100 HBM3": _H100_SXM,  # what the SXM board calls itself
    "H100 SXM5": _H100_SXM,
    "H100 PCIe": Peak(756.5, 756.5, 378.0, 51.2, _HOPPER),
    "H100 NVL": Peak(*_HOPPER_NVL, _HOPPER),
    "GH200": Peak(989.4, 989.4, 494.7, 67.0, "NVIDIA GH200 Grace Hopper Superchip data sheet"),
    "H200": Peak(989.4, 989.4, 494.7, 67.0, _H200),
    "H200 NVL": Peak(*_HOPPER_NVL, _H200),
    "B200": Peak(2250.0, 2250.0, 1125.0, 75.0, "NVIDIA HGX B200 data sheet, an eighth of it"),
    "A100 SXM4": _A100,
    "A100 PCIe": _A100,
    "A30": Peak(165.0, 165.0, 82.0, 10.3, "NVIDIA A30 Tensor Core GPU data sheet"),
    "A40": Peak(149.7, 149.7, 74.8, 37.4, "NVIDIA A40 data sheet"),
    "A10": Peak(125.0, 125.0, 62.5, 31.2, "NVIDIA A10 Tensor Core GPU data sheet"),
    "A10G": Peak(70.0, 70.0, 35.0, 31.52, "NVIDIA A10G data sheet"),
    "L4": Peak(121.0, 121.0, 60.0, 30.3, "NVIDIA L4 Tensor Core GPU data sheet (halved)"),
    "L40": Peak(181.05, 181.05, 90.5, 90.5, "NVIDIA L40 data sheet"),
    "L40S": Peak(362.05, 362.05, 183.0, 91.6, "NVIDIA L40S data sheet"),
    "V100 SXM2": _V100_SXM,
    "V100 SXM3": _V100_SXM,
    "V100 PCIe": Peak(None, 112.0, None, 14.0, _VOLTA),
    "V100S PCIe": Peak(None, 130.0, None, 16.4, _VOLTA),
    "T4": Peak(None, 65.0, None, 8.1, "NVIDIA T4 data sheet"),
    "RTX A6000": Peak(154.8, 154.8, 77.4, 38.7, _GA102),
    "RTX 3070": Peak(40.6, 40.6, 20.3, 20.3, _GA102),
    "RTX 3090": Peak(71.0, 71.0, 35.6, 35.6, _GA102),
    "RTX 4080": Peak(97.5, 97.5, 48.7, 48.7, _ADA),
    "RTX 4090": Peak(165.2, 165.2, 82.6, 82.6, _ADA),
    "RTX 6000 Ada": Peak(364.2, 364.2, 182.1, 91.1, "NVIDIA RTX 6000 Ada data sheet (a quarter of "
                         "its fp8 figure with sparsity)"),
    "RTX 5070": Peak(61.7, 61.7, 30.9, 30.9, _BLACKWELL),
    "RTX 5070 Ti": Peak(87.9, 87.9, 43.9, 43.9, _BLACKWELL),
    "RTX 5080": Peak(112.6, 112.6, 56.3, 56.3, _BLACKWELL),
    "RTX 5090": Peak(209.5, 209.5, 104.8, 104.8, _BLACKWELL),
    "MI250X": Peak(191.5, 191.5, None, 47.9, _MI250X),
    "MI300X": Peak(1307.4, 1307.4, 653.7, 163.4, "AMD Instinct MI300X data sheet"),
}  # fmt: skip
"""By what is left of a device's name without its vendor, its product line and its memory's size."""

_ANY = re.compile(r"nvidia|tesla|geforce|amd|instinct|oam|generation|\d+gb")
"""Words of a name that change no peak."""


def peak_of(name: str) -> Peak | None:
    """The peak of the device that torch calls ``name``; None where it is not in the table.

    Every word counts: an L40 is no L4, an H100 NVL no H100 of a board, and a part of a device (a
    MIG slice, a virtual GPU) or its laptop's namesake has a peak that nobody publishes.
    """
    return _BY_WORDS.get(_words(name))


def _words(name: str) -> frozenset[str]:
    words = re.findall(r"[a-z0-9]+", name.lower())
    return frozenset(word for word in words if not _ANY.fullmatch(word))


_BY_WORDS = {_words(name): peak for name, peak in PEAKS.items()}


def peak_flops(device: torch.device, compute: str, *, given_tflops: float | None) -> float | None:
    """FLOP/s that ``device`` could reach at most in ``compute`` (bf16, fp16 or fp32).

    ``given_tflops`` is what the user says (``trainer.peak_tflops``), and goes before the table. In
    fp32 it is TF32's peak where torch may compute matrix products in it. None for a CPU, and for a
    device that is not in the table.
    """
    if given_tflops is not None:
        return given_tflops * 1e12
    peak = peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if peak is None:
        return None
    tf32 = compute == "fp32" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    tflops: float | None = getattr(peak, "tf32" if tf32 and peak.tf32 else compute)
    return None if tflops is None else tflops * 1e12


def tell_unknown(device: torch.device, compute: str) -> None:
    """Says that there is no MFU, and how to have one."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        log.info(
            "no MFU is shown: the peak of the device %r in %s is not known here; give it as "
            "trainer.peak_tflops=NUMBER (dense TFLOP/s of one device)",
            *(name, compute),
        )
