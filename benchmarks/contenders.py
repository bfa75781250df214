"""The same training under each library; every function trains for ``steps`` on ``data``."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console as Terminal
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.work import BATCH, BareLoop, Samples, as_is, build_model
from torsh_trainer import CheckpointOptions, DataSource, Loading, Task, Trainer
from torsh_trainer.callbacks.console import Console
from torsh_trainer.callbacks.jsonl import Jsonl

Contender = Callable[[Any, int, tuple[int, ...], Path, str], None]
NEVER = 10**9


class Bar(Console):
    """The progress bar as on a terminal, drawn into memory."""

    def terminal(self) -> Terminal:
        return Terminal(file=io.StringIO(), force_terminal=True, width=120)


class _Source(DataSource):
    collate = staticmethod(as_is)

    def __init__(self, data: Any) -> None:
        self.train = data


class BenchTask(Task):
    """Cross entropy on the benchmark's samples with plain SGD."""

    def __init__(self, data: Any, widths: tuple[int, ...]) -> None:
        self.data = _Source(data)
        self.widths = widths

    def build_model(self) -> nn.Module:
        return build_model(self.widths)

    def build_optimizers(self, named_parameters: Any) -> Any:
        return {"main": torch.optim.SGD([p for _, p in named_parameters], lr=0.01)}

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(outputs, batch[1])


def torsh(data: Any, steps: int, widths: tuple[int, ...], folder: Path, device: str) -> None:
    """This product, with progress bar, metrics file and checkpoints on."""
    trainer(data, steps, widths, folder, device).fit()


def trainer(
    data: Any,
    steps: int,
    widths: tuple[int, ...],
    folder: Path,
    device: str,
    *,
    ranks: int = 1,
    **options: Any,
) -> Trainer:
    """The trainer of this benchmark; ``options`` may bring another task."""
    return Trainer(
        checkpoint=CheckpointOptions(every_steps=NEVER, at_end=False, resume="never"),
        callbacks=[Bar(style="bar"), Jsonl()],
        run_dir=folder / "torsh",
        max_steps=steps,
        log_every=50,
        device="cuda" if device.startswith("cuda") else "cpu",
        **{
            "strategy": "single",
            "task": BenchTask(data, widths),
            "loading": Loading(batch_size=BATCH * ranks, drop_last=True),
            **options,
        },
    )


def loader(data: Any) -> DataLoader[Any]:
    """torch's loader, as the peers use it."""
    return DataLoader(data, batch_size=BATCH, shuffle=True, collate_fn=as_is, drop_last=True)


def endless(data: Samples) -> Any:
    """Batches of torch's loader without end."""
    while True:
        yield from loader(data)


def bare(data: Any, steps: int, widths: tuple[int, ...], folder: Path, device: str) -> None:
    """The bare loop against itself: the noise of the measurement."""
    BareLoop(build_model(widths).to(device), endless(data), device).run(steps)


def fabric(data: Any, steps: int, widths: tuple[int, ...], folder: Path, device: str) -> None:
    """Lightning Fabric with nothing on."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cuda" if device.startswith("cuda") else "cpu", devices=1)
    model = build_model(widths)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    wrapped = fabric.setup_dataloaders(loader(data))
    _loop(model, optimizer, wrapped, fabric.backward, steps)


def accelerate(data: Any, steps: int, widths: tuple[int, ...], folder: Path, device: str) -> None:
    """Accelerate with nothing on."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=not device.startswith("cuda"))
    model = build_model(widths)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, wrapped = accelerator.prepare(model, optimizer, loader(data))
    _loop(model, optimizer, wrapped, accelerator.backward, steps)


def _loop(model: Any, optimizer: Any, batches: Any, backward: Any, steps: int) -> None:
    """As their guides write it; the last epoch is gone through to its end."""
    done = 0
    while done < steps:
        for x, y in batches:
            optimizer.zero_grad()
            backward(F.cross_entropy(model(x), y))
            optimizer.step()
            done += 1


def lightning(data: Any, steps: int, widths: tuple[int, ...], folder: Path, device: str) -> None:
    """Lightning's Trainer with its defaults; no loss logged."""
    _lightning(data, steps, widths, folder, device, logs=False)


def lightning_logged(
    data: Any, steps: int, widths: tuple[int, ...], folder: Path, device: str
) -> None:
    """Lightning's Trainer with a logged loss in the progress bar."""
    _lightning(data, steps, widths, folder, device, logs=True)


def lightning_module(widths: tuple[int, ...], *, logs: bool) -> Any:
    """The benchmark's training as a LightningModule."""
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build_model(widths)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = F.cross_entropy(self.model(batch[0]), batch[1])
            if logs:
                self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Module()


def _lightning(
    data: Any, steps: int, widths: tuple[int, ...], folder: Path, device: str, *, logs: bool
) -> None:
    import lightning as L

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    fit = L.Trainer(
        max_steps=steps,
        accelerator="cuda" if device.startswith("cuda") else "cpu",
        devices=1,
        default_root_dir=folder / "lightning",
        enable_model_summary=False,
    )
    fit.fit(lightning_module(widths, logs=logs), loader(data))


def torsh_lightning(
    data: Any, steps: int, widths: tuple[int, ...], folder: Path, device: str
) -> None:
    """The LightningModule with a logged loss on our loop; progress bar, metrics file on."""
    import lightning as L
    from torsh_trainer_lightning.task import LightningTask

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader(data)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    task = LightningTask(lightning_module(widths, logs=True), Data())
    trainer(data, steps, widths, folder, device, task=task, loading=Loading()).fit()


def hugging_face(data: Any, steps: int, widths: tuple[int, ...], folder: Path, device: str) -> None:
    """Hugging Face's Trainer with its defaults."""
    from transformers import Trainer as HfTrainer
    from transformers import TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build_model(widths)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            outputs = self.model(x)
            return {"loss": F.cross_entropy(outputs, labels), "logits": outputs}

    arguments = TrainingArguments(
        output_dir=str(folder / "hf"),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        use_cpu=not device.startswith("cuda"),
        report_to=[],
        save_strategy="no",
        logging_steps=50,
        optim="sgd",
        max_grad_norm=0.0,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    HfTrainer(
        model=Model(),
        args=arguments,
        train_dataset=data,
        data_collator=lambda batch: {"x": batch[0], "labels": batch[1]},
    ).train()


ALL: dict[str, Contender] = {
    "bare loop against itself": bare,
    "ToRSh Trainer (progress bar, metrics, checkpoints on)": torsh,
    "Lightning Fabric (nothing on)": fabric,
    "Accelerate (nothing on)": accelerate,
    "Lightning Trainer (nothing logged)": lightning,
    "Lightning Trainer (loss logged)": lightning_logged,
    "the same LightningModule on our loop (loss logged)": torsh_lightning,
    "Hugging Face Trainer": hugging_face,
}
