"""Rates that people ask for, from the samples per second that the loop measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torsh_trainer.callbacks.base import RunInfo


@dataclass(frozen=True)
class Throughput:
    """How one run's samples per second turn into other rates.

    ``unit`` and ``units_per_sample`` give ``<unit>_per_s`` (``tokens_per_s``). With
    ``flops_per_sample`` and ``peak_flops`` (all devices together, per second) known, ``mfu`` is the
    model FLOPs utilisation, between 0 and 1: the floating-point operations that the model needs
    for what it processed in a second, over what the devices could do (PaLM, arXiv 2204.02311,
    appendix B; recomputation is not counted).
    """

    unit: str = "samples"
    units_per_sample: float = 1.0
    flops_per_sample: float | None = None
    peak_flops: float | None = None

    @classmethod
    def of(cls, info: RunInfo) -> Throughput:
        """The rates of the run that ``info`` describes."""
        return cls(info.unit, info.units_per_sample, info.flops_per_sample, info.peak_flops)

    @property
    def name(self) -> str:
        """The metric that people read for speed: ``samples_per_s``, ``tokens_per_s``, ..."""
        return f"{self.unit}_per_s"

    def complete(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """``metrics`` with the rates that follow from ``samples_per_s``; given ones stay."""
        samples_per_s = metrics.get("samples_per_s")
        if samples_per_s is None:
            return dict(metrics)
        rates = {self.name: samples_per_s * self.units_per_sample}
        if self.flops_per_sample is not None and self.peak_flops:
            rates["mfu"] = samples_per_s * self.flops_per_sample / self.peak_flops
        return {**metrics, **{name: rate for name, rate in rates.items() if name not in metrics}}
