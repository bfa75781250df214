"""Every recipe, run through the door as a user runs it, for a short time."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.usefixtures("warm_interpreters")

Door = Callable[..., "CompletedProcess[str]"]


def result_of(done: CompletedProcess[str], folder: Path) -> dict[str, Any]:
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("runs/**/result.json")
    return json.loads(path.read_text())


def reports_of(folder: Path, split: str) -> list[dict[str, Any]]:
    (path,) = folder.glob("runs/**/metrics.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if row["split"] == split]


@pytest.mark.exhaustive
def test_digits_on_two_processes_are_read_with_an_accuracy_of_097(
    run_door: Door, tmp_path: Path
) -> None:
    done = run_door(["+recipe=digits", "strategy=ddp", "launcher.num_processes=2"])
    result = result_of(done, tmp_path)
    assert result["world_size"] == 2
    assert result["metrics"]["test_accuracy"] >= 0.97
    assert 0.9 <= result["metrics"]["accuracy"] <= 1


def test_the_language_model_reports_perplexity_tokens_and_utilisation(
    warm_door: Door, tmp_path: Path
) -> None:
    library = tmp_path / "library"
    library.mkdir()
    for number in range(40):
        (library / f"m{number}.py").write_text(
            f"def function_{number}():\n    return {number}\n" * 20
        )
    done = warm_door(
        [
            "+recipe=stdlib_lm",
            f"data.folder={library}",
            "trainer.max_steps=20",
            "trainer.log_every=10",
            "data.batch_size=8",
            "model.layers=1",
            "trainer.peak_tflops=100",
        ]
    )
    metrics = result_of(done, tmp_path)["metrics"]
    assert metrics["test_loss"] < math.log(256)
    assert metrics["test_perplexity"] == pytest.approx(math.exp(metrics["test_loss"]))
    assert metrics["test_bits_per_byte"] == pytest.approx(metrics["test_loss"] / math.log(2))
    row = reports_of(tmp_path, "train")[-1]
    assert row["tokens_per_s"] == pytest.approx(row["samples_per_s"] * 128)
    assert row["tflops_per_device"] > 0
    assert row["mfu"] == pytest.approx(row["tflops_per_device"] / 100)


def test_a_model_of_transformers_learns_bytes(warm_door: Door, tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    for number in range(40):
        (library / f"m{number}.py").write_text(f"def f_{number}():\n    return {number}\n" * 40)
    done = warm_door(
        [
            "+recipe=hf_lm",
            f"data.folder={library}",
            "trainer.max_steps=20",
            "data.batch_size=8",
            "model.overrides.num_hidden_layers=1",
        ]
    )
    metrics = result_of(done, tmp_path)["metrics"]
    assert metrics["test_loss"] < math.log(256)
    assert metrics["test_bits_per_byte"] == pytest.approx(metrics["test_loss"] / math.log(2))


def write_clothes(folder: Path) -> None:
    """Images whose bright rows say their class, in files like those of Fashion-MNIST."""
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 2000), ("t10k", 200)):
        labels = torch.arange(count) % 10
        images = torch.randint(60, (count, 28, 28), generator=generator)
        images[torch.arange(count), labels * 2 + 3] += 150
        _write_idx(folder / f"{part}-images-idx3-ubyte", images)
        _write_idx(folder / f"{part}-labels-idx1-ubyte", labels)


def _write_idx(path: Path, values: Tensor) -> None:
    sizes = struct.pack(f">{values.dim()}I", *values.shape)
    header = struct.pack(">HBB", 0, 8, values.dim()) + sizes
    path.write_bytes(header + values.to(torch.uint8).numpy().tobytes())


def test_fashion_mnist_learns_from_idx_files_in_a_folder(warm_door: Door, tmp_path: Path) -> None:
    write_clothes(tmp_path)
    done = warm_door(["+recipe=fashion_mnist", f"data.folder={tmp_path}", "trainer.max_epochs=3"])
    assert result_of(done, tmp_path)["metrics"]["test_accuracy"] > 0.9


def test_fashion_mnist_without_its_files_names_the_debian_package(
    warm_door: Door, tmp_path: Path
) -> None:
    done = warm_door(["+recipe=fashion_mnist", f"data.folder={tmp_path / 'nowhere'}"])
    assert done.returncode == 2, done.stderr
    assert "apt-get install dataset-fashion-mnist" in done.stderr
    assert "data.folder=" in done.stderr
    assert "Traceback" not in done.stderr
