"""Rates that people ask for, from the samples per second that the loop measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torsh_trainer.callbacks.base import RunInfo


@dataclass(frozen=True)
class Throughput:
    """How one run's samples per second turn into other rates.

    ``unit`` and ``units_per_sample`` give ``<unit>_per_s`` (``tokens_per_s``). With
    ``flops_per_sample`` known, ``tflops_per_device`` is how many floating-point operations the
    model needs for what one of ``devices`` processed in a second, in units of 1e12; what activation
    checkpointing computes again is not counted. With ``peak_flops`` (all devices together, per
    second) too, ``mfu`` is the model FLOPs utilisation, between 0 and 1: those operations over what
    the devices could do (PaLM, arXiv 2204.02311, appendix B).
    """

    unit: str = "samples"
    units_per_sample: float = 1.0
    flops_per_sample: float | None = None
    peak_flops: float | None = None
    devices: int = 1

    @classmethod
    def of(cls, info: RunInfo) -> Throughput:
        """The rates of the run that ``info`` describes."""
        flops, peak = info.flops_per_sample, info.peak_flops
        return cls(info.unit, info.units_per_sample, flops, peak, info.world.size)

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
        if self.flops_per_sample is not None:
            flops = samples_per_s * self.flops_per_sample
            rates["tflops_per_device"] = flops / self.devices / 1e12
            if self.peak_flops:
                rates["mfu"] = flops / self.peak_flops
        return {**metrics, **{name: rate for name, rate in rates.items() if name not in metrics}}
