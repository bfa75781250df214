"""Small data with a signal in it, the same in every process."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

FEATURES = 6
CLASSES = 3


def samples(count: int, *, seed: int) -> TensorDataset:
    """Features of shape (count, 6), and a class of three that they tell."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(x, x[:, :CLASSES].argmax(dim=1))


def sequences(count: int, length: int, *, seed: int) -> TensorDataset:
    """Series of shape (count, length, 1), and their running sums."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, length, 1, generator=generator)
    return TensorDataset(x, x.cumsum(dim=1))


class Samples(L.LightningDataModule):
    """A data module as the documentation has it; ``shuffle`` draws from the global stream."""

    def __init__(
        self, batch_size: int = 4, train: int = 24, evaluation: int = 10, shuffle: bool = True
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.passed = 0

    def prepare_data(self) -> None:
        samples(1, seed=0)

    def setup(self, stage: str) -> None:
        self.train = samples(self.hparams.train, seed=1)
        self.held_out = samples(self.hparams.evaluation, seed=2)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        size, shuffle = self.hparams.batch_size, self.hparams.shuffle
        return DataLoader(self.train, batch_size=size, shuffle=shuffle)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.held_out, batch_size=self.hparams.batch_size)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.held_out, batch_size=self.hparams.batch_size)

    def predict_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.held_out, batch_size=self.hparams.batch_size)

    def state_dict(self) -> dict[str, int]:
        self.passed += 1
        return {"passed": self.passed}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.passed = state_dict["passed"]


class Shares(Samples):
    """The same global batches, in order, however many ranks share them."""

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        assert self.trainer is not None
        ranks, rank = self.trainer.world_size, self.trainer.global_rank
        sampler = DistributedSampler(self.train, ranks, rank, shuffle=False)
        return DataLoader(self.train, self.hparams.batch_size // ranks, sampler=sampler)


class Rows(Dataset[Tensor]):
    """Rows of random numbers, as Lightning's demos have them, of a seed of their own."""

    def __init__(self, size: int, length: int) -> None:
        self.data = torch.randn(length, size, generator=torch.Generator().manual_seed(length))

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]

    def __len__(self) -> int:
        return len(self.data)


def write_corpus(folder: Path, *, words: int = 2400) -> int:
    """Writes the text that Lightning's language models would download; its number of words."""
    file = folder / "data" / "wikitext-2.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(3)
    kinds = [f"word{number}" for number in range(20)]
    drawn = torch.randint(len(kinds), (words,), generator=generator).tolist()
    lines = [" ".join(kinds[i] for i in drawn[start : start + 10]) for start in range(0, words, 10)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(kinds) + 1  # and the end of a line
