"""Cross entropy of an output layer whose words are cut over processes, without whole logits.

As ``tasks.chunked_loss``, a chunk of tokens at a time. Three small sums over processes for each
chunk: the largest score, the sum of exponentials, and the score of the target, which one has.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from torsh_trainer.comm.base import Communicator
from torsh_trainer.strategies.tensor_parallel.functions import copy_to_parts
from torsh_trainer.tasks.chunked_loss import IGNORED, chunk_rows, sum_of_losses


def sum_of_losses_of_parts(
    hidden: Tensor, weight: Tensor, targets: Tensor, comm: Communicator, *, words: int
) -> Tensor:
    """The summed cross entropy, in fp32 and 0-dim, the same on all members.

    ``hidden`` is (..., width), the same on all; ``weight`` (vocabulary / members, width), this
    one's rows; ``targets`` (...) int64, where ``IGNORED`` does not count. ``words`` are the rows of
    the whole weight that stand for a word. Computed in the dtype that ``sum_of_losses`` takes.
    """
    score = partial(_score_parts, words=words, comm=comm)
    rows = chunk_rows(weight.shape[0] * comm.size)
    inputs = copy_to_parts(hidden, comm)
    return sum_of_losses(inputs, weight, targets, rows=rows, score=score)


def _score_parts(
    logits: Tensor, targets: Tensor, *, words: int, comm: Communicator
) -> tuple[Tensor, Tensor]:
    """The summed loss of a chunk, and its gradient by ``logits``, (rows, own words)."""
    scores = logits.float()
    own = scores.shape[1]
    first = comm.rank * own
    scores[:, max(0, words - first) :] = -torch.inf
    counts = targets != IGNORED
    place = torch.where(counts, targets, 0) - first
    mine = (place >= 0) & (place < own)
    column = torch.where(mine, place, 0).unsqueeze(1)
    largest = scores.amax(1, keepdim=True)
    comm.all_reduce(largest, op="max")
    scores -= largest
    hit = torch.where(mine.unsqueeze(1), scores.gather(1, column), 0.0)
    scores.exp_()
    both = torch.cat([scores.sum(1, keepdim=True), hit], 1)
    comm.all_reduce(both)
    parts, hit = both[:, :1], both[:, 1:]
    loss = torch.where(counts, (parts.log() - hit).squeeze(1), 0.0).sum()
    scores /= parts
    scores.scatter_add_(1, column, torch.where(mine.unsqueeze(1), -1.0, 0.0))
    scores.masked_fill_(~counts.unsqueeze(1), 0.0)
    return loss, scores
