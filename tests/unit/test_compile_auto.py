"""trainer.compile=auto: compiled where a measurement says that it pays, and no number changes."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset

from torsh_trainer import CheckpointOptions, DataSource, Loading, OptimizerSpec, Task, Trainer
from torsh_trainer.checkpoint.rng import rng_state
from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.data.batch import MicroBatch
from torsh_trainer.errors import ConfigError
from torsh_trainer.strategies.base import BatchPlan, Job
from torsh_trainer.strategies.dp import DP
from torsh_trainer.training import compilation
from torsh_trainer.training.compilation import Measured, measure
from torsh_trainer.training.trainer import Result

TRACED = {"backend": "aot_eager"}  # traces as inductor does, and compiles in no time


class Noisy(Dataset[Any]):
    """Samples that draw, from three generators."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(4) + float(numpy.random.rand())  # noqa: NPY002 - as users draw
        return noise + index / 32, torch.tensor([index / 32])


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return ((torch.ones(4), torch.ones(1)) for _ in range(32))


class Dropping(Task):
    """A regression with dropout, whose model may refuse to be compiled."""

    model: Callable[[], nn.Module] = lambda self: nn.Sequential(
        nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)
    )

    def __init__(self, data: Any = None) -> None:
        self.optimizer = OptimizerSpec("SGD", lr=0.05)
        self.data = DataSource()
        self.data.train = Noisy() if data is None else data

    def build_model(self) -> nn.Module:
        return self.model()

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch[1])


class NoCompiler(nn.Linear):
    def compile(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler here")


class Stubborn(Dropping):
    def build_model(self) -> nn.Module:
        return NoCompiler(4, 1)


class Clock:
    """Answers in pairs that are so many seconds apart."""

    def __init__(self, *seconds: float) -> None:
        self._seconds, self._now = iter(seconds), 0.0
        self._asked = itertools.cycle((False, True))

    def __call__(self) -> float:
        if next(self._asked):
            self._now += next(self._seconds)
        return self._now


def job_of(task: Task) -> Job:
    return Job(task, task.build_model, BatchPlan(4, 4, 1, 1))


def read(comm: Communicator) -> MicroBatch:
    return MicroBatch((torch.ones(4, 4), torch.ones(4, 1)), 4.0, None)


def measured(clock: Clock, *, count: int, task: Task | None = None) -> Measured:
    job = job_of(task or Dropping())
    return measure(job, read, LocalCommunicator(), options=TRACED, count=count, clock=clock)


# -- what is measured -----------------------------------------------------------------------------

# first, three to warm up, ten to be timed: eager, then compiled
GAINS = (2.0, 3.0, 10.0, 21.0, 1.5, 5.0)
LOSES = (2.0, 3.0, 10.0, 21.0, 3.0, 9.9)


def test_it_pays_where_the_steps_left_repay_compiling_twice() -> None:
    found = measured(Clock(*GAINS), count=1000)
    assert (found.eager_s, found.compiled_s, found.compile_s) == (1.0, 0.5, 20.0)
    assert found.pays
    assert str(found) == (
        "on: forward and backward take 0.50 of the time, and 20 s of compiling are repaid after 40 "
        "of 1,000 micro-batches"
    )
    assert found.as_dict() == {
        "compiles": True,
        "count": 1000,
        "eager_s": 1.0,
        "compiled_s": 0.5,
        "compile_s": 20.0,
    }


def test_it_does_not_where_too_little_is_gained() -> None:
    found = measured(Clock(*LOSES), count=1000)
    assert not found.pays
    assert "off: forward and backward take 0.99 of the time, and compiling 20 s" in str(found)


def test_a_short_run_is_not_compiled_to_find_out() -> None:
    found = measured(Clock(2.0, 3.0, 0.1), count=1000)  # 10 s in all
    assert math.isinf(found.compiled_s)
    assert not found.pays
    assert "too short a time" in str(found)
    assert found.as_dict()["compiled_s"] is None


def test_a_model_that_cannot_be_compiled_stays_eager_with_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = measured(Clock(*GAINS), count=1000, task=Stubborn())
    assert not found.pays
    assert [record.getMessage() for record in caplog.records] == [
        "trainer.compile=auto: the model was not measured compiled: no compiler here"
    ]


def test_a_model_that_does_not_fit_twice_stays_eager(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(compilation.Single, "prepare", full)
    assert not measured(Clock(), count=1000).pays
    assert "not measured eager: out of memory" in caplog.text


def test_measuring_leaves_every_generator_as_it_was() -> None:
    device = torch.device("cpu")
    before = rng_state(device)
    measured(Clock(*GAINS), count=1000)
    after = rng_state(device)
    assert torch.equal(before.pop("torch"), after.pop("torch"))
    assert before == after


# -- runs -----------------------------------------------------------------------------------------


@pytest.fixture
def asked_here(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], list[bool]]:
    """Lets runs on this CPU ask, and says what comes of it; the answers are the trials made."""
    trials: list[bool] = []

    def allow(pays: bool) -> list[bool]:
        time_of = compilation._time

        def _time(job: Job, *args: Any) -> tuple[float, float]:
            _, later = time_of(job, *args)
            assert math.isfinite(later), "the trial itself is the real one"
            trials.append(job.compile is not None)
            return (2.0, 1.0) if job.compile is None else (21.0, 0.5 if pays else 1.0)

        monkeypatch.setattr(compilation, "_time", _time)
        monkeypatch.setattr(compilation, "asks_on", lambda device: True)
        monkeypatch.setattr(compilation, "LEAST", 1)
        monkeypatch.setattr(compilation, "WORTH_TRYING_S", 0.0)
        monkeypatch.setattr(Measured, "pays", property(lambda self: self.compiled_s < 1.0))
        return trials

    return allow


def run(folder: Path, *, steps: int = 6, task: Task | None = None, **knobs: Any) -> Result:
    knobs = {"compile_options": TRACED, "strategy": "single", **knobs}
    return Trainer(
        task=task or Dropping(),
        loading=Loading(batch_size=8, micro_batch_size=4),
        max_steps=steps,
        run_dir=folder,
        device="cpu",
        log_every=1,
        eval_every_epochs=None,
        **knobs,
    ).fit()


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows]


@pytest.mark.parametrize("pays", [True, False])
def test_a_run_trains_as_one_that_was_told_so(
    pays: bool,
    asked_here: Callable[[bool], list[bool]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(tmp_path / "told", compile=pays)
    trials = asked_here(pays)
    result = run(tmp_path / "auto")
    assert trials == [False, True]
    assert losses(tmp_path / "auto") == losses(tmp_path / "told")
    assert result.content["compile"]["compiles"] is pays
    assert f"compile        auto, {'on' if pays else 'off'}: forward" in capsys.readouterr().out
    plain = json.loads((Path(result.checkpoint or "") / "state.json").read_text())
    assert plain["setup"]["trainer.compile"] is pays


@pytest.mark.parametrize("options", [TRACED, {}, {"dynamic": True}], ids=str)
def test_a_compiled_run_with_dropout_goes_on_for_many_steps_as_an_eager_one(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Each step has another key: a compiler that saw it would compile for a symbol."""
    run(tmp_path / "eager", compile=False)
    run(tmp_path / "compiled", compile=True, compile_options=options)
    compiled = losses(tmp_path / "compiled")
    assert len(compiled) == 6
    assert compiled == pytest.approx(losses(tmp_path / "eager"), rel=1e-6)


@pytest.mark.parametrize("before", [True, False])
def test_a_run_goes_on_as_its_checkpoint_was_trained(
    before: bool,
    asked_here: Callable[[bool], list[bool]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(tmp_path / "whole", compile=before)
    run(tmp_path / "part", compile=before, steps=3)
    trials = asked_here(not before)
    run(tmp_path / "part", steps=6)
    assert trials == []
    word = "on" if before else "off"
    assert f"compile        auto, {word}, as the checkpoint was trained" in capsys.readouterr().out
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({"deterministic": True}, "trainer.deterministic=true takes the same kernels"),
        ({"compile_options": {"backend": "mine"}}, "a dropout would draw by micro-batch"),
        ({"compile_options": {"mode": "reduce-overhead"}}, "records CUDA graphs, beside accumul"),
        ({"task": Dropping(Streamed())}, "the data cannot be read beside the run"),
        ({"max_epochs": 1, "steps": None, "task": Dropping(Streamed())}, "cannot be read beside"),
    ],
)
def test_what_forbids_it_is_said_and_nothing_is_tried(
    knobs: dict[str, Any],
    why: str,
    asked_here: Callable[[bool], list[bool]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trials = asked_here(True)
    run(tmp_path, checkpoint=CheckpointOptions(at_end=False), **knobs)
    said = capsys.readouterr().out
    assert "compile        auto, off: " in said
    assert why in " ".join(said.split())
    assert trials == []


def test_a_run_of_few_steps_is_not_measured(
    asked_here: Callable[[bool], list[bool]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trials = asked_here(True)
    monkeypatch.setattr(compilation, "LEAST", 1000)
    run(tmp_path)
    assert trials == []


def test_a_strategy_that_compiles_nothing_says_so() -> None:
    assert DP().cannot_compile() == "strategy=dp copies the model in each step"


def test_on_a_cpu_nobody_asks_and_nothing_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(tmp_path)
    assert "compile" not in result.content
    assert "compile" not in capsys.readouterr().out


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.compile=maybe is unknown") as refused:
        Trainer(task=Dropping(), compile="maybe")  # type: ignore[arg-type]
    assert refused.value.fix == "choose auto, true or false"
