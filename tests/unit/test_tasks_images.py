"""Digits, Fashion-MNIST and image folders."""

from __future__ import annotations

import gzip
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import default_collate

from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.tasks.digits import Digits
from torsh_trainer.tasks.fashion_mnist import FashionMnist, read_idx
from torsh_trainer.tasks.image_folder import ImageFolder
from torsh_trainer.tasks.sources import TensorData, balance_classes, collate, split


def fetched(data: Any, indices: list[int]) -> Any:
    """A batch as a loader gets it: whole where the dataset can, else sample by sample."""
    whole = getattr(data, "__getitems__", None)
    return collate(whole(indices) if whole else [data[i] for i in indices])


def rows_of(data: TensorData) -> set[bytes]:
    return {image.numpy().tobytes() for image in data.tensors[0]}


def test_a_batch_fetched_whole_equals_its_samples_stacked() -> None:
    data = TensorData(torch.rand(9, 2), torch.arange(9), transform=lambda x: x * 2)
    indices = [3, 0, 8, 3]
    stacked = default_collate([data[i] for i in indices])
    for whole, expected in zip(fetched(data, indices), stacked, strict=True):
        assert torch.equal(whole, expected)
    for whole, expected in zip(data.__getitems__(torch.tensor(indices)), stacked, strict=True):
        assert torch.equal(whole, expected)


def test_tensors_of_different_lengths_are_no_samples() -> None:
    with pytest.raises(ConfigError, match="2 and 3 rows"):
        TensorData(torch.zeros(2), torch.zeros(3))


def test_digits_are_those_of_scikit_learn_each_in_one_part() -> None:
    source = Digits()
    parts = [source.train, source.eval, source.test]
    images = torch.from_numpy(load_digits().images).float() / 16
    assert sum(map(len, parts)) == len(images)
    whole = TensorData(torch.cat([part.tensors[0] for part in parts]))
    assert rows_of(whole) == rows_of(TensorData(images))
    x, y = fetched(source.train, [5, 2])
    assert (x.shape, x.dtype, y.dtype) == ((2, 1, 8, 8), torch.float32, torch.int64)
    assert 0 <= x.min() <= x.max() <= 1


def test_the_digits_are_asked_of_the_library_where_their_file_is_not_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = Digits().train.tensors
    nowhere = SimpleNamespace(submodule_search_locations=["/nowhere"])
    monkeypatch.setattr("torsh_trainer.tasks.digits.find_spec", lambda name: nowhere)
    asked = Digits().train.tensors
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(read, asked, strict=True))


def test_every_part_of_the_digits_has_the_classes_in_equal_shares() -> None:
    source = Digits(eval_fraction=0.1, test_fraction=0.25)
    counts = torch.bincount(torch.from_numpy(load_digits().target)).float()
    for data, share in ((source.eval, 0.1), (source.test, 0.25), (source.train, 0.65)):
        assert (torch.bincount(data.tensors[1]) - counts * share).abs().max() <= 1


def test_the_split_follows_its_seed_and_nothing_else() -> None:
    torch.manual_seed(1)
    first = Digits(split_seed=3).test.tensors[0]
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(Digits(split_seed=3).test.tensors[0], first)
    assert not torch.equal(Digits(split_seed=4).test.tensors[0], first)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_source_that_has_loaded_travels_as_its_knobs_and_loads_again() -> None:
    source = Digits(eval_fraction=0.3)
    assert len(source.train)
    pickled = cloudpickle.dumps(source)
    assert len(pickled) < 1000
    again = cloudpickle.loads(pickled)
    assert again == source
    assert torch.equal(again.eval.tensors[0], source.eval.tensors[0])


def test_data_asked_for_while_a_model_is_built_elsewhere_is_on_the_cpu() -> None:
    source = Digits()
    with torch.device("meta"):
        assert source.train.tensors[0].device.type == "cpu"


def test_a_fraction_of_0_leaves_a_part_out() -> None:
    source = Digits(eval_fraction=0, test_fraction=0)
    assert (source.eval, source.test) == (None, None)
    assert len(source.train) == len(load_digits().target)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"eval_fraction": 1.5}, "data.eval_fraction=1.5"),
        ({"eval_fraction": 0.5, "test_fraction": 0.5}, "leaves nothing to train on"),
    ],
)
def test_fractions_that_make_no_split_are_refused(knobs: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Digits(**knobs)  # type: ignore[arg-type]


def test_augmentation_draws_from_the_generator_that_the_loader_seeds() -> None:
    source = Digits(augment=True)
    assert not hasattr(source.train, "__getitems__")  # else the loader would not seed samples

    def sample(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return source.train[0][0]

    assert torch.equal(sample(1), sample(1))
    different = {sample(seed).numpy().tobytes() for seed in range(100)}
    assert len(different) == 9  # by -1, 0 or 1 pixel each way
    assert source.train.data.tensors[0][0].numpy().tobytes() in different
    assert torch.equal(source.sample_weights(), Digits().sample_weights())


def test_scikit_learn_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ResourceError, match=r"needs the library sklearn.*torsh-trainer\[recipes\]"):
        _ = Digits().train


def test_balanced_weights_draw_every_class_alike() -> None:
    labels = torch.tensor([0, 0, 0, 1, 2, 2])
    weights = balance_classes(labels)
    totals = [weights[labels == label].sum().item() for label in range(3)]
    assert totals == pytest.approx([1.0, 1.0, 1.0])


def test_a_split_of_too_few_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 samples are too few to split"):
        split(3, fractions=(0.1,), seed=0)


# ------------------------------------------------------------------------------ Fashion-MNIST


def write_idx(path: Path, values: Tensor) -> None:
    header = struct.pack(">HBB", 0, 8, values.dim()) + struct.pack(
        f">{values.dim()}I", *values.shape
    )
    content = header + values.to(torch.uint8).numpy().tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_dataset(folder: Path, *, suffix: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    for part, count in (("t10k", 20), ("train", 100)):
        images = torch.randint(256, (count, 28, 28), generator=generator)
        labels = torch.arange(count) % 10
        write_idx(folder / f"{part}-images-idx3-ubyte{suffix}", images)
        write_idx(folder / f"{part}-labels-idx1-ubyte{suffix}", labels)
    return images, labels


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_are_read_packed_or_not(tmp_path: Path, suffix: str) -> None:
    images, labels = write_dataset(tmp_path, suffix=suffix)
    source = FashionMnist(folder=str(tmp_path), eval_fraction=0)
    x, y = fetched(source.train, list(range(100)))
    assert torch.equal(x, images.unsqueeze(1) / 255)
    assert torch.equal(y, labels)
    assert len(source.test) == 20


def test_a_part_of_the_training_images_is_held_out(tmp_path: Path) -> None:
    write_dataset(tmp_path, suffix="")
    source = FashionMnist(folder=str(tmp_path), eval_fraction=0.2)
    assert (len(source.train), len(source.eval), len(source.test)) == (80, 20, 20)
    assert rows_of(source.train).isdisjoint(rows_of(source.eval))


def test_augmented_clothes_are_mirrored_and_moved(tmp_path: Path) -> None:
    images, _ = write_dataset(tmp_path, suffix="")
    source = FashionMnist(folder=str(tmp_path), eval_fraction=0, augment=True)
    image = images[0].unsqueeze(0) / 255
    padded = torch.nn.functional.pad(torch.stack([image, image.flip(-1)]), (2, 2, 2, 2))
    possible = {
        view[..., top : top + 28, left : left + 28].contiguous().numpy().tobytes()
        for view in padded
        for top in range(5)
        for left in range(5)
    }
    drawn = {source.train[0][0].contiguous().numpy().tobytes() for _ in range(300)}
    assert drawn <= possible
    assert len(drawn) > 40  # of 50


def test_a_missing_file_names_the_package_and_the_knob(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dataset-fashion-mnist.*data\.folder=FOLDER"):
        _ = FashionMnist(folder=str(tmp_path / "nowhere")).train


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not an IDX file"),
        (b"<html>", "is not an IDX file"),
        (struct.pack(">HBBI", 0, 8, 1, 4) + b"\1\2\3", r"holds 3 values, but says \[4\]"),
        (struct.pack(">HBBI", 0, 8, 1, 0), r"holds 0 values"),
        (struct.pack(">HBB", 0, 8, 3) + b"\1", r"holds 0 values"),
    ],
    ids=["empty", "html", "too short", "nothing", "no sizes"],
)
def test_a_file_that_is_cut_off_or_something_else_is_named(
    tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "train-labels-idx1-ubyte"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{path.name} {words}"):
        read_idx(path)


@pytest.mark.parametrize(
    "content", [b"not gzip", gzip.compress(bytes(1000), mtime=0)[:-12]], ids=["text", "cut off"]
)
def test_a_broken_gzip_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "train-labels-idx1-ubyte.gz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cannot read .*idx1-ubyte\.gz"):
        read_idx(path)


def test_images_and_labels_of_different_number_are_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path, suffix="")
    write_idx(tmp_path / "train-labels-idx1-ubyte", torch.zeros(7))
    with pytest.raises(ConfigError, match="do not belong together"):
        _ = FashionMnist(folder=str(tmp_path)).train


# ------------------------------------------------------------------------------- image folders

COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


def write_images(
    folder: Path, *, count: int = 10, size: tuple[int, int] = (20, 12), classes: Any = COLOURS
) -> str:
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", size, COLOURS.get(name, (1, 2, 3))).save(
                folder / name / f"{number}.png"
            )
    return str(folder)


def test_an_image_folder_gives_normalised_squares_and_the_class_of_their_folder(
    tmp_path: Path,
) -> None:
    source = ImageFolder(folder=write_images(tmp_path), image_size=8, augment=False)
    assert source.classes == ["blue", "green", "red"]
    assert (len(source.train), len(source.eval), len(source.test)) == (24, 3, 3)
    x, y = fetched(source.train, list(range(24)))
    assert x.shape == (24, 3, 8, 8)
    for image, label in zip(x, y, strict=True):
        colour = torch.tensor(COLOURS[source.classes[label]]) / 255
        expected = ((colour - 0.5) / 0.25).view(3, 1, 1).expand(3, 8, 8)
        torch.testing.assert_close(image, expected)


def test_without_augmentation_an_image_is_cropped_in_the_middle(tmp_path: Path) -> None:
    (tmp_path / "wide").mkdir()
    picture = Image.new("RGB", (12, 4), (255, 0, 0))
    picture.paste((0, 255, 0), (4, 0, 8, 4))
    picture.save(tmp_path / "wide" / "1.png")
    source = ImageFolder(
        folder=str(tmp_path), image_size=4, eval_fraction=0, test_fraction=0, augment=False
    )
    image = source.train[0][0] * 0.25 + 0.5
    green = torch.tensor([0.0, 1.0, 0.0]).view(3, 1, 1).expand(3, 4, 4)
    torch.testing.assert_close(image, green)


def test_augmentation_of_images_is_for_training_alone_and_seeded(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    for number in range(10):
        Image.effect_noise((40, 30), 90).convert("RGB").save(folder / f"{number}.png")
    source = ImageFolder(folder=str(tmp_path), image_size=16)

    def draw(data: Any, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return data[0][0]

    assert torch.equal(draw(source.train, 1), draw(source.train, 1))
    assert not torch.equal(draw(source.train, 1), draw(source.train, 2))
    assert torch.equal(draw(source.eval, 1), draw(source.eval, 2))


def test_folders_of_their_own_for_evaluation_test_and_prediction(tmp_path: Path) -> None:
    plain = tmp_path / "predict"
    plain.mkdir()
    Image.new("L", (5, 5)).save(plain / "grey.png")
    source = ImageFolder(
        folder=write_images(tmp_path / "train"),
        eval_folder=write_images(tmp_path / "eval", count=2, classes=["red"]),
        test_folder=write_images(tmp_path / "test", count=1),
        predict_folder=str(plain),
        image_size=4,
    )
    assert [len(d) for d in (source.train, source.eval, source.test, source.predict)] == [
        30, 2, 3, 1,
    ]  # fmt: skip
    assert source.eval[0][1] == source.classes.index("red")
    (images,) = fetched(source.predict, [0])
    assert images.shape == (1, 3, 4, 4)


def test_an_unreadable_image_is_named(tmp_path: Path) -> None:
    source = ImageFolder(folder=write_images(tmp_path), eval_fraction=0, test_fraction=0)
    (tmp_path / "blue" / "0.png").write_bytes(b"no image")
    with pytest.raises(ConfigError, match=r"cannot read .*blue/0\.png as an image"):
        _ = source.train[0]
    whole = (tmp_path / "blue" / "1.png").read_bytes()
    (tmp_path / "blue" / "1.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"cannot read .*blue/1\.png as an image"):
        _ = source.train[1]


def test_folders_that_hold_nothing_of_use_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no folder .*data\.folder"):
        _ = ImageFolder(folder=str(tmp_path / "nowhere")).train
    with pytest.raises(ConfigError, match="has no subfolders"):
        _ = ImageFolder(folder=str(tmp_path)).train
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"there are no images in .*empty"):
        _ = ImageFolder(folder=str(tmp_path)).train


def test_a_class_that_training_lacks_is_refused(tmp_path: Path) -> None:
    source = ImageFolder(
        folder=write_images(tmp_path / "train"),
        test_folder=write_images(tmp_path / "test", classes=["violet"]),
    )
    with pytest.raises(ConfigError, match="has the class 'violet'"):
        _ = source.test


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"image_size": 0}, "data.image_size=0"),
        ({"smallest_crop": 0.0}, "data.smallest_crop=0.0"),
        ({"std": (0.2, 0.2)}, "three numbers each"),
    ],
)
def test_knobs_of_an_image_folder_out_of_range_are_refused(
    knobs: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        ImageFolder(folder="photos", **knobs)


def test_pillow_missing_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ResourceError, match=r"needs the library PIL.*torsh-trainer\[recipes\]"):
        _ = ImageFolder(folder=write_images(tmp_path)).train
