"""Modules and tasks that load in a way of their own: what they change is told, and what they do
not load is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from torsh_trainer import DataSource, Task, Trainer
from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.checkpoint.store.integrity import verify
from torsh_trainer.data.loading import Loading
from torsh_trainer.errors import ConfigError, ResourceError, Unsupported


class Copied(nn.Linear):
    """Its state holds copies, and it loads them."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return type(state)({name: value.detach().clone() for name, value in state.items()})


class Idle(Copied):
    """Loads nothing, and says nothing."""

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return nn.modules.module._IncompatibleKeys([], [])


class Scaled(nn.Linear):
    """Doubles its bias once it has loaded."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_load_state_dict_post_hook(_double)


def _double(module: nn.Module, keys: Any) -> None:
    with torch.no_grad():
        module.bias.mul_(2.0)  # type: ignore[operator, union-attr]


class Odd(nn.Module):
    """Buffers of all kinds: none of them is changed by a load."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("none", torch.empty(0, 4))
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("wave", torch.tensor([1 + 2j, -3j]))
        self.register_buffer("eighth", torch.tensor([1.5, float("nan")]).to(torch.float8_e5m2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1  # type: ignore[operator]
        return self.linear(x)


class Regression(Task):
    def __init__(self, kind: type[nn.Module], optimizer: str = "adamw") -> None:
        self.kind, self.kind_of_optimizer = kind, optimizer
        self.data = DataSource()
        x = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
        self.data.train = TensorDataset(x, x[:, :2])

    def build_model(self) -> nn.Module:
        return self.kind(3, 2) if issubclass(self.kind, nn.Linear) else self.kind()

    def build_optimizers(self, named_parameters: Any) -> Any:
        parameters = [p for _, p in named_parameters]
        if self.kind_of_optimizer == "tensor rate":
            rate = torch.tensor(0.01)
            return {"main": torch.optim.Adam(parameters, lr=rate, foreach=False)}
        return {"main": getattr(torch.optim, self.kind_of_optimizer)(parameters, lr=0.01)}

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return nn.functional.mse_loss(outputs, batch[1])


class Tampering(Regression):
    """Puts back what it keeps of its own, into the model."""

    def build_model(self) -> nn.Module:
        self.model = super().build_model()
        return self.model

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 1}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            self.model.bias.fill_(7.0)  # type: ignore[operator, union-attr]


def fit(task: Task, folder: Path, steps: int, **checkpoint: Any) -> Any:
    options = CheckpointOptions(dir=str(folder / "checkpoints"), **checkpoint)
    return Trainer(
        task=task,
        strategy="single",
        loading=Loading(batch_size=4),
        max_steps=steps,
        run_dir=folder / f"run{steps}{len(checkpoint)}",
        checkpoint=options,
        eval_every_epochs=None,
        device="cpu",
        seed=steps,  # another beginning: what is not loaded shows
    ).fit()


def go_on(task: Task, folder: Path, **checkpoint: Any) -> Any:
    fit(task, folder, 2)
    return fit(task, folder, 4, allow=("seed",), **checkpoint)


@pytest.mark.matrix(5)
@pytest.mark.parametrize("kind", [nn.Linear, Copied, Odd])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adagrad", "Rprop", "tensor rate"])
def test_what_loads_as_it_should_goes_on_without_a_word(kind, optimizer, tmp_path, caplog):
    result = go_on(Regression(kind, optimizer), tmp_path)
    assert result.content["steps"] == 4
    assert not [one for one in caplog.records if "not what was saved" in one.getMessage()]


def test_a_model_that_loads_nothing_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"model\.bias, model\.weight are not what was saved"
    ) as e:
        go_on(Regression(Idle, "AdamW"), tmp_path)
    assert "look at how Idle loads" in str(e.value)
    assert fit(Regression(Idle, "AdamW"), tmp_path, 4, allow=("seed",), check_loaded=False)


def test_what_a_hook_changes_on_purpose_is_told(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        go_on(Regression(Scaled, "AdamW"), tmp_path)
    told = [
        one.getMessage() for one in caplog.records if "changes what it loads" in one.getMessage()
    ]
    assert told == ["Scaled changes what it loads: model.bias is not what was saved"]


def test_what_a_task_changes_after_a_load_is_told(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        go_on(Tampering(nn.Linear, "AdamW"), tmp_path)
    told = [one.getMessage() for one in caplog.records if "changes what was" in one.getMessage()]
    assert told == ["Tampering.load_state_dict changes what was loaded: model.bias"]


def test_a_checkpoint_without_hashes_loads_and_the_log_says_so(tmp_path, caplog):
    fit(Regression(nn.Linear, "AdamW"), tmp_path, 2, check_loaded=False)
    (path,) = (tmp_path / "checkpoints").glob("step-*")
    assert not (path / "hashes.json").exists()
    with caplog.at_level(logging.INFO):
        fit(Regression(nn.Linear, "AdamW"), tmp_path, 4, allow=("seed",))
    assert any("has no hashes" in one.getMessage() for one in caplog.records)


def test_the_file_of_hashes_is_part_of_the_checkpoint(tmp_path):
    fit(Regression(Odd, "AdamW"), tmp_path, 2)
    (path,) = (tmp_path / "checkpoints").glob("step-*")
    hashes = json.loads((path / "hashes.json").read_text())["hashes"]
    assert {"engine.model.linear.weight", "engine.optimizer.main.state.linear.bias.exp_avg"} <= set(
        hashes
    )
    assert all(len(one) == 16 for one in hashes.values())
    verify(path)
    (path / "hashes.json").write_text("{}")
    with pytest.raises(ResourceError, match=r"hashes\.json"):
        verify(path)


def test_an_optimizer_that_evaluates_the_loss_itself_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(Unsupported, match="LBFGS needs a closure"):
        fit(Regression(nn.Linear, "LBFGS"), tmp_path, 2)
