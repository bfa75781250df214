"""Whole runs on a device: loaders, weights, compilation, checkpoints across devices, failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torsh_trainer import (
    Callback,
    CheckpointOptions,
    DataSource,
    Loading,
    OptimizerSpec,
    Task,
    Trainer,
)
from torsh_trainer.callbacks.base import StepReport
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError
from torsh_trainer.optim.precision import Precision
from torsh_trainer.testing.ranks import RankFailure, RankPool
from torsh_trainer.training import compilation
from torsh_trainer.training.trainer import run_in

VOCABULARY, LENGTH, COUNT, BATCH, PADDING = 13, 6, 24, 8, -100
OTHER_DEVICE = 1e-4
"""How far losses of two devices may be apart, relative, after a few steps of AdamW."""


class Sentences(torch.utils.data.Dataset[Any]):
    """Sentences of several lengths, padded."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(VOCABULARY, (COUNT, LENGTH), generator=generator)
        lengths = torch.randint(1, LENGTH + 1, (COUNT, 1), generator=generator)
        after = (self.tokens * 3 + 1) % VOCABULARY
        self.targets = after.masked_fill(torch.arange(LENGTH) >= lengths, PADDING)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self.tokens[index], "targets": self.targets[index]}


class Source(DataSource):
    train = Sentences()


class Counted(Task):
    """A mean over the tokens that count: batches weigh what they hold."""

    data = Source()
    optimizer = OptimizerSpec("AdamW", lr=0.01)
    sample_weight = None
    unit = "tokens"

    def build_model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return nn.Sequential(
                nn.Embedding(VOCABULARY, 16),
                nn.Linear(16, 32),
                nn.GELU(),
                nn.Linear(32, VOCABULARY),
            )

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch["tokens"])

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        assert outputs.device == batch["targets"].device, "the batch is elsewhere"
        return F.cross_entropy(outputs.flatten(0, 1), batch["targets"].flatten())

    def weight(self, batch: Any) -> float:
        return float((batch["targets"] != PADDING).sum())


class FailsOnTheLastRank(Counted):
    """Raises in its third forward, on the rank that it is told."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls = 0

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        self.calls += 1
        if self.calls == 3 and int(torch.distributed.get_rank()) == self.rank:
            raise ValueError("the milk is spilt")
        return super().loss(outputs, batch)


class Losses(Callback):
    """The loss of each step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step(self, report: StepReport) -> None:
        self.seen.append((report.metrics or {})["loss"])


def trainer(folder: Path, device: str, **options: Any) -> Trainer:
    given = {
        "task": Counted(),
        "strategy": "single",
        "loading": Loading(batch_size=BATCH, shuffle=False),
        "checkpoint": CheckpointOptions(at_end=False, resume="never"),
        "max_steps": 6,
        "max_grad_norm": 1.0,
        "precision": Precision(),  # fp32 on a GPU too, where a run by default computes in bf16
        **options,
    }
    return Trainer(
        run_dir=folder,
        device=device,
        default_callbacks=False,
        log_every=1,
        eval_every_epochs=None,
        log_level="error",
        **given,
    )


def losses_of(folder: Path, device: str, **options: Any) -> list[float]:
    seen = Losses()
    trainer(folder, device, callbacks=[seen], **options).fit()
    return seen.seen


def plain_losses(steps: int) -> list[float]:
    """The same in plain PyTorch on the CPU, a whole batch at a time."""
    task = Counted()
    model = task.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data, losses = Sentences(), []
    for step in range(steps):
        first = step * BATCH % COUNT
        tokens, targets = (t[first : first + BATCH] for t in (data.tokens, data.targets))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def near(values: list[float]) -> Any:
    return pytest.approx(values, rel=OTHER_DEVICE)


def test_counted_weights_are_those_of_plain_pytorch_on_the_cpu(tmp_path: Path, device: str) -> None:
    """Two micro-batches of a batch hold other numbers of tokens: a mean of means would show."""
    loading = Loading(batch_size=BATCH, micro_batch_size=BATCH // 2, shuffle=False)
    assert losses_of(tmp_path, device, loading=loading) == near(plain_losses(6))


def test_loaders_with_workers_and_pinned_memory_give_what_the_loop_itself_loads(
    tmp_path: Path, device: str
) -> None:
    """``pin_memory=null`` pins on CUDA alone, where it is also asked for by its name."""
    plain = losses_of(tmp_path / "in the loop", device)
    pins = {"cpu": (None, False), "cuda": (None, True, False)}[device]
    for pinned in pins:
        loading = Loading(batch_size=BATCH, shuffle=False, num_workers=2, pin_memory=pinned)
        assert losses_of(tmp_path / f"{pinned}", device, loading=loading) == plain


def test_compilation_changes_nothing_but_rounding(tmp_path: Path, device: str) -> None:
    """With the compiler for GPUs there; on a CPU, where that would take a minute, without code."""
    options = {} if device == "cuda" else {"backend": "aot_eager"}
    compiled = losses_of(tmp_path / "compiled", device, compile=True, compile_options=options)
    assert compiled == near(losses_of(tmp_path / "eager", device))


def test_auto_measures_on_a_device_and_changes_nothing_but_rounding(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "LEAST", 1)
    monkeypatch.setattr(compilation, "WORTH_TRYING_S", 0.0)
    options = {} if device == "cuda" else {"backend": "aot_eager"}
    found = trainer(tmp_path / "auto", device, compile="auto", compile_options=options).fit()
    if device == "cpu":
        assert "compile" not in found.content
        return
    measured = found.content["compile"]
    assert measured["eager_s"] > 0
    assert measured["compiled_s"] > 0
    eager = trainer(tmp_path / "eager", device, compile=False).fit()
    assert [found.content["train_loss"]] == near([eager.content["train_loss"]])


def test_cuda_graphs_and_accumulation_are_refused_or_right(tmp_path: Path, device: str) -> None:
    """What a graph leaves in its pool must not be somebody's gradient when it is replayed."""
    loading = Loading(batch_size=BATCH, micro_batch_size=BATCH // 2, shuffle=False)
    eager = losses_of(tmp_path / "eager", device, loading=loading)
    options = {"compile": True, "compile_options": {"mode": "reduce-overhead"}}
    refused, graphs = "", eager
    try:
        graphs = losses_of(tmp_path / "graphs", device, loading=loading, **options)
    except ConfigError as error:
        refused = str(error)
    assert graphs == near(eager)
    assert not refused or "reduce-overhead" in refused


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("cpu", "cpu"),
        pytest.param("cuda", "cuda", marks=pytest.mark.gpu),
        pytest.param("cuda", "cpu", marks=pytest.mark.gpu),
        pytest.param("cpu", "cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_a_run_saved_in_the_background_goes_on_on_another_device(
    tmp_path: Path, before: str, after: str, strategy: str
) -> None:
    saving = CheckpointOptions(every_steps=3, mode="async", resume="auto", at_end=False)
    here = {"checkpoint": saving, "strategy": strategy}
    first = losses_of(tmp_path, before, max_steps=3, **here)
    rest = losses_of(tmp_path, after, max_steps=6, **here)
    assert len(rest) == 3, "it did not begin where the other has stopped"
    assert first + rest == near(plain_losses(6))


def test_a_rank_that_raises_ends_with_its_words(tmp_path: Path, device: str, ranks: int) -> None:
    """The others sit in a collective that it will never join; it waits for none of them."""
    failing = trainer(
        tmp_path, device, task=FailsOnTheLastRank(ranks - 1), strategy="ddp", max_steps=20
    )
    with (
        RankPool(ranks, join=False, grace_s=1.0) as pool,
        pytest.raises(RankFailure) as failure,
    ):
        pool.run(run_one, failing, timeout_s=240)
    assert f"rank {ranks - 1} raised" in str(failure.value)
    assert "the milk is spilt" in str(failure.value)


def run_one(world: World, made: Trainer) -> None:
    run_in(world, made)
