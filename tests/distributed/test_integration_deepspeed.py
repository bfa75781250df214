"""A DeepSpeed configuration in a script's own loop, beside the same loop on plain FSDP2."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn import functional as F

from torsh_trainer import DeepSpeedConfig, DeepSpeedIntegration, FullyShardedDataParallel
from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError, Unsupported
from torsh_trainer.optim.optimizers import OptimizerSpec
from torsh_trainer.optim.schedule.deepspeed import DeepSpeedWarmup
from torsh_trainer.strategies.base import BatchPlan, Job, MicroBatch
from torsh_trainer.tasks.base import Task
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.verify.subject import LENGTH, VOCABULARY, SubjectModel

RANKS, STEPS, SAMPLES = 2, 3, 4

GUIDE = """\
{
  "zero_optimization": {
    "stage": 3,
    "allgather_bucket_size": 200000000,
    "reduce_bucket_size": 200000000,
    "overlap_comm": true,
    "contiguous_gradients": true,
    "stage3_max_live_parameters": 1000000000,
    "stage3_max_reuse_distance": 1000,
    "stage3_prefetch_bucket_size": 500000000,
    "offload_optimizer": {"device": "cpu"},
    "offload_param": {"device": "cpu"}
  },
  "gradient_clipping": 1.0,
  "gradient_accumulation_steps": 4,
  "fp16": {
    "enabled": true,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1
  }
}
"""
"""A file of the setup guide: neither a batch size nor an optimizer, which are the script's."""

WHOLE = {
    "train_micro_batch_size_per_gpu": SAMPLES,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 2},
    "gradient_clipping": 0.1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.01}},
    "data_types": {"grad_accum_dtype": "fp32"},
}


class Curve(NamedTuple):
    losses: list[float]
    rates: list[float]
    parameters: dict[str, torch.Tensor]  # whole, after the last step


def model_of() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SubjectModel(batch_norm=False)
    del model.unused  # what no loss reaches is another test's
    return model


def batch_of(comm: Communicator, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number * comm.world.size + comm.world.rank)
    tokens = torch.randint(VOCABULARY, (2, SAMPLES, LENGTH), generator=generator)
    return tokens[0], tokens[1]


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1].flatten())


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("module."): p.detach().full_tensor().cpu()  # type: ignore[attr-defined]
        for name, p in model.named_parameters()
    }


def as_configured(comm: Communicator, config: DeepSpeedConfig, by_hand: bool) -> Curve:
    """The script: forward, ``backward``, ``step``, as under DeepSpeed's engine."""
    integration = DeepSpeedIntegration(config)
    integration.initialize(comm.world.rank, comm.world.size)
    make = (lambda parameters: torch.optim.SGD(parameters, lr=0.5)) if by_hand else None
    model = FullyShardedDataParallel(model_of(), integration.to_fsdp_config(), optimizer=make)
    losses, rates = [], []
    for number in range(STEPS * model.config.accumulate):
        loss = loss_of(model, batch_of(comm, number))
        model.backward(loss)
        if model.step() is not None:
            assert model.optimizer is not None
            rates.append(model.optimizer.param_groups[0]["lr"])
        losses.append(float(loss))
    assert model.updates == STEPS
    return Curve(losses, rates, whole(model))


def plain_fsdp2(comm: Communicator, how: Mapping[str, Any]) -> Curve:
    """The same, written out with nothing but torch."""
    model = model_of()
    dtype = how["dtype"]
    offload: Any = CPUOffloadPolicy(pin_memory=False) if how["offload"] else OffloadPolicy()
    common = {
        "mesh": init_device_mesh("cpu", (comm.world.size,)),
        "reshard_after_forward": how["reshard"],
        "offload_policy": offload,
    }
    low = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mp_policy=low, **common)  # type: ignore[arg-type]
    root = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype and torch.float32
    )
    fully_shard(model, mp_policy=root, **common)
    optimizer = how["optimizer"](model.parameters())
    base = optimizer.param_groups[0]["lr"]
    losses, rates = [], []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = base * how["factor"](step)
        rates.append(optimizer.param_groups[0]["lr"])
        for k in range(how["accumulate"]):
            loss = loss_of(model, batch_of(comm, step * how["accumulate"] + k))
            (loss / how["accumulate"] * how["scale"]).backward()
            losses.append(float(loss))
        for parameter in model.parameters():
            parameter.grad /= how["scale"]
            assert torch.isfinite(parameter.grad.to_local()).all()  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(model.parameters(), how["clip"])
        optimizer.step()
        optimizer.zero_grad()
    return Curve(losses, rates, whole(model))


def furthest(ones: list[Curve], others: list[Curve]) -> float:
    """The largest difference of a loss or a parameter, relative to its largest element."""
    pairs = list(zip(ones, others, strict=True))
    apart = [
        float((mine.parameters[name] - value).abs().max() / value.abs().max())
        for mine, theirs in pairs
        for name, value in theirs.parameters.items()
    ]
    losses = torch.tensor([[a.losses, b.losses] for a, b in pairs], dtype=torch.double)
    assert all(a.rates == pytest.approx(b.rates, rel=1e-12) for a, b in pairs)
    return max(*apart, float((losses[:, 0] - losses[:, 1]).abs().max()))


def test_the_file_of_the_guide_trains_as_plain_fsdp2_does(tmp_path):
    path = tmp_path / "deepspeed_config.json"
    path.write_text(GUIDE)
    config = DeepSpeedConfig.from_file(path, mode="clean")
    how = {
        "dtype": torch.float16,
        "reshard": True,
        "offload": True,
        "accumulate": 4,
        "scale": 2.0**16,
        "clip": 1.0,
        "factor": lambda step: 1.0,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    }
    mine = shared_pool(RANKS).run(as_configured, config, True)
    theirs = shared_pool(RANKS).run(plain_fsdp2, how)
    assert furthest(mine, theirs) <= 1e-6
    # The bound tells something: half precision is further from fp32 than that.
    fp32 = shared_pool(RANKS).run(plain_fsdp2, {**how, "dtype": None, "scale": 1.0})
    assert furthest(theirs, fp32) > 1e-5


def test_optimizer_schedule_clipping_and_accumulation_are_the_files(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(WHOLE))
    schedule = DeepSpeedWarmup(warmup_steps=4)
    how = {
        "dtype": None,
        "reshard": False,
        "offload": False,
        "accumulate": 2,
        "scale": 1.0,
        "clip": 0.1,
        "factor": lambda step: schedule.factor(step, None),
        "optimizer": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.01, fused=False),
    }
    mine = shared_pool(RANKS).run(as_configured, DeepSpeedConfig.from_file(path), False)
    theirs = shared_pool(RANKS).run(plain_fsdp2, how)
    assert furthest(mine, theirs) <= 1e-5
    unclipped = shared_pool(RANKS).run(
        plain_fsdp2, {**how, "factor": lambda step: 1.0, "clip": 1e9}
    )
    with pytest.raises(AssertionError):
        furthest(mine, unclipped)  # the rates are others


class _Script(Task):
    """The script's model and loss, for the engine that the loop of a trainer drives."""

    def __init__(self, optimizer: OptimizerSpec) -> None:
        self.optimizer = optimizer

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(outputs.float(), batch[1].flatten())


def driven_by_a_trainer(comm: Communicator, config: DeepSpeedConfig, held: bool) -> Curve:
    """What the recipe of the same file trains; ``held`` False leaves out one rounding of it."""
    said = DeepSpeedIntegration(config).to_fsdp_config()
    assert said.optimizer is not None
    assert said.precision.gradients == "bf16"
    precision = said.precision if held else replace(said.precision, gradients="fp32")
    task, size = _Script(said.optimizer), said.accumulate * SAMPLES * comm.world.size
    job = Job(
        task=task,
        build_model=model_of,
        batch=BatchPlan(size, SAMPLES, said.accumulate, comm.world.size),
        precision=precision,
        clip=said.clip,
        skip_nonfinite=said.skip_nonfinite,
    )
    engine = said.strategy.prepare(job, comm)
    losses = []
    for step in range(STEPS):
        engine.zero_grad()
        places = [step * said.accumulate + k for k in range(said.accumulate)]
        micros = [MicroBatch(batch_of(comm, place), float(SAMPLES), None) for place in places]
        report = engine.forward_backward(micros, float(size), task)
        engine.step(said.clip)
        losses += [float(loss) for loss, _ in report.parts]
    rates = [engine.optimizers["main"].param_groups[0]["lr"]] * STEPS
    return Curve(losses, rates, whole(engine.model))


def test_in_bf16_the_loop_of_a_script_rounds_where_the_recipes_loop_rounds():
    values = {key: value for key, value in WHOLE.items() if key not in ("scheduler", "data_types")}
    config = DeepSpeedConfig.from_dict({**values, "bf16": {"enabled": True}})
    mine = shared_pool(RANKS).run(as_configured, config, False)
    theirs = shared_pool(RANKS).run(driven_by_a_trainer, config, True)
    assert furthest(mine, theirs) == 0
    assert furthest(mine, shared_pool(RANKS).run(driven_by_a_trainer, config, False)) > 0


def test_gradients_that_overflow_leave_the_parameters_alone_and_then_lower_the_scale():
    values = json.loads(GUIDE)
    values["fp16"] |= {"initial_scale_power": 40, "hysteresis": 1}

    def overflowing(comm: Communicator, config: DeepSpeedConfig) -> tuple[bool, int, float]:
        integration = DeepSpeedIntegration(config)
        model = FullyShardedDataParallel(
            model_of(),
            integration.to_fsdp_config(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        )
        before = whole(model)
        for number in range(8):
            model.backward(loss_of(model, batch_of(comm, number)))
            model.step()
        after = whole(model)
        same = all(torch.equal(before[name], after[name]) for name in before)
        return same, model.updates, model.last_step()["loss_scale"]

    for same, updates, scale in shared_pool(RANKS).run(
        overflowing, DeepSpeedConfig.from_dict(values)
    ):
        assert (same, updates, scale) == (True, 0, 2.0**39)


def test_what_the_script_does_itself_is_listed_and_what_cannot_be_is_refused(tmp_path):
    config = DeepSpeedIntegration(
        DeepSpeedConfig.from_dict({**WHOLE, "steps_per_print": 7})
    ).to_fsdp_config()
    assert config.left == {"data.micro_batch_size": SAMPLES, "trainer.log_every": 7}
    assert config.plan is not None
    for changed, words in (
        ({"zero_optimization": {"stage": 1}}, "stage 1 keeps parameters whole"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type has no translation"),
        ({"train_batch_size": 16, "gradient_accumulation_steps": None}, "number of processes"),
    ):
        values = {key: value for key, value in {**WHOLE, **changed}.items() if value is not None}
        integration = DeepSpeedIntegration(DeepSpeedConfig.from_dict(values))
        with pytest.raises((Unsupported, ConfigError), match=words):
            integration.to_fsdp_config()
    with pytest.raises(ConfigError, match="this process is rank 0 of 1, not 0 of 4"):
        integration.initialize(0, 4)
    with pytest.raises(ConfigError, match="there is no group"):
        FullyShardedDataParallel(model_of(), config)


def test_a_step_without_an_optimizer_and_two_optimizers_are_errors():
    def tried(comm: Communicator) -> list[str]:
        said = []
        bare = DeepSpeedIntegration(DeepSpeedConfig.from_dict(json.loads(GUIDE))).to_fsdp_config()
        model = FullyShardedDataParallel(model_of(), bare)
        model.backward(loss_of(model, batch_of(comm, 0)))
        with pytest.raises(ConfigError) as caught:
            model.step()
        said.append(str(caught.value))
        full = DeepSpeedIntegration(DeepSpeedConfig.from_dict(WHOLE)).to_fsdp_config()
        with pytest.raises(ConfigError) as caught:
            FullyShardedDataParallel(model_of(), full, optimizer=torch.optim.SGD)
        return [*said, str(caught.value)]

    for none, two in shared_pool(RANKS).run(tried):
        assert "there is no optimizer to step" in none
        assert "leave out one of them" in two
