"""Steps of every engine on a device: beside plain PyTorch on the CPU, and without a question."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.builtin import NCCL, Gloo
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.dp import DP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.single import Single
from torsh_trainer.testing import cases, reference
from torsh_trainer.testing.compare import FP32, UB16, Tolerance, close, same_tensors
from torsh_trainer.testing.ranks import OPTIONS, shared_pool
from torsh_trainer.testing.reference import Scenario, TrainingOutcome
from torsh_trainer.testing.strategy import BF16_MIXED, FP16_MIXED
from torsh_trainer.testing.tiny import TinyData, total_weight

# Another device adds in another order and has an exp and a tanh of its own: 16 times the bound that
# another order on the same device has. In low precision autocast's list of operations is another
# on CUDA (layer norms stay fp32 there), so that activations differ by units in the last place.
OTHER_DEVICE = Tolerance(*(16 * bound for bound in FP32))
OTHER_LOW = Tolerance(first=4 * UB16, relative=8 * UB16, parameters=8 * UB16)

SEVERAL = ("ddp", "built_in", "fsdp", "fsdp_offloaded")


def strategy_of(name: str, device: str) -> Strategy:
    """``built_in`` is nccl between GPUs, and gloo, the same engine, between CPUs."""
    several: dict[str, Strategy] = {
        "single": Single(),
        "ddp": DDP(),
        "built_in": NCCL() if device == "cuda" else Gloo(),
        "fsdp": FSDP(wrap_min_bytes=0),
        "fsdp_offloaded": FSDP(cpu_offload=True),
    }
    return several[name]


def compare(outcome: TrainingOutcome, plain: TrainingOutcome, bound: Tolerance) -> None:
    assert outcome.skipped == plain.skipped
    for step, (ours, theirs) in enumerate(zip(outcome.losses, plain.losses, strict=True)):
        for mine, expected in zip(ours, theirs, strict=True):
            for one, other in zip(mine, expected, strict=True):
                close(one, other, bound.relative if step else bound.first, f"step {step}: loss")
    same_tensors(outcome.parameters, plain.parameters, bound.parameters, "parameters")
    assert outcome.loss_scale in (None, plain.loss_scale)


@pytest.mark.parametrize("name", SEVERAL)
def test_a_strategy_trains_on_a_device_what_plain_pytorch_trains_on_the_cpu(
    name: str, device: str, ranks: int
) -> None:
    scenario = Scenario(data=TinyData(accumulate=2, tokens=True), ema_decay=0.5)
    plain = reference.train(scenario, ranks)
    pool = shared_pool(ranks, device, OPTIONS)
    for outcome in pool.run(cases.train, strategy_of(name, device), scenario):
        compare(outcome, plain, OTHER_DEVICE)


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize("precision", [BF16_MIXED, FP16_MIXED], ids=["bf16", "fp16"])
def test_low_precision_is_near_the_cpu_and_skips_the_same_steps(
    name: str, precision: Any, device: str
) -> None:
    """In fp16 the loss of the second step overflows: its update is left out, the scale halved."""
    spoilt = 1 if precision.scales_loss else None
    scenario = Scenario(precision=precision, data=TinyData(steps=4, spoilt=spoilt))
    plain = reference.train(scenario, 1)
    (outcome,) = shared_pool(1, device, OPTIONS).run(
        cases.train, strategy_of(name, device), scenario
    )
    compare(outcome, plain, OTHER_LOW)
    assert outcome.skipped == [number == spoilt for number in range(4)]


def test_dp_is_plain_pytorch_on_a_gpu_and_says_that_it_is_not_for_a_cpu(device: str) -> None:
    pool = shared_pool(1, device, OPTIONS)
    if device == "cuda":
        (outcome,) = pool.run(cases.train, DP(device_ids=(0,)), Scenario())
        compare(outcome, reference.train(Scenario(), 1), OTHER_DEVICE)
        return
    with pytest.raises(AssertionError, match=f"{ConfigError.__name__}.*strategy=ddp"):
        pool.run(cases.train, DP(), Scenario())


@pytest.mark.gpus(2)
def test_dp_cuts_a_micro_batch_over_two_gpus() -> None:
    scenario = Scenario(data=TinyData(samples=4))
    (outcome,) = shared_pool(1, "cuda", OPTIONS).run(cases.train, DP(device_ids=(0, 1)), scenario)
    compare(outcome, reference.train(scenario, 1), OTHER_DEVICE)


# -- a step asks the device nothing --------------------------------------------------------------


READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class Reads(TorchDispatchMode):
    """Where values of tensors are read on the host.

    Two do not count, of tensors that lie on the host beside any device: torch's optimizers read
    their step counters, and DDP how many ranks it was told (``strategies/sums.py``), of shape (1,).
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operation in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
        ):
            frames = traceback.extract_stack()[:-1]
            by_optimizer = any("torch/optim/" in frame.filename for frame in frames)
            if not by_optimizer and args[0].shape != (1,):
                self.seen.append("".join(traceback.format_list(frames[-4:])))
        return operation(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_questions(device: str) -> Iterator[None]:
    """On CUDA torch itself raises where the host would wait; a CPU has nothing to wait for, so
    that all reads are found which would make it wait on another device."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    with Reads() as reads:
        yield
    assert not reads.seen, "\n".join(reads.seen)


def step_unasked(comm: Communicator, strategy: Strategy, scenario: Scenario) -> bool:
    """Two steps, so that all is allocated, then one under ``no_questions``; its update is whole."""
    driver = cases.Driver(comm, strategy, scenario)
    for number in range(2):
        driver.step(number, TrainingOutcome())
    engine = driver.engine
    micro_batches = driver.micro_batches(2)
    total = total_weight(scenario.data.step(2, driver.mesh.dp))
    with no_questions(comm.device.type):
        engine.zero_grad()
        engine.forward_backward(micro_batches, total, driver.task)
        engine.step(scenario.clip)
    return all(torch.isfinite(p.detach()).all() for p in engine.model.parameters())


@pytest.mark.parametrize("name", ["single", "ddp", "built_in", "fsdp"])
def test_a_step_in_bf16_with_clipping_accumulation_and_an_average_asks_nothing(
    name: str, device: str, ranks: int
) -> None:
    if name == "single" and ranks > 1:
        name = "ddp"  # single is one process
    scenario = Scenario(
        optimizer="adamw",
        precision=BF16_MIXED,
        clip=replace(Scenario().clip, norm=0.5),
        ema_decay=0.9,
        data=TinyData(accumulate=2),
    )
    done = shared_pool(ranks, device, OPTIONS).run(
        step_unasked, strategy_of(name, device), scenario
    )
    assert done == [True] * ranks


def test_the_watch_sees_a_question(device: str) -> None:
    value = torch.ones((), device=device)
    with pytest.raises((RuntimeError, AssertionError)), no_questions(device):
        float(value)
