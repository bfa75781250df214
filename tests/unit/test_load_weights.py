"""The weights of a checkpoint, in a module of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from torsh_trainer import load_weights
from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.data.loading import Loading
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.launchers.local import Local
from torsh_trainer.optim.optimizers import OptimizerSpec
from torsh_trainer.tasks.base import DataSource, Task
from torsh_trainer.training.trainer import Result, Trainer

pytestmark = pytest.mark.usefixtures("warm_interpreters")

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))


class Rows(DataSource):
    train = TensorDataset(X, X.sum(1, keepdim=True))
    eval = TensorDataset(X[:16], X[:16].sum(1, keepdim=True))


class Counting(nn.Linear):
    """Keeps how often it was called beside its tensors, as some layers do."""

    calls = 0

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(rows)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Tied(nn.Module):
    """One weight under two names, running statistics, and state that is no tensor."""

    def __init__(self, kind: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.head = kind(4, 1)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.second(self.norm(self.first(rows)).relu()))


class Sums(Task):
    optimizer = OptimizerSpec("SGD", lr=0.1, momentum=0.5)
    data = Rows()

    def __init__(self, kind: type[nn.Linear] = nn.Linear) -> None:
        self.kind = kind

    def build_model(self) -> nn.Module:
        return Tied(self.kind)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.mse_loss(outputs, batch[1])


def trained(folder: Path, **given: Any) -> Result:
    knobs = {"max_steps": 6, "loading": Loading(batch_size=8), "default_callbacks": False}
    return Trainer(**{"task": Sums(), "run_dir": folder, **knobs, **given}).fit()


def assert_same_state(one: nn.Module, other: nn.Module, **tolerance: float) -> None:
    torch.testing.assert_close(one.state_dict(), other.state_dict(), **tolerance)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("run")
    return trained(folder, task=Sums(Counting), ema_decay=0.5)


def test_a_result_loads_its_weights_into_a_module(result: Result) -> None:
    model = Tied(Counting)
    result.load_into(model)
    assert_same_state(model, result.model, rtol=0, atol=0)
    assert model.head.calls == 6
    assert model.second.weight is model.first.weight


@pytest.mark.parametrize("place", ["checkpoint", "run_dir"])
def test_a_path_does_as_well_after_the_program_has_ended(result: Result, place: str) -> None:
    model = Tied(Counting)
    load_weights(model, getattr(result, place))
    assert_same_state(model, result.model, rtol=0, atol=0)


def test_the_moving_average_is_taken_under_every_name_of_a_tied_weight(result: Result) -> None:
    averaged, last = Tied(Counting), Tied(Counting)
    result.load_into(averaged, ema=True)
    result.load_into(last)
    assert not torch.equal(averaged.first.weight, last.first.weight)
    assert torch.equal(averaged.first.weight, averaged.second.weight)
    outputs = averaged.eval()(X[:16])
    loss = nn.functional.mse_loss(outputs, Rows.eval.tensors[1])
    assert loss.item() == pytest.approx(result.metrics["loss"], rel=1e-5)  # of the average


def test_a_module_of_another_dtype_takes_the_weights_cast(result: Result) -> None:
    model = Tied(Counting).double()
    result.load_into(model)
    assert model.head.weight.dtype == torch.float64
    assert torch.equal(model.head.weight.float(), result.model.head.weight)


class Wider(Tied):
    def __init__(self) -> None:
        super().__init__(Counting)
        self.head = Counting(4, 3)
        self.more = nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Wider, r"not in the checkpoint: more\.weight, more\.bias; of another shape: head\.weight"),
        (lambda: nn.DataParallel(Tied(Counting)), "give it itself, not what wraps it"),
        (lambda: Tied().to("meta"), "meta device"),
    ],
    ids=["wider", "wrapped", "meta"],
)
def test_a_module_that_does_not_fit_is_refused_and_left_alone(
    result: Result, make: Any, words: str
) -> None:
    model = make()
    before = {name: value.clone() for name, value in model.named_parameters()}
    with pytest.raises(ConfigError, match=words):
        result.load_into(model)
    for name, value in model.named_parameters():
        assert value.is_meta or torch.equal(value, before[name])


def test_what_is_no_checkpoint_and_what_keeps_no_average_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone: nothing is there; give the path of a checkpoint"):
        load_weights(Tied(), tmp_path / "gone")
    plain = trained(tmp_path / "plain")
    with pytest.raises(ConfigError, match="holds no moving average; leave ema out"):
        plain.load_into(Tied(), ema=True)
    file = next(Path(plain.checkpoint).glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(ResourceError, match="name another, or copy this one again"):
        plain.load_into(Tied())


def test_a_run_that_saved_nothing_points_to_its_model(tmp_path: Path) -> None:
    unsaved = trained(tmp_path, checkpoint=CheckpointOptions(at_end=False))
    with pytest.raises(ConfigError, match=r"saved no checkpoint; .* or take result\.model"):
        unsaved.load_into(Tied())


@pytest.mark.matrix(1)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_after_two_processes_the_weights_come_whole(tmp_path: Path, strategy: str) -> None:
    both = trained(tmp_path / "two", strategy=strategy, launcher=Local(num_processes=2))
    assert both.model is None
    model = Tied()
    both.load_into(model)
    loss = nn.functional.mse_loss(model.eval()(X[:16]), Rows.eval.tensors[1])
    assert loss.item() == pytest.approx(both.metrics["loss"], rel=1e-5)
    # BatchNorm sees micro-batches: one process accumulates two of the ranks' size.
    alone = trained(tmp_path / "one", loading=Loading(batch_size=8, micro_batch_size=4))
    assert_same_state(model, alone.model, rtol=1e-4, atol=1e-5)
