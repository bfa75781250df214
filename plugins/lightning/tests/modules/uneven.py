"""Batches of evaluation dealt out to ranks one by one, so that some have one more than others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics.classification import MulticlassAccuracy

from modules.data import CLASSES, FEATURES, Shares
from modules.finetuning import Stack


class Dealt(Shares):
    """Three batches: two for the first of two ranks. ``streams`` do not know their length."""

    def __init__(self, *, samples: int = 9, streams: bool = False) -> None:
        super().__init__(batch_size=8, train=40, evaluation=samples)
        self.streams = streams

    def _dealt(self) -> DataLoader[Any]:
        assert self.trainer is not None
        count, ranks, rank = len(self.held_out), self.trainer.world_size, self.trainer.global_rank
        batches = [list(range(i, min(i + 4, count))) for i in range(0, count, 4)][rank::ranks]
        if self.streams:
            return DataLoader(Stream(self.held_out, batches), batch_size=None)
        return DataLoader(
            self.held_out, batch_size=4, sampler=[i for part in batches for i in part]
        )

    val_dataloader = test_dataloader = predict_dataloader = _dealt


class Stream(IterableDataset[Any]):
    def __init__(self, samples: Any, batches: list[list[int]]) -> None:
        self.samples = samples
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            yield tuple(part[batch] for part in self.samples.tensors)


class Collects(Stack):
    """Keeps what its evaluation comes to, in each of the usual ways."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES, affine=False)
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.register_buffer("evaluated", torch.zeros(()))
        self.outputs: list[Tensor] = []
        self.count = 0

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        return self.head(self.backbone(self.norm(batch[0])))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.predict_step(batch, batch_idx)
        self.accuracy(logits, batch[1])
        self.outputs.append(logits.detach())
        self.evaluated += len(logits)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        # Its mean over ranks of unequal numbers would be rounded by Lightning.
        loss = F.cross_entropy(logits, batch[1], reduction="sum")
        self.log("loss", loss, reduce_fx="sum", sync_dist=True)
        self.log("samples", float(len(logits)), reduce_fx="sum", sync_dist=True)

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        rows = sum(map(len, self.outputs))
        self.log("rows", float(rows), reduce_fx="sum", sync_dist=True)
        self.log("counted", float(self.count), reduce_fx="sum", sync_dist=True)
        self.log("evaluated", self.evaluated, reduce_fx="sum", sync_dist=True)
        self.outputs.clear()
        self.count = 0
        self.evaluated.zero_()

    on_test_epoch_end = on_validation_epoch_end
