"""The look at the kernels of attention does not wait for the device."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from torsh_trainer.testing.fake_accelerator import FakeAccelerator, run_on_fake_accelerator
from torsh_trainer.training.attention import KernelWatch


def looks(accelerator: FakeAccelerator) -> tuple[int, int, int]:
    """Attentions seen, and the host's waits and copies with a look and without one."""
    query = torch.randn(2, 2, 8, 16, device=accelerator.device, dtype=torch.bfloat16)
    with accelerator.count() as plain:
        F.scaled_dot_product_attention(query, query, query, is_causal=True)
    with accelerator.count() as counts, KernelWatch() as seen:
        F.scaled_dot_product_attention(query, query, query, is_causal=True)
    return (
        seen.kernels.total(),
        counts.synchronisations.total(),
        plain.synchronisations.total(),
    )


def test_a_look_at_the_kernel_waits_for_nothing() -> None:
    assert run_on_fake_accelerator(looks) == (1, 0, 0)
