"""The loss of a language model without the logits of the whole batch, beside plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torsh_trainer.errors import ConfigError
from torsh_trainer.tasks import chunked_loss
from torsh_trainer.tasks.base import DataSource
from torsh_trainer.tasks.chunked_loss import IGNORED, chunk_rows, pays, sum_of_losses
from torsh_trainer.tasks.language_model import LanguageModel
from torsh_trainer.tasks.models import GPT

WORDS, WIDTH, TOKENS = 50, 8, 51


def drawn() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias, and targets of which some do not count."""
    torch.manual_seed(0)
    hidden = torch.randn(3, TOKENS // 3, WIDTH, requires_grad=True)
    weight = torch.randn(WORDS, WIDTH, requires_grad=True)
    targets = torch.randint(WORDS, (3, TOKENS // 3))
    targets[0, 3:] = IGNORED
    return hidden, weight, torch.randn(WORDS, requires_grad=True), targets


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, weight, bias).float().flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=IGNORED)


@pytest.mark.parametrize("rows", [1, 8, 1000])
@pytest.mark.parametrize("biased", [False, True])
def test_loss_and_gradients_are_those_of_plain_cross_entropy(rows: int, biased: bool) -> None:
    hidden, weight, bias, targets = drawn()
    given = bias if biased else None
    inputs = [hidden, weight, *([bias] if biased else [])]
    got = sum_of_losses(hidden, weight, targets, bias=given, rows=rows)
    right = plain(hidden, weight, given, targets)
    torch.testing.assert_close(got, right)
    for mine, torchs in zip(
        torch.autograd.grad(got * 0.3, inputs),
        torch.autograd.grad(right * 0.3, inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, torchs, rtol=1e-5, atol=1e-5)


def test_under_autocast_the_loss_is_fp32_and_the_gradients_are_as_near_as_bf16_is() -> None:
    hidden, weight, _, targets = drawn()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = sum_of_losses(hidden, weight, targets, rows=8)
        right = plain(hidden, weight, None, targets)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, right)
    exact = torch.autograd.grad(plain(hidden, weight, None, targets), (hidden, weight))
    mine = torch.autograd.grad(got, (hidden, weight))
    theirs = torch.autograd.grad(right, (hidden, weight))
    for one, other, truth in zip(mine, theirs, exact, strict=True):
        assert one.dtype == torch.float32
        assert (one - truth).norm() <= 1.1 * (other - truth).norm()


def test_a_batch_without_a_target_and_one_that_needs_no_gradient() -> None:
    hidden, weight, _, targets = drawn()
    loss = sum_of_losses(hidden, weight, torch.full_like(targets, IGNORED), rows=8)
    assert loss.item() == 0.0
    assert not any(g.any() for g in torch.autograd.grad(loss, (hidden, weight)))
    with torch.no_grad():
        assert not sum_of_losses(hidden, weight, targets, rows=8).requires_grad
    frozen = sum_of_losses(hidden, weight.detach(), targets, rows=8)
    whole = plain(hidden, weight, None, targets)
    torch.testing.assert_close(
        torch.autograd.grad(frozen, hidden), torch.autograd.grad(whole, hidden)
    )


def test_a_target_that_is_no_word_is_refused() -> None:
    hidden, weight, _, targets = drawn()
    for wrong in (WORDS, -1):
        with pytest.raises(RuntimeError, match="out of bounds"):
            sum_of_losses(hidden, weight, torch.full_like(targets, wrong), rows=8)


def test_rows_that_stand_for_no_word_have_no_part_in_the_loss() -> None:
    hidden, weight, _, targets = drawn()
    more = torch.cat([weight.detach(), 100 * torch.ones(14, WIDTH)]).requires_grad_()
    got = sum_of_losses(hidden, more, targets, words=WORDS, rows=8)
    right = plain(hidden, weight, None, targets)
    torch.testing.assert_close(got, right)
    of_more, of_weight = torch.autograd.grad(got, more)[0], torch.autograd.grad(right, weight)[0]
    torch.testing.assert_close(of_more[:WORDS], of_weight, rtol=1e-5, atol=1e-5)
    assert not of_more[WORDS:].any()


class Largest(TorchDispatchMode):
    """Notes the numbers of the largest tensor that is made."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        self.numbers = max([self.numbers, *sizes])
        return made


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "chunk_rows", lambda vocabulary: 5)


def task_of(way: Any, **facts: Any) -> tuple[LanguageModel, nn.Module]:
    data = DataSource()
    for name, value in facts.items():
        setattr(data, name, value)
    task = LanguageModel(
        lambda: GPT(vocab_size=700, context=12, layers=1, heads=2, width=8),
        data,
        chunked_loss=way,
    )
    torch.manual_seed(0)
    return task, task.build_model()


def batches() -> dict[str, Any]:
    torch.manual_seed(1)
    windows = torch.randint(700, (3, 13))
    targets = windows[:, 1:].clone()
    targets[1, 4:] = IGNORED
    return {"windows": windows, "padded": {"tokens": windows[:, :-1], "targets": targets}}


@pytest.mark.parametrize("kind", ["windows", "padded"])
@pytest.mark.usefixtures("small_chunks")
def test_a_gpt_with_tied_embeddings_trains_alike_and_never_makes_all_logits(kind: str) -> None:
    batch, found = batches()[kind], {}
    for way in (True, False):
        task, model = task_of(way)
        with Largest() as largest:
            loss = task.loss(task.forward(model, batch), batch)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
        assert (largest.numbers >= 3 * 12 * 700) is (way is False)
        found[way] = [loss, *gradients]
        mean = task.evaluate(model.eval(), batch)["loss"]
        torch.testing.assert_close(torch.as_tensor(mean.total / mean.weight), loss)
    for mine, torchs in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("small_chunks")
def test_a_compiled_gpt_sums_losses_in_one_graph() -> None:
    task, model = task_of(True)
    batch = batches()["windows"]
    right = task.loss(task.forward(model, batch), batch)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got = task.loss(task.forward(compiled, batch), batch)
    torch.testing.assert_close(got, right)
    torch.testing.assert_close(
        torch.autograd.grad(got, list(model.parameters())),
        torch.autograd.grad(right, list(model.parameters())),
    )


def test_chunks_pay_where_logits_are_large_and_the_summary_says_so() -> None:
    assert chunk_rows(50257) == 640
    assert not pays(2 * 1024, 50257)
    assert pays(16 * 1024, 50257)
    assert not pays(512 * 128, 256)
    task, _ = task_of("auto", fixed_length=True, context=12)
    assert task.notes(micro_batch_size=8) == {}
    always, _ = task_of(True, fixed_length=True, context=12)
    assert "in chunks of" in always.notes(micro_batch_size=8)["loss"]
    never, _ = task_of(False, fixed_length=True, context=12)
    assert never.notes(micro_batch_size=10**9) == {}


def test_what_cannot_be_had_is_refused() -> None:
    with pytest.raises(ConfigError, match="chunked_loss=often"):
        task_of("often")
    task = LanguageModel(lambda: nn.Embedding(16, 16), DataSource(), chunked_loss=True)
    with pytest.raises(ConfigError, match="does not sum losses"):
        task.build_model()
