"""What ``translate --mode exact`` makes of a configuration, trained beside the real engine.

Both start from the same weights and see the same samples. In bf16 and fp16 the losses are the same
to the last bit, and so are the fp32 masters after plain SGD; after Adam with clipping the masters
are a rounding of fp32 apart, since the norm is summed up in another order. A
parameter that no forward reaches stays where it is; DeepSpeed updates it as if its gradient were 0.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torsh_trainer_deepspeed.original import Original

from torsh_trainer import registry
from torsh_trainer.comm.base import Communicator
from torsh_trainer.optimizers import OptimizerSpec
from torsh_trainer.precision import LossScaling, Precision
from torsh_trainer.strategies.base import BatchPlan, Clip, Job, MicroBatch, Strategy
from torsh_trainer.testing.ranks import shared
from torsh_trainer.testing.state import whole_state
from torsh_trainer.translate.deepspeed.source import Options
from torsh_trainer.translate.deepspeed.translator import filled, translate
from torsh_trainer.verify.subject import LENGTH, VOCABULARY, Subject

SAMPLES, STEPS = 3, 5
START_S = 400.0  # importing DeepSpeed on a busy machine

FP32_BOUND = 1e-6
"""Relative to the largest element: 16 units in the last place."""


@dataclass(frozen=True)
class Run:
    """What one of the two sides is told."""

    strategy: Strategy
    accumulate: int
    batch_norm: bool
    precision: Precision = Precision()
    clip: Clip = Clip()
    phantom_lr: float | None = None
    optimizer: OptimizerSpec = OptimizerSpec()


class Curve(NamedTuple):
    losses: list[list[float]]  # of this rank, by step and micro-batch
    norms: list[float]
    scales: list[float | None]
    parameters: list[dict[str, torch.Tensor]]  # whole, before the first step and after each


def micro_batches(step: int, comm: Communicator, accumulate: int) -> list[MicroBatch]:
    found = []
    for k in range(accumulate):
        place = (step * comm.world.size + comm.world.rank) * accumulate + k
        generator = torch.Generator().manual_seed(place)
        tokens = torch.randint(VOCABULARY, (2, SAMPLES, LENGTH), generator=generator)
        found.append(MicroBatch((tokens[0], tokens[1]), float(SAMPLES), rng_key=place))
    return found


def trained(comm: Communicator, run: Run) -> Curve:
    """A few steps, driven as the loop does."""
    task = Subject(run.optimizer, batch_norm=run.batch_norm)

    def build_model() -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return task.build_model()

    size = SAMPLES * run.accumulate * comm.world.size
    job = Job(
        task=task,
        build_model=build_model,
        batch=BatchPlan(size, SAMPLES, run.accumulate, comm.world.size),
        precision=run.precision,
        clip=run.clip,
        phantom_lr=run.phantom_lr,
        skip_nonfinite=run.precision.scales_loss,
    )
    engine = run.strategy.prepare(job, comm)
    curve = Curve([], [], [], [])

    def look() -> None:
        # Buffers are each rank's own until they are shared: not compared.
        names = {name for name, _ in engine.model.named_parameters()}
        state = {n: v for n, v in engine.state_dict()["model"].items() if n in names}
        whole = whole_state(state, comm)
        curve.parameters.append({n: v.detach().double().clone() for n, v in whole.items()})

    look()
    for step in range(STEPS):
        engine.zero_grad()
        report = engine.forward_backward(
            micro_batches(step, comm, run.accumulate), float(size), task
        )
        outcome = engine.step(run.clip, measure_norm=True)
        assert outcome.grad_norm is not None
        curve.losses.append([float(loss) for loss, _ in report.parts])
        curve.norms.append(float(outcome.grad_norm))
        curve.scales.append(engine.last_step().get("loss_scale"))
        look()
    engine.close()
    return curve


SGD = {"type": "SGD", "params": {"lr": 0.5}}
ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}}


def config_of(stage: int, precision: str, accumulate: int, **more: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": accumulate,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
        "optimizer": SGD,
        **more,
    }
    if precision.startswith("bf16"):
        config["bf16"] = {"enabled": True}
    if precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
    if precision == "bf16, sums in fp32":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def native(config: dict[str, Any], ranks: int) -> Run:
    """What the translation says, as objects."""
    plan = translate(config, Options(world_size=ranks))
    values: dict[str, dict[str, Any]] = {}
    for key, value in plan.values.items():
        group, _, name = key.partition(".")
        values.setdefault(group, {})[name] = value
    low: Any = plan.choices.get("precision", "fp32").partition("_")[0]
    said = values.get("precision", {})
    scaling = {k.partition(".")[2]: v for k, v in said.items() if k.startswith("loss_scaling.")}
    own = {k: v for k, v in said.items() if "." not in k}
    kind = {"sgd": "SGD", "adamw": "AdamW"}[plan.choices["optimizer"]]
    trainer = values.get("trainer", {})
    return Run(
        registry.strategy_class(plan.choices["strategy"])(**values.get("strategy", {})),
        config["gradient_accumulation_steps"],
        batch_norm=low == "fp32",
        precision=Precision(params=low, compute=low, loss_scaling=LossScaling(**scaling), **own),
        clip=Clip(trainer.get("max_grad_norm")),
        phantom_lr=trainer.get("phantom_lr"),
        optimizer=OptimizerSpec.from_config(
            {"_target_": f"torch.optim.{kind}", **values.get("optimizer", {})}
        ),
    )


@cache
def original(text: str, ranks: int) -> list[Curve]:
    """The real engine, once for every configuration."""
    config = json.loads(text)
    run = Run(
        Original(config=filled(config), fp16_on_cpu=True),
        config["gradient_accumulation_steps"],
        batch_norm=not ({"bf16", "fp16"} & set(config)),
    )
    curves: list[Curve] = shared(ranks).run(trained, run, timeout_s=START_S)
    return curves


def both(config: dict[str, Any], ranks: int, **other: Any) -> tuple[list[Curve], list[Curve]]:
    """The translation, with ``other`` settings where a test spoils it, and the original."""
    run = native(config, ranks)
    precision = dict(other.pop("precision", {}))
    scaling = replace(run.precision.loss_scaling, **precision.pop("loss_scaling", {}))
    run = replace(run, precision=replace(run.precision, loss_scaling=scaling, **precision), **other)
    curves = shared(ranks).run(trained, run, timeout_s=START_S)
    return curves, original(json.dumps(config), ranks)


def furthest(mine: Curve, theirs: Curve, *, but: str = "no parameter") -> float:
    """The largest difference of any parameter at any step, relative to its largest element.

    Names that begin with ``but`` do not count.
    """
    return max(
        float((one[name] - value).abs().max() / value.abs().max())
        for one, other in zip(mine.parameters, theirs.parameters, strict=True)
        for name, value in other.items()
        if not name.startswith(but)
    )


def loss_apart(mine: Curve, theirs: Curve) -> float:
    ours, others = (torch.tensor(c.losses, dtype=torch.double) for c in (mine, theirs))
    return float(((ours - others) / others).abs().max())


HALF = ("bf16", "bf16, sums in fp32")
STAGES = (0, 1, 2, 3)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_in_fp32_a_translation_is_a_rounding_apart(stage, ranks):
    for accumulate in (1, 2, 3):
        for mine, theirs in zip(*both(config_of(stage, "fp32", accumulate), ranks), strict=True):
            assert loss_apart(mine, theirs) <= FP32_BOUND
            assert furthest(mine, theirs) <= FP32_BOUND
            assert mine.norms == pytest.approx(theirs.norms, rel=FP32_BOUND)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("stage", "precision"),
    # At stage 0 DeepSpeed refuses to add up in another dtype.
    [(stage, name) for stage in STAGES for name in HALF if stage or name == "bf16"],
)
def test_in_bf16_a_translation_gives_the_same_bits(stage, precision, ranks):
    for accumulate in (1, 2, 3):
        for mine, theirs in zip(*both(config_of(stage, precision, accumulate), ranks), strict=True):
            assert mine.losses == theirs.losses
            assert furthest(mine, theirs) == 0.0
            assert mine.norms == pytest.approx(theirs.norms, rel=FP32_BOUND)


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_in_fp16_it_does_too_through_growths_of_the_loss_scale(stage, accumulate):
    config = config_of(stage, "fp16", accumulate)
    for mine, theirs in zip(*both(config, 2), strict=True):
        assert mine.losses == theirs.losses
        assert furthest(mine, theirs) == 0.0
        assert mine.scales == theirs.scales
        assert mine.scales[0] != mine.scales[-1]
        assert mine.norms == pytest.approx(theirs.norms, rel=FP32_BOUND)


def test_overflows_leave_the_same_scale_behind():
    config = config_of(2, "fp16", 1)
    config["fp16"] |= {"initial_scale_power": 30, "hysteresis": 2, "loss_scale_window": 1}
    for mine, theirs in zip(*both(config, 2), strict=True):
        assert mine.scales == theirs.scales
        assert mine.scales[1] == mine.scales[0] > mine.scales[-1]
        assert mine.losses == theirs.losses


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_with_adamw_decay_and_clipping_it_stays_a_rounding_apart(stage, precision):
    config = config_of(stage, precision, 2, optimizer=ADAMW, gradient_clipping=0.3)
    for mine, theirs in zip(*both(config, 2), strict=True):
        assert max(theirs.norms) > 0.3
        assert loss_apart(mine, theirs) <= (0.0 if precision == "bf16" else 1e-5)
        # Adam divides a gradient by its own size: the roundings of small ones grow.
        assert furthest(mine, theirs, but="unused.") <= 1e-4
        assert furthest(mine, theirs) > 1e-4  # what no forward reaches decays in DeepSpeed alone


CONTROLS = {
    "masters that begin unrounded": (1, "bf16", SGD, {"precision": {"rounded_start": False}}),
    "sums in fp32, stage 1": (1, "bf16", SGD, {"precision": {"gradients": "fp32"}}),
    "sums in fp32, stage 2": (2, "bf16", SGD, {"precision": {"gradients": "fp32"}}),
    "sums in bf16": (2, "bf16, sums in fp32", SGD, {"precision": {"gradients": "bf16"}}),
    "gradients that travel in fp32": (
        1,
        "bf16, sums in fp32",
        SGD,
        {"precision": {"reduce": "fp32"}},
    ),
    "linear layers that round once": (3, "bf16", SGD, {"precision": {"rounded_products": False}}),
    "no phantom step": (0, "bf16", ADAMW, {"phantom_lr": None}),
    "no clipping": (1, "fp32", SGD, {"clip": Clip()}),
    "growth a step early": (
        2,
        "fp16",
        SGD,
        {"precision": {"loss_scaling": {"growth_delay": 0}}},
    ),
    "a growth that halves nothing": (
        2,
        "fp16",
        SGD,
        {"precision": {"loss_scaling": {"divide_by_grown": False}}},
    ),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_a_rule_that_is_switched_off_is_seen(control):
    stage, precision, optimizer, spoilt = CONTROLS[control]
    clip = 0.3 if "clip" in spoilt else 0.0
    config = config_of(stage, precision, 3, optimizer=optimizer, gradient_clipping=clip)
    (right, *_), (theirs, *_) = both(config, 2)
    (mine, *_), _ = both(config, 2, **spoilt)
    bound = 10 * max(FP32_BOUND, furthest(right, theirs, but="unused."))
    assert furthest(mine, theirs, but="unused.") > bound or mine.scales != theirs.scales
