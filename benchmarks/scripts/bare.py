"""The digits recipe's training as a bare PyTorch script."""

from __future__ import annotations

import sys

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.scripts import marks
from torsh_trainer.tasks.models import SmallCNN


def main(steps: int) -> None:
    """Trains for so many steps."""
    x, y = load_digits(return_X_y=True)
    images = torch.tensor(x / 16.0, dtype=torch.float32).reshape(-1, 1, 8, 8)
    data = TensorDataset(images, torch.tensor(y))
    torch.manual_seed(0)
    model = SmallCNN(image_size=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    done = 0
    while done < steps:
        for x, y in DataLoader(data, batch_size=64, shuffle=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            marks.first_step()
            done += 1
            if done == steps:
                break
    marks.finish()


main(int(sys.argv[1]))
