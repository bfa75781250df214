"""Random numbers by sample on a device: of seed, step and sample, and of nothing else."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torsh_trainer.data.batch import MicroBatch, MicroBatchPlace, Samples
from torsh_trainer.data.sampler import ForwardKeys
from torsh_trainer.randomness import SampleDraws

SAMPLES = 24


def masks_of(device: str, *, step: int, micro: int, seed: int = 5) -> Tensor:
    """Two masks of dropout for each sample, on the host; forwards see ``micro`` samples each."""
    key = ForwardKeys(seed).of_step(step)
    draws = SampleDraws(nn.Identity().to(device), torch.device(device))
    found = []
    for first in range(0, SAMPLES, micro):
        place = MicroBatchPlace(0, 1, Samples(first, micro, key))
        with draws.of(MicroBatch(None, 1.0, key + first, place)):
            ones = torch.ones(micro, 64, device=device)
            found.append(torch.stack([F.dropout(ones), F.dropout(ones)]).cpu())
    return torch.cat(found, dim=1)


def test_a_mask_is_of_seed_step_and_sample_however_the_batch_is_cut(device: str) -> None:
    whole = masks_of(device, step=3, micro=SAMPLES)
    for micro in (1, 4, 12):
        assert torch.equal(masks_of(device, step=3, micro=micro), whole), micro
    assert torch.equal(masks_of(device, step=3, micro=SAMPLES), whole), "drawn again"
    assert not torch.equal(masks_of(device, step=4, micro=SAMPLES), whole), "another step"
    assert not torch.equal(masks_of(device, step=3, micro=SAMPLES, seed=6), whole), "another seed"
    assert len({tuple(mask.tolist()) for mask in whole.flatten(0, 1)}) == 2 * SAMPLES


def test_the_mask_is_that_of_the_cpu(device: str) -> None:
    here = masks_of(device, step=3, micro=12)
    assert torch.equal(here, masks_of("cpu", step=3, micro=SAMPLES))
