"""What ``translate`` makes of a script, trained beside what the script does under the real Horovod.

Both start from the same weights and see the same samples. In fp32, and with gradients that travel
in fp16, losses and parameters are the same to the last bit on one and two processes.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from horovod.runner import launch
from horovod.runner.common.util import config_parser
from torch import nn
from torch.nn import functional
from torsh_trainer_horovod import runtime
from torsh_trainer_horovod.original import Epochs, Original

from torsh_trainer.comm.base import Communicator
from torsh_trainer.optim.optimizers import OptimizerSpec
from torsh_trainer.optim.precision import Precision
from torsh_trainer.strategies.base import BatchPlan, Clip, Job
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.trial import (
    FP32_BOUND,
    SAMPLES,
    RankTrace,
    TrialRun,
    beyond,
    draw_weights,
    furthest,
    loss_apart,
    measure_moves,
    micro_batches,
    run_of,
    train_curve,
)
from torsh_trainer.translate.horovod import rules_script, settings
from torsh_trainer.translate.horovod.job import Options
from torsh_trainer.translate.horovod.translator import original, translate
from torsh_trainer.translate.plan import Plan
from torsh_trainer.verify.subject import VOCABULARY, Subject

CONF = Path(__file__).parents[3] / "conf"
START_S = 400.0  # importing Horovod on a busy machine
proves = partial(pytest.mark.proves, engine="horovod")

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
for epoch in range(9):
    for batch in loader:
        optimizer.zero_grad()
        {forward}
        {loss}.backward()
        optimizer.synchronize()
        {clip}
        with optimizer.skip_synchronize():
            {step}
        {each_step}
    {each_epoch}
"""
STATE = "hvd.broadcast_optimizer_state({}, root_rank=0)"
SGD = "SGD(model.parameters(), lr=0.1 * hvd.size(), momentum=0.9, weight_decay=0.1)"
ADAMW = "AdamW(model.parameters(), lr=0.01, weight_decay=0.5)"


def script(optimizer: str = SGD, wrapper: str = "", **parts: str) -> str:
    blank = dict.fromkeys(re.findall(r"{(\w+)}", SCRIPT), "")
    usual = {"loss": "model(batch)", "step": "optimizer.step()"}
    return SCRIPT.format(**{**blank, **usual, "optimizer": optimizer, "wrapper": wrapper, **parts})


def scheduled(scheduler: str, *, interval: str = "each_step", optimizer: str = SGD) -> str:
    made = f"scheduler = torch.optim.lr_scheduler.{scheduler}"
    return script(optimizer, after=made, **{interval: "scheduler.step()"})


def native(plan: Plan) -> TrialRun:
    return run_of(plan, CONF, accumulate=plan.values["trainer.accumulate"])


def planned(path: Path, text: str, ranks: int) -> tuple[Plan, TrialRun]:
    """The translation of a script, and what is told to the original."""
    path.write_text(text)
    plan = translate(path, Options(world_size=ranks))
    assert plan.counts["refused"] == 0, plan.findings
    said = original(path, Options(world_size=ranks))
    epochs = Epochs() if said.get("interval") == "epoch" else None
    return plan, TrialRun(Original(config=said), said["passes"], schedule=epochs)


def both(
    path: Path, text: str, ranks: int, *, strategy: dict[str, Any] | None = None, **other: Any
) -> tuple[list[RankTrace], list[RankTrace]]:
    """The translation, with ``other`` settings where a test spoils it, and the original."""
    plan, theirs = planned(path, text, ranks)
    run = native(plan)
    if strategy is not None:
        run = replace(run, strategy=replace(run.strategy, **strategy))
    task = {"task": other["task"]} if "task" in other else {}
    pool = shared_pool(ranks)
    mine: list[RankTrace] = pool.run(train_curve, replace(run, **other), timeout_s=START_S)
    others: list[RankTrace] = pool.run(train_curve, replace(theirs, **task), timeout_s=START_S)
    return mine, others


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
    "all processes, by their names": script(
        wrapper="process_set=hvd.global_process_set, named_parameters=model.named_parameters()"
    ),
}


def assert_the_same_bits(mine: list[RankTrace], theirs: list[RankTrace]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert one.losses == other.losses
        assert furthest(one, other) == 0.0
        assert one.norms == pytest.approx(other.norms, rel=1e-6)
        assert one.rates == pytest.approx(other.rates, rel=1e-12)


@pytest.mark.matrix(4)
@proves(
    "clip",
    "compression",
    "engine",
    "groups",
    "loss.division",
    "op",
    "optimizer.lr",
    "optimizer.type",
    "passes",
    "predivide",
    "process-sets",
    "script.init",
    "start.optimizer",
    "start.unused",
    "wrapper.names",
)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("job", JOBS)
def test_a_translation_gives_the_bits_of_horovod(tmp_path, job, ranks):
    assert_the_same_bits(*both(tmp_path / "train.py", JOBS[job], ranks))


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


@pytest.mark.matrix(2)
@pytest.mark.parametrize("control", CONTROLS)
def test_a_rule_that_is_switched_off_is_seen(tmp_path, control):
    job, spoilt = CONTROLS[control]
    (mine, _), (theirs, _) = both(tmp_path / "train.py", JOBS[job], 2, **spoilt)
    assert furthest(mine, theirs) > 1e-6


def running_means(comm: Communicator, run: TrialRun) -> torch.Tensor:
    """This rank's BatchNorm after a step and a forward."""
    task = run.task(run.optimizer)
    job = Job(task, partial(draw_weights, task), BatchPlan(SAMPLES * 2, SAMPLES, 1, 2))
    engine = run.strategy.prepare(job, comm)
    for step in range(2):
        engine.zero_grad()
        engine.forward_backward(micro_batches(step, comm, 1), 2.0 * SAMPLES, task)
        engine.step(Clip())
    means: torch.Tensor = engine.model.batch_norm.running_mean.clone()
    engine.close()
    return means


@proves("start.buffers")
def test_every_process_keeps_its_own_buffers():
    sgd = OptimizerSpec.from_config({"_target_": "torch.optim.SGD", "lr": 0.1})
    own = TrialRun(DDP(find_unused_parameters=True, broadcast_buffers=False), 1, optimizer=sgd)
    shares = TrialRun(DDP(find_unused_parameters=True), 1, optimizer=sgd)
    config = {"optimizer": {"class": "SGD", "options": {"lr": 0.1}}}
    theirs, mine, spoilt = (
        shared_pool(2).run(running_means, run, timeout_s=START_S)
        for run in (TrialRun(Original(config=config), 1), own, shares)
    )
    for rank in (0, 1):
        assert torch.equal(theirs[rank], mine[rank])
    assert not torch.equal(theirs[1], spoilt[1])


def broadcast(comm: Communicator) -> bool:
    """Whether Horovod leaves every process with what ddp does, where each begins otherwise."""
    theirs = Subject().build_model()  # drawn by each process for itself
    task = Subject()
    held = [p.detach().clone() for p in theirs.parameters()]
    with runtime.start(comm, {}) as hvd:
        hvd.broadcast_parameters(theirs.state_dict(), root_rank=0)
    changed = any(not torch.equal(*two) for two in zip(held, theirs.parameters(), strict=True))
    assert changed == (comm.world.rank > 0)
    own = Subject().build_model()
    with torch.no_grad():
        for p, before in zip(own.parameters(), held, strict=True):
            p.copy_(before)
    job = Job(task, lambda: own, BatchPlan(SAMPLES * comm.world.size, SAMPLES, 1, comm.world.size))
    engine = DDP(find_unused_parameters=True).prepare(job, comm)
    mine, others = engine.model.state_dict(), theirs.state_dict()
    same = all(torch.equal(mine[name], value) for name, value in others.items())
    engine.close()
    return same


def seeded(comm: Communicator, case: Callable[[Communicator], bool]) -> bool:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(comm.world.rank)
        return case(comm)


@proves("start.parameters")
def test_every_process_begins_with_the_parameters_and_buffers_of_rank_0():
    assert shared_pool(2).run(seeded, broadcast, timeout_s=START_S) == [True, True]


# -- optimizers ------------------------------------------------------------------------------------

OPTIMIZERS = (
    "Adadelta(model.parameters(), lr=0.5, rho=0.8, eps=1e-4, weight_decay=0.1)",
    "Adafactor(model.parameters(), lr=0.05, beta2_decay=-0.5, eps=(None, 1e-2), d=2.0)",
    (
        "Adagrad(model.parameters(), lr=0.02, lr_decay=0.1, weight_decay=0.1, "
        "initial_accumulator_value=0.1, eps=1e-3)"
    ),
    "Adam(model.parameters(), 0.01, (0.8, 0.95), 1e-4, weight_decay=0.1, amsgrad=True)",
    "Adam(model.parameters(), 0.01, weight_decay=0.1, decoupled_weight_decay=True)",
    "AdamW(model.parameters(), lr=0.01, betas=(0.5, 0.6), eps=1e-4, amsgrad=True, maximize=True)",
    "AdamW(model.parameters())",
    "AdamW(model.parameters(), lr=0.01, fused=True)",
    "Adamax(model.parameters(), lr=0.01, betas=(0.8, 0.9), eps=1e-4, weight_decay=0.1)",
    "ASGD(model.parameters(), lr=0.1, lambd=0.1, alpha=0.5, t0=2, weight_decay=0.1)",
    (
        "NAdam(model.parameters(), lr=0.01, momentum_decay=0.1, weight_decay=0.1, "
        "betas=(0.8, 0.9), eps=1e-4, decoupled_weight_decay=True)"
    ),
    (
        "RAdam(model.parameters(), lr=0.01, betas=(0.8, 0.9), eps=1e-4, weight_decay=0.1, "
        "decoupled_weight_decay=True)"
    ),
    (
        "RMSprop(model.parameters(), lr=0.001, alpha=0.5, eps=1e-3, weight_decay=0.1, "
        "momentum=0.5, centered=True)"
    ),
    "Rprop(model.parameters(), lr=0.001, etas=(0.4, 1.5), step_sizes=(1e-5, 0.01))",
    "SGD(model.parameters(), 0.2, 0.8, 0.3, weight_decay=0.1, foreach=True)",
    "SGD(model.parameters(), lr=0.02, momentum=0.8, nesterov=True)",
)


@pytest.mark.matrix(3)
@proves("optimizer.lr", "optimizer.option", "optimizer.type")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_of_torch_steps_as_it_does_under_horovod(tmp_path, optimizer):
    assert_the_same_bits(*both(tmp_path / "train.py", script(optimizer), 2))


def test_every_optimizer_and_option_that_is_translated_is_among_them():
    made = [re.match(r"(\w+)", text)[1] for text in OPTIMIZERS]
    assert set(made) == set(rules_script.TORCH)
    said = {
        (kind, o)
        for kind, text in zip(made, OPTIMIZERS, strict=True)
        for o in re.findall(r"(\w+)=", text)
    }
    said |= {("Adam", "betas"), ("Adam", "eps"), ("SGD", "momentum"), ("SGD", "dampening")}
    for kind, options in rules_script.OPTIONS.items():
        missing = {o for o in options if (kind, o) not in said}
        assert missing <= {"weight_decay"}, (kind, missing)


# -- schedules -------------------------------------------------------------------------------------

SCHEDULES = (
    "ConstantLR(optimizer, 0.5, 1)",
    "CosineAnnealingLR(optimizer, 4, eta_min=0.01)",
    "CosineAnnealingWarmRestarts(optimizer, 2, T_mult=2)",
    "CyclicLR(optimizer, base_lr=0.01, max_lr=0.2, step_size_up=2, cycle_momentum=False)",
    "ExponentialLR(optimizer, 0.5)",
    "LinearLR(optimizer, 0.25, 1.0, 3)",
    "MultiStepLR(optimizer, [1, 3], gamma=0.3)",
    "OneCycleLR(optimizer, max_lr=0.3, total_steps=8)",
    "PolynomialLR(optimizer, 4, 2.0)",
    "StepLR(optimizer, step_size=2, gamma=0.3)",
)


@pytest.mark.matrix(2)
@proves("schedule.interval", "schedule.option", "schedule.type")
@pytest.mark.parametrize("scheduler", SCHEDULES)
def test_every_update_of_a_schedule_is_the_scripts(tmp_path, scheduler):
    """By step and by epoch; one of them moves the momentum, too."""
    for interval in ("each_step", "each_epoch"):
        mine, theirs = both(tmp_path / "train.py", scheduled(scheduler, interval=interval), 2)
        assert_the_same_bits(mine, theirs)
        assert len(set(theirs[0].rates)) > 1


def test_every_schedule_that_is_translated_is_among_them():
    assert {text.partition("(")[0] for text in SCHEDULES} == rules_script.SCHEDULERS


# -- half precision --------------------------------------------------------------------------------

HALF = "with torch.autocast('cpu', dtype=torch.{}): pass"
SCALED = {
    "forward": f"scaler = torch.amp.GradScaler('cpu'); {HALF.format('float16')}".replace(
        "; with", "\n        with"
    ),
    "loss": "scaler.scale(model(batch))",
    "step": "scaler.step(optimizer)",
}
AUTOCAST = {
    "bf16": script(forward=HALF.format("bfloat16")),
    "bf16, clipped": script(forward=HALF.format("bfloat16"), clip=CLIP),
    "fp16": script(forward=HALF.format("float16")),
    "fp16, scaled": script(**SCALED),
}


@pytest.mark.matrix(2)
@proves("precision.dtype")
@pytest.mark.parametrize("job", AUTOCAST)
def test_autocast_gives_the_bits_of_horovod(tmp_path, job):
    mine, theirs = both(tmp_path / "train.py", AUTOCAST[job], 2)
    assert_the_same_bits(mine, theirs)
    if job == "fp16, scaled":
        assert mine[0].scales == theirs[0].scales


@pytest.mark.matrix(2)
@pytest.mark.parametrize("job", AUTOCAST)
def test_autocast_that_is_left_out_is_seen(tmp_path, job):
    (mine, _), (theirs, _) = both(tmp_path / "train.py", AUTOCAST[job], 2, precision=FP32)
    assert furthest(mine, theirs) > 1e-6


# -- sparse embeddings -----------------------------------------------------------------------------


class Bag(nn.Module):
    """An embedding whose gradients are sparse, the mean over a sample, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 8, sparse=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.tokens(tokens).mean(1))
        return logits


class Sparse(Subject):
    def build_model(self) -> nn.Module:
        return Bag()

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(outputs, batch[1][:, 0])


@proves("sparse")
@pytest.mark.parametrize("dense", [True, False])
def test_sparse_embeddings_are_reduced_as_under_horovod(tmp_path, dense):
    plain = "SGD(model.parameters(), lr=0.1)"
    text = script(plain, wrapper=f"sparse_as_dense={dense}")
    assert_the_same_bits(*both(tmp_path / "train.py", text, 2))
    for mine, theirs in zip(*both(tmp_path / "train.py", text, 2, task=Sparse), strict=True):
        assert loss_apart(mine, theirs) <= FP32_BOUND
        assert furthest(mine, theirs) <= FP32_BOUND


# -- four ranks ------------------------------------------------------------------------------------

ON_FOUR = ("the mean", "the sum", "a mean of passes", "clipping", "a state that stays")


@pytest.mark.matrix(1)
@proves("engine", "op", "passes", "start.optimizer", "start.unused")
@pytest.mark.parametrize("job", ON_FOUR)
def test_on_four_ranks_fp32_is_a_rounding_apart(tmp_path, job):
    for mine, theirs in zip(*both(tmp_path / "train.py", JOBS[job], 4), strict=True):
        # Adam divides a gradient by its own size: the roundings of small ones grow.
        allowed = 1e-4 if "Adam" in JOBS[job] else 10 * FP32_BOUND
        assert loss_apart(mine, theirs) <= 1e-5
        assert furthest(mine, theirs) <= allowed
        assert mine.norms == pytest.approx(theirs.norms, rel=1e-4)


@proves("compression")
def test_on_four_ranks_a_step_in_fp16_differs_by_the_roundings_of_a_sum_at_most(tmp_path):
    lr = 0.1
    plain = f"SGD(model.parameters(), lr={lr})"
    text = script(plain, wrapper="compression=hvd.Compression.fp16, backward_passes_per_step=2")
    plan, theirs = planned(tmp_path / "train.py", text, 4)
    curve = shared_pool(4).run(train_curve, theirs, timeout_s=START_S)[0]

    def share(run: TrialRun) -> float:
        found = shared_pool(4).run(measure_moves, run, curve.parameters[:-1], timeout_s=START_S)[0]
        # Passes are added up, and not divided: what travels is twice their mean.
        return beyond(found, curve, low="fp16", roundings=4 - 1, lr=2 * lr)

    run = native(plan)
    assert share(run) <= 1.0
    longer = OptimizerSpec.from_config({"_target_": "torch.optim.SGD", "lr": 1.3 * lr})
    assert share(replace(run, optimizer=longer)) > 1.0


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
