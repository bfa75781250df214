"""A run that waits for torch.compile says so, once; what CUDA graphs would overwrite is refused."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.exc import CppCompileError
from torch.utils.data import TensorDataset

from torsh_trainer import DataSource, Loading, OptimizerSpec, Task, Trainer
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.errors import TrainingError, Unsupported
from torsh_trainer.strategies import compiling
from torsh_trainer.strategies.base import BatchPlan, Job
from torsh_trainer.strategies.compiling import (
    CompileListener,
    refuse_overwritten_gradients,
    tell_of_compilations,
)
from torsh_trainer.strategies.modules import build
from torsh_trainer.testing.tiny import TinyTask

WORDS = "torch.compile compiles the model"


def said(caplog: pytest.LogCaptureFixture) -> int:
    return sum(WORDS in record.message for record in caplog.records)


def wait_until_said(caplog: pytest.LogCaptureFixture) -> None:
    while not said(caplog):
        time.sleep(0.01)


def test_a_long_compilation_is_said_while_it_goes_on_and_the_next_one_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = CompileListener(patience_s=0.05)
    told.begin()
    wait_until_said(caplog)
    told.end()
    told.begin()
    time.sleep(0.2)
    told.end()
    assert said(caplog) == 1


def test_short_ones_count_together(caplog: pytest.LogCaptureFixture) -> None:
    told = CompileListener(patience_s=0.3)
    while not said(caplog):
        told.begin()
        time.sleep(0.02)
        told.end()


def test_one_that_ends_in_time_goes_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    told = CompileListener(patience_s=30.0)
    told.begin()
    told.end()
    assert said(caplog) == 0


def test_torch_tells_of_its_compilations(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell_of_compilations()
    torch._dynamo.reset()  # which removes whoever listens, in any run of this process
    tell_of_compilations()
    tell_of_compilations()  # once a process
    told = compiling._told
    assert told is not None
    monkeypatch.setattr(told, "_patience_s", 0.0)
    monkeypatch.setattr(told, "_said", False)
    model = Doubling()
    model.compile(backend=_slow)
    with caplog.at_level(logging.WARNING):
        model(torch.ones(1, 2))
    assert said(caplog) == 1


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def _slow(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
    time.sleep(0.3)
    return graph.forward


RECORDS = [
    {"mode": "reduce-overhead"},
    {"mode": "max-autotune"},
    {"options": {"triton.cudagraphs": True}},
    {"backend": "cudagraphs"},
]
PLAIN = [{}, {"mode": "max-autotune-no-cudagraphs"}, {"options": {"triton.cudagraphs": False}}]


def job(compile_options: dict[str, Any] | None, accumulate: int) -> Job:
    task = TinyTask()
    return Job(
        task, task.build_model, BatchPlan(4 * accumulate, 4, accumulate, 1), compile=compile_options
    )


class OnCuda(LocalCommunicator):
    """Says that it computes on a GPU; nothing is put there before the refusal."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cuda", 0)


@pytest.mark.parametrize("options", RECORDS, ids=str)
def test_gradients_that_a_cuda_graph_would_overwrite_are_refused_before_the_model_is_built(
    options: dict[str, Any],
) -> None:
    refused = job(options, 2)
    with pytest.raises(Unsupported, match="max-autotune-no-cudagraphs") as caught:
        build(refused, OnCuda())
    assert "trainer.accumulate=2" in str(caught.value)


@pytest.mark.parametrize("options", [None, *PLAIN], ids=str)
def test_accumulation_without_cuda_graphs_is_not_refused(options: dict[str, Any] | None) -> None:
    refuse_overwritten_gradients(job(options, 2), torch.device("cuda", 0))


@pytest.mark.parametrize("options", RECORDS, ids=str)
def test_one_micro_batch_a_step_or_a_cpu_takes_cuda_graphs_options(options: dict[str, Any]) -> None:
    refuse_overwritten_gradients(job(options, 1), torch.device("cuda", 0))
    refuse_overwritten_gradients(job(options, 2), torch.device("cpu"))


class Points(DataSource):
    def __init__(self) -> None:
        self.train = TensorDataset(torch.randn(12, 3), torch.randn(12, 1))
        self.eval = TensorDataset(torch.randn(5, 3), torch.randn(5, 1))


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Lines(Task):
    optimizer = OptimizerSpec("SGD", lr=0.1)

    def __init__(self) -> None:
        self.data = Points()

    def build_model(self) -> nn.Module:
        return Line()

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return (outputs - batch[1]).square().mean()


def test_a_failure_of_the_compiler_is_one_sentence_in_training_and_in_evaluation(
    tmp_path: Path,
) -> None:
    """g++ refuses what inductor gives it; of another shape than in training, say."""

    def refuses(shape: int) -> Any:
        def compile_graph(graph: Any, inputs: list[Any]) -> Any:
            if any(getattr(one, "shape", ())[:1] == (shape,) for one in inputs):
                output = "a.cpp: In function f:\na.cpp:31:9: error: no match for 'operator&'\n"
                raise CppCompileError(["g++", "a.cpp"], output)
            return graph.forward

        return compile_graph

    def run(refused: int, name: str) -> str:
        torch._dynamo.reset()
        with pytest.raises(TrainingError) as caught:
            Trainer(
                task=Lines(),
                loading=Loading(batch_size=6, eval_batch_size=5),
                compile=True,
                compile_options={"backend": refuses(refused), "dynamic": False},
                max_steps=2,
                stages=("fit",),
                run_dir=tmp_path / name,
                default_callbacks=False,
            ).fit()
        return str(caught.value)

    for refused, name in ((6, "training"), (5, "evaluation")):
        said = run(refused, name)
        assert "cannot compile this model for a batch of this shape" in said
        assert "CppCompileError: no match for 'operator&'; trainer.compile=false" in said
