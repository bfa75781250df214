"""Blocks that FSDP gathers together, since each alone is small: what is merged, and that it trains
as it did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.merging import Unit, merge_small, units_in_words
from torsh_trainer.strategies.units import units_of
from torsh_trainer.testing import reference
from torsh_trainer.testing.cases import Driver
from torsh_trainer.testing.compare import FP32, same_tensors
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.reference import Scenario, TrainingOutcome
from torsh_trainer.testing.tiny import VOCABULARY, WIDTH, TinyData, TinyTask

BLOCK = 4 * (WIDTH * WIDTH + WIDTH)
"""Bytes of one Linear below."""


class Stack(nn.Module):
    """Layers of which the loss takes the output of the first alone, or of all in a row."""

    def __init__(self, layers: int, *, in_a_row: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.in_a_row = in_a_row

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        if self.in_a_row:
            for layer in self.layers:
                hidden = F.gelu(layer(hidden))
        else:
            hidden, *_ = [F.gelu(layer(hidden)) for layer in self.layers]
        logits: Tensor = self.head(hidden)
        return logits


class StackTask(TinyTask):
    def __init__(self, layers: int = 5, *, in_a_row: bool = True, wide: int | None = None) -> None:
        super().__init__()
        self.layers, self.in_a_row, self.wide = layers, in_a_row, wide

    def build_model(self) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = Stack(self.layers, in_a_row=self.in_a_row)
            if self.wide is not None:
                model.layers[self.wide].to(torch.bfloat16)
            return model


def layout(comm: Communicator, knobs: FSDP, task: StackTask) -> tuple[str, int]:
    """How the engine says that it is cut, and how many units FSDP2 has."""
    scenario = Scenario(data=TinyData())
    engine = Driver(comm, knobs, scenario, task=task).engine
    found = engine.layout(), len(units_of(engine.model))
    engine.close()
    return found


@pytest.mark.parametrize(
    ("knobs", "layers", "units"),
    [
        (FSDP(), 5, 2),
        (FSDP(wrap_min_bytes=0), 5, 6),
        (FSDP(wrap_min_bytes=2 * BLOCK), 4, 3),
        (FSDP(wrap_min_bytes=2 * BLOCK), 5, 4),
        (FSDP(wrap_min_bytes=2 * BLOCK + 1), 6, 3),
        (FSDP(wrap_modules=("Linear",)), 5, 7),
    ],
    ids=["default", "each", "pairs", "pairs and one", "triples", "named"],
)
def test_neighbours_are_one_unit_until_they_have_the_bytes(
    knobs: FSDP, layers: int, units: int
) -> None:
    said, found = shared_pool(2).run(layout, knobs, StackTask(layers))[0]
    assert found == units
    assert said.startswith(f"sharded in {units} units: ")


def test_the_layout_names_what_is_together() -> None:
    said, _ = shared_pool(2).run(layout, FSDP(wrap_min_bytes=2 * BLOCK), StackTask(5))[0]
    assert said == (
        "sharded in 4 units: 2 x 2 Linear of 0.0 MiB, 1 x 1 Linear of 0.0 MiB, the rest of 0.0 MiB"
    )


def test_blocks_that_train_in_other_dtypes_stay_apart() -> None:
    task = StackTask(4, wide=1)
    said, units = shared_pool(2).run(layout, FSDP(), task)[0]
    assert units == 4
    assert said.startswith("sharded in 4 units: 2 x 1 Linear of 0.0 MiB, 1 x 2 Linear")


def test_a_model_of_blocks_alone_is_one_unit() -> None:
    layers = [nn.Linear(512, 512) for _ in range(3)]
    root = nn.Sequential(*layers)
    blocks = [Unit((layer,), tuple(layer.parameters())) for layer in layers]
    merged = merge_small(blocks, [root], least=2**23)
    assert (
        units_in_words(merged, [Unit((root,), ())]) == "sharded in 1 unit: 1 x 3 Linear of 3.0 MiB"
    )


def lonely(comm: Communicator, knobs: FSDP) -> dict[str, Tensor]:
    """Trains where a block is called by itself before each step, outside of the model's forward."""
    driver = Driver(comm, knobs, Scenario(data=TinyData(steps=4)), task=StackTask(5))
    outcome = TrainingOutcome()

    def look() -> None:
        with torch.no_grad():
            driver.engine.model.layers[1](torch.ones(2, WIDTH))

    for step in range(4):
        look()
        driver.step(step, outcome)
    return driver.finish(outcome).parameters


@pytest.mark.parametrize("frees", [True, False])
def test_a_block_of_a_merged_unit_can_be_called_by_itself(frees: bool) -> None:
    expected = reference.train(Scenario(data=TinyData(steps=4)), 2, task=StackTask(5)).parameters
    knobs = FSDP(wrap_min_bytes=3 * BLOCK, reshard_after_forward=frees)
    for found in shared_pool(2).run(lonely, knobs):
        same_tensors(found, expected, FP32.parameters, "parameters")


def parameters(comm: Communicator, knobs: FSDP, task: StackTask) -> dict[str, Tensor]:
    driver = Driver(comm, knobs, Scenario(data=TinyData(steps=4, accumulate=2)), task=task)
    outcome = TrainingOutcome()
    for step in range(4):
        driver.step(step, outcome)
    return driver.finish(outcome).parameters


@pytest.mark.parametrize("in_a_row", [True, False])
@pytest.mark.parametrize("least", [0, 2 * BLOCK, 3 * BLOCK, 2**30])
def test_merged_blocks_equal_plain_pytorch(least: int, in_a_row: bool) -> None:
    task = StackTask(5, in_a_row=in_a_row)
    expected = reference.train(
        Scenario(data=TinyData(steps=4, accumulate=2)), 2, task=task
    ).parameters
    for found in shared_pool(2).run(parameters, FSDP(wrap_min_bytes=least), task):
        same_tensors(found, expected, FP32.parameters, "parameters")


def test_a_run_goes_on_with_other_units(warm_door: Any, tmp_path: Path) -> None:
    def losses(folder: str, steps: int, *overrides: str) -> list[float]:
        words = ["+recipe=digits", "strategy=fsdp", "trainer.stages=[fit]", "trainer.log_every=1"]
        words += [f"trainer.max_steps={steps}", "schedule=constant"]
        words += ["schedule.warmup_ratio=null", f"hydra.run.dir={folder}"]
        done = warm_door([*words, *overrides], processes=2, timeout_s=240)
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [row["loss"] for row in map(json.loads, lines) if row["split"] == "train"]

    whole = losses("whole", 6)
    losses("parts", 3, "strategy.wrap_min_bytes=0")
    assert losses("parts", 6) == pytest.approx(whole, rel=1e-6)


def test_fewer_bytes_than_none_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"strategy\.wrap_min_bytes=-1 is below 0"):
        FSDP(wrap_min_bytes=-1)
