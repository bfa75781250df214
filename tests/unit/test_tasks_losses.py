"""The ready tasks: losses, weights and metrics against plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torsh_trainer.errors import ConfigError
from torsh_trainer.tasks.base import DataSource
from torsh_trainer.tasks.classification import Classification
from torsh_trainer.tasks.language_model import LanguageModel
from torsh_trainer.tasks.models import GPT, MLP
from torsh_trainer.tasks.regression import Regression
from torsh_trainer.tasks.text import pad_tokens


def gpt() -> GPT:
    return GPT(vocab_size=16, context=12, layers=1, heads=2, width=8)


def language_model(**facts: Any) -> tuple[LanguageModel, nn.Module]:
    data = DataSource()
    for name, value in facts.items():
        setattr(data, name, value)
    task = LanguageModel(gpt, data)
    torch.manual_seed(0)
    return task, task.build_model()


def sentences(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(16, (length,), generator=generator) for length in lengths]


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def weighted(task: LanguageModel, model: nn.Module, batches: list[Any]) -> Tensor:
    """What an engine does with micro-batches: mean losses by weight over the total weight."""
    weights = [task.weight(batch) for batch in batches]
    parts = [
        task.loss(task.forward(model, batch), batch) * weight / sum(weights)
        for batch, weight in zip(batches, weights, strict=True)
    ]
    return torch.stack(parts).sum()


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_two_unequal_micro_batches_weigh_as_much_as_their_concatenation(cut: int) -> None:
    task, model = language_model()
    samples = sentences(3, 11, 6, 8)
    whole = pad_tokens(samples)
    parts = [pad_tokens(samples[:cut]), pad_tokens(samples[cut:])]
    assert task.weight(whole) == sum(len(sample) - 1 for sample in samples)
    expected = task.loss(task.forward(model, whole), whole)
    torch.testing.assert_close(weighted(task, model, parts), expected)
    for got, want in zip(
        gradients(model, weighted(task, model, parts)), gradients(model, expected), strict=True
    ):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-4)


def test_the_loss_of_padded_text_is_the_mean_over_its_real_tokens() -> None:
    task, model = language_model()
    samples = sentences(4, 9, 2)
    batch = pad_tokens(samples)
    alone = [
        F.cross_entropy(model(sample[None, :-1])[0], sample[1:], reduction="sum")
        for sample in samples
    ]
    tokens = sum(len(sample) - 1 for sample in samples)
    expected = torch.stack(alone).sum() / tokens
    torch.testing.assert_close(task.loss(task.forward(model, batch), batch), expected)
    mean = task.evaluate(model, batch)["loss"]
    torch.testing.assert_close(torch.as_tensor(mean.total / mean.weight), expected)
    per_sample = torch.stack(alone) / torch.tensor([len(sample) - 1.0 for sample in samples])
    torch.testing.assert_close(task.predict(model, batch), per_sample)


def test_windows_give_the_same_loss_as_plain_cross_entropy() -> None:
    task, model = language_model()
    windows = torch.randint(16, (3, 13), dtype=torch.uint8)
    logits = model(windows[:, :-1].long())
    expected = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].long().flatten())
    torch.testing.assert_close(task.loss(task.forward(model, windows), windows), expected)
    assert task.weight(windows) == 3 * 12
    mean = task.evaluate(model, windows)["loss"]
    torch.testing.assert_close(torch.as_tensor(mean.total / mean.weight), expected)


def test_a_micro_batch_without_a_single_target_has_loss_0_and_gradient_0() -> None:
    task, model = language_model()
    batch = {"tokens": torch.zeros(1, 3).long(), "targets": torch.full((1, 3), -100)}
    loss = task.loss(task.forward(model, batch), batch)
    assert task.weight(batch) == 0.0
    assert loss.item() == 0.0
    assert not any(gradient.any() for gradient in gradients(model, loss))


def test_fixed_windows_have_a_weight_that_needs_no_communication() -> None:
    task, model = language_model(fixed_length=True, context=12)
    assert task.sample_weight == 12.0
    assert task.units_per_sample == 12.0
    assert task.unit == "tokens"
    assert task.flops_per_sample(model) == 12 * gpt().flops_per_token(12)
    windows = torch.randint(16, (5, 13))
    assert task.weight(windows) == 5 * task.sample_weight


def test_operations_are_not_told_where_a_gradient_is_left_out() -> None:
    task, model = language_model(fixed_length=True, context=12)
    next(model.parameters()).requires_grad_(False)
    assert task.flops_per_sample(model) is None


def test_text_of_different_lengths_is_weighed_by_the_batch() -> None:
    task, _ = language_model(mean_length=7.5)
    assert task.sample_weight is None
    assert task.units_per_sample == 7.5


def test_a_model_that_cannot_count_its_operations_says_so_by_none() -> None:
    task = LanguageModel(lambda: nn.Embedding(16, 16), DataSource())
    assert task.flops_per_sample(task.build_model()) is None


def test_perplexity_and_bits_per_byte_follow_from_the_loss() -> None:
    task, _ = language_model(byte_level=True)
    assert task.summarise({"loss": math.log(8)}) == {
        "loss": math.log(8),
        "perplexity": pytest.approx(8.0),
        "bits_per_byte": pytest.approx(3.0),
    }
    assert task.summarise({"loss": 1e4})["perplexity"] == math.inf
    task, _ = language_model()
    assert "bits_per_byte" not in task.summarise({"loss": 1.0})


def test_a_batch_of_another_kind_is_refused_with_the_form_to_use() -> None:
    task, model = language_model()
    with pytest.raises(ConfigError, match=r"no tensor called 'tokens'.*collate"):
        task.forward(model, {"input_ids": torch.zeros(1, 3)})


def classification(**knobs: Any) -> tuple[Classification, nn.Module]:
    torch.manual_seed(0)
    task = Classification(
        lambda: MLP(in_features=4, out_features=3, hidden=(5,)), DataSource(), **knobs
    )
    return task, task.build_model()


def test_classification_gives_cross_entropy_and_accuracy() -> None:
    task, model = classification()
    x, y = torch.randn(50, 4), torch.randint(3, (50,))
    logits = model(x)
    torch.testing.assert_close(
        task.loss(task.forward(model, (x, y)), (x, y)), F.cross_entropy(logits, y)
    )
    metrics = task.evaluate(model, (x, y))
    assert metrics["accuracy"].total / metrics["accuracy"].weight == pytest.approx(
        (logits.argmax(1) == y).float().mean().item()
    )
    torch.testing.assert_close(
        metrics["loss"].total / metrics["loss"].weight, F.cross_entropy(logits, y)
    )


def test_label_smoothing_changes_the_training_loss_and_not_the_evaluation() -> None:
    task, model = classification(label_smoothing=0.2)
    x, y = torch.randn(20, 4), torch.randint(3, (20,))
    torch.testing.assert_close(
        task.loss(model(x), (x, y)), F.cross_entropy(model(x), y, label_smoothing=0.2)
    )
    mean = task.evaluate(model, (x, y))["loss"]
    torch.testing.assert_close(mean.total / mean.weight, F.cross_entropy(model(x), y))


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,), lambda x: (x, torch.zeros(6))])
def test_classes_are_predicted_with_or_without_labels_in_the_batch(
    wrap: Callable[..., Any],
) -> None:
    task, model = classification()
    x = torch.randn(6, 4)
    torch.testing.assert_close(task.predict(model, wrap(x)), model(x).argmax(1))


def test_classes_with_names_are_predicted_by_name() -> None:
    task, model = classification()
    task.data.classes = ["ant", "bee", "cow"]  # type: ignore[attr-defined]
    x = torch.randn(6, 4)
    assert task.predict(model, x) == [["ant", "bee", "cow"][i] for i in model(x).argmax(1)]


@pytest.mark.parametrize("columns", [None, 1, 3])
@pytest.mark.parametrize("criterion", ["mse", "mae"])
def test_regression_gives_both_errors(criterion: str, columns: int | None) -> None:
    torch.manual_seed(0)
    task = Regression(
        lambda: MLP(in_features=4, out_features=columns or 1, hidden=(5,)),
        DataSource(),
        criterion=criterion,  # type: ignore[arg-type]
    )
    model = task.build_model()
    x, y = torch.randn(30, 4), torch.randn(30, columns) if columns else torch.randn(30)
    outputs = model(x) if columns else model(x).squeeze(1)
    errors = {"mse": (outputs - y).square().mean(), "mae": (outputs - y).abs().mean()}
    torch.testing.assert_close(task.loss(task.forward(model, (x, y)), (x, y)), errors[criterion])
    metrics = {
        name: mean.total / mean.weight for name, mean in task.evaluate(model, (x, y)).items()
    }
    torch.testing.assert_close(metrics, {"loss": errors[criterion], **errors})


def test_outputs_that_would_broadcast_against_the_targets_are_refused() -> None:
    task = Regression(lambda: MLP(in_features=4, out_features=2, hidden=()), DataSource())
    with pytest.raises(ConfigError, match=r"\(8, 2\).*\(8, 1\).*model.out_features"):
        task.loss(torch.zeros(8, 2), (None, torch.zeros(8, 1)))


class Facts(DataSource):
    def __init__(self, **facts: Any) -> None:
        vars(self).update(facts)


@pytest.mark.parametrize(
    ("task", "fix"),
    [
        (Classification(MLP, Facts(num_classes=11)), "set model.out_features=11"),
        (Classification(MLP, Facts(in_features=63)), "set model.in_features=63"),
        (Regression(MLP, Facts(num_targets=2)), "set model.out_features=2"),
        (LanguageModel(gpt, Facts(vocab_size=17)), "set model.vocab_size=17"),
        (LanguageModel(gpt, Facts(context=13)), "set model.context=13"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused_with_the_override(
    task: Any, fix: str
) -> None:
    with pytest.raises(ConfigError, match=fix):
        task.build_model()


def test_a_model_with_more_classes_tokens_or_context_than_the_data_is_fine() -> None:
    Classification(MLP, Facts(num_classes=9, in_features=64)).build_model()
    LanguageModel(gpt, Facts(vocab_size=10, context=4)).build_model()


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda: Classification(MLP, DataSource(), label_smoothing=1.0),
            "task.label_smoothing=1.0",
        ),
        (lambda: Regression(MLP, DataSource(), criterion="rmse"), "choose mse or mae"),  # type: ignore[arg-type]
    ],
)
def test_a_knob_out_of_range_is_refused(build: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build()


def test_a_task_travels_to_a_worker_process() -> None:
    task, model = classification()
    again = cloudpickle.loads(cloudpickle.dumps(task))
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    assert torch.equal(again.loss(model(x), (x, y)), task.loss(model(x), (x, y)))
