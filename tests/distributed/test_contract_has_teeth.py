"""The strategies' suite itself: an engine that is wrong in one way fails it, a right one does not.

Every wrong engine here is DDP with one fault, and names the test that has to see it. Without them
a green suite might be an empty one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from torsh_trainer.optim.precision import Precision
from torsh_trainer.strategies.base import Clip
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.testing.ranks import RankFailure
from torsh_trainer.testing.strategy import StrategyContract

RANKS = 2


class Wrong:
    """An engine with a fault: what a subclass does not spoil goes to the right one."""

    def __init__(self, engine):
        self.right = engine

    def __getattr__(self, name):
        return getattr(self.right, name)


class Sums(Wrong):
    """Adds the gradients of ranks instead of averaging."""

    def forward_backward(self, micro_batches, total_weight, task):
        return self.right.forward_backward(micro_batches, total_weight / RANKS, task)


class IgnoresWeights(Wrong):
    """Gives every micro-batch the same weight, as a plain DDP script does."""

    def forward_backward(self, micro_batches, total_weight, task):
        equal = [micro._replace(weight=1.0) for micro in micro_batches]
        return self.right.forward_backward(equal, float(len(equal) * RANKS), task)


class AveragesPerRank(Wrong):
    """Takes the mean on each rank, and then the mean of those."""

    def forward_backward(self, micro_batches, total_weight, task):
        own = sum(micro.weight for micro in micro_batches) or 1.0
        return self.right.forward_backward(micro_batches, own * RANKS, task)


class ForgetsAMicroBatch(Wrong):
    def forward_backward(self, micro_batches, total_weight, task):
        return self.right.forward_backward(micro_batches[-1:], total_weight, task)


class KeepsTheLastStepsGradient(Wrong):
    def zero_grad(self):
        pass


class DropsOtherUnits(Wrong):
    """Leaves random numbers to chance."""

    def forward_backward(self, micro_batches, total_weight, task):
        free = [micro._replace(rng_key=None) for micro in micro_batches]
        return self.right.forward_backward(free, total_weight, task)


class NeverClips(Wrong):
    def step(self, clip, *, measure_norm=False):
        return self.right.step(Clip(), measure_norm=measure_norm)


class ClipsByEachRanksOwnNorm(Wrong):
    """Reports a norm that is too large by the root of the number of ranks."""

    def step(self, clip, *, measure_norm=False):
        tighter = None if clip.norm is None else clip.norm / RANKS**0.5
        return self.right.step(replace(clip, norm=tighter), measure_norm=measure_norm)


class KeepsItsFirstLearningRate(Wrong):
    def __init__(self, engine):
        super().__init__(engine)
        self.rates = [g["lr"] for o in engine.optimizers.values() for g in o.param_groups]

    def step(self, clip, *, measure_norm=False):
        groups = [g for o in self.right.optimizers.values() for g in o.param_groups]
        for group, rate in zip(groups, self.rates, strict=True):
            group["lr"] = rate
        return self.right.step(clip, measure_norm=measure_norm)


class CountsEveryBatch(Wrong):
    def evaluate(self, batches, task, *, averaged=False):
        counted = [(batch, True) for batch, _ in batches]
        return self.right.evaluate(counted, task, averaged=averaged)


class EvaluatesWithoutTheAverage(Wrong):
    def evaluate(self, batches, task, *, averaged=False):
        return self.right.evaluate(batches, task, averaged=False)


class StaysInTraining(Wrong):
    """Evaluates with dropout."""

    def predict(self, batches, task, *, averaged=False):
        for batch, counts in batches:
            if counts:
                yield task.predict(self.right.model.train(), batch)


class EvaluatesItsOwnBuffers(Wrong):
    def __init__(self, engine):
        super().__init__(engine)
        engine._buffers.gather = lambda: None


class ForgetsThePlaces(Wrong):
    """Has rank 0's buffers instead of averages over all."""

    def forward_backward(self, micro_batches, total_weight, task):
        unplaced = [micro._replace(place=None) for micro in micro_batches]
        return self.right.forward_backward(unplaced, total_weight, task)


class ForgetsTheOptimizer(Wrong):
    def load_state_dict(self, state):
        empty = {n: {**entry, "state": {}} for n, entry in state["optimizer"].items()}
        self.right.load_state_dict({**state, "optimizer": empty})


class ForgetsTheLossScale(Wrong):
    def load_state_dict(self, state):
        self.right.load_state_dict({k: v for k, v in state.items() if k != "loss_scale"})


class StepsTheWrongOptimizer(Wrong):
    def step_one(self, name, clip=Clip(), **options):
        return self.right.step_one({"head": "body", "body": "head"}[name], clip, **options)


class SumsInManualBackward(Wrong):
    def backward(self, loss, *, sync=True):
        self.right.backward(loss * RANKS, sync=sync)


@dataclass(frozen=True)
class Faulty(DDP):
    """DDP whose engine, or whose reading of the job, is wrong."""

    fault: Any = None
    ignores: Any = None  # a field of the job, and what it takes for it

    def prepare(self, job, comm):
        if self.ignores is not None:
            job = replace(job, **dict([self.ignores]))
        engine = super().prepare(job, comm)
        return engine if self.fault is None else self.fault(engine)


class Suite(StrategyContract):
    """Not collected by its name; its tests are called from below."""

    strategy = Faulty()
    for_unused: ClassVar[Any] = None


SEEN_BY = [
    (Sums, "test_three_steps_of_sgd_equal_plain_pytorch"),
    (IgnoresWeights, "test_the_gradient_is_the_mean_over_all_tokens"),
    (IgnoresWeights, "test_a_ragged_tail_counts_every_sample_once"),
    (IgnoresWeights, "test_weights_count_across_accumulated_micro_batches"),
    (AveragesPerRank, "test_the_gradient_is_the_mean_over_all_tokens"),
    (AveragesPerRank, "test_a_ragged_tail_counts_every_sample_once"),
    (ForgetsAMicroBatch, "test_accumulated_micro_batches_equal_one_large_batch"),
    (KeepsTheLastStepsGradient, "test_three_steps_of_sgd_equal_plain_pytorch"),
    (DropsOtherUnits, "test_micro_batches_drop_the_units"),
    (NeverClips, "test_clipping_by_norm"),
    (NeverClips, "test_clipping_by_value"),
    (ClipsByEachRanksOwnNorm, "test_clipping_by_norm"),
    (KeepsItsFirstLearningRate, "test_adamw_with_clipping_and_a_schedule"),
    (CountsEveryBatch, "test_evaluation_counts_each_batch_once"),
    (EvaluatesWithoutTheAverage, "test_the_moving_average"),
    (StaysInTraining, "test_predictions_are_those_of_the_plain_model"),
    (EvaluatesItsOwnBuffers, "test_running_statistics"),
    (ForgetsThePlaces, "test_running_statistics"),
    (ForgetsTheOptimizer, "test_a_state_carries_training_into_a_fresh_engine"),
    (ForgetsTheLossScale, "test_a_state_carries_the_loss_scale"),
    (StepsTheWrongOptimizer, "test_manual_backward"),
    (SumsInManualBackward, "test_manual_backward"),
]
IGNORED = [
    (("precision", Precision()), "test_mixed_bf16"),
    (("precision", Precision()), "test_true_bf16"),
    (("precision", Precision()), "test_mixed_fp16"),
    (("precision", Precision(compute="bf16")), "test_true_bf16"),
    (("activation_checkpointing", False), "test_activation_checkpointing"),
    (("skip_nonfinite", False), "test_a_step_with_a_non_finite_gradient"),
    (("ema_decay", 0.6), "test_the_moving_average"),
]


def whole_name(beginning):
    (name,) = [name for name in dir(StrategyContract) if name.startswith(beginning)]
    return name


def suite_of(strategy):
    return type("SuiteOfOne", (Suite,), {"strategy": strategy})()


def fails(strategy, test):
    """The suite's words for what is wrong; a crash of the engine would prove nothing."""
    with pytest.raises(AssertionError) as caught:
        getattr(suite_of(strategy), whole_name(test))(RANKS)
    words = str(caught.value)
    assert not isinstance(caught.value, RankFailure) or "AssertionError: " in words, words
    return words


@pytest.mark.parametrize(("fault", "test"), SEEN_BY, ids=lambda v: getattr(v, "__name__", v))
def test_the_suite_sees_that_an_engine(fault, test):
    assert fails(Faulty(fault=fault), test)


@pytest.mark.parametrize(("ignores", "test"), IGNORED, ids=str)
def test_the_suite_sees_that_an_option_is_ignored(ignores, test):
    assert fails(Faulty(ignores=ignores), test)


def test_the_suites_words_name_step_and_quantity():
    words = fails(Faulty(fault=Sums), "test_three_steps_of_sgd")
    assert words.startswith("step 0: gradient norm is ")
    assert "(ratio 2;" in words


@pytest.mark.matrix(8)
@pytest.mark.parametrize("test", sorted({whole_name(test) for _, test in SEEN_BY + IGNORED}))
def test_the_suite_finds_no_fault_with_the_right_engine(test):
    getattr(suite_of(Faulty()), test)(RANKS)


def test_the_suite_sees_a_refusal_that_is_declared_and_not_made():
    class Declares(Suite):
        refuses: ClassVar[Any] = {"bf16_mixed": "it says so"}

    with pytest.raises(AssertionError, match="bf16_mixed is declared as refused"):
        Declares().test_mixed_bf16_equals_plain_autocast(RANKS)


def test_the_suite_accepts_a_refusal_that_is_made():
    class Refuses(DDP):
        def prepare(self, job, comm):
            if job.precision.autocast:
                raise self.refuse("precision=bf16_mixed", use="use precision=fp32")
            return super().prepare(job, comm)

    class Declares(Suite):
        strategy = Refuses()
        refuses: ClassVar[Any] = {"bf16_mixed": "this strategy computes in fp32"}

    Declares().test_mixed_bf16_equals_plain_autocast(RANKS)
    Declares().test_three_steps_of_sgd_equal_plain_pytorch(RANKS)
