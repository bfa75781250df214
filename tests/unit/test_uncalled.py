"""What users define under a name that nothing calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from torsh_trainer import Callback, DataSource, Loading, Task, Trainer
from torsh_trainer.errors import ConfigError
from torsh_trainer.tasks.classification import Classification

WHOLE = TensorDataset(torch.ones(4, 1))


class Plain(Task):
    def __init__(self, data: DataSource | None = None) -> None:
        self.data = data or DataSource()

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.mean()


def refusal(task: Task | None = None, *callbacks: Callback) -> str:
    with pytest.raises(ConfigError) as caught:
        Trainer(task=task or Plain(), callbacks=callbacks, max_steps=1)
    return str(caught.value)


def test_a_hook_that_no_callback_has_is_refused() -> None:
    class Mine(Callback):
        def on_train_end(self, result: Any) -> None: ...

    class Mistyped(Callback):
        def on_evalute(self, report: Any) -> None: ...

    assert "Mine.on_train_end: nothing calls" in refusal(None, Mine())
    assert "did you mean 'on_evaluate'?" in refusal(None, Mistyped())


def test_a_hook_of_another_trainers_callback_is_not_ours_to_judge() -> None:
    class Other:
        def on_train_end(self) -> None: ...

    class Both(Callback, Other):
        def on_train_end(self) -> None: ...

    Trainer(task=Plain(), callbacks=[Both()], max_steps=1)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("evaluation_step", "evaluate"),
        ("evalute", "evaluate"),
        ("summarize", "summarise"),
        ("build_optimizer", "build_optimizers"),
        ("configure_optimizers", "build_optimizers"),
        ("predict_step", "predict"),
    ],
)
def test_a_method_of_a_task_under_a_name_of_another_is_refused(name: str, meant: str) -> None:
    kind = type("Mine", (Plain,), {name: lambda self, *_: None})
    assert f"Mine.{name}: nothing calls or reads that; did you mean {meant!r}?" in refusal(kind())


def test_a_helper_beside_the_method_itself_is_the_users_own() -> None:
    class Mine(Plain):
        def build_optimizer(self) -> None: ...

        def build_optimizers(self, named_parameters: Any) -> Any:
            return self.build_optimizer()

        def losses(self) -> None: ...

    Trainer(task=Mine(), max_steps=1)


def test_a_method_that_misspells_one_of_a_task_of_ours_is_refused() -> None:
    class Mine(Classification):
        def evalute(self, model: nn.Module, batch: Any) -> Any: ...

    assert "did you mean 'evaluate'?" in refusal(Mine(Plain().build_model, DataSource()))


def test_a_method_that_misspells_one_of_a_base_of_the_users_own_is_refused() -> None:
    class Base(Plain):
        def evaluate(self, model: nn.Module, batch: Any) -> Any: ...

    class Mine(Base):
        def evalute(self, model: nn.Module, batch: Any) -> Any: ...

    class Source(DataSource):
        def sample_weights(self) -> Tensor:
            return torch.ones(4)

    class Mine2(Source):
        def sample_weight(self) -> Tensor:
            return torch.zeros(4)

    assert "Mine.evalute: nothing calls" in refusal(Mine())
    assert "did you mean 'sample_weights'?" in refusal(Plain(Mine2()))


def test_a_helper_that_another_method_names_is_the_users_own() -> None:
    class Base(Plain):
        def build_optimizers(self, named_parameters: Any) -> Any:
            return [self.build_optimizer(each) for each in (named_parameters,)]

        def on_outputs(self) -> None: ...

        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            self.on_outputs()
            return super().loss(outputs, batch)

    class Mine(Base):
        def build_optimizer(self, named_parameters: Any) -> None: ...

        def on_outputs(self) -> None: ...

    Trainer(task=Mine(), max_steps=1)


@pytest.mark.parametrize("name", ["on_step", "on_train_epoch_end"])
def test_a_hook_on_a_task_is_refused(name: str) -> None:
    kind = type("Mine", (Plain,), {name: lambda self, *_: None})
    words = refusal(kind())
    assert f"Mine.{name}: nothing calls or reads that; a task has no hooks" in words
    assert "torsh_trainer.Callback has: on_start, on_step," in words


def test_a_split_under_another_name_is_refused() -> None:
    class Mine(DataSource):
        def __init__(self) -> None:
            self.train, self.val = WHOLE, WHOLE

    class Mine2(DataSource):
        @property
        def validation(self) -> Any:
            return WHOLE

    class Fine(DataSource):
        def __init__(self) -> None:
            self.train, self.val, self.eval = WHOLE, WHOLE, WHOLE
            self.test, self.validation = WHOLE, 0.2

    assert "Mine.val: nothing calls or reads that; did you mean 'eval'?" in refusal(Plain(Mine()))
    assert "Mine2.validation" in refusal(Plain(Mine2()))
    Trainer(task=Plain(Fine()), max_steps=1)


def test_a_collate_under_torchs_name_is_refused() -> None:
    class Mine(DataSource):
        def collate_fn(self, samples: Any) -> Any:
            return samples

    assert "did you mean 'collate'?" in refusal(Plain(Mine()))


def test_a_weight_that_is_never_asked_for_is_refused() -> None:
    class Mine(Plain):
        def weight(self, batch: Any) -> float:
            return 1.0

    assert "set sample_weight = None" in refusal(Mine())
    Mine.sample_weight = None
    Trainer(task=Mine(), max_steps=1)


def test_a_state_that_is_saved_and_never_loaded_is_refused() -> None:
    class Mine(Plain):
        def state_dict(self) -> dict[str, Any]:
            return {"a": 1}

    class Keeps(Callback):
        def load_state_dict(self, state: Any) -> None: ...

    assert "Mine defines state_dict without load_state_dict" in refusal(Mine())
    assert "Keeps defines load_state_dict without state_dict" in refusal(None, Keeps())


def test_a_number_from_a_hook_stops_no_run(tmp_path: Path) -> None:
    class Returns(Callback):
        def on_step(self, report: Any) -> Any:
            return 0.25

    class Line(Plain):
        def __init__(self) -> None:
            self.data = DataSource()
            self.data.train = WHOLE

    with pytest.raises(ConfigError, match=r"Returns\.on_step returned a float"):
        Trainer(
            task=Line(),
            loading=Loading(batch_size=4),
            callbacks=[Returns()],
            max_steps=2,
            run_dir=tmp_path / "run",
            device="cpu",
        ).fit()
