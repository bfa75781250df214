"""A folder of images with one subfolder for each class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from torsh_trainer.errors import ConfigError
from torsh_trainer.tasks.sources import (
    LoadedOnUse,
    Splits,
    balance_classes,
    check_fractions,
    library,
    split,
)

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})


class ImageFiles(Dataset[Any]):
    """Images read as they are asked for: (3, ``size``, ``size``) float32, normalised, and a label.

    An image is resized so that its shorter side is ``size`` and cropped in the middle. With
    ``augment`` the crop is a random square of at least ``smallest_crop`` of the largest one, and
    the image is mirrored half the time; the draws are torch's, so that the loader can seed them
    for each sample.

    Raises:
        ConfigError: a file cannot be read as an image.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        labels: Tensor | None,
        *,
        size: int,
        mean: Sequence[float],
        std: Sequence[float],
        augment: bool = False,
        smallest_crop: float = 0.6,
    ) -> None:
        self.paths, self.labels = list(paths), labels
        self.size, self.augment, self.smallest_crop = size, augment, smallest_crop
        self.mean = torch.tensor(mean).view(3, 1, 1)
        self.std = torch.tensor(std).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        image = (self._image(self.paths[index]) - self.mean) / self.std
        return (image,) if self.labels is None else (image, self.labels[index])

    def _image(self, path: Path) -> Tensor:
        pillow = library("PIL.Image", needs="data=image_folder")
        try:
            with pillow.open(path) as file:
                picture = file.convert("RGB")
        except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
            raise ConfigError(
                f"cannot read {path} as an image ({error})", fix="replace it, or move it away"
            ) from error
        square = self._square(*picture.size)
        picture = picture.resize((self.size, self.size), pillow.Resampling.BILINEAR, box=square)
        pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        image = pixels.view(self.size, self.size, 3).permute(2, 0, 1).float().div_(255)
        return image.flip(-1) if self.augment and torch.rand(()) < 0.5 else image

    def _square(self, width: int, height: int) -> tuple[float, float, float, float]:
        """Left, top, right and bottom of the crop."""
        side = float(min(width, height))
        across = down = 0.5
        if self.augment:
            scale, across, down = torch.rand(3).tolist()
            side *= self.smallest_crop + (1 - self.smallest_crop) * scale
        left, top = (width - side) * across, (height - side) * down
        return left, top, left + side, top + side


@dataclass(frozen=True, kw_only=True)
class ImageFolder(LoadedOnUse):
    """Images in ``folder``/CLASS/..., resized and cropped to ``image_size`` pixels square, RGB.

    Classes are the subfolders in sorted order; images lie anywhere below them. Held out are
    ``eval_folder`` and ``test_folder`` (with the same subfolders) where they are given, else
    ``eval_fraction`` and ``test_fraction`` of every class, drawn by ``split_seed``.
    ``predict_folder`` holds images without classes. ``augment`` crops and mirrors training images
    at random; a crop's side is at least ``smallest_crop`` of the whole. Pixels in [0, 1] are
    shifted by ``mean`` and divided by ``std``, red, green, blue.

    Raises:
        ConfigError: a folder is missing or holds no images, or has a class that ``folder`` has
            not.
        ResourceError: Pillow is not installed.
    """

    folder: str
    image_size: int = 64
    eval_folder: str | None = None
    test_folder: str | None = None
    predict_folder: str | None = None
    eval_fraction: float = 0.1
    test_fraction: float = 0.1
    split_seed: int = 0
    augment: bool = True
    smallest_crop: float = 0.6
    mean: Sequence[float] = (0.5, 0.5, 0.5)
    std: Sequence[float] = (0.25, 0.25, 0.25)

    in_channels: ClassVar[int] = 3

    def __post_init__(self) -> None:
        check_fractions(eval_fraction=self.eval_fraction, test_fraction=self.test_fraction)
        if self.image_size < 1:
            raise ConfigError(f"data.image_size={self.image_size} is too small", fix="e.g. 64")
        if not 0 < self.smallest_crop <= 1:
            raise ConfigError(
                f"data.smallest_crop={self.smallest_crop} is not a part of a side",
                fix="give a number above 0, up to 1",
            )
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ConfigError(
                "data.mean and data.std are not three numbers each, std above 0",
                fix="give one for red, green and blue",
            )

    @cached_property
    def classes(self) -> list[str]:
        """Names of the classes by number."""
        return _subfolders(self.folder, knob="folder")

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.classes)

    def load(self) -> Splits:
        library("PIL.Image", needs="data=image_folder")  # now, not at the first image
        paths, labels = self._listed
        parts = [self._images([paths[i] for i in rows], labels[rows]) for rows in self._parts]
        train, held_out, test = (part if len(part) else None for part in parts)
        assert train is not None  # split() would have refused
        train.augment = self.augment
        if self.eval_folder:
            held_out = self._images(*self._list(self.eval_folder, knob="eval_folder"))
        if self.test_folder:
            test = self._images(*self._list(self.test_folder, knob="test_folder"))
        predict = test
        if self.predict_folder:
            predict = self._images(_images_under(Path(self.predict_folder), "predict_folder"), None)
        return Splits(train, held_out, test, predict)

    def sample_weights(self) -> Tensor:
        return balance_classes(self._listed[1][self._parts[0]])

    @cached_property
    def _listed(self) -> tuple[list[Path], Tensor]:
        return self._list(self.folder, knob="folder")

    @cached_property
    def _parts(self) -> list[Tensor]:
        """Rows of the listing for training, evaluation and test."""
        paths, labels = self._listed
        shares = [
            0.0 if self.eval_folder else self.eval_fraction,
            0.0 if self.test_folder else self.test_fraction,
        ]
        return split(len(paths), fractions=shares, seed=self.split_seed, labels=labels)

    def _list(self, folder: str, *, knob: str) -> tuple[list[Path], Tensor]:
        numbers = {name: number for number, name in enumerate(self.classes)}
        unknown = set(_subfolders(folder, knob=knob)) - numbers.keys()
        if unknown:
            raise ConfigError(
                f"{folder} has the class {min(unknown)!r}, which {self.folder} has not",
                fix="give both the same subfolders",
            )
        paths: list[Path] = []
        labels: list[int] = []
        for name in _subfolders(folder, knob=knob):
            found = _images_under(Path(folder, name), knob)
            paths += found
            labels += [numbers[name]] * len(found)
        return paths, torch.tensor(labels)

    def _images(self, paths: list[Path], labels: Tensor | None) -> ImageFiles:
        return ImageFiles(
            paths,
            labels,
            size=self.image_size,
            mean=self.mean,
            std=self.std,
            smallest_crop=self.smallest_crop,
        )


def _subfolders(folder: str, *, knob: str) -> list[str]:
    if not Path(folder).is_dir():
        raise ConfigError(
            f"there is no folder {folder}", fix=f"point data.{knob} at a folder of class folders"
        )
    names = sorted(
        path.name for path in Path(folder).iterdir() if path.is_dir() and path.name[0] != "."
    )
    if not names:
        raise ConfigError(
            f"{folder} has no subfolders", fix="put the images of each class into one of its own"
        )
    return names


def _images_under(folder: Path, knob: str) -> list[Path]:
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not found:
        raise ConfigError(
            f"there are no images in {folder}",
            fix=f"put some there ({', '.join(sorted(SUFFIXES))}), or correct data.{knob}",
        )
    return found
