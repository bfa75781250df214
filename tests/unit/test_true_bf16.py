"""True bf16 casts each parameter by itself, in each forward: what that is for (record 0005)."""

import torch
from torch import nn

from torsh_trainer.strategies.modules import ComputeIn


class Halves(nn.Module):
    """Two layers, of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.used(x)
        return out


def test_a_parameter_that_no_forward_uses_gets_no_gradient_and_does_not_decay() -> None:
    """One node for all parameters would give it a gradient of zero, and AdamW would shrink it."""
    model = Halves()
    before = model.unused.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    ComputeIn(model, torch.bfloat16)(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert model.unused.weight.grad is None
    assert torch.equal(model.unused.weight, before)
    assert model.used.weight.grad is not None
    assert model.used.weight.grad.dtype == torch.float32


def test_what_is_written_where_no_version_counts_is_seen_by_the_next_forward() -> None:
    """A copy that is kept for the micro-batches of a step would not see it."""
    model = Halves()
    module, x = ComputeIn(model, torch.bfloat16), torch.ones(2, 4)
    first, version = module(x), model.used.weight._version
    model.used.weight.data.mul_(2.0)
    assert model.used.weight._version == version
    assert torch.equal(module(x), 2 * first)


def test_gradients_of_a_forward_are_right_though_another_forward_came_after_it() -> None:
    """Casts that share their memory from forward to forward would be written over."""
    model = Halves()
    module, x = ComputeIn(model, torch.bfloat16), torch.ones(2, 4, requires_grad=True)
    out = module(x)
    low = model.used.weight.detach().bfloat16()
    with torch.no_grad():
        model.used.weight.mul_(2.0)
    module(x)
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, low.float().sum(0).bfloat16().float().expand(2, 4))
