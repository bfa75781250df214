"""The contract of a strategy as a test suite: it must equal plain PyTorch on one process."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import cloudpickle
import torch

from torsh_trainer.comm.base import CommOptions
from torsh_trainer.optim.precision import LossScaling, Precision
from torsh_trainer.strategies.base import Clip, Strategy
from torsh_trainer.testing import cases, reference
from torsh_trainer.testing.compare import (
    BF16,
    FP16,
    FP32,
    FP32_ADAM,
    REDUCED,
    Tolerance,
    close,
    is_frozen,
    same_resumed,
    same_slots,
    same_tensors,
    world_of,
)
from torsh_trainer.testing.mesh import ReplicatedModel
from torsh_trainer.testing.ranks import OPTIONS, shared_pool
from torsh_trainer.testing.reference import Scenario, TrainingOutcome
from torsh_trainer.testing.resuming import as_dicts, differences
from torsh_trainer.testing.tiny import TinyData, TinyModelOptions, TinyTask

BF16_MIXED = Precision(compute="bf16")
BF16_TRUE = Precision(params="bf16", compute="bf16")
BF16_REDUCED = Precision(reduce="bf16")
FP16_MIXED = Precision(
    compute="fp16", loss_scaling=LossScaling(initial_scale=1024.0, growth_interval=2)
)


CAPABILITIES = (
    "accumulation",
    "activation_checkpointing",
    "bf16_mixed",
    "bf16_true",
    "buffers",
    "clip_norm",
    "clip_value",
    "ema",
    "fp16_mixed",
    "manual_optimization",
    "reduce_bf16",
    "several_optimizers",
    "skip_nonfinite",
    "sync_batchnorm",
    "unused_parameters",
)
"""What a strategy may refuse; all else is what a strategy is for."""


_Rule = TypeVar("_Rule", bound=Callable[..., None])


def _gradient(rule: _Rule) -> _Rule:
    """Marks a rule that looks at the numbers of a step: every variant and world size runs it."""
    rule.is_about_gradients = True  # type: ignore[attr-defined]
    return rule


class StrategyContract:
    """What every strategy must do; a plugin's test is one class that inherits this one.

    ``strategy`` is the one under test, ``world_sizes`` the numbers of processes it is tried on.
    ``refuses`` names those of ``CAPABILITIES`` that it cannot honour, with the reason; the suite
    then asserts that it says so (``Unsupported``). ``for_unused`` is the strategy to use for a
    model with a parameter that no loss reaches, where a knob must say so; ``for_branches`` the one
    for a forward that goes other ways on other processes and in other steps (None: the former).
    ``tolerances`` replaces bounds by precision name, where an engine rounds in other places.
    ``micro_batches`` multiplies the micro-batches of every step, where a knob wants a multiple.
    ``comm_options`` choose the backend of the processes, gloo where they do not.
    With ``model_replicate`` so many processes stand in the place of each of ``world_sizes``, and
    compute the same thing on the same samples; with ``tensor_parallel`` they share each layer, with
    ``pipeline_parallel`` they have the layers in turn, with ``context_parallel`` each has a part of
    every sequence. ``model`` is what the tiny model has in all rules, ``length`` how many tokens a
    sample has (None: an odd number).

    With ``variant`` the class tries other knobs of a strategy that has a class of its own. A suite
    that holds every promise once runs all rules for a strategy on two processes (or on its first
    number of them); on other numbers, and for a variant, those about gradients, of which
    ``rules_of_a_variant`` may name a few: ``is_exhaustive``.
    """

    strategy: ClassVar[Strategy]
    world_sizes: ClassVar[tuple[int, ...]] = (2, 4)
    refuses: ClassVar[Mapping[str, str]] = {}
    for_unused: ClassVar[Strategy | None] = None
    for_branches: ClassVar[Strategy | None] = None
    tolerances: ClassVar[Mapping[str, Tolerance]] = {}
    micro_batches: ClassVar[int] = 1
    device: ClassVar[str] = "cpu"
    comm_options: ClassVar[CommOptions] = OPTIONS
    model_replicate: ClassVar[int] = 1
    tensor_parallel: ClassVar[int] = 1
    pipeline_parallel: ClassVar[int] = 1
    context_parallel: ClassVar[int] = 1
    model: ClassVar[TinyModelOptions] = TinyModelOptions()
    length: ClassVar[int | None] = None
    variant: ClassVar[bool] = False
    rules_of_a_variant: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def pytest_generate_tests(cls, metafunc: Any) -> None:
        """pytest's hook: one test for each world size."""
        if "world_size" in metafunc.fixturenames:
            sizes = metafunc.cls.world_sizes
            metafunc.parametrize("world_size", sizes, ids=[f"{size}-ranks" for size in sizes])

    @classmethod
    def is_exhaustive(cls, rule: Callable[..., None], world_size: int) -> bool:
        """Whether this rule on so many processes holds what another one holds already."""
        whole = 2 if 2 in cls.world_sizes else cls.world_sizes[0]
        gradients = getattr(rule, "is_about_gradients", False)
        if cls.variant and cls.rules_of_a_variant:
            gradients = rule.__name__ in cls.rules_of_a_variant
        return not gradients and (cls.variant or world_size != whole)

    # -- the gradient, SGD first: Adam would hide a factor -----------------------------------------

    @_gradient
    def test_three_steps_of_sgd_equal_plain_pytorch(self, world_size: int) -> None:
        self._equals(Scenario(), world_size)

    @_gradient
    def test_accumulated_micro_batches_equal_one_large_batch(self, world_size: int) -> None:
        data = TinyData(accumulate=3)
        self._equals(Scenario(data=data), world_size, needs="accumulation")

    def test_a_ragged_tail_counts_every_sample_once(self, world_size: int) -> None:
        self._equals(Scenario(data=TinyData(ragged=True)), world_size)

    @_gradient
    def test_the_tail_of_an_accumulated_step_counts_every_sample_once(
        self, world_size: int
    ) -> None:
        data = TinyData(ragged=True, accumulate=2)
        self._equals(Scenario(data=data), world_size, needs="accumulation")

    @_gradient
    def test_the_gradient_is_the_mean_over_all_tokens_though_ranks_have_different_numbers(
        self, world_size: int
    ) -> None:
        self._equals(Scenario(data=TinyData(tokens=True)), world_size)

    def test_weights_count_across_accumulated_micro_batches(self, world_size: int) -> None:
        data = TinyData(tokens=True, accumulate=2)
        self._equals(Scenario(data=data), world_size, needs="accumulation")

    @_gradient
    def test_clipping_by_norm_uses_the_norm_of_the_global_gradient(self, world_size: int) -> None:
        scenario = Scenario(clip=Clip(norm=0.1), data=TinyData(tokens=True))
        self._equals(scenario, world_size, needs="clip_norm")

    def test_clipping_by_value_equals_plain_pytorch(self, world_size: int) -> None:
        self._equals(Scenario(clip=Clip(value=0.02)), world_size, needs="clip_value")

    # -- optimizers and schedules ------------------------------------------------------------------

    @_gradient
    def test_adamw_with_clipping_and_a_schedule_equals_plain_pytorch(self, world_size: int) -> None:
        scenario = Scenario(
            optimizer="adamw",
            clip=Clip(norm=0.5),
            schedule=(0.5, 1.0, 0.25),
            data=TinyData(tokens=True, accumulate=1 if "accumulation" in self.refuses else 2),
        )
        self._equals(scenario, world_size, needs="clip_norm")

    def test_tied_parameters_equal_plain_pytorch(self, world_size: int) -> None:
        scenario = Scenario(model=TinyModelOptions(tied=True), optimizer="adamw")
        self._equals(scenario, world_size)

    def test_two_optimizers_step_their_own_parameters(self, world_size: int) -> None:
        self._equals(Scenario(optimizer="two"), world_size, needs="several_optimizers")

    @_gradient
    def test_a_parameter_that_no_rank_used_is_not_updated(self, world_size: int) -> None:
        scenario = self._cut(Scenario(model=TinyModelOptions(unused=True), optimizer="adamw"))
        strategy = self.for_unused or self.strategy
        outcomes = self._equals(scenario, world_size, needs="unused_parameters", strategy=strategy)
        before = scenario.task.build_model().state_dict()
        for outcome in outcomes or ():
            for name in ("unused.weight", "unused.bias"):
                assert torch.equal(outcome.parameters[name], before[name]), f"{name} has moved"

    def test_an_expert_a_batch_equals_plain_pytorch(self, world_size: int) -> None:
        one = {"accumulation", "unused_parameters"} & set(self.refuses)
        scenario = Scenario(
            model=TinyModelOptions(experts=True),
            optimizer="adamw",
            clip=Clip() if "clip_norm" in self.refuses else Clip(norm=0.5),
            data=TinyData(accumulate=1 if one else 2, steps=4),
        )
        strategy = self.for_branches or self.for_unused or self.strategy
        self._equals(scenario, world_size, needs="unused_parameters", strategy=strategy)

    def test_frozen_parameters_stay_and_the_others_train(self, world_size: int) -> None:
        self._equals(Scenario(model=TinyModelOptions(frozen=True), optimizer="adamw"), world_size)

    # -- precision ---------------------------------------------------------------------------------

    @_gradient
    def test_mixed_bf16_equals_plain_autocast(self, world_size: int) -> None:
        self._equals(Scenario(precision=BF16_MIXED), world_size, needs="bf16_mixed")

    def test_true_bf16_equals_a_bf16_model_with_an_fp32_master(self, world_size: int) -> None:
        self._equals(Scenario(precision=BF16_TRUE), world_size, needs="bf16_true")

    def test_mixed_fp16_scales_the_loss_and_skips_overflow_as_torch_does(
        self, world_size: int
    ) -> None:
        scenario = Scenario(precision=FP16_MIXED, data=TinyData(steps=4, spoilt=1))
        self._equals(scenario, world_size, needs="fp16_mixed")

    def test_gradients_reduced_in_bf16_are_rounded_once_a_rank(self, world_size: int) -> None:
        scenario = Scenario(precision=BF16_REDUCED)
        self._equals(scenario, world_size, needs="reduce_bf16")

    # -- what runs beside the gradient -------------------------------------------------------------

    def test_micro_batches_drop_the_units_that_their_key_says(self, world_size: int) -> None:
        data = TinyData(accumulate=1 if "accumulation" in self.refuses else 2)
        self._equals(Scenario(model=TinyModelOptions(dropout=0.4), data=data), world_size)

    def test_activation_checkpointing_recomputes_and_changes_nothing(self, world_size: int) -> None:
        scenario = Scenario(model=TinyModelOptions(dropout=0.4), activation_checkpointing=True)
        if not self._equals(scenario, world_size, needs="activation_checkpointing"):
            return
        calls = self._on_ranks(cases.block_calls, scenario, world_size)
        plain = self._on_ranks(
            cases.block_calls, replace(scenario, activation_checkpointing=False), world_size
        )
        assert calls == [2 * count for count in plain], "no block ran twice"

    def test_a_step_with_a_non_finite_gradient_changes_nothing_on_any_rank(
        self, world_size: int
    ) -> None:
        scenario = Scenario(
            optimizer="adamw", data=TinyData(steps=3, spoilt=1), skip_nonfinite=True
        )
        outcomes = self._equals(scenario, world_size, needs="skip_nonfinite")
        for outcome in outcomes or ():
            assert outcome.skipped == [False, True, False]

    def test_the_moving_average_equals_plain_arithmetic(self, world_size: int) -> None:
        self._equals(Scenario(ema_decay=0.5), world_size, needs="ema")

    def test_running_statistics_are_those_of_one_process(self, world_size: int) -> None:
        for data in (TinyData(), TinyData(accumulate=2, ragged=True)):
            scenario = Scenario(model=TinyModelOptions(batch_norm=True), data=data)
            self._equals(scenario, world_size, needs="buffers")

    def test_synchronized_batch_norm_equals_one_norm_of_all_samples(self, world_size: int) -> None:
        model = TinyModelOptions(batch_norm=True)
        for data in (TinyData(), TinyData(accumulate=2, ragged=True)):
            scenario = Scenario(model=model, data=data, sync_batchnorm=True)
            self._equals(scenario, world_size, needs="sync_batchnorm")

    def test_evaluation_counts_each_batch_once_and_leaves_training_alone(
        self, world_size: int
    ) -> None:
        scenario = Scenario(model=TinyModelOptions(dropout=0.4), data=TinyData(tokens=True))
        expected = self._train_reference(scenario, world_size, self.strategy)
        for outcome in self._on_ranks(cases.train_between_evaluations, scenario, world_size):
            self._compare(outcome, expected, self._tolerance(scenario))

    def test_predictions_are_those_of_the_plain_model_in_order(self, world_size: int) -> None:
        scenario = self._cut(Scenario(model=TinyModelOptions(dropout=0.4)))
        dp = self._dp(self.strategy, world_size)
        model = scenario.task.build_model().eval()
        batches = scenario.data.evaluation(dp)
        for rank, outputs in enumerate(self._on_ranks(cases.predict, scenario, world_size)):
            mine = batches[self.strategy.mesh(world_of(rank, world_size)).dp_rank]
            expected = [model(batch["tokens"]) for batch, counts in mine if counts]
            assert len(outputs) == len(expected)
            for ours, plain in zip(outputs, expected, strict=True):
                torch.testing.assert_close(ours, plain.detach(), rtol=1e-5, atol=1e-6)

    # -- manual optimization -----------------------------------------------------------------------

    def test_manual_backward_averages_over_ranks_and_steps_one_optimizer(
        self, world_size: int
    ) -> None:
        optimizer = "sgd" if "several_optimizers" in self.refuses else "two"
        scenario = Scenario(optimizer=optimizer, data=TinyData(accumulate=2))
        if self._is_refused("manual_optimization", scenario, world_size, case=cases.manual):
            return
        ranks = self._dp(self.strategy, world_size)
        expected = cases.manual_reference(self._cut(scenario), ranks)
        for parameters in self._on_ranks(cases.manual, scenario, world_size):
            same_tensors(parameters, expected, FP32.parameters, "after manual steps")

    # -- state -------------------------------------------------------------------------------------

    @_gradient
    def test_a_state_carries_training_into_a_fresh_engine(self, world_size: int) -> None:
        scenario = Scenario(
            optimizer="adamw",
            data=TinyData(tokens=True),
            ema_decay=None if "ema" in self.refuses else 0.5,
        )
        expected = self._train_reference(scenario, world_size, self.strategy)
        for went_on, resumed in self._on_ranks(cases.resume, scenario, world_size):
            self._compare(went_on, expected, self._tolerance(scenario))
            same_resumed(resumed, went_on, self._resume_bound(scenario, world_size))

    def test_a_state_carries_the_loss_scale(self, world_size: int) -> None:
        scenario = Scenario(precision=FP16_MIXED, data=TinyData(steps=3, spoilt=1))
        if self._is_refused("fp16_mixed", scenario, world_size):
            return
        for went_on, resumed in self._on_ranks(cases.resume, scenario, world_size):
            same_resumed(resumed, went_on, self._resume_bound(scenario, world_size))

    def test_a_state_has_the_names_of_the_plain_model_and_fp32_values(
        self, world_size: int
    ) -> None:
        model = TinyModelOptions(tied=True)
        precision = Precision() if "bf16_true" in self.refuses else BF16_TRUE
        scenario = self._cut(Scenario(model=model, precision=precision, data=TinyData(steps=1)))
        plain = scenario.task.build_model().state_dict()
        for outcome in self._on_ranks(cases.train, scenario, world_size):
            assert set(outcome.parameters) == set(plain)
            for name, tensor in outcome.parameters.items():
                assert tensor.shape == plain[name].shape, name
                assert tensor.dtype == plain[name].dtype, name

    # -- the shape of a strategy -------------------------------------------------------------------

    def test_the_mesh_divides_the_world_without_rest(self, world_size: int) -> None:
        meshes = [self.strategy.mesh(world_of(rank, world_size)) for rank in range(world_size)]
        for mesh in meshes:
            assert mesh.dp == mesh.size == world_size
            assert mesh.dp_replicate * mesh.dp_shard == mesh.dp
        assert len({mesh.dp_rank for mesh in meshes}) == world_size, "two ranks have one place"

    def test_a_strategy_is_a_frozen_value_that_travels(self) -> None:
        knobs: Any = self.strategy
        assert dataclasses.is_dataclass(knobs)
        for knob in dataclasses.fields(knobs):
            assert is_frozen(knobs, knob.name), "a knob can be changed: freeze the dataclass"
        assert pickle.loads(cloudpickle.dumps(self.strategy)) == self.strategy

    def test_what_it_refuses_is_something_that_can_be_refused(self) -> None:
        assert set(self.refuses) <= set(CAPABILITIES)
        assert all(self.refuses.values()), "a refusal has a reason"

    def test_a_loss_that_is_not_a_scalar_is_the_users_mistake(self, world_size: int) -> None:
        self._blames_the_user(cases.VectorLoss, world_size)

    def test_a_loss_without_a_gradient_is_the_users_mistake(self, world_size: int) -> None:
        self._blames_the_user(cases.DetachedLoss, world_size)

    # -- how it is done ----------------------------------------------------------------------------

    def _equals(
        self,
        scenario: Scenario,
        world_size: int,
        *,
        needs: str = "",
        strategy: Strategy | None = None,
    ) -> list[TrainingOutcome] | None:
        """Every rank's outcome, compared; None when the capability is refused, as declared."""
        strategy = strategy or self.strategy
        if self._is_refused(needs, scenario, world_size):
            return None
        expected = self._train_reference(scenario, world_size, strategy)
        outcomes = self._on_ranks(cases.train, scenario, world_size, strategy=strategy)
        for outcome in outcomes:
            self._compare(outcome, expected, self._tolerance(scenario))
        return outcomes

    def _is_refused(
        self,
        capability: str,
        scenario: Scenario,
        world_size: int,
        case: Callable[..., Any] | None = None,
    ) -> bool:
        if capability not in self.refuses:
            return False
        for words in self._on_ranks(cases.refusal, scenario, world_size, case or cases.train):
            assert words, (
                f"{capability} is declared as refused ({self.refuses[capability]}), "
                "and no Unsupported was raised"
            )
        return True

    def _blames_the_user(self, task: type[TinyTask], world_size: int) -> None:
        for words in self._on_ranks(cases.blame, Scenario(), world_size, task):
            assert words, "no ConfigError was raised"

    def _on_ranks(
        self,
        case: Callable[..., Any],
        scenario: Scenario,
        world_size: int,
        *args: Any,
        strategy: Strategy | None = None,
    ) -> list[Any]:
        copies = self.model_replicate * self.tensor_parallel * self.context_parallel
        pp = self.pipeline_parallel
        pool = shared_pool(world_size * copies * pp, self.device, self.comm_options)
        given = (strategy or self.strategy, self._cut(scenario), *args)
        if copies * pp == 1:
            return pool.run(case, *given)
        mesh = ReplicatedModel(
            model_replicate=self.model_replicate,
            tp=self.tensor_parallel,
            cp=self.context_parallel,
            pp=pp,
        )
        answers = pool.run(cases.on_a_mesh, mesh, case, *given)
        for rank, answer in enumerate(
            answers
        ):  # stages are the outermost axis, copies the innermost
            first = answers[rank % (world_size * copies) // copies * copies]
            differing = differences(as_dicts(answer), as_dicts(first))
            assert not differing, f"rank {rank} has the samples of another, and not its {differing}"
        return answers[: world_size * copies : copies]

    def _train_reference(
        self, scenario: Scenario, world_size: int, strategy: Strategy
    ) -> TrainingOutcome:
        return reference.train(
            self._cut(scenario),
            self._dp(strategy, world_size),
            gradient_scale=strategy.gradient_scale_on(world_of(0, world_size)),
            device=self.device,
        )

    def _cut(self, scenario: Scenario) -> Scenario:
        accumulate = scenario.data.accumulate * self.micro_batches
        model = replace(scenario.model, attention=self.model.attention)
        length = scenario.data.length if self.length is None else self.length
        data = replace(scenario.data, accumulate=accumulate, length=length)
        return replace(scenario, data=data, model=model)

    def _dp(self, strategy: Strategy, world_size: int) -> int:
        return strategy.mesh(world_of(0, world_size)).dp

    def _tolerance(self, scenario: Scenario) -> Tolerance:
        name = scenario.precision.name
        if scenario.precision.reduce != "fp32":
            name = "reduce-bf16"
        bounds = {
            "fp32": FP32 if scenario.optimizer != "adamw" else FP32_ADAM,
            "bf16-mixed": BF16,
            "bf16-true": BF16,
            "fp16-mixed": FP16,
            "reduce-bf16": REDUCED,
            **self.tolerances,
        }
        return bounds[name]

    def _resume_bound(self, scenario: Scenario, world_size: int) -> float:
        """A resumed engine runs the very same operations: nothing differs at all on two ranks.

        On more, the order of a sum depends on a value's place in its buffer (gloo's ring, NCCL's
        too), and DDP lays its buffers out anew after the first step of an engine.
        """
        return 0.0 if world_size <= 2 else self._tolerance(scenario).parameters

    def _compare(
        self, outcome: TrainingOutcome, expected: TrainingOutcome, tolerance: Tolerance
    ) -> None:
        """Names the first step and quantity that differ: the quantity names the broken rule."""
        assert outcome.skipped == expected.skipped, "other steps were skipped"
        for step, skipped in enumerate(expected.skipped):
            bound = tolerance.relative if step else tolerance.first
            for rank, losses in enumerate(expected.losses[step]):
                ours = outcome.losses[step][rank]
                assert len(ours) == len(losses), f"step {step}: {len(ours)} losses on rank {rank}"
                for mine, plain in zip(ours, losses, strict=True):
                    close(mine, plain, bound, f"step {step}, rank {rank}: loss")
            if skipped:
                assert not math.isfinite(outcome.norms[step])
            else:
                norms = outcome.norms[step], expected.norms[step]
                close(*norms, tolerance.relative, f"step {step}: gradient norm")
        same_tensors(outcome.parameters, expected.parameters, tolerance.parameters, "parameters")
        for name, slots in expected.optimizer.items():
            same_slots(outcome.optimizer[name], slots, tolerance.parameters, name)
        self._compare_metrics(outcome, expected, tolerance)
        assert outcome.loss_scale in (None, expected.loss_scale), "the loss scale differs"

    def _compare_metrics(
        self, outcome: TrainingOutcome, expected: TrainingOutcome, tolerance: Tolerance
    ) -> None:
        for kind in ("metrics", "averaged_metrics"):
            ours, plain = getattr(outcome, kind), getattr(expected, kind)
            assert set(ours) == set(plain), kind
            for name in plain:
                # A rounding may turn an argmax over.
                if name == "loss" or tolerance in (FP32, FP32_ADAM):
                    close(ours[name], plain[name], tolerance.relative, f"{kind}: {name}")
