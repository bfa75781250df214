"""Fashion-MNIST: photographs of clothes in the IDX files of MNIST."""

from __future__ import annotations

import gzip
import math
import zlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from torsh_trainer.errors import ConfigError
from torsh_trainer.tasks.sources import (
    Augmented,
    LoadedOnUse,
    Splits,
    TensorData,
    balance_classes,
    check_fractions,
    shift_and_flip,
    split,
)

DEBIAN_FOLDER = "/usr/share/datasets/fashion-mnist"


@dataclass(frozen=True, kw_only=True)
class FashionMnist(LoadedOnUse):
    """60000 images to train and 10000 to test: image (1, 28, 28) float32 in [0, 1], label 0-9.

    ``folder`` holds the four IDX files under their usual names, with or without ``.gz``; MNIST's
    own files read alike. ``eval_fraction`` of the training images is held out, drawn by
    ``split_seed``. ``augment`` mirrors training images half the time and moves them by up to two
    pixels.

    Raises:
        ConfigError: a file is missing or not what its name says.
    """

    folder: str = DEBIAN_FOLDER
    eval_fraction: float = 0.05
    split_seed: int = 0
    augment: bool = False

    in_features: ClassVar[int] = 784
    in_channels: ClassVar[int] = 1
    image_size: ClassVar[int] = 28
    num_classes: ClassVar[int] = 10

    def __post_init__(self) -> None:
        check_fractions(eval_fraction=self.eval_fraction)

    def load(self) -> Splits:
        data, test = self._read("train"), self._read("t10k")
        rows = split(
            len(data),
            fractions=(self.eval_fraction,),
            seed=self.split_seed,
            labels=data.tensors[1],
        )
        train, held_out = (data.take(part) for part in rows)
        changed = partial(shift_and_flip, pixels=2, flip=True)
        return Splits(
            Augmented(train, changed) if self.augment else train, held_out, test, predict=test
        )

    def sample_weights(self) -> Tensor:
        train = self.train.data if self.augment else self.train
        return balance_classes(train.tensors[1])

    def _read(self, part: str) -> TensorData:
        images = read_idx(_find(self.folder, f"{part}-images-idx3-ubyte"))
        labels = read_idx(_find(self.folder, f"{part}-labels-idx1-ubyte"))
        if images.dim() != 3 or labels.dim() != 1 or len(images) != len(labels):
            raise ConfigError(
                f"{part}: images of shape {tuple(images.shape)} and labels of shape "
                f"{tuple(labels.shape)} in {self.folder} do not belong together",
                fix="download the four files again",
            )
        return TensorData(images.unsqueeze(1), labels.long(), transform=_scale)


def _scale(images: Tensor) -> Tensor:
    return images.float().div_(255)


def _find(folder: str, name: str) -> Path:
    for path in (Path(folder, name), Path(folder, f"{name}.gz")):
        if path.is_file():
            return path
    raise ConfigError(
        f"there is no {name} or {name}.gz in {folder}",
        fix="apt-get install dataset-fashion-mnist, or point data.folder=FOLDER at the IDX files",
        folder=folder,
    )


def read_idx(path: Path) -> Tensor:
    """The tensor of bytes in an IDX file (http://yann.lecun.com/exdb/mnist), gzipped or not.

    The format: two zero bytes, the type (8: unsigned byte), the number of dimensions, the size of
    each as a big-endian 32-bit number, then the values.

    Raises:
        ConfigError: the file is cut off, or not an IDX file of bytes.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"cannot read {path} ({error})", fix="download it again") from error
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise ConfigError(f"{path} is not an IDX file of bytes", fix="download it again")
    start = 4 + 4 * content[3]
    shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4)]
    if len(content) != start + math.prod(shape) or not math.prod(shape):
        raise ConfigError(
            f"{path} holds {max(len(content) - start, 0)} values, but says {shape}",
            fix="download it again",
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).view(shape)
