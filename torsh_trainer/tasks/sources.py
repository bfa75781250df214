"""What the ready data sources share: lazy loading, splits, tensors fetched by the batch."""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.tasks.base import DataSource
from torsh_trainer.tasks.collating import stack


class Splits(NamedTuple):
    """The datasets of a source; None where there is none."""

    train: Any = None
    eval: Any = None
    test: Any = None
    predict: Any = None


def collate(samples: Any) -> Any:
    """A batch that was fetched whole stays as it is; a list of samples is stacked."""
    return stack(samples) if isinstance(samples, list) else samples


class LoadedOnUse(DataSource):
    """A source that loads nothing before a process asks for its first dataset.

    Subclasses are frozen dataclasses of knobs and give ``load``. Pickled, a source is its knobs
    alone: every process loads for itself.
    """

    collate = staticmethod(collate)

    def load(self) -> Splits:
        """Reads the data; called once a process, on the CPU."""
        raise NotImplementedError

    @cached_property
    def splits(self) -> Splits:
        """The datasets, loaded on first use."""
        with torch.device("cpu"):  # the caller may be building a model on another device
            return self.load()

    @cached_property
    def train(self) -> Any:
        return self.splits.train

    @cached_property
    def eval(self) -> Any:
        return self.splits.eval

    @cached_property
    def test(self) -> Any:
        return self.splits.test

    @cached_property
    def predict(self) -> Any:
        return self.splits.predict

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]


def row_numbers(indices: Sequence[int] | Tensor) -> Tensor:
    """Indices as an int64 tensor; by way of a buffer, which is several times as fast."""
    if isinstance(indices, Tensor):
        return indices
    return torch.frombuffer(array("q", indices), dtype=torch.int64)


class TensorData(Dataset[Any]):
    """Samples that are rows of tensors of one length, fetched by the batch.

    A batch is a tuple with one tensor for each of ``tensors``; ``transform`` maps the first (a
    whole batch, or one sample), e.g. from bytes to scaled floats.
    """

    def __init__(
        self, *tensors: Tensor, transform: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        lengths = {len(tensor) for tensor in tensors}
        if len(lengths) != 1:
            raise ConfigError(
                f"tensors of {' and '.join(map(str, sorted(lengths))) or 'no'} rows are no samples",
                fix="give tensors whose first dimension is the number of samples",
            )
        self.tensors = tensors
        self.transform = transform

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self._transform_parts(tuple(tensor[index] for tensor in self.tensors))

    def __getitems__(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, ...]:
        rows = row_numbers(indices)
        return self._transform_parts(tuple(tensor.index_select(0, rows) for tensor in self.tensors))

    def take(self, rows: Tensor) -> TensorData | None:
        """The samples at ``rows``, as a dataset; None when there are none."""
        if not len(rows):
            return None
        return TensorData(*(tensor[rows] for tensor in self.tensors), transform=self.transform)

    def _transform_parts(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self.transform is None:
            return parts
        return (self.transform(parts[0]), *parts[1:])


class Augmented(Dataset[Any]):
    """``data`` with ``augment`` applied to the first part of every sample as it is drawn.

    Samples are fetched one at a time, so that the loader can seed torch's generator for each: the
    draws depend on the sample and the epoch, not on the batch or the process.
    """

    def __init__(self, data: Any, augment: Callable[[Tensor], Tensor]) -> None:
        self.data, self.augment = data, augment

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        first, *rest = self.data[index]
        return (self.augment(first), *rest)


def shift_and_flip(image: Tensor, *, pixels: int, flip: bool) -> Tensor:
    """``image`` (channels, height, width), moved by up to ``pixels`` each way and mirrored half
    the time; what moves in is 0."""
    down, right, mirrored = torch.randint(1 << 30, (3,)).tolist()
    if flip and mirrored % 2:
        image = image.flip(-1)
    if not pixels:
        return image
    height, width = image.shape[-2:]
    span = 2 * pixels + 1
    top, left = down % span, right % span
    padded = torch.nn.functional.pad(image, (pixels,) * 4)
    return padded[..., top : top + height, left : left + width]


def check_fractions(**named: float) -> None:
    """Parts of the training data that are held out: each in [0, 1), and something left to train.

    Raises:
        ConfigError: they are not.
    """
    for name, value in named.items():
        if not 0 <= value < 1:
            raise ConfigError(
                f"data.{name}={value} is not a part of the data", fix="give a number from 0 to 1"
            )
    if sum(named.values()) >= 1:
        raise ConfigError(
            f"{' + '.join(f'data.{name}' for name in named)} leaves nothing to train on",
            fix="give parts that add up to less than 1",
        )


def split(
    count: int, *, fractions: Sequence[float], seed: int, labels: Tensor | None = None
) -> list[Tensor]:
    """Row numbers of the training part, then of one part for each of ``fractions``.

    The rows are drawn by ``seed``, without touching the global generator, and stand in rising
    order. With ``labels`` (count,) each class is split by itself, so that the parts have the
    classes in equal shares. A part of more than 0 has at least one row (of all classes together).

    Raises:
        ConfigError: a part, or the training part, has no row.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(count, generator=generator, device="cpu")
    groups = [order]
    if labels is not None:
        drawn = labels[order]
        groups = [order[drawn == label] for label in labels.unique()]
    parts: list[list[Tensor]] = [[] for _ in range(len(fractions) + 1)]
    for group in groups:
        edges = [round(len(group) * sum(fractions[:i])) for i in range(len(fractions) + 1)]
        for part, start, stop in zip(parts[1:], edges, edges[1:], strict=False):
            part.append(group[start:stop])
        parts[0].append(group[edges[-1] :])
    rows = [torch.cat(part).sort().values for part in parts]
    if any(not len(part) for part, share in zip(rows, (1.0, *fractions), strict=True) if share):
        raise ConfigError(
            f"{count} samples are too few to split: "
            f"{', '.join(str(len(part)) for part in rows)} for training and the held-out parts",
            fix="bring more data, or change data.eval_fraction and data.test_fraction",
        )
    return rows


def balance_classes(labels: Tensor) -> Tensor:
    """Sampling weights that draw every class equally often: 1 / (rows of the class)."""
    counts = torch.bincount(labels)
    return counts.double().reciprocal()[labels]


def library(module: str, *, needs: str, install: str = "torsh-trainer[recipes]") -> Any:
    """The optional library ``module``.

    Raises:
        ResourceError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ResourceError(
            f"{needs} needs the library {module.partition('.')[0]}, which is not installed",
            fix=f'pip install "{install}"',
            module=module,
        ) from error
