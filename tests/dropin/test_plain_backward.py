"""A backward that a DeepSpeed script does not leave to the engine: run by it, or refused.

That it gives DeepSpeed's gradients is tested beside DeepSpeed, in plugins/deepspeed.
"""

from __future__ import annotations

import pytest
import torch

from torsh_trainer.comm.base import CommOptions
from torsh_trainer.dropin.negotiation.connection import StallCheck
from torsh_trainer.dropin.session import Seat, session
from torsh_trainer.dropin.zero import plain_backward, processes
from torsh_trainer.dropin.zero.starting import initialize
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, Unsupported

INPUTS = torch.arange(6.0).view(2, 3)
LR = 0.1


@pytest.fixture
def start(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "backward", plain_backward.TORCHS)
    monkeypatch.setattr(torch, "save", torch.save)
    monkeypatch.setattr(session, "_place", None)
    session.set_place(Seat(World(), CommOptions(backend="gloo"), StallCheck()))

    def make(stage=1, accumulate=1, mpu=None, **more):
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": accumulate,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "SGD", "params": {"lr": LR}},
            "zero_optimization": {"stage": stage},
            **more,
        }
        torch.manual_seed(0)
        return initialize(model=torch.nn.Linear(3, 1), config=config, mpu=mpu)[0]

    yield make
    processes.leave()


@pytest.mark.parametrize("stage", [1, 2])
def test_loss_backward_is_the_engines(start, stage):
    engine = start(stage, accumulate=2)
    before = engine.module.weight.detach().clone()
    expected = torch.nn.Linear(3, 1)
    expected.load_state_dict(engine.module.state_dict())
    for inputs in (INPUTS, 2 * INPUTS):
        engine(inputs).square().mean().backward()
        engine.step()
        (expected(inputs).square().mean() / 2).backward()
    moved = before - engine.module.weight.detach()
    assert torch.allclose(moved, LR * expected.weight.grad, rtol=1e-5)
    assert engine.global_steps == 1


def test_what_no_engine_returned_is_torchs_own(start):
    engine, other = start(), torch.nn.Linear(3, 1)
    loss = engine(INPUTS).mean()
    other(INPUTS).mean().backward()
    assert other.weight.grad is not None
    assert engine.module.weight.grad is None
    loss.backward()
    assert engine.module.weight.grad is not None


@pytest.mark.parametrize(
    ("stage", "more", "words"),
    [
        (0, {}, r"loss.backward\(\) at ZeRO stage 0"),
        (1, {"fp16": {"enabled": True}}, r"loss.backward\(\) in fp16, whose loss is scaled"),
    ],
)
def test_what_deepspeed_refuses_is_refused(start, stage, more, words):
    engine = start(stage, **more)
    with pytest.raises(ConfigError, match=words):
        engine(INPUTS.half() if more else INPUTS).float().mean().backward()


def test_gradients_that_the_engine_would_not_average_are_refused(start):
    engine = start()
    with pytest.raises(ConfigError, match=r"torch\.autograd\.backward on the engine's outputs"):
        torch.autograd.backward(engine(INPUTS).mean())
    engine.zero_grad()
    engine.module(INPUTS).mean().backward()
    with pytest.raises(ConfigError, match="with gradients of another backward"):
        engine.step()


def test_gradients_of_inputs_alone_are_not(start):
    engine, inputs = start(), INPUTS.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(engine(inputs).mean(), inputs)
    assert torch.equal(gradient, engine.module.weight.detach().expand(2, 3) / 2)
    engine.backward(engine(INPUTS).mean())
    engine.step()


class Megatrons:
    def __init__(self, share: int) -> None:
        self.share = share

    def get_model_parallel_world_size(self) -> int:
        return self.share


def test_functions_of_parallelism_are_taken_where_no_model_is_cut(start):
    assert start(mpu=Megatrons(1)).train_batch_size() == 2
    for mpu in (Megatrons(2), object()):
        with pytest.raises(Unsupported, match="with mpu or mesh_param: parallelism within a model"):
            start(mpu=mpu)


@pytest.mark.parametrize("stage", [0, 1])
def test_two_backwards_for_one_step_are_summed_and_told_once_where_deepspeed_drops_one(
    start, stage, capsys
):
    engine = start(stage)
    for _ in range(2):
        engine.backward(engine(INPUTS).mean())
        engine.backward(engine(INPUTS).mean())
        engine.step()
    assert capsys.readouterr().out.count("with the last one's gradients alone") == (stage == 1)
