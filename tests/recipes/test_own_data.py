"""The ready tasks on a user's own data, with the commands of docs/tasks.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_diabetes, load_iris

pytestmark = pytest.mark.usefixtures("warm_interpreters")

Door = Callable[..., "CompletedProcess[str]"]


def result_of(done: CompletedProcess[str], folder: Path) -> dict[str, Any]:
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("runs/**/result.json")
    return json.loads(path.read_text())


def predictions(folder: Path) -> Any:
    (path,) = folder.glob("runs/**/predictions.pt")
    return torch.load(path, weights_only=True)


def write_table(path: Path, header: list[str], rows: list[list[Any]]) -> None:
    path.write_text("\n".join(",".join(map(str, row)) for row in [header, *rows]) + "\n")


def test_a_table_of_flowers_is_classified_and_predicted_by_name(
    warm_door: Door, tmp_path: Path
) -> None:
    iris = load_iris()
    names = [str(iris.target_names[label]) for label in iris.target]
    rows = [[*row, name] for row, name in zip(iris.data.tolist(), names, strict=True)]
    write_table(tmp_path / "flowers.csv", ["a", "b", "c", "d", "species"], rows)
    write_table(tmp_path / "new.csv", ["d", "c", "b", "a"], [row[3::-1] for row in rows[::10]])
    done = warm_door(
        [
            "task=classification", "model=mlp", "data=csv",
            "data.path=flowers.csv", "data.target=species", "data.predict_path=new.csv",
            "data.weighted=true", "model.in_features=4", "model.out_features=3",
            "data.batch_size=32", "trainer.max_epochs=30", "trainer.stages=[fit,test,predict]",
        ]
    )  # fmt: skip
    assert result_of(done, tmp_path)["metrics"]["test_accuracy"] >= 0.8
    right = [a == b for a, b in zip(predictions(tmp_path), names[::10], strict=True)]
    assert sum(right) >= 12  # of 15


def test_numbers_of_a_table_are_predicted_better_than_by_their_mean(
    warm_door: Door, tmp_path: Path
) -> None:
    x, y = load_diabetes(return_X_y=True)
    rows = [[*row, target / 100] for row, target in zip(x.tolist(), y.tolist(), strict=True)]
    write_table(tmp_path / "patients.csv", [*"abcdefghij", "progress"], rows)
    done = warm_door(
        [
            "task=regression", "model=mlp", "data=csv", "data.kind=regression",
            "data.path=patients.csv", "data.target=progress", "model.in_features=10",
            "model.out_features=1", "data.batch_size=32", "trainer.max_epochs=20",
            "trainer.stages=[fit,test]",
        ]
    )  # fmt: skip
    metrics = result_of(done, tmp_path)["metrics"]
    assert metrics["test_mse"] < 0.8 * (y / 100).var()
    assert metrics["test_loss"] == metrics["test_mse"]


def test_a_folder_of_images_trains_with_loader_processes(run_door: Door, tmp_path: Path) -> None:
    for name, colour in (("leaf", (40, 200, 40)), ("rose", (200, 40, 40))):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(30):
            noise = Image.effect_noise((30, 24), 60).convert("RGB")
            image = Image.blend(noise, Image.new("RGB", noise.size, colour), 0.5)
            image.save(tmp_path / "photos" / name / f"{number}.jpg")
    done = run_door(
        [
            "task=classification", "model=small_cnn", "data=image_folder", "data.folder=photos",
            "data.image_size=16", "model.in_channels=3", "model.image_size=16",
            "model.num_classes=2", "model.channels=[8,8]", "data.batch_size=16",
            "data.num_workers=2", "trainer.max_epochs=5", "trainer.stages=[fit,test]",
        ]
    )  # fmt: skip
    assert result_of(done, tmp_path)["metrics"]["test_accuracy"] == 1


@pytest.fixture
def book(tmp_path: Path) -> Path:
    folder = tmp_path / "books" / "one"
    folder.mkdir(parents=True)
    lines = [f"{'na ' * (number % 7)}line {number}" for number in range(200)]
    (folder / "a.txt").write_text("\n".join(lines))
    return tmp_path


TEXT = [
    "task=language_model",
    "model=gpt_tiny",
    "data=text_files",
    "model.layers=1",
    "model.width=32",
]


def test_lines_of_different_lengths_train_alike_on_one_and_two_processes(
    warm_door: Door, book: Path
) -> None:
    losses = []
    for processes in (1, 2):
        folder = book / str(processes)
        folder.mkdir()
        done = warm_door(
            [
                *TEXT, "data.paths='../books/**/*.txt'", "data.sample=line", "data.batch_size=16",
                "trainer.max_steps=12", "strategy=ddp", f"launcher.num_processes={processes}",
            ],
            folder,
            processes=processes,
        )  # fmt: skip
        losses.append(result_of(done, folder)["train_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_context_longer_than_the_models_is_refused_before_the_first_step(
    warm_door: Door, book: Path
) -> None:
    done = warm_door(
        [*TEXT, "data.paths='books/**/*.txt'", "data.context=200", "trainer.max_steps=1"]
    )
    assert done.returncode == 2, done.stderr
    assert "set model.context=200" in done.stderr
