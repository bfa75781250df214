"""Checkpoint hooks in our loop: what they are given, and what they make of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from loops import as_alone, as_torchrun, quiet
from recorder import described
from test_loop_ranks import Net, Rows
from torch import nn
from torsh_trainer_lightning.task import LightningTask

from torsh_trainer import CheckpointOptions, Trainer
from torsh_trainer.checkpoint.cli.export import Export, export
from torsh_trainer.environments.world import World


class Hears(Net):
    """Keeps what its hooks are given."""

    def __init__(self, loss: Any = None, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.saved: dict[str, Any] = {}
        self.loaded: dict[str, Any] = {}
        self.steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    def on_save_checkpoint(self, checkpoint):
        assert checkpoint["hyper_parameters"]["width"] == 8
        self.saved = dict(checkpoint)

    def on_load_checkpoint(self, checkpoint):
        self.loaded = dict(checkpoint)


class HearsWithObject(Hears):
    """One of its arguments is no data."""

    def __init__(self) -> None:
        super().__init__(loss=nn.MSELoss())


class Filters(Hears):
    """Saves its head alone, and takes the rest from itself."""

    def on_save_checkpoint(self, checkpoint):
        kept = {k: v for k, v in checkpoint["state_dict"].items() if k.startswith("net.2")}
        checkpoint["state_dict"] = kept

    def on_load_checkpoint(self, checkpoint):
        assert not any(name.startswith("net.0") for name in checkpoint["state_dict"])
        own = {k: torch.full_like(v, 0.25) for k, v in FIRST.items()}
        checkpoint["state_dict"] = {**own, **checkpoint["state_dict"]}


FIRST = {"net.0.weight": torch.zeros(8, 8), "net.0.bias": torch.zeros(8)}


class FiltersForGood(Filters):
    """Never puts back what it has left out."""

    def on_load_checkpoint(self, checkpoint):
        pass


class FiltersLoosely(FiltersForGood):
    """And does not mind."""

    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False


class Doubles(Hears):
    """Saves other values than it trains, under other names too, and undoes it."""

    def on_save_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        state["net.0.weight"] = state["net.0.weight"] * 2
        checkpoint["best"] = {"score": np.float32(0.1), "rows": np.arange(6.0).reshape(2, 3)}
        checkpoint["file"] = [Path("a") / "b"]
        checkpoint["again"] = {"first": state["net.0.bias"]}

    def on_load_checkpoint(self, checkpoint):
        super().on_load_checkpoint(checkpoint)
        state = checkpoint["state_dict"]
        state["net.0.weight"] = state["net.0.weight"] / 2


class Own:
    def __init__(self, value: int) -> None:
        self.value = value


class AddsOwn(Hears):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["own"] = Own(5)


class DropsOptimizers(Hears):
    def on_save_checkpoint(self, checkpoint):
        del checkpoint["optimizer_states"]


class Restarts(Hears):
    """Goes on with fresh moments."""

    def on_load_checkpoint(self, checkpoint):
        (state,) = checkpoint["optimizer_states"]
        for slots in state["state"].values():
            slots["exp_avg"].zero_()


def run(folder: Path, kind: type[Hears], strategy: str, **knobs: Any) -> tuple[Hears, Any]:
    """The module after a run, and what came of it."""
    quiet()
    made: list[Hears] = []

    def module() -> Hears:
        made.append(kind())
        return made[0]

    task = LightningTask(module, Rows, trust_ckpt=knobs.pop("trust", False))
    options = CheckpointOptions(resume=knobs.pop("resume", "never"), allow=("task",))
    trainer = Trainer(
        task=task, strategy=strategy, seed=3, run_dir=folder, checkpoint=options, **knobs
    )
    try:
        content: Any = trainer.fit().content
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        content = f"{type(error).__name__}: {error}"
    return made[0], content


def on_rank(
    world: World,
    port: int,
    folder: Path,
    kind: type[Hears],
    strategy: str,
    epochs: int,
    resume: str,
) -> tuple[Any, dict[str, Any], dict[str, Any], int]:
    """Loss and checkpoint of a run, what its hooks were given, and how many steps it made."""
    if strategy != "single":
        as_torchrun(world, port, folder)
    else:
        as_alone(folder)
        if world.rank:
            return None, {}, {}, 0
    name = f"{kind.__name__}-{strategy}-{epochs}"
    module, content = run(folder / name, kind, strategy, max_epochs=epochs, resume=resume)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if not isinstance(content, str):
        content = content["train_loss"], content["checkpoint"]
    return content, plain(module.saved), plain(module.loaded), module.steps


def plain(given: dict[str, Any]) -> dict[str, Any]:
    """What can be sent, and still described."""
    found = {key: value for key, value in given.items() if key != "torsh_trainer"}
    return {key: str(value) if key == "hyper_parameters" else value for key, value in found.items()}


def theirs(folder: Path, kind: type[Hears], epochs: int = 1, **fit: Any) -> Hears:
    """The module after so many epochs in Lightning's Trainer, saved at their end."""
    quiet()
    L.seed_everything(3, verbose=False)
    module = kind()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, datamodule=Rows(), **fit)
    trainer.save_checkpoint(folder / "theirs.ckpt")
    return module


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_hooks_are_given_what_lightning_gives_them(strategy, on_ranks, tmp_path):
    expected = plain(theirs(tmp_path, HearsWithObject).saved)
    first, second = on_ranks(on_rank, tmp_path, HearsWithObject, strategy, 1, "never")
    assert not isinstance(first[0], str), first[0]
    assert first[1].keys() == expected.keys()
    assert {k: (v.shape, v.dtype) for k, v in first[1]["state_dict"].items()} == {
        k: (v.shape, v.dtype) for k, v in expected["state_dict"].items()
    }
    assert described(first[1]["optimizer_states"]) == described(expected["optimizer_states"])
    if strategy == "single":
        for name, value in expected["state_dict"].items():
            assert torch.equal(first[1]["state_dict"][name], value)
    else:
        assert second[1]["state_dict"].keys() == expected["state_dict"].keys()
        assert second[1].keys() == first[1].keys()
    _, checkpoint = first[0]
    for again in on_ranks(on_rank, tmp_path, HearsWithObject, strategy, 2, checkpoint):
        if again[0] is None:
            continue
        assert not isinstance(again[0], str), again[0]
        assert again[2].keys() == first[1].keys()
        for name, value in first[1]["state_dict"].items():
            assert torch.equal(again[2]["state_dict"][name], value)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_weights_that_a_hook_takes_out_are_not_saved(strategy, on_ranks, tmp_path):
    (first, _) = on_ranks(on_rank, tmp_path, Filters, strategy, 1, "never")
    _, checkpoint = first[0]
    export(Path(checkpoint), Export("torch", tmp_path / "weights.pt"))
    kept = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert list(kept) == ["net.2.weight", "net.2.bias"]
    export(Path(checkpoint), Export("lightning", tmp_path / "ours.ckpt"))
    ours = torch.load(tmp_path / "ours.ckpt", weights_only=True)
    assert ours["state_dict"].keys() == kept.keys()
    again, _ = on_ranks(on_rank, tmp_path, Filters, strategy, 2, checkpoint)
    assert not isinstance(again[0], str), again[0]
    refused, _ = on_ranks(on_rank, tmp_path, FiltersForGood, strategy, 2, checkpoint)
    assert "does not fit the module" in str(refused[0])
    assert "strict_loading" in str(refused[0])
    assert refused[3] == 0
    loosely, _ = on_ranks(on_rank, tmp_path, FiltersLoosely, strategy, 2, checkpoint)
    assert not isinstance(loosely[0], str), loosely[0]


class Begins(Filters):
    """Remembers what its training begins with."""

    def on_train_start(self):
        self.began = {name: value.clone() for name, value in self.state_dict().items()}


def test_training_begins_with_what_a_load_hook_puts_back(tmp_path):
    """As with Lightning's own file."""
    theirs(tmp_path, Begins)
    began = theirs(tmp_path / "more", Begins, 2, ckpt_path=tmp_path / "theirs.ckpt").began
    _, first = run(tmp_path / "run", Begins, "single", max_epochs=1)
    again = {"max_epochs": 2, "resume": first["checkpoint"]}
    module, _ = run(tmp_path / "ours", Begins, "single", **again)
    assert module.steps == 8
    for name, value in began.items():
        assert torch.equal(module.began[name], value), name


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_values_that_a_hook_replaces_and_adds_come_back(strategy, on_ranks, tmp_path):
    whole, _ = on_ranks(on_rank, tmp_path, Hears, strategy, 2, "never")
    first, _ = on_ranks(on_rank, tmp_path, Doubles, strategy, 1, "never")
    again, _ = on_ranks(on_rank, tmp_path, Doubles, strategy, 2, first[0][1])
    assert not isinstance(again[0], str), again[0]
    assert again[0][0] == whole[0][0]
    best = again[2]["best"]
    assert type(best["score"]) is np.float32
    assert best["score"] == np.float32(0.1)
    assert (best["rows"] == np.arange(6.0).reshape(2, 3)).all()
    assert again[2]["file"] == [Path("a/b")]
    assert torch.equal(again[2]["again"]["first"], again[2]["state_dict"]["net.0.bias"])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (AddsOwn, r"AddsOwn\.on_save_checkpoint has put \S*test_hooked\.Own .* as 'own'"),
        (DropsOptimizers, r"on_save_checkpoint has changed 'optimizer_states'"),
    ],
)
def test_what_could_not_be_saved_is_refused_before_the_first_step(kind, words, tmp_path):
    module, said = run(tmp_path, kind, "single", max_epochs=1)
    assert re.search(words, said), said
    assert module.steps == 0


def test_objects_are_saved_as_code_where_the_user_trusts_them(tmp_path):
    module, first = run(tmp_path / "run", AddsOwn, "single", max_epochs=1, trust=True)
    assert module.steps
    again = {"max_epochs": 2, "resume": first["checkpoint"]}
    _, said = run(tmp_path / "not", AddsOwn, "single", **again)
    assert "task.trust_ckpt=true" in said
    module, _ = run(tmp_path / "more", AddsOwn, "single", trust=True, **again)
    assert module.loaded["own"].value == 5


def test_states_of_optimizers_that_a_load_hook_changes_are_stepped_with(tmp_path):
    _, first = run(tmp_path / "run", Hears, "single", max_epochs=1)
    ends = []
    for kind in (Hears, Restarts):
        again = {"max_epochs": 2, "resume": first["checkpoint"]}
        module, content = run(tmp_path / kind.__name__, kind, "single", **again)
        assert not isinstance(content, str), content
        ends.append(module.net[0].weight.detach())
    assert not torch.equal(*ends)
