"""Which peak a device has, by the name that its driver gives it."""

from __future__ import annotations

import logging

import pytest
import torch

from torsh_trainer.errors import ConfigError
from torsh_trainer.training.trainer import Trainer
from torsh_trainer.utils import peaks
from torsh_trainer.utils.peaks import PEAKS, peak_flops, peak_of, tell_unknown

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("name", "bf16"),
    {
        "NVIDIA H100 80GB HBM3": 989.4,
        "NVIDIA H100 PCIe": 756.5,
        "NVIDIA H100 NVL": 835.5,
        "NVIDIA GH200 480GB": 989.4,
        "NVIDIA H200": 989.4,
        "NVIDIA H200 NVL": 835.5,
        "NVIDIA B200": 2250.0,
        "NVIDIA A100-SXM4-40GB": 312.0,
        "NVIDIA A100-SXM4-80GB": 312.0,
        "A100-SXM4-40GB": 312.0,
        "NVIDIA A100-PCIE-40GB": 312.0,
        "NVIDIA A100 80GB PCIe": 312.0,
        "NVIDIA A30": 165.0,
        "NVIDIA A40": 149.7,
        "NVIDIA A10": 125.0,
        "NVIDIA A10G": 70.0,
        "NVIDIA L4": 121.0,
        "NVIDIA L40": 181.05,
        "NVIDIA L40S": 362.05,
        "NVIDIA GeForce RTX 3090": 71.0,
        "NVIDIA GeForce RTX 4090": 165.2,
        "NVIDIA RTX 6000 Ada Generation": 364.2,
        "NVIDIA RTX A6000": 154.8,
        "NVIDIA GeForce RTX 5070 Ti": 87.9,
        "NVIDIA GeForce RTX 5090": 209.5,
        "AMD Instinct MI250X": 191.5,
        "AMD Instinct MI300X": 1307.4,
        "AMD Instinct MI300X OAM": 1307.4,
    }.items(),
)
def test_a_device_has_the_peak_of_its_whole_name(name, bf16):
    peak = peak_of(name)
    assert peak is not None
    assert peak.bf16 == bf16


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA RTX A1000",  # is no A100
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3080 Ti",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA A100-SXM-64GB",  # one of a computing centre's own, with more cores
        "GRID A100-10C",
        "NVIDIA A40-48Q",
        "NVIDIA H100",  # which of them?
        "AMD Instinct MI250X / MI250",
        "NVIDIA X9000",
        "",
    ],
)
def test_a_part_of_a_device_and_its_namesakes_have_no_peak(name):
    assert peak_of(name) is None


@pytest.mark.parametrize(
    ("name", "fp16", "fp32"),
    [
        ("Tesla V100-SXM2-16GB", 125.0, 15.7),
        ("Tesla V100-PCIE-32GB", 112.0, 14.0),
        ("Tesla V100S-PCIE-32GB", 130.0, 16.4),
        ("Tesla T4", 65.0, 8.1),
    ],
)
def test_devices_without_bf16_have_no_peak_in_it(name, fp16, fp32):
    peak = peak_of(name)
    assert peak is not None
    assert (peak.bf16, peak.fp16, peak.fp32) == (None, fp16, fp32)


def test_names_of_the_table_are_told_apart_and_name_their_source():
    assert len({peaks._words(name) for name in PEAKS}) == len(PEAKS)
    for name, peak in PEAKS.items():
        assert peak_of(name) == peak
        assert "data sheet" in peak.source or "white paper" in peak.source
        assert peak.fp16 >= (peak.tf32 or peak.fp32) >= peak.fp32


@pytest.fixture
def called(monkeypatch):
    """Has torch call the device by a name."""

    def call(name: str) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)

    return call


@pytest.fixture
def tf32():
    """Lets matrix products of fp32 be computed in TF32."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision

    def allow() -> None:
        matmul.fp32_precision = "tf32"

    yield allow
    matmul.fp32_precision = before


def test_the_peak_follows_what_is_computed_in(called, tf32):
    called("NVIDIA A100-SXM4-80GB")
    asked = [peak_flops(CUDA, kind, given_tflops=None) for kind in ("bf16", "fp16", "fp32")]
    assert asked == [312e12, 312e12, 19.5e12]
    tf32()
    assert peak_flops(CUDA, "fp32", given_tflops=None) == 156e12
    called("Tesla V100-SXM2-16GB")
    assert peak_flops(CUDA, "fp32", given_tflops=None) == 15.7e12
    assert peak_flops(CUDA, "bf16", given_tflops=None) is None


def test_what_the_user_gives_goes_first(called):
    called("NVIDIA X9000")
    assert peak_flops(CUDA, "bf16", given_tflops=1.5) == 1.5e12
    assert peak_flops(CUDA, "bf16", given_tflops=None) is None
    assert peak_flops(torch.device("cpu"), "fp32", given_tflops=None) is None


def test_an_unknown_device_is_named_with_the_knob_and_a_cpu_is_not(called, caplog):
    called("NVIDIA X9000")
    with caplog.at_level(logging.INFO):
        tell_unknown(torch.device("cpu"), "fp32")
        assert not caplog.records
        tell_unknown(CUDA, "bf16")
    assert "'NVIDIA X9000' in bf16" in caplog.text
    assert "trainer.peak_tflops=NUMBER" in caplog.text


@pytest.mark.parametrize("tflops", [0, -3.0, float("nan")])
def test_a_peak_that_is_no_positive_number_is_refused(tflops):
    with pytest.raises(ConfigError, match="peak_tflops"):
        Trainer(task=None, peak_tflops=tflops)  # type: ignore[arg-type]
