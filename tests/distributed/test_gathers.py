"""What a step under FSDP gathers and copies, no more than it has to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError
from torsh_trainer.optim.precision import Precision
from torsh_trainer.strategies.base import Clip
from torsh_trainer.strategies.clipping import local_norm
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.gathering import find_rounded_by_autocast
from torsh_trainer.strategies.units import units_of
from torsh_trainer.testing.cases import Driver
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.reference import Scenario, TrainingOutcome
from torsh_trainer.testing.tiny import VOCABULARY, WIDTH, TinyData, TinyTask


class Counted(TorchDispatchMode):
    """Counts operations of one name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.count = name, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += self.name in str(func)
        return func(*args, **(kwargs or {}))


def gathers_of_a_step(comm: Communicator, knobs: FSDP, accumulate: int) -> tuple[int, int]:
    """All-gathers of the second step, and the number of units."""
    driver = Driver(comm, knobs, Scenario(data=TinyData(steps=2, accumulate=accumulate)))
    driver.step(0, TrainingOutcome())
    with Counted("_allgather_base_") as counted:
        driver.step(1, TrainingOutcome())
    units = len(units_of(driver.engine.model))
    driver.engine.close()
    return counted.count, units


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_step_gathers_once_where_parameters_stay_whole_after_the_forward(accumulate: int) -> None:
    knobs = FSDP(reshard_after_forward=False, wrap_min_bytes=0)
    for gathers, units in shared_pool(2).run(gathers_of_a_step, knobs, accumulate):
        assert gathers == units > 1


def test_the_norm_of_gradients_on_the_host_is_one_copy_to_the_device() -> None:
    gradients = [torch.full((3, size), 2.0) for size in range(1, 9)]
    with Counted("_to_copy") as copies:
        assert local_norm(gradients, torch.device("meta")).is_meta
    assert copies.count == 1
    expected = torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients]))
    assert local_norm(gradients, torch.device("cpu")) == pytest.approx(float(expected))


LOW = Precision(compute="bf16")


class Heads(nn.Module):
    """Layers that autocast rounds, alone and beside others, and one that is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.between = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits: Tensor = self.head(self.between(self.norm(hidden)))
        return logits


class HeadsTask(TinyTask):
    def build_model(self) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Heads()


def trained(
    comm: Communicator, knobs: FSDP, precision: Precision
) -> tuple[TrainingOutcome, int, set[str]]:
    """All steps, the bytes that the last one gathered, and what FSDP2 gathers in a low dtype."""
    scenario = Scenario(
        data=TinyData(steps=3, accumulate=2), precision=precision, clip=Clip(norm=0.1)
    )
    driver = Driver(comm, knobs, scenario, task=HeadsTask())
    outcome = TrainingOutcome()
    for number in range(scenario.data.steps):
        with GatheredBytes() as gathered:
            driver.step(number, outcome)
    low = {
        part._param_fqn
        for unit in units_of(driver.engine.model)
        for part in unit.fsdp_params
        if part.unsharded_param.dtype is torch.bfloat16
    }
    return driver.finish(outcome), gathered.nbytes, low


class GatheredBytes(TorchDispatchMode):
    """Adds up what all-gathers bring."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_allgather_base_" in str(func):
            self.nbytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "knobs",
    [
        FSDP(wrap_min_bytes=0),
        FSDP(reshard_after_forward=False, reduce_every_micro_batch=True),
        FSDP(wrap_min_bytes=0, cpu_offload=True),
    ],
    ids=["units", "one unit, reduced each time", "units on the host"],
)
def test_weights_that_travel_as_autocast_rounds_them_train_the_same_bit_for_bit(
    knobs: FSDP,
) -> None:
    low = replace(knobs, gather_in_compute_dtype=True)
    for wide, narrow in zip(
        shared_pool(2).run(trained, knobs, LOW), shared_pool(2).run(trained, low, LOW), strict=True
    ):
        for name, value in wide[0].parameters.items():
            assert torch.equal(narrow[0].parameters[name], value), name
        assert narrow[0].losses == wide[0].losses
        assert wide[2] == set()
        assert {name.rpartition(".")[0] for name in narrow[2]} == {
            "between", "blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2", "head"
        }  # fmt: skip
        assert "head.weight" not in narrow[2]
        assert narrow[1] < 0.7 * wide[1]


def test_in_fp32_the_knob_changes_nothing() -> None:
    knobs = FSDP(wrap_min_bytes=0, gather_in_compute_dtype=True)
    assert {
        name for found in shared_pool(2).run(trained, knobs, Precision()) for name in found[2]
    } == (set())


def test_what_others_read_or_hooks_see_travels_whole() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), Own(2, 2), nn.Linear(2, 2))
    model[1].forward = torch.relu
    model[3].bias.register_hook(lambda gradient: gradient)
    assert find_rounded_by_autocast(model) == {"0.weight", "0.bias", "3.weight"}


def test_it_is_refused_beside_find_unused_parameters() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        FSDP(gather_in_compute_dtype=True, find_unused_parameters=True)
