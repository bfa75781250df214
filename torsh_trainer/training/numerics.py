"""How numbers are rounded on this device: what ``auto`` comes to, and torch's global switches."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, Literal

import torch

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ResourceError
from torsh_trainer.optim.precision import Precision, Products

log = logging.getLogger(__name__)

_AMPERE = 8  # the compute capability from which CUDA devices have bf16 and TF32
_ON_CPU: dict[str, Products] = {"tf32": "high", "bf16": "medium"}


# -- precision=auto -------------------------------------------------------------------------------


def settle(asked: Precision, comm: Communicator, *, saved: str | None = None) -> Precision:
    """What a run computes in that asks for ``asked``; collective.

    ``saved`` is the name of the precision of the checkpoint that it goes on from: auto goes on in
    it. Otherwise auto is bf16 by autocast on GPUs that all compute in it, else fp32.

    Raises:
        ResourceError: bf16 is asked for, and the GPU of a process has none; on every process.
    """
    device = comm.device
    able = device.type == "cpu" or bool(comm.reduce_values([float(has_bf16(device))], op="min")[0])
    if not asked.is_auto:
        if asked.compute == "bf16" and not able:
            raise ResourceError(
                f"precision={asked.name.replace('-', '_')}: {_lacking(device)}",
                fix="take precision=fp16_mixed, or precision=fp32",
            )
        return asked
    here = "fp32" if device.type == "cpu" or not able else "bf16-mixed"
    wanted = saved or here
    if wanted.startswith("bf16") and not able:
        log.warning(
            "precision=auto: the checkpoint was trained in %s, and goes on in fp32: %s",
            wanted,
            _lacking(device),
        )
        return asked.with_name("fp32")
    if wanted != here:
        log.warning(
            "precision=auto goes on in %s, as the checkpoint was trained; a new run would be in %s "
            "here, and so is this one with precision=%s",
            wanted,
            here,
            here.replace("-", "_"),
        )
    elif not able:
        log.warning("precision=auto is fp32 here: %s; fp16_mixed is faster", _lacking(device))
    return asked.with_name(wanted)


def has_bf16(device: torch.device) -> bool:
    """Whether ``device`` computes in bf16 itself, and does not emulate it in fp32."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def _lacking(device: torch.device) -> str:
    if has_bf16(device):
        return "the GPU of another process has no bf16"
    return f"{torch.cuda.get_device_name(device)} has no bf16"


# -- torch's global switches ----------------------------------------------------------------------


@contextlib.contextmanager
def set_switches(*, deterministic: bool, matmul: Products | None) -> Iterator[None]:
    """torch's switches as a run wants them within the block, and afterwards as they were before.

    They belong to the whole process: the next job of a sweep, or the program that called the
    library, may want others. ``matmul`` None leaves its switches as they are.
    """
    switches = _Switches()
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    if matmul is not None:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = matmul != "highest"
    try:
        yield
    finally:
        switches.restore()


class _Switches:
    """The switches as they are, to be put back.

    torch has an older and a newer name for some of them, and its getters of the older refuse to
    answer where both were used: it is asked by the newer, and told by both.
    """

    def __init__(self) -> None:
        backends: Any = torch.backends
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        self._only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
        self._benchmark = backends.cudnn.benchmark
        self._matmul = torch.get_float32_matmul_precision()
        operators = (
            backends.cuda.matmul,
            backends.mkldnn.matmul,
            backends.cudnn.conv,
            backends.cudnn.rnn,
        )
        self._operators = [(operator, operator.fp32_precision) for operator in operators]

    def restore(self) -> None:
        torch.use_deterministic_algorithms(self._deterministic, warn_only=self._only_warns)
        torch.backends.cudnn.benchmark = self._benchmark
        torch.set_float32_matmul_precision(self._matmul)
        torch.backends.cudnn.allow_tf32 = self._operators[2][1] == "tf32"
        for operator, before in self._operators:
            if operator.fp32_precision != before:
                operator.fp32_precision = before


def search_kernels(
    asked: bool | Literal["auto"],
    device: torch.device,
    *,
    deterministic: bool,
    fixed_shapes: bool,
) -> None:
    """Lets cuDNN measure which kernel is the fastest for each shape of a convolution, or not.

    ``auto`` does so on a CUDA device where shapes are fixed, since every new shape is measured.
    """
    if asked is not True and asked is not False:
        if device.type != "cuda" or deterministic or not fixed_shapes:
            return
        asked = True
    torch.backends.cudnn.benchmark = asked


# -- what is told ---------------------------------------------------------------------------------


def products(device: torch.device) -> Products:
    """How products of fp32 matrices are rounded on ``device``, as torch is set now."""
    backends: Any = torch.backends
    if device.type == "cuda":
        rounds = backends.cuda.matmul.fp32_precision == "tf32" and _has_tf32(device)
        return "high" if rounds else "highest"
    return _ON_CPU.get(backends.mkldnn.matmul.fp32_precision, "highest")


def facts(precision: Precision, device: torch.device) -> dict[str, Any]:
    """What decides how numbers are rounded, for provenance.json."""
    return {
        "precision": precision.name,
        "matmul": products(device),
        "convolutions": "high" if _rounds_convolutions(device) else "highest",
        "cudnn_benchmark": device.type == "cuda" and torch.backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def in_words(asked: Precision, settled: Precision, device: torch.device) -> str:
    """What the summary has to say beside the name of the precision, or nothing."""
    words = ["chosen by precision=auto"] if asked.is_auto and device.type != "cpu" else []
    rounded = products(device)
    if rounded != "highest" and device.type == "cuda":
        words.append("products of fp32 matrices in TF32")
    elif rounded != "highest":
        words.append(f"precision.matmul={rounded}, as far as the CPU has it")
    if settled.compute == "fp32" and _rounds_convolutions(device):
        words.append("convolutions in TF32")
    if device.type == "cuda" and torch.backends.cudnn.benchmark:
        words.append("cuDNN measures its kernels")
    if settled.compute == "fp32" and rounded == "highest" and _has_tf32(device):
        words.append("precision.matmul=high (TF32) or precision=bf16_mixed is faster here")
    return "; ".join(words)


def _has_tf32(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return bool(torch.version.hip) or torch.cuda.get_device_capability(device)[0] >= _AMPERE


def _rounds_convolutions(device: torch.device) -> bool:
    conv: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    return device.type == "cuda" and _has_tf32(device) and conv.fp32_precision == "tf32"
