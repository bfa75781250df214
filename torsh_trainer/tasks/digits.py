"""Handwritten digits, 8 x 8 pixels, as scikit-learn ships them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor

from torsh_trainer.tasks.sources import (
    Augmented,
    LoadedOnUse,
    Splits,
    TensorData,
    balance_classes,
    check_fractions,
    library,
    shift_and_flip,
    split,
)


@dataclass(frozen=True, kw_only=True)
class Digits(LoadedOnUse):
    """1797 digits: image (1, 8, 8) float32 in [0, 1], label 0-9.

    Every class is split alike into training, ``eval_fraction`` and ``test_fraction``, drawn by
    ``split_seed``. ``augment`` moves training images by up to one pixel.

    Raises:
        ResourceError: scikit-learn is not installed.
    """

    eval_fraction: float = 0.1
    test_fraction: float = 0.2
    split_seed: int = 0
    augment: bool = False

    in_features: ClassVar[int] = 64
    in_channels: ClassVar[int] = 1
    image_size: ClassVar[int] = 8
    num_classes: ClassVar[int] = 10

    def __post_init__(self) -> None:
        check_fractions(eval_fraction=self.eval_fraction, test_fraction=self.test_fraction)

    def load(self) -> Splits:
        table = torch.from_numpy(_table())
        images = table[:, :-1].reshape(-1, 1, 8, 8).float().div(16)
        data = TensorData(images, table[:, -1].long())
        rows = split(
            len(data),
            fractions=(self.eval_fraction, self.test_fraction),
            seed=self.split_seed,
            labels=data.tensors[1],
        )
        train, held_out, test = (data.take(part) for part in rows)
        moved = partial(shift_and_flip, pixels=1, flip=False)
        return Splits(
            Augmented(train, moved) if self.augment else train, held_out, test, predict=test
        )

    def sample_weights(self) -> Tensor:
        train = self.train.data if self.augment else self.train
        return balance_classes(train.tensors[1])


def _table() -> Any:
    """(1797, 65) of float64: 64 pixels of 0 to 16, and the label.

    Out of the file that scikit-learn ships, where it lies as it does today: to import the library
    takes longer than all that a short run computes.
    """
    found = find_spec("sklearn")
    for folder in (found and found.submodule_search_locations) or ():
        file = Path(folder, "datasets", "data", "digits.csv.gz")
        if file.is_file():
            return numpy.loadtxt(file, delimiter=",")
    digits = library("sklearn.datasets", needs="data=digits").load_digits()
    return numpy.column_stack([digits.data, digits.target])
