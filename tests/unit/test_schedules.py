"""Schedules equal torch's own, run live beside them; the rest equal their published formulas."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.optim import lr_scheduler as torch_schedulers

from torsh_trainer.errors import ConfigError
from torsh_trainer.optim import schedule as schedules
from torsh_trainer.optim.schedule import (
    Constant,
    Cosine,
    InverseSqrt,
    Linear,
    OneCycle,
    Polynomial,
    ReduceOnPlateau,
    Schedule,
    Step,
    TorchSchedule,
    WarmupStableDecay,
)

CONF = Path(__file__).resolve().parents[2] / "conf" / "schedule"
TOTAL, LR = 60, 0.3


def optimizer(*rates: float) -> torch.optim.SGD:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in rates or (LR,)]
    return torch.optim.SGD(groups, lr=LR, momentum=0.9)


def rates_of(one: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in one.param_groups]


def torchs(make: Callable[[Any], Any], count: int = TOTAL) -> list[float]:
    """Factors over the base rate that a torch scheduler gives to each update."""
    one = optimizer()
    scheduler = make(one)
    factors = []
    for _ in range(count):
        factors.append(rates_of(one)[0] / LR)
        one.step()
        scheduler.step()
    return factors


def ours(schedule: Schedule, count: int = TOTAL, total: int | None = TOTAL) -> list[float]:
    return [schedule.factor(update, total) for update in range(count)]


def after_warmup(make: Callable[[Any], Any], warmup: int, start: float) -> Callable[[Any], Any]:
    def chained(one: Any) -> Any:
        rise = torch_schedulers.LinearLR(one, start_factor=start, total_iters=warmup)
        return torch_schedulers.SequentialLR(one, [rise, make(one)], milestones=[warmup])

    return chained


PAIRS: dict[str, tuple[Schedule, Callable[[Any], Any]]] = {
    "warm-up": (
        Constant(warmup_steps=7, warmup_start=0.25),
        lambda o: torch_schedulers.LinearLR(o, start_factor=0.25, total_iters=7),
    ),
    "linear": (
        Linear(final=0.1),
        lambda o: torch_schedulers.LinearLR(o, 1.0, end_factor=0.1, total_iters=TOTAL),
    ),
    "cosine": (Cosine(), lambda o: torch_schedulers.CosineAnnealingLR(o, T_max=TOTAL)),
    "cosine to a floor": (
        Cosine(final=0.2),
        lambda o: torch_schedulers.CosineAnnealingLR(o, T_max=TOTAL, eta_min=0.2 * LR),
    ),
    "polynomial": (
        Polynomial(power=2.5),
        lambda o: torch_schedulers.PolynomialLR(o, total_iters=TOTAL, power=2.5),
    ),
    "milestones": (
        Step(milestones=(5, 20, 20, 41), gamma=0.5),
        lambda o: torch_schedulers.MultiStepLR(o, milestones=[5, 20, 20, 41], gamma=0.5),
    ),
    "step size": (
        Step(step_size=9, gamma=0.3),
        lambda o: torch_schedulers.StepLR(o, step_size=9, gamma=0.3),
    ),
    "warm-up and linear": (
        Linear(warmup_ratio=0.2, warmup_start=0.1),
        after_warmup(
            lambda o: torch_schedulers.LinearLR(o, 1.0, end_factor=0.0, total_iters=TOTAL - 12),
            12,
            0.1,
        ),
    ),
    "warm-up and cosine": (
        Cosine(warmup_steps=10, warmup_start=0.5, final=0.1),
        after_warmup(
            lambda o: torch_schedulers.CosineAnnealingLR(o, T_max=TOTAL - 10, eta_min=0.1 * LR),
            10,
            0.5,
        ),
    ),
    "warm-up, stable, decay": (
        WarmupStableDecay(warmup_steps=10, warmup_start=0.5, decay_ratio=0.25, final=0.1),
        lambda o: torch_schedulers.SequentialLR(
            o,
            [
                torch_schedulers.LinearLR(o, 0.5, total_iters=10),
                torch_schedulers.ConstantLR(o, 1.0),
                torch_schedulers.LinearLR(o, 1.0, end_factor=0.1, total_iters=15),
            ],
            milestones=[10, TOTAL - 15],
        ),
    ),
    "warm-up from zero and inverse square root": (
        InverseSqrt(warmup_steps=8),
        lambda o: torch_schedulers.LambdaLR(
            o, lambda u: u / 8 if u < 8 else 8**0.5 * max(u, 1) ** -0.5
        ),
    ),
    "inverse square root alone": (
        InverseSqrt(timescale=5),
        lambda o: torch_schedulers.LambdaLR(o, lambda u: (1 + u / 5) ** -0.5),
    ),
    **{
        f"one cycle {anneal} {phases} {share}": (
            OneCycle(anneal=anneal, three_phase=phases == 3, warmup_ratio=share, div_factor=10.0),
            lambda o, anneal=anneal, phases=phases, share=share: torch_schedulers.OneCycleLR(
                o,
                max_lr=LR,
                total_steps=TOTAL,
                pct_start=share,
                anneal_strategy=anneal,
                div_factor=10.0,
                three_phase=phases == 3,
                cycle_momentum=False,
            ),
        )
        for anneal in ("cos", "linear")
        for phases in (2, 3)
        for share in (0.3, 0.47)
    },
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize("name", PAIRS)
def test_a_schedule_equals_torchs(name: str) -> None:
    schedule, make = PAIRS[name]
    # Torch's chained forms divide by the last factor: stop where that is 0.
    count = TOTAL - 1
    assert ours(schedule, count) == pytest.approx(torchs(make, count), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("decay", "formula"),
    [
        ("linear", lambda q: 1 - q),
        ("cosine", lambda q: (1 + math.cos(math.pi * q)) / 2),
        ("sqrt", lambda q: 1 - math.sqrt(q)),
    ],
)
def test_the_decays_after_the_plateau_follow_their_formulas(decay: Any, formula: Any) -> None:
    schedule = WarmupStableDecay(decay_steps=20, decay=decay, final=0.1)
    wanted = [1.0] * 40 + [0.1 + 0.9 * formula(u / 20) for u in range(20)]
    assert ours(schedule) == pytest.approx(wanted)


ENDING = [
    (Linear, {}),
    (Cosine, {}),
    (Polynomial, {"power": 2.0}),
    (WarmupStableDecay, {}),
]


@pytest.mark.parametrize(("shape", "knobs"), ENDING)
def test_a_schedule_ends_at_its_final_factor_and_stays_there(shape: Any, knobs: Any) -> None:
    schedule = shape(final=0.05, warmup_steps=5, **knobs)
    assert [schedule.factor(TOTAL + more, TOTAL) for more in (0, 1, 1000)] == pytest.approx(
        [0.05] * 3
    )


@pytest.mark.parametrize(("shape", "knobs"), [*ENDING, (OneCycle, {})])
def test_a_length_of_its_own_does_without_that_of_the_run(shape: Any, knobs: Any) -> None:
    own = shape(total_steps=TOTAL, **knobs)
    assert ours(own, total=None) == ours(shape(**knobs)) == ours(own, total=7)


@pytest.mark.parametrize(
    "schedule",
    [Linear(), Cosine(), Polynomial(), WarmupStableDecay(), OneCycle(), Constant(warmup_ratio=0.1)],
)
def test_a_schedule_that_needs_a_total_says_so(schedule: Schedule) -> None:
    with pytest.raises(ConfigError, match=rf"schedule={schedule.name} needs .*trainer.max_steps"):
        schedule.factor(0, None)


@pytest.mark.parametrize(
    "schedule", [Constant(warmup_steps=3), InverseSqrt(warmup_steps=3), Step(step_size=2)]
)
def test_a_schedule_that_needs_no_total_goes_on_without(schedule: Schedule) -> None:
    assert ours(schedule, total=None) == ours(schedule)


@pytest.mark.parametrize(
    "schedule",
    [Linear(warmup_steps=50), Cosine(warmup_steps=50), WarmupStableDecay(warmup_steps=50)],
)
def test_a_run_shorter_than_the_warm_up_rises_and_no_more(schedule: Schedule) -> None:
    assert ours(schedule, count=10, total=10) == [u / 50 for u in range(10)]


def test_only_a_schedule_that_never_changes_is_constant() -> None:
    assert Constant().constant
    assert not Constant(warmup_steps=1).constant
    assert not Constant(warmup_ratio=0.1).constant
    assert not Linear().constant


def test_a_warm_up_ratio_is_that_share_of_the_run_in_whole_updates() -> None:
    for total in (10, 30, 70, 100, 1000):
        for percent in (1, 7, 10, 29, 50):
            steps = Cosine(warmup_steps=round(total * percent / 100))
            assert ours(Cosine(warmup_ratio=percent / 100), total, total) == ours(
                steps, total, total
            )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Linear(warmup_steps=3, warmup_ratio=0.1), "both set the warm-up"),
        (lambda: Linear(warmup_steps=-1), "schedule.warmup_steps=-1"),
        (lambda: Linear(warmup_ratio=1.5), "schedule.warmup_ratio=1.5"),
        (lambda: Linear(warmup_start=2.0), "schedule.warmup_start=2.0"),
        (lambda: Linear(final=-0.1), "schedule.final=-0.1"),
        (lambda: Linear(total_steps=0), "schedule.total_steps=0"),
        (lambda: Polynomial(power=0.0), "schedule.power=0.0"),
        (lambda: InverseSqrt(timescale=0), "schedule.timescale=0"),
        (Step, "needs one of schedule.step_size and schedule.milestones"),
        (lambda: Step(step_size=3, milestones=(4,)), "needs one of"),
        (lambda: Step(milestones=(9, 4)), "ascending"),
        (lambda: Step(step_size=1, gamma=0.0), "schedule.gamma=0.0"),
        (lambda: WarmupStableDecay(decay="cubic"), "schedule.decay=cubic"),  # type: ignore[arg-type]
        (lambda: WarmupStableDecay(decay_ratio=2.0), "schedule.decay_ratio=2.0"),
        (lambda: OneCycle(anneal="cosine"), "schedule.anneal=cosine"),  # type: ignore[arg-type]
        (lambda: OneCycle(div_factor=0.0), "schedule.div_factor=0.0"),
        (lambda: ReduceOnPlateau(mode="lower"), "schedule.mode=lower"),  # type: ignore[arg-type]
        (lambda: ReduceOnPlateau(gamma=1.0), "schedule.gamma=1.0"),
        (lambda: ReduceOnPlateau(patience=-1), "schedule.patience=-1"),
        (TorchSchedule, "needs schedule.scheduler"),
        (lambda: TorchSchedule(scheduler="StepLR", interval="day"), "schedule.interval=day"),  # type: ignore[arg-type]
    ],
)
def test_a_knob_out_of_range_is_refused_by_name(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


# -- reduce on plateau ---------------------------------------------------------------------------


def noisy_losses(seed: int, count: int = 80) -> list[float]:
    chance = random.Random(seed)
    losses = [chance.choice([1.0 / (i + 1), 0.3, 0.3001, 0.5]) for i in range(count)]
    return [math.nan if i % 17 == 16 else loss for i, loss in enumerate(losses)]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("threshold_mode", ["rel", "abs"])
@pytest.mark.parametrize(("patience", "cooldown"), [(0, 0), (3, 0), (2, 4)])
def test_plateau_equals_torchs(
    mode: Any, threshold_mode: Any, patience: int, cooldown: int
) -> None:
    knobs = {
        "mode": mode,
        "patience": patience,
        "threshold": 1e-2,
        "threshold_mode": threshold_mode,
        "cooldown": cooldown,
        "min_lr": 1e-5,
        "eps": 1e-6,
    }
    mine, theirs = optimizer(0.3, 0.01), optimizer(0.3, 0.01)
    running = ReduceOnPlateau(gamma=0.4, **knobs).start({"main": mine})
    reference = torch_schedulers.ReduceLROnPlateau(theirs, factor=0.4, **knobs)
    seen = set()
    for loss in noisy_losses(patience + cooldown):
        running.on_update()
        running.on_evaluate({"loss": loss})
        reference.step(loss)
        assert rates_of(mine) == rates_of(theirs)
        seen.add(rates_of(mine)[0])
    assert len(seen) > 2


def test_plateau_goes_on_from_its_state() -> None:
    knobs = ReduceOnPlateau(patience=1, cooldown=2, warmup_steps=40)
    whole, first, second = optimizer(0.3, 0.1), optimizer(0.3, 0.1), optimizer(0.3, 0.1)
    straight = knobs.start({"main": whole})
    before = knobs.start({"main": first})
    losses = noisy_losses(3)
    for loss in losses[:30]:
        for running in (straight, before):
            running.on_update()
            running.on_evaluate({"loss": loss})
    after = knobs.start({"main": second})
    after.load_state_dict(before.state_dict())
    assert rates_of(second) == rates_of(whole)
    for loss in losses[30:]:
        for running in (straight, after):
            running.on_update()
            running.on_evaluate({"loss": loss})
        assert rates_of(second) == rates_of(whole)


def test_plateau_warms_up_as_the_other_schedules_do() -> None:
    one = optimizer()
    running = ReduceOnPlateau(warmup_steps=10, warmup_start=0.1).start({"main": one})
    warmup = Constant(warmup_steps=10, warmup_start=0.1)
    for update in range(15):
        assert rates_of(one)[0] == LR * warmup.factor(update, None)
        running.on_update()


def test_plateau_offers_the_metrics_that_there_are() -> None:
    running = ReduceOnPlateau(metric="acuracy").start({"main": optimizer()})
    with pytest.raises(ConfigError, match="did you mean 'accuracy'"):
        running.on_evaluate({"accuracy": 0.5, "loss": 1.0})


# -- torch's schedulers --------------------------------------------------------------------------


class Halving(torch_schedulers.LRScheduler):
    """A scheduler as a user writes one."""

    def get_lr(self) -> list[float]:
        return [base * 0.5**self.last_epoch for base in self.base_lrs]


def warm_then_step(one: torch.optim.Optimizer, *, warmup: int) -> Any:
    rise = torch_schedulers.LinearLR(one, total_iters=warmup)
    fall = torch_schedulers.MultiStepLR(one, milestones=[3, 6])
    return torch_schedulers.SequentialLR(one, [rise, fall], milestones=[warmup])


SCHEDULERS: dict[str, tuple[Any, dict[str, Any], Callable[[Any], Any]]] = {
    "short name": (
        "steplr",
        {"step_size": 3},
        lambda o: torch_schedulers.StepLR(o, step_size=3),
    ),
    "import path": (
        "torch.optim.lr_scheduler.MultiStepLR",
        {"milestones": [2, 9]},
        lambda o: torch_schedulers.MultiStepLR(o, milestones=[2, 9]),
    ),
    "changes momentum": (
        "OneCycleLR",
        {"max_lr": 0.5, "total_steps": 40},
        lambda o: torch_schedulers.OneCycleLR(o, max_lr=0.5, total_steps=40),
    ),
    "with restarts": (
        "CosineAnnealingWarmRestarts",
        {"T_0": 4, "T_mult": 2},
        lambda o: torch_schedulers.CosineAnnealingWarmRestarts(o, 4, 2),
    ),
    "own class": (Halving, {}, Halving),
    "own function": (
        warm_then_step,
        {"warmup": 4},
        lambda o: warm_then_step(o, warmup=4),
    ),
}


def settings(one: torch.optim.Optimizer) -> list[tuple[float, float]]:
    return [(group["lr"], group["momentum"]) for group in one.param_groups]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_torch_scheduler_steps_with_updates_and_goes_on_from_its_state(name: str) -> None:
    scheduler, options, make = SCHEDULERS[name]
    knobs = TorchSchedule(scheduler=scheduler, options=options)
    mine, theirs = optimizer(0.3, 0.1), optimizer(0.3, 0.1)
    running, reference = knobs.start({"main": mine}), make(theirs)
    for update in range(30):
        assert settings(mine) == settings(theirs), update
        if update == 11:  # the run stops here and another goes on
            state = running.state_dict()
            assert plain(state)
            mine = optimizer(0.3, 0.1)
            running = knobs.start({"main": mine})
            running.load_state_dict(state)
            assert settings(mine) == settings(theirs)
        for one in (mine, theirs):
            one.step()
        running.on_update()
        running.on_epoch()  # not its interval
        running.on_evaluate({"loss": 1.0})
        reference.step()


def plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, str) and plain(v) for k, v in value.items())
    if isinstance(value, list):
        return all(plain(v) for v in value)
    return value is None or isinstance(value, bool | int | float | str)


def test_a_torch_scheduler_can_step_with_epochs() -> None:
    mine, theirs = optimizer(), optimizer()
    knobs = TorchSchedule(scheduler="ExponentialLR", options={"gamma": 0.5}, interval="epoch")
    running, reference = knobs.start({"main": mine}), torch_schedulers.ExponentialLR(theirs, 0.5)
    for update in range(12):
        mine.step()
        theirs.step()
        running.on_update()
        if update % 4 == 3:
            running.on_epoch()
            reference.step()
        assert rates_of(mine) == rates_of(theirs)


def test_torchs_plateau_scheduler_follows_evaluations() -> None:
    mine, theirs = optimizer(), optimizer()
    knobs = TorchSchedule(
        scheduler="ReduceLROnPlateau",
        options={"patience": 1},
        interval="evaluate",
        metric="perplexity",
    )
    running = knobs.start({"main": mine})
    reference = torch_schedulers.ReduceLROnPlateau(theirs, patience=1)
    for loss in noisy_losses(5, count=20):
        running.on_evaluate({"perplexity": loss})
        reference.step(loss)
        assert rates_of(mine) == rates_of(theirs)
    with pytest.raises(ConfigError, match="did you mean 'perplexities'"):
        running.on_evaluate({"perplexities": 1.0})


def test_each_optimizer_has_a_scheduler_of_its_own() -> None:
    both = {"main": optimizer(), "others": optimizer(0.01)}
    running = TorchSchedule(scheduler=Halving).start(both)
    for one in both.values():
        one.step()
    running.on_update()
    assert [rates_of(one) for one in both.values()] == [[LR / 2], [0.01 / 2]]


@pytest.mark.parametrize(
    ("scheduler", "options", "words"),
    [
        ("StepLT", {}, "did you mean 'StepLR'"),
        ("torch.optim.lr_scheduler.Nothing", {}, "has no 'Nothing'"),
        ("torch.optim.lr_scheduler.__all__", {}, "not a class or a function"),
        ("StepLR", {"stepsize": 3}, "did you mean 'step_size'"),
        ("StepLR", {}, "cannot be made: .*step_size"),
        ("ReduceLROnPlateau", {}, "set schedule.interval=evaluate"),
    ],
)
def test_a_bad_scheduler_is_refused_in_words(scheduler: str, options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TorchSchedule(scheduler=scheduler, options=options).start({"main": optimizer()})


# -- configuration -------------------------------------------------------------------------------


def knob_classes() -> dict[str, Any]:
    return {
        found.name: found
        for found in vars(schedules).values()
        if dataclasses.is_dataclass(found) and isinstance(found, type)
    }


def test_every_schedule_has_its_yaml_under_its_name() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} == set(knob_classes())


@pytest.mark.parametrize("name", sorted(knob_classes()))
def test_the_yaml_holds_the_defaults_of_the_constructor(name: str) -> None:
    node = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    kind = knob_classes()[name]
    assert node.pop("_target_") == f"torsh_trainer.optim.schedule.{kind.__name__}"
    defaults = {}
    for knob in dataclasses.fields(kind):
        made = knob.default_factory is not dataclasses.MISSING
        default = knob.default_factory() if made else knob.default
        defaults[knob.name] = list(default) if isinstance(default, tuple) else default
    if name == "torch":  # nothing to default to
        assert node.pop("scheduler") == "???"
        assert not defaults.pop("scheduler")
    assert node == defaults


def test_the_arguments_of_a_torch_scheduler_are_keywords_or_a_mapping() -> None:
    given = TorchSchedule("StepLR", step_size=2, gamma=0.5, interval="epoch")
    mapped = {"step_size": 2, "gamma": 0.5}
    assert given == TorchSchedule(scheduler="StepLR", options=mapped, interval="epoch")
    with pytest.raises(ConfigError, match="StepLR has no 'step_sise'; did you mean 'step_size'"):
        TorchSchedule("StepLR", step_sise=2).start({"main": optimizer()})
    with pytest.raises(ConfigError, match="gamma is given twice"):
        TorchSchedule("StepLR", options=mapped, gamma=0.1)
