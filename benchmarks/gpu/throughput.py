"""Tokens a second of GPT-2 124M in bf16, compiled, beside a bare compiled loop in one process."""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.contenders import trainer as bench_trainer
from benchmarks.gpu.size import BF16, CLIP, BareSteps, Size, Tokens, size_for, task_of, waiting
from benchmarks.work import as_is
from torsh_trainer import Loading
from torsh_trainer.utils import peaks

LEAST, MOST = 4, 20
"""Blocks of each side."""


def loader(data: Any, size: Size, device: str) -> DataLoader[Any]:
    """torch's loader, pinned on a GPU."""
    return DataLoader(
        data,
        batch_size=size.micro_batch,
        shuffle=True,
        collate_fn=as_is,
        drop_last=True,
        pin_memory=device == "cuda",
    )


def endless(data: Any, size: Size, device: str) -> Iterator[Tensor]:
    """Its batches without end."""
    while True:
        yield from loader(data, size, device)


def torsh(data: Tokens, size: Size, device: str, steps: int, folder: Path) -> None:
    """This product: progress bar, metrics file and checkpoints on."""
    bench_trainer(
        data,
        steps,
        (),
        folder,
        device,
        task=task_of(size, data),
        loading=Loading(batch_size=size.micro_batch, drop_last=True, num_workers=0),
        precision=BF16,
        compile=size.compiles,
        max_grad_norm=CLIP,
    ).fit()


def lightning(data: Tokens, size: Size, device: str, steps: int, folder: Path) -> None:
    """Lightning's Trainer, nothing logged."""
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.task = task_of(size)
            model = self.task.build_model()
            self.model = torch.compile(model) if size.compiles else model

        def training_step(self, batch: Any, index: int) -> Tensor:
            return self.task.loss(self.task.forward(self.model, batch), batch)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            # Its gradient_clip_val refuses fused optimizers under mixed precision.
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)

        def configure_optimizers(self) -> Any:
            return next(iter(self.task.build_optimizers(self.model.named_parameters()).values()))

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    L.Trainer(
        max_steps=steps,
        accelerator=device,
        devices=1,
        precision="bf16-mixed",
        default_root_dir=folder,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    ).fit(Module(), loader(data, size, device))


def accelerate(data: Tokens, size: Size, device: str, steps: int, folder: Path) -> None:
    """Accelerate with nothing on; its loop as the guide writes it."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=device == "cpu", mixed_precision="bf16")
    task = task_of(size)
    model: Any = task.build_model()
    (optimizer,) = task.build_optimizers(model.named_parameters()).values()
    model = torch.compile(model) if size.compiles else model
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(data, size, device))
    done = 0
    while done < steps:
        for batch in batches:
            optimizer.zero_grad()
            with accelerator.autocast():
                loss = task.loss(task.forward(model, batch), batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            done += 1
            if done == steps:
                break


CONTENDERS: dict[str, Callable[..., None]] = {
    "ToRSh Trainer": torsh,
    "Lightning Trainer": lightning,
    "Accelerate": accelerate,
}


def measure(name: str, device: str) -> dict[str, Any]:
    """The contender's time beside the bare loop's, blocks of both in turn; and its speed."""
    size = size_for(device)
    bare = BareSteps(
        size, device, endless(Tokens(size, device), size, device), compiles=size.compiles
    )
    step_s = _step_s(bare, device)
    block = max(1, min(10, round(1.0 / step_s)))
    blocks = max(LEAST, min(MOST, round(size.seconds / (block * step_s))))
    data = Tokens(size, device, bare, block=block)
    with tempfile.TemporaryDirectory() as folder:
        CONTENDERS[name](data, size, device, data.steps(blocks), Path(folder))
    seen_s = statistics.median(data.blocks.contender)
    flops = size.tokens_a_step * size.build_model().flops_per_token(size.context)
    peak = peaks.peak_flops(torch.device(device), "bf16", given_tflops=None)
    return {
        "contender": name,
        "model": f"{size.name}, {size.micro_batch} x {size.context} tokens a step",
        "ratio": asdict(data.blocks.ratio),
        "step_ms": 1e3 * seen_s,
        "bare_ms": data.blocks.bare_us / 1e3,
        "tokens_per_s": size.tokens_a_step / seen_s,
        "tflops": flops / seen_s / 1e12,
        "mfu": None if peak is None else flops / seen_s / peak,
        "blocks": len(data.blocks.contender),
        "steps_a_block": block,
        "compiled": size.compiles,
    }


def _step_s(bare: BareSteps, device: str) -> float:
    """Seconds of a step of the bare loop once it is warm."""
    with waiting(device):
        bare(3)
    began = time.perf_counter()
    with waiting(device):
        bare(3)
    return (time.perf_counter() - began) / 3
