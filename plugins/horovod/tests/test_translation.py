"""What ``translate`` makes of a script, trained beside what the script does under the real Horovod.

Both start from the same weights and see the same samples. In fp32, and with gradients that travel
in fp16, losses and parameters are the same to the last bit on one and two processes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from horovod.runner import launch
from horovod.runner.common.util import config_parser
from torsh_trainer_horovod.original import Original

from torsh_trainer.comm.base import Communicator
from torsh_trainer.optimizers import OptimizerSpec
from torsh_trainer.precision import Precision
from torsh_trainer.strategies.base import BatchPlan, Clip, Job, MicroBatch, Strategy
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.testing.ranks import shared
from torsh_trainer.translate.horovod import settings
from torsh_trainer.translate.horovod.job import Options
from torsh_trainer.translate.horovod.translator import original, translate
from torsh_trainer.verify.subject import LENGTH, VOCABULARY, Subject

SAMPLES, STEPS = 3, 4
START_S = 400.0  # importing Horovod on a busy machine

SCRIPT = """\
import horovod.torch as hvd
import torch

hvd.init()
loader = torch.utils.data.DataLoader(data, batch_size=3)
optimizer = torch.optim.{optimizer}
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
{before}
optimizer = hvd.DistributedOptimizer(optimizer, {wrapper})
{after}
for batch in loader:
    optimizer.zero_grad()
    {loss}.backward()
    optimizer.synchronize()
    {clip}
    with optimizer.skip_synchronize():
        optimizer.step()
"""
STATE = "hvd.broadcast_optimizer_state({}, root_rank=0)"
SGD = "SGD(model.parameters(), lr=0.1 * hvd.size(), momentum=0.9, weight_decay=0.1)"
ADAMW = "AdamW(model.parameters(), lr=0.01, weight_decay=0.5)"


def script(optimizer: str = SGD, wrapper: str = "", **parts: str) -> str:
    blank = {"before": "", "after": "", "loss": "model(batch)", "clip": ""}
    return SCRIPT.format(optimizer=optimizer, wrapper=wrapper, **{**blank, **parts})


@dataclass(frozen=True)
class Run:
    """What one of the two sides is told."""

    strategy: Strategy
    accumulate: int
    precision: Precision = Precision()
    clip: Clip = Clip()
    phantom_lr: float | None = None
    phantom_state: bool = True
    optimizer: OptimizerSpec = OptimizerSpec()


class Curve(NamedTuple):
    losses: list[list[float]]  # of this rank, by step and micro-batch
    norms: list[float]
    parameters: list[dict[str, torch.Tensor]]  # before the first step and after each


def micro_batches(step: int, comm: Communicator, accumulate: int) -> list[MicroBatch]:
    found = []
    for k in range(accumulate):
        place = (step * comm.world.size + comm.world.rank) * accumulate + k
        generator = torch.Generator().manual_seed(place)
        tokens = torch.randint(VOCABULARY, (2, SAMPLES, LENGTH), generator=generator)
        found.append(MicroBatch((tokens[0], tokens[1]), float(SAMPLES), rng_key=place))
    return found


def drawn(task: Subject) -> Any:
    """The same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return task.build_model()


def trained(comm: Communicator, run: Run) -> Curve:
    """A few steps, driven as the loop does."""
    task = Subject(run.optimizer)
    size = SAMPLES * run.accumulate * comm.world.size
    job = Job(
        task=task,
        build_model=partial(drawn, task),
        batch=BatchPlan(size, SAMPLES, run.accumulate, comm.world.size),
        precision=run.precision,
        clip=run.clip,
        phantom_lr=run.phantom_lr,
        phantom_state=run.phantom_state,
    )
    engine = run.strategy.prepare(job, comm)
    curve = Curve([], [], [])

    def look() -> None:
        named = engine.model.named_parameters()
        curve.parameters.append({n: v.detach().double().clone() for n, v in named})

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
        look()
    engine.close()
    return curve


def both(path: Path, text: str, ranks: int, **other: Any) -> tuple[list[Curve], list[Curve]]:
    """The translation, with ``other`` settings where a test spoils it, and the original."""
    path.write_text(text)
    options = Options(world_size=ranks)
    plan = translate(path, options)
    assert plan.counts["refused"] == 0
    values: dict[str, dict[str, Any]] = {}
    for key, value in plan.values.items():
        group, _, name = key.partition(".")
        values.setdefault(group, {})[name] = value
    trainer = values.get("trainer", {})
    kind = {"sgd": "SGD", "adamw": "AdamW", "adam": "Adam"}[plan.choices["optimizer"]]
    target = {"_target_": f"torch.optim.{kind}", **values["optimizer"]}
    run = Run(
        DDP(**(values["strategy"] | other.pop("strategy", {}))),
        trainer["accumulate"],
        precision=Precision(**values.get("precision", {})),
        clip=Clip(trainer.get("max_grad_norm"), trainer.get("max_grad_value")),
        phantom_lr=trainer.get("phantom_lr"),
        phantom_state=trainer.get("phantom_state", True),
        optimizer=OptimizerSpec.from_config(target),
    )
    said = original(path, options)
    theirs = Run(Original(config=said), said["passes"])
    pool = shared(ranks)
    mine: list[Curve] = pool.run(trained, replace(run, **other), timeout_s=START_S)
    others: list[Curve] = pool.run(trained, theirs, timeout_s=START_S)
    return mine, others


def furthest(mine: Curve, theirs: Curve) -> float:
    """The largest difference of any parameter at any step, relative to its largest element."""
    return max(
        float((one[name] - value).abs().max() / value.abs().max())
        for one, other in zip(mine.parameters, theirs.parameters, strict=True)
        for name, value in other.items()
    )


CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)"
BEFORE, AFTER = {"before": STATE.format("optimizer")}, {"after": STATE.format("optimizer")}
JOBS: dict[str, str] = {
    "the mean": script(),
    "the sum": script(wrapper="op=hvd.Sum"),
    "a sum of passes": script(wrapper="backward_passes_per_step=3"),
    "a mean of passes": script(
        wrapper="backward_passes_per_step=2", loss="(model(batch) / 2)", after=AFTER["after"]
    ),
    "fp16": script(wrapper="compression=hvd.Compression.fp16, backward_passes_per_step=2"),
    "fp16, the sum": script(wrapper="compression=hvd.Compression.fp16, op=hvd.Sum"),
    "a factor before the sum": script(wrapper="gradient_predivide_factor=2.0"),
    "groups": script(wrapper="groups=2"),
    "clipping": script(clip=CLIP),
    "clipping the sum": script(clip=CLIP, wrapper="op=hvd.Sum"),
    "clipping elements": script(clip=CLIP.replace("norm_", "value_").replace("0.1", "0.001")),
    "a state that wrapping loses": script(ADAMW, **BEFORE),
    "a state that stays": script(ADAMW, **AFTER),
    "momentum that stays": script(**AFTER),
    "Adam with L2, state lost": script(ADAMW.replace("AdamW", "Adam"), **BEFORE),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("job", JOBS)
def test_a_translation_gives_the_bits_of_horovod(tmp_path, job, ranks):
    for mine, theirs in zip(*both(tmp_path / "train.py", JOBS[job], ranks), strict=True):
        assert mine.losses == theirs.losses
        assert furthest(mine, theirs) == 0.0
        assert mine.norms == pytest.approx(theirs.norms, rel=1e-6)


FP32 = Precision()
CONTROLS: dict[str, tuple[str, dict[str, Any]]] = {
    "a mean for the sum": ("the sum", {"strategy": {"op": "average"}}),
    "a mean of passes for their sum": (
        "a sum of passes",
        {"strategy": {"backward_passes_per_step": 1}},
    ),
    "gradients that travel in fp32": ("fp16", {"precision": FP32}),
    "no clipping": ("clipping", {"clip": Clip()}),
    "no phantom step": ("a state that stays", {"phantom_lr": None}),
    "no phantom step before wrapping": ("a state that wrapping loses", {"phantom_lr": None}),
    "a state that is kept": ("a state that wrapping loses", {"phantom_state": True}),
    "unused parameters that stand still": ("the mean", {"strategy": {"zero_unused": False}}),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_a_rule_that_is_switched_off_is_seen(tmp_path, control):
    job, spoilt = CONTROLS[control]
    (mine, _), (theirs, _) = both(tmp_path / "train.py", JOBS[job], 2, **spoilt)
    assert furthest(mine, theirs) > 1e-6


def running_means(comm: Communicator, run: Run) -> torch.Tensor:
    """This rank's BatchNorm after a step and a forward."""
    task = Subject(run.optimizer)
    job = Job(task, partial(drawn, task), BatchPlan(SAMPLES * 2, SAMPLES, 1, 2))
    engine = run.strategy.prepare(job, comm)
    for step in range(2):
        engine.zero_grad()
        engine.forward_backward(micro_batches(step, comm, 1), 2.0 * SAMPLES, task)
        engine.step(Clip())
    means: torch.Tensor = engine.model.batch_norm.running_mean.clone()
    engine.close()
    return means


def test_every_process_keeps_its_own_buffers():
    sgd = OptimizerSpec.from_config({"_target_": "torch.optim.SGD", "lr": 0.1})
    own = Run(DDP(find_unused_parameters=True, broadcast_buffers=False), 1, optimizer=sgd)
    shares = Run(DDP(find_unused_parameters=True), 1, optimizer=sgd)
    config = {"optimizer": {"class": "SGD", "options": {"lr": 0.1}}}
    theirs, mine, spoilt = (
        shared(2).run(running_means, run, timeout_s=START_S)
        for run in (Run(Original(config=config), 1), own, shares)
    )
    for rank in (0, 1):
        assert torch.equal(theirs[rank], mine[rank])
    assert not torch.equal(theirs[1], spoilt[1])


# -- the names of Horovod's settings -------------------------------------------------------------


@pytest.fixture
def parser(monkeypatch) -> argparse.ArgumentParser:
    """horovodrun's own."""
    seen: list[argparse.ArgumentParser] = []

    def capture(self: argparse.ArgumentParser, *args: Any) -> None:
        seen.append(self)
        raise SystemExit

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", capture)
    with pytest.raises(SystemExit):
        launch.parse_args()
    return seen[0]


def test_every_option_of_horovodrun_is_known_and_no_other(parser):
    theirs = {flag for action in parser._actions for flag in action.option_strings}
    assert set(settings.by_flag()) == theirs - {"-h", "--help"}


def test_every_option_takes_as_many_words(parser):
    for action in parser._actions:
        for flag in action.option_strings:
            if flag in ("-h", "--help"):
                continue
            words = {None: 1, 0: 0, 2: 2, 1: 1}[action.nargs]
            assert settings.by_flag()[flag][0].takes == words, flag


class Asked(dict[str, Any]):
    """A mapping that remembers what it was asked for."""

    def __init__(self, prefix: str, asked: set[str]) -> None:
        super().__init__()
        self.prefix, self.asked = prefix, asked

    def get(self, key: str, default: Any = None) -> Any:
        if self.prefix:
            self.asked.add(f"{self.prefix}.{key}")
            return default
        if key == "controller":
            self.asked.add(key)
            return default
        inner = Asked(key, self.asked)
        inner["x"] = 1  # true
        return inner


def test_every_key_of_a_config_file_is_known_and_no_other():
    asked: set[str] = set()
    config_parser.set_args_from_config(argparse.Namespace(), Asked("", asked), set())
    assert set(settings.by_key()) == asked


def test_a_config_file_means_what_horovodrun_takes_it_for(tmp_path):
    """Through the variables that horovodrun would set: ours read back what the file says."""
    values: dict[str, Callable[[], Any] | Any] = {
        "fusion_threshold_mb": 3,
        "cycle_time_ms": 2.5,
        "cache_capacity": 9,
        "hierarchical_allreduce": True,
        "torus_allreduce": False,
        "autotune": True,
        "autotune_log_file": "log.txt",
        "autotune_gaussian_process_noise": 0.5,
        "timeline_filename": "t.json",
        "timeline_mark_cycles": True,
        "no_stall_check": True,
        "stall_check_warning_time_seconds": 5,
        "gloo_timeout_seconds": 7,
        "log_level": "INFO",
        "log_with_timestamp": True,
    }
    known = [setting.name for setting in settings.TUNED]
    others = ["no_stall_check", "stall_check_shutdown_time_seconds", "tcp_flag"]
    args = argparse.Namespace(**(dict.fromkeys([*known, *others]) | values))
    found: dict[str, Any] = {}
    for variable, text in config_parser.set_env_from_args({}, args).items():
        setting = settings.by_variable()[variable]
        found[setting.name] = settings.of_variable(setting, text)
    ours = {"stall_check_warning_time_seconds": "stall_warning_s"}
    ours["gloo_timeout_seconds"] = "gloo_timeout_s"
    for name, value in values.items():
        if name == "no_stall_check":
            assert found["stall_check"] is False
        else:
            said = str(value).lower() if name == "log_level" else value
            assert found[ours.get(name, name)] == said
