"""trainer.attention: which kernels scaled_dot_product_attention may take, and which it takes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from torsh_trainer import CheckpointOptions, Loading, Trainer
from torsh_trainer.errors import ConfigError
from torsh_trainer.optim.optimizers import OptimizerSpec
from torsh_trainer.tasks.base import DataSource, Task
from torsh_trainer.training import attention
from torsh_trainer.training.attention import (
    KernelWatch,
    allow_kernels,
    kernels_of,
    watch_first_forward,
)


class Operators(TorchDispatchMode):
    """The names of the operators within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    @property
    def fused(self) -> int:
        return sum("flash_attention_for_cpu" in name for name in self.names)


def tokens(*, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 2, 6, 8, generator=generator).requires_grad_(grad)


def attend(query: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(query, query, query, is_causal=True, **options)


@pytest.mark.parametrize(
    ("asked", "fused"),
    [("auto", True), ("flash", True), ("math", False), (("flash", "math"), True)],
)
def test_torch_takes_only_what_is_allowed_in_forward_and_backward(asked: Any, fused: bool) -> None:
    with allow_kernels(asked), Operators() as seen:
        query = tokens()
        checkpoint(attend, query, use_reentrant=False).sum().backward()
    assert bool(seen.fused) is fused
    assert sum("flash_attention_for_cpu_backward" in name for name in seen.names) == fused


def test_kernels_agree_within_rounding_and_torchs_switches_come_back() -> None:
    def gradient(asked: Any) -> Tensor:
        query = tokens()
        with allow_kernels(asked):
            attend(query).square().sum().backward()
        assert query.grad is not None
        return query.grad

    before = (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled())
    assert before == (True, True)
    torch.testing.assert_close(gradient("math"), gradient("flash"))
    assert (
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
    ) == before


@pytest.mark.parametrize(
    ("asked", "sentence", "fix"),
    [
        ("falsh", "falsh is no kernel", "did you mean 'flash'?"),
        ((), "leaves attention no kernel", "name one of flash, efficient, cudnn, math, or auto"),
        (("flash", "auto"), "auto is no kernel", "did you mean"),
    ],
)
def test_what_is_no_kernel_is_refused(asked: Any, sentence: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        kernels_of(asked)
    assert fix in refused.value.fix or "one of" in refused.value.fix


def test_what_a_cpu_has_not_is_refused_before_the_model_is_built(tmp_path: Path) -> None:
    task = Attending()
    with pytest.raises(ConfigError, match=r"attention=\[efficient,cudnn\]: a CPU has the kernels"):
        run(tmp_path, task=task, attention=("efficient", "cudnn"))
    assert not task.built
    attention.check_device(("efficient", "math"), torch.device("cpu"))
    attention.check_device("cudnn", torch.device("cuda"))


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True, dropout=dropout)
        self.head = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        mixed, _ = self.attend(inputs, inputs, inputs, need_weights=False)
        return self.head(mixed).squeeze(-1)


class Attending(Task):
    """One attention over tokens of noise."""

    def __init__(self, dropout: float = 0.0) -> None:
        self.optimizer = OptimizerSpec("SGD", lr=0.1)
        self.dropout, self.built = dropout, False
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(16, 5, 8, generator=generator)
        self.data = DataSource()
        self.data.train = TensorDataset(x, x[..., 0])

    def build_model(self) -> nn.Module:
        self.built = True
        return Block(self.dropout)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch[1])


def run(folder: Path, *, task: Task | None = None, steps: int = 3, **knobs: Any) -> float:
    result = Trainer(
        task=task or Attending(),
        strategy="single",
        loading=Loading(batch_size=8),
        max_steps=steps,
        run_dir=folder,
        device="cpu",
        eval_every_epochs=None,
        **knobs,
    ).fit()
    return float(result.content["train_loss"])


def test_a_run_computes_by_the_kernel_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Operators() as seen:
        by_math = run(tmp_path / "math", attention="math")
    assert not seen.fused
    with Operators() as seen:
        by_flash = run(tmp_path / "flash", attention="flash")
    assert seen.fused
    assert by_math == pytest.approx(by_flash, rel=1e-6)
    assert run(tmp_path / "auto") == by_flash
    assert "attention by math" in capsys.readouterr().out


def test_an_attention_that_no_allowed_kernel_computes_is_told_in_one_sentence(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="attention=flash: torch can compute an att") as refused:
        run(tmp_path, task=Attending(dropout=0.5), attention="flash")
    assert "trainer.attention=[flash,math]" in refused.value.fix
    content = json.loads((tmp_path / "result.json").read_text())
    assert "trainer.attention=flash" in content["error"]["message"]
    run(tmp_path / "both", task=Attending(dropout=0.5), attention=("flash", "math"))


def test_another_error_of_the_model_is_left_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="of mine"), attention.explain_refusals("math"):
        raise RuntimeError("of mine")


def test_a_run_that_goes_on_with_another_kernel_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, attention="math", checkpoint=CheckpointOptions(at_end=True))
    with caplog.at_level(logging.INFO):
        run(tmp_path, steps=5)
    assert "trainer.attention" in caplog.text
    assert "attention is rounded otherwise" in caplog.text


# -- what is seen of the first forward ------------------------------------------------------------


def test_each_attention_is_noted_once_wherever_it_is_called() -> None:
    from torch.nn.functional import scaled_dot_product_attention as imported

    query = tokens(grad=False)
    with KernelWatch() as seen:
        attend(query)
        imported(query, query, query)
        Block().train()(torch.ones(1, 3, 8))
        F.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
    assert seen.kernels == {"flash": 3, "math": 1}
    assert not seen.reasons  # those of a GPU
    assert F.scaled_dot_product_attention is imported


def test_one_forward_of_training_is_looked_at_and_an_error_ends_the_look() -> None:
    model, found = Block(), []
    watch_first_forward(model, lambda seen: found.append(dict(seen.kernels)))
    model.eval()(torch.ones(1, 3, 8))
    assert not found
    model.train()
    with pytest.raises(AssertionError):
        model(torch.ones(1, 3, 7))
    assert found == [{}]
    attend_before = F.scaled_dot_product_attention
    model(torch.ones(1, 3, 8))
    assert len(found) == 1
    assert F.scaled_dot_product_attention is attend_before
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_math_on_a_gpu_is_a_warning_with_torchs_reasons(caplog: pytest.LogCaptureFixture) -> None:
    seen = KernelWatch()
    seen.kernels["math"], seen.reasons = 2, ["flash: Expected query, key and value to be half"]
    seen.tell()
    assert caplog.records[-1].levelname == "WARNING"
    assert "flash: Expected query, key and value to be half" in caplog.text
    caplog.clear()
    fused = KernelWatch()
    fused.kernels["efficient"] = 3
    with caplog.at_level(logging.INFO):
        fused.tell()
    assert caplog.records[-1].getMessage() == "attention: efficient"


def test_a_forward_that_calls_its_own_module_is_watched_once_and_leaves_no_mode() -> None:
    class CallsItself(nn.Module):
        deep = True

        def forward(self, x: Tensor) -> Tensor:
            if self.deep:
                self.deep = False
                return torch.as_tensor(self(x))
            return F.scaled_dot_product_attention(x, x, x)

    found: list[dict[str, int]] = []
    model = CallsItself()
    watch_first_forward(model, lambda seen: found.append(dict(seen.kernels)))
    model(torch.randn(1, 2, 4, 8))
    assert [sum(kernels.values()) for kernels in found] == [1]
    assert torch.overrides._get_current_function_mode_stack() == []
