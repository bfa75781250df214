"""Horovod on MPI: the same training as over gloo, and Adasum as its formula says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torsh_trainer_horovod import runtime
from torsh_trainer_horovod.strategy import Horovod

from torsh_trainer.comm.base import CommOptions
from torsh_trainer.errors import ConfigError, ResourceError, Unsupported
from torsh_trainer.strategies.base import Clip
from torsh_trainer.testing import cases
from torsh_trainer.testing.compare import FP32, same_tensors
from torsh_trainer.testing.ranks import RankPool, shared_pool
from torsh_trainer.testing.reference import Scenario, TrainingOutcome
from torsh_trainer.testing.tiny import TinyData

MPI = CommOptions(backend="mpi", timeout_s=60.0, startup_timeout_s=60.0)
SCENARIO = Scenario(data=TinyData(accumulate=2))
ADASUM = Horovod(op="adasum")


def on_mpi(world_size: int) -> RankPool:
    return shared_pool(world_size, options=MPI)


def trained(comm: Any, knobs: Horovod, scenario: Scenario) -> tuple[TrainingOutcome, bool, bool]:
    """A training, and whether Horovod ran on MPI in it, and runs afterwards."""
    import horovod.torch as hvd

    with runtime.start(comm, knobs.variables):
        over_mpi = hvd.mpi_enabled() and hvd.is_initialized()
    return cases.train(comm, knobs, scenario), over_mpi, hvd.is_initialized()


def test_on_mpi_it_trains_as_over_gloo_and_ends_with_its_engine():
    (plain, over_mpi, _), *_ = shared_pool(2).run(trained, Horovod(), SCENARIO)
    assert not over_mpi
    for outcome, over_mpi, running in on_mpi(2).run(trained, Horovod(), SCENARIO):
        assert over_mpi
        assert not running
        assert outcome.losses == plain.losses
        same_tensors(outcome.parameters, plain.parameters, FP32.parameters, "parameters")


# -- adasum ----------------------------------------------------------------------------------------


def adasum(parts: list[Tensor]) -> Tensor:
    """Section 3 of Maleki et al. 2020 (arXiv:2006.02924), as it stands there."""
    if len(parts) == 1:
        return parts[0].double()
    middle = len(parts) // 2
    a, b = adasum(parts[:middle]), adasum(parts[middle:])
    dot = (a * b).sum()
    shares = [torch.zeros(()) if not v.any() else dot / (2 * (v * v).sum()) for v in (a, b)]
    return (1 - shares[0]) * a + (1 - shares[1]) * b


def combined(scenario: Scenario, ranks: int) -> dict[str, Tensor]:
    """Plain PyTorch: each rank's step from the same parameters, which move by their Adasum."""
    task = scenario.task
    model = task.build_model()
    (optimizer,) = task.build_optimizers(model.named_parameters()).values()
    for number in range(scenario.data.steps):
        before = [p.detach().clone() for p in model.parameters()]
        moves = []
        for micros in scenario.data.step(number, ranks):
            model.zero_grad()
            for batch, *_ in micros:
                (task.loss(model(batch["tokens"]), batch) / len(micros)).backward()
            optimizer.step()
            moves.append([p.detach() - b for p, b in zip(model.parameters(), before, strict=True)])
            put(model, before)
        put(
            model,
            [b + adasum(list(m)) for b, m in zip(before, zip(*moves, strict=True), strict=True)],
        )
    return {name: p.detach() for name, p in model.state_dict().items()}


def put(model: torch.nn.Module, values: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)


@pytest.mark.parametrize("ranks", [2, 4])
def test_adasum_is_its_formula(ranks):
    expected = combined(SCENARIO, ranks)
    for outcome in on_mpi(ranks).run(cases.train, ADASUM, SCENARIO):
        same_tensors(outcome.parameters, expected, FP32.parameters, "parameters")
    mean, *_ = shared_pool(ranks).run(cases.train, Horovod(), SCENARIO)
    with pytest.raises(AssertionError, match="parameters"):
        same_tensors(mean.parameters, expected, FP32.parameters, "parameters")


def script(comm: Any, scenario: Scenario) -> dict[str, Tensor]:
    """What a user of Horovod writes."""
    with runtime.start(comm, {}) as hvd:
        task = scenario.task
        model = task.build_model()
        (optimizer,) = task.build_optimizers(model.named_parameters()).values()
        named = list(model.named_parameters())
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, op=hvd.Adasum)
        for number in range(scenario.data.steps):
            optimizer.zero_grad()
            (micro,) = scenario.data.step(number, hvd.size())[hvd.rank()]
            task.loss(model(micro.batch["tokens"]), micro.batch).backward()
            optimizer.step()
        return {name: p.detach() for name, p in model.state_dict().items()}


def test_and_what_a_script_of_plain_horovod_gives():
    scenario = Scenario()
    ours = on_mpi(2).run(cases.train, ADASUM, scenario)
    for mine, theirs in zip(ours, on_mpi(2).run(script, scenario), strict=True):
        same_tensors(mine.parameters, theirs, FP32.parameters, "parameters")


def test_a_state_carries_adasum_into_a_fresh_engine():
    for went_on, resumed in on_mpi(2).run(cases.resume, ADASUM, SCENARIO):
        assert resumed.losses[-1] == went_on.losses[-1]
        same_tensors(resumed.parameters, went_on.parameters, 0.0, "parameters")


def refused(comm: Any, scenario: Scenario, *, built: bool = True) -> str:
    import horovod.torch as hvd

    held = hvd.mpi_built
    if not built:
        hvd.mpi_built = lambda: False
    try:
        cases.Driver(comm, ADASUM, scenario)
    except (ConfigError, ResourceError, Unsupported) as error:
        return str(error)
    finally:
        hvd.mpi_built = held
    return ""


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        (Scenario(optimizer="adamw"), "op=adasum with AdamW that keeps state"),
        (replace(SCENARIO, clip=Clip(norm=1.0)), "op=adasum with trainer.max_grad_norm"),
    ],
    ids=["state", "clip"],
)
def test_what_needs_everybodys_gradient_or_one_state_is_refused(scenario, words):
    for said in on_mpi(2).run(refused, scenario):
        assert f"strategy=horovod cannot honour {words}" in said


def test_adasum_without_mpi_names_what_it_needs():
    for said in shared_pool(2).run(refused, SCENARIO):
        assert said.endswith("Horovod has it on MPI; add launcher=mpi comm=mpi")
    for said in shared_pool(2).run(lambda comm: refused(comm, SCENARIO, built=False)):
        assert said.endswith("python -m torsh_trainer_horovod.build --mpi")


@pytest.mark.parametrize("knob", ["groups", "sparse_as_dense", "find_unused_parameters"])
def test_a_knob_that_adasum_does_not_have_is_refused(knob):
    with pytest.raises(ConfigError, match=f"strategy.{knob} does nothing with strategy.op=adasum"):
        Horovod(op="adasum", **{knob: 1})
