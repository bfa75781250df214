"""The benchmarks of ``make gpu`` in their CPU form: each measures something, and says it."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def measure(repository: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repository))
        yield importlib.import_module("benchmarks.gpu.measure")


@pytest.fixture
def measured(measure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``measured(part)``: what was found, and its rows, as the command line leaves them."""

    def run(part: str) -> tuple[dict[str, Any], list[list[str]]]:
        file = tmp_path / f"{part}.json"
        monkeypatch.setattr(sys, "argv", ["measure", part, "--device", "cpu", str(file)])
        measure.main()
        content = json.loads(file.read_text())
        assert all(len(row) == 4 for row in content["rows"])
        return content["found"], content["rows"]

    return run


@pytest.mark.parametrize("part", ["throughput", "lightning", "accelerate"])
def test_a_loop_is_measured_beside_a_bare_one(part: str, measured: Any, measure: Any) -> None:
    found, ((what, speed, beside, _),) = measured(part)
    low, value, high = (found["ratio"][name] for name in ("low", "value", "high"))
    assert 0 < low <= value <= high
    assert found["blocks"] >= measure.throughput.LEAST
    # 4 sequences of 16 tokens a step.
    assert found["tokens_per_s"] == pytest.approx(64e3 / found["step_ms"])
    assert found["mfu"] is None, "a CPU has no peak"
    assert "tokens/s" in speed
    assert "not compiled" in what
    assert "of a bare loop's step" in beside


def test_a_step_of_the_engine_asks_torch_for_about_as_many_operators(measured: Any) -> None:
    found, rows = measured("cost")
    assert found["operators"]["bare"] > 100
    assert found["operators_ratio"] < 1.05
    assert len(rows) == 2


def test_fsdp_is_measured_beside_fsdp2(measured: Any) -> None:
    found, ((what, _, _, _),) = measured("sharded")
    assert found["ratio"]["low"] > 0
    assert "1 rank(s)" in what


def test_saves_and_loads_are_measured_by_way(measured: Any) -> None:
    found, rows = measured("saving")
    assert set(found["saves"]) == {"torch.save", "sync", "async"}
    assert set(found["loads"]) == {"torch.save", "sync"}
    assert set(found["ratios"]) == {"sync", "async"}
    assert len(rows) == 5


def test_the_share_of_the_time_with_nothing_to_do(measured: Any, measure: Any) -> None:
    found, _ = measured("idle")
    assert 0 <= found["idle"] < 1
    assert found["intervals"] > 100
    share = measure.idle.idle_share
    assert share([(0, 4), (2, 6), (8, 10)]) == pytest.approx(0.2)  # one overlaps, one comes late
    assert share([(0, 10), (2, 3)]) == 0
    with pytest.raises(ValueError, match="saw nothing"):
        share([])


def test_the_device_and_the_versions_are_told(measured: Any) -> None:
    found, ((_, device, _, versions),) = measured("facts")
    assert device == "a CPU"
    assert f"torch {found['versions']['torch']}" in versions


def test_a_mfu_is_of_the_peak_of_the_device(measure: Any) -> None:
    found = {
        "contender": "a loop",
        "model": "a model",
        "compiled": True,
        "ratio": {"value": 1.004, "low": 1.0, "high": 1.009},
        "tokens_per_s": 400_000.0,
        "tflops": 350.0,
        "mfu": 0.3537,
        "step_ms": 40.0,
        "blocks": 20,
        "steps_a_block": 10,
    }
    ((_, speed, beside, _),) = measure.rows_of_throughput(found)
    assert beside == "1.004 (1.000 to 1.009) of a bare loop's step"
    assert speed == "400,000 tokens/s, 350 TFLOP/s, MFU 35.4%"
