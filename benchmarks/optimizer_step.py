"""``python -m benchmarks.optimizer_step``: an optimizer's step, fused beside torch's default.

Blocks of the two alternate; the ratio is that of the fastest block of each, which other work on the
machine disturbs least.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.comparing import in_turns
from torsh_trainer.optim.optimizers import OptimizerSpec

MODELS: dict[str, Callable[[], Sequence[nn.Module]]] = {
    "MLP, 8 tensors of 64x64": lambda: [nn.Linear(64, 64) for _ in range(4)],
    "CNN, 8 tensors, 152k": lambda: [
        nn.Conv2d(1, 32, 3),
        nn.Conv2d(32, 64, 3),
        nn.Linear(1024, 128),
        nn.Linear(128, 10),
    ],
    "MLP, 16 tensors of 256x256": lambda: [nn.Linear(256, 256) for _ in range(8)],
}
SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {}),
    "SGD with momentum": ("SGD", {"momentum": 0.9}),
    "Adagrad": ("Adagrad", {}),
    "Adam": ("Adam", {}),
    "AdamW": ("AdamW", {}),
}
STEPS = 10


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimizer_step")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=100)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"| optimizer | {' | '.join(MODELS)} |")
    print("| --- " * (len(MODELS) + 1) + "|")
    for label, (target, kwargs) in SPECS.items():
        cells = []
        for make in MODELS.values():
            spec = OptimizerSpec(target, options=kwargs, no_decay=False)
            cells.append(f"{ratio(spec, make, options.blocks, options.device):.2f}")
        print(f"| {label} | {' | '.join(cells)} |", flush=True)


def ratio(
    spec: OptimizerSpec, make: Callable[[], Sequence[nn.Module]], blocks: int, device: str
) -> float:
    """Fused over torch's default."""
    fused = _optimizer(spec, make, device)
    group = fused.param_groups[0]
    assert group["fused"], "nothing to compare"
    plain = _optimizer(spec, make, device)
    for setting in plain.param_groups:
        setting["fused"] = None
    _block(fused, device), _block(plain, device)  # state is allocated
    took = in_turns((fused, plain), lambda optimizer: _block(optimizer, device), rounds=blocks)
    return min(took[fused]) / min(took[plain])


def _optimizer(
    spec: OptimizerSpec, make: Callable[[], Sequence[nn.Module]], device: str
) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    model = nn.ModuleList(make()).to(device)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return spec.build(model.named_parameters())


def _block(optimizer: torch.optim.Optimizer, device: str) -> float:
    began = time.perf_counter()
    for _ in range(STEPS):
        optimizer.step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
