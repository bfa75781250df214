"""Checkpoints taken to other formats and back: other programs open them and go on alike."""

from __future__ import annotations

import json
import pickle
import resource
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

from torsh_trainer import (
    Callback,
    CheckpointOptions,
    DataSource,
    Loading,
    OptimizerSpec,
    Task,
    Trainer,
)
from torsh_trainer.callbacks.base import StepReport
from torsh_trainer.checkpoint.cli import comparing
from torsh_trainer.checkpoint.cli.contents import Contents
from torsh_trainer.checkpoint.cli.export import Export, export
from torsh_trainer.checkpoint.cli.importing import Import, import_file
from torsh_trainer.data.sampler import epoch_order
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.optim.schedule.shapes import Cosine
from torsh_trainer.optim.schedule.torch_scheduler import TorchSchedule
from torsh_trainer.tasks.weights import load_pretrained

SAMPLES, BATCH, HALF, WHOLE = 48, 8, 5, 10  # half-way is in the middle of an epoch
X = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True)


class Net(nn.Module):
    """Tied weights, a norm with buffers of both kinds, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 8).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.body = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.body.weight
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.frozen(x))
        out: Tensor = self.head(self.tied(torch.tanh(self.body(hidden))))
        return out


class Source(DataSource):
    train = TensorDataset(X, Y)
    eval = TensorDataset(X[:10], Y[:10])


class Fitting(Task):
    data = Source()

    def __init__(self, optimizer: OptimizerSpec) -> None:
        self.optimizer = optimizer

    def build_model(self) -> nn.Module:
        return Net()

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch[1])


ADAMW = OptimizerSpec("AdamW", lr=0.02, options={"weight_decay": 0.1})


class Losses(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_step(self, report: StepReport) -> None:
        if report.metrics:
            self.values.append(report.metrics["loss"])


class Run(NamedTuple):
    """What training with our trainer left, and the losses of its steps."""

    model: nn.Module
    losses: list[float]
    checkpoint: Path


def train(folder: Path, steps: int, **knobs: Any) -> Run:
    losses = Losses()
    defaults: dict[str, Any] = {
        "task": Fitting(ADAMW),
        "strategy": "single",
        "loading": Loading(batch_size=BATCH),
        "callbacks": [losses],
        "max_steps": steps,
        "log_every": 1,
        "eval_every_epochs": None,
        "run_dir": folder,
        "device": "cpu",
    }
    result = Trainer(**{**defaults, **knobs}).fit()
    assert result.model is not None
    assert result.checkpoint is not None
    return Run(result.model, losses.values, Path(result.checkpoint))


def batches(first: int, last: int) -> list[list[Tensor]]:
    """What our trainer sees in steps ``first`` to ``last``, from the documented order."""
    found = []
    for step in range(first, last):
        epoch, at = divmod(step * BATCH, SAMPLES)
        ids = epoch_order(SAMPLES, seed=0, epoch=epoch, shuffle=True)[at : at + BATCH]
        found.append([X[ids], Y[ids]])
    return found


def plainly(model: nn.Module, optimizer: Any, first: int, last: int) -> list[float]:
    """The same steps written out in plain PyTorch."""
    losses = []
    for x, y in batches(first, last):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Ten steps with a decaying rate and a moving average, also saved after five."""
    return train(
        tmp_path_factory.mktemp("whole") / "run",
        WHOLE,
        schedule=Cosine(),
        ema_decay=0.9,
        checkpoint=CheckpointOptions(every_steps=HALF),
    )


@pytest.fixture(scope="module")
def half(whole: Run) -> Path:
    """The checkpoint of the fifth step."""
    return whole.checkpoint.with_name(f"step-{HALF:08d}")


def saved_model(checkpoint: Path) -> dict[str, Tensor]:
    """The weights as plain PyTorch reads them."""
    state = {"engine": {"model": dict(Net().state_dict())}}
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    return state["engine"]["model"]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def options(output: Path, **more: Any) -> Export:
    return Export(**{"format": "safetensors", "output": output, **more})


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """What a full disk looks like, wherever this runs: the kernel refuses to write on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# -- weights --------------------------------------------------------------------------------------


def test_safetensors_opens_the_weights_bit_for_bit_tied_ones_too(half, tmp_path):
    written, notes = export(half, options(tmp_path / "model.safetensors"))
    assert written == [tmp_path / "model.safetensors"]
    assert notes == []
    found = load_file(written[0])
    assert_same(found, saved_model(half))
    Net().load_state_dict(found)  # strict: nothing missing, nothing left over


def test_others_may_read_the_file_as_they_may_read_any_other(half, tmp_path):
    (tmp_path / "any").touch()
    for name in ("safetensors", "torch"):
        (path,), _ = export(half, options(tmp_path / name, format=name))
        assert stat.filemode(path.stat().st_mode) == stat.filemode(
            (tmp_path / "any").stat().st_mode
        )


def test_torch_opens_the_weights_as_a_plain_state_dict(half, tmp_path):
    (path,), _ = export(half, options(tmp_path / "model.pt", format="torch"))
    assert_same(torch.load(path, weights_only=True), saved_model(half))


def test_the_average_takes_the_place_of_the_parameters_and_buffers_stay(whole, tmp_path):
    (path,), _ = export(whole.checkpoint, options(tmp_path / "ema.safetensors", ema=True))
    names = [name for name, p in whole.model.named_parameters() if p.requires_grad]
    state = {
        "engine": {
            "ema": {"averages": {n: torch.empty_like(whole.model.state_dict()[n]) for n in names}}
        }
    }
    dcp.load(state, checkpoint_id=whole.checkpoint, no_dist=True)
    averages = state["engine"]["ema"]["averages"]
    raw = saved_model(whole.checkpoint)
    assert not torch.equal(averages["head.weight"], raw["head.weight"])
    shared = {"tied.weight": averages["body.weight"]}
    assert_same(load_file(path), {**raw, **averages, **shared})


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_weights_convert_and_counters_do_not(name, dtype, half, tmp_path):
    (path,), _ = export(half, options(tmp_path / "model.safetensors", dtype=name))
    expected = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in saved_model(half).items()
    }
    assert expected["norm.num_batches_tracked"].dtype == torch.int64
    assert_same(load_file(path), expected)


def test_names_take_a_prefix_and_lose_one(half, tmp_path):
    found = options(tmp_path / "part.safetensors", strip="norm.", prefix="encoder.")
    (path,), _ = export(half, found)
    norm = {k: v for k, v in saved_model(half).items() if k.startswith("norm.")}
    assert_same(load_file(path), {k.replace("norm.", "encoder."): v for k, v in norm.items()})


def test_hf_writes_shards_no_larger_than_asked_and_an_index_that_finds_every_tensor(half, tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "net"}')
    found = options(tmp_path / "hf", format="hf", max_shard_size="300B", config=config)
    written, _ = export(half, found)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    shards = sorted({*index["weight_map"].values()})
    assert len(shards) > 2
    assert {path.name for path in written} == {
        *shards,
        "config.json",
        "model.safetensors.index.json",
    }
    expected = saved_model(half)
    merged: dict[str, Tensor] = {}
    for shard in shards:
        tensors = load_file(tmp_path / "hf" / shard)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 300
        assert all(index["weight_map"][name] == shard for name in tensors)
        merged |= tensors
    assert_same(merged, expected)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == {"model_type": "net"}

    model = Net()
    assert load_pretrained(model, tmp_path / "hf").complete
    assert_same(dict(model.state_dict()), expected)


def test_hf_takes_the_config_from_the_runs_own_configuration(tmp_path):
    model = {"_target_": "mine.Net", "config": {"model_type": "net", "layers": 2}}
    run = train(tmp_path / "run", 1, config={"model": model})
    export(run.checkpoint, options(tmp_path / "hf", format="hf"))
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == model["config"]


def test_hf_says_that_a_config_is_missing(half, tmp_path):
    _, notes = export(half, options(tmp_path / "hf", format="hf"))
    assert "--config" in notes[0]


# -- nothing is lost on the way -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["safetensors", "torch", "lightning", "hf"])
def test_what_is_there_is_replaced_only_by_force_and_then_whole(name, half, whole, tmp_path):
    output = tmp_path / "out"
    written, _ = export(half, options(output, format=name))
    before = {path: path.read_bytes() for path in written}
    with pytest.raises(ConfigError, match="--force"):
        export(whole.checkpoint, options(output, format=name))
    assert {path: path.read_bytes() for path in written} == before
    written, _ = export(whole.checkpoint, options(output, format=name, force=True))
    assert {path: path.read_bytes() for path in written} != before


def test_hf_leaves_other_files_of_the_folder_and_no_shard_of_before(half, tmp_path):
    output = tmp_path / "hf"
    export(half, options(output, format="hf", max_shard_size="300B"))
    (output / "tokenizer.json").write_text("{}")
    export(half, options(output, format="hf", force=True))
    assert sorted(path.name for path in output.iterdir()) == ["model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize("name", ["safetensors", "torch", "lightning", "hf"])
def test_a_full_disk_leaves_the_file_that_was_there_and_no_other(name, half, tmp_path):
    output = tmp_path / "out"
    written, _ = export(half, options(output, format=name))
    before = {path: path.read_bytes() for path in written}
    with files_of_at_most(500), pytest.raises(ResourceError, match="File too large"):
        export(half, options(output, format=name, force=True))
    assert {path: path.read_bytes() for path in written} == before
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_damaged_checkpoint_is_not_exported(half, tmp_path):
    copy = tmp_path / half.name
    copy.mkdir()
    for file in half.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    victim = next(copy.glob("*.distcp"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    with pytest.raises(ResourceError, match=victim.name):
        export(copy, options(tmp_path / "model.safetensors"))
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"optimizer": True}, "weights alone"),
        ({"config": Path("c.json")}, "belongs to --format hf"),
        ({"format": "hf", "max_shard_size": "ten"}, "is no size"),
        ({"format": "hf", "max_shard_size": "5iB"}, "is no size"),
        ({"format": "hf", "config": Path("/nowhere/c.json")}, "No such file"),
        ({"format": "torch", "ema": True, "optimizer": True}, "does not belong to the average"),
        ({"strip": "nothing."}, "no name of the model begins so"),
        ({"format": "torch", "optimizer": True, "strip": "head."}, "trains other parameters"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_name(more, says, half, tmp_path):
    with pytest.raises(ConfigError, match=says):
        export(half, options(tmp_path / "out", **more))
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_an_average_has_none_to_export(tmp_path):
    run = train(tmp_path / "run", 1)
    with pytest.raises(ConfigError, match="no moving average"):
        export(run.checkpoint, options(tmp_path / "out", ema=True))


def test_without_safetensors_the_line_to_install_it_is_given(half, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ResourceError, match="pip install"):
        export(half, options(tmp_path / "out"))
    export(half, options(tmp_path / "out", format="torch"))


# -- plain PyTorch goes on, and is gone on from ---------------------------------------------------


def test_plain_torch_goes_on_from_the_optimizer_by_name(whole, half, tmp_path):
    (path,), _ = export(half, options(tmp_path / "both.pt", format="torch", optimizer=True))
    content = torch.load(path, weights_only=True)
    assert content["step"] == HALF
    assert content["samples"] == HALF * BATCH
    model = Net()
    model.load_state_dict(content["model"])
    # In an order of its own: names tell which state is whose.
    decay = [p for p in model.parameters() if p.ndim > 1 and p.requires_grad]
    rest = [p for p in model.parameters() if p.ndim < 2 and p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": rest[::-1]}, {"params": decay[::-1]}], lr=1.0)
    whole_state = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(model, optimizer, content["optimizer"], options=whole_state)
    assert content["base_lrs"] == [ADAMW.lr, ADAMW.lr]
    for group in optimizer.param_groups:
        group["initial_lr"] = ADAMW.lr  # as torch's schedulers want it to go on
    schedule = LambdaLR(
        optimizer, lambda update: Cosine().factor(update, WHOLE), last_epoch=HALF - 1
    )
    losses = []
    for step in range(HALF, WHOLE):
        losses += plainly(model, optimizer, step, step + 1)
        schedule.step()
    assert losses == pytest.approx(whole.losses[HALF:], rel=1e-6)


@pytest.mark.parametrize("no_decay", [True, False])
def test_a_run_goes_on_from_what_plain_torch_saved(no_decay, tmp_path):
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.02, weight_decay=0.1
    )
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    plainly(model, optimizer, 0, HALF)
    file, names = tmp_path / "plain.pt", tmp_path / "names.txt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    names.write_text("\n".join(trained))
    wanted = Import(file, tmp_path / "in", parameters=names, samples=HALF * BATCH)
    path, notes = import_file(wanted)
    assert path == tmp_path / "in" / f"step-{HALF:08d}"  # Adam counts its steps
    assert any(str(path) in note for note in notes)

    expected = plainly(model, optimizer, HALF, WHOLE)
    spec = OptimizerSpec("AdamW", lr=0.02, options={"weight_decay": 0.1}, no_decay=no_decay)
    going_on = CheckpointOptions(resume=str(path))
    task = Fitting(spec)
    found = train(tmp_path / "run", WHOLE, task=task, checkpoint=going_on, frozen=("frozen.*",))
    assert found.losses == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(found.model.state_dict(), model.state_dict())


def test_without_the_optimizers_state_the_same_run_differs(tmp_path):
    """The test above would notice: the first losses agree and the next do not."""
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    plainly(model, optimizer, 0, HALF)
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    path, _ = import_file(Import(tmp_path / "plain.pt", tmp_path / "in"))
    spec = OptimizerSpec("AdamW", lr=0.02, options={"weight_decay": 0.1}, no_decay=False)
    found = train(
        tmp_path / "run",
        HALF,
        task=Fitting(spec),
        checkpoint=CheckpointOptions(resume=str(path)),
    )
    expected = plainly(model, optimizer, 0, HALF)
    assert found.losses[0] == pytest.approx(expected[0], rel=1e-6)
    assert found.losses[2] != pytest.approx(expected[2], rel=1e-3)


def test_several_groups_by_number_need_names_and_take_them_from_the_file(tmp_path):
    model = Net()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    with_names = torch.optim.SGD(
        [{"params": named[3:]}, {"params": named[:3], "lr": 0.1}], lr=0.2, momentum=0.9
    )
    plainly(model, with_names, 0, 2)
    state = {"model": model.state_dict(), "optimizer": with_names.state_dict(), "step": 2}
    torch.save(state, tmp_path / "named.pt")
    path, _ = import_file(Import(tmp_path / "named.pt", tmp_path / "named"))
    contents = Contents.open(path, verified=True)
    groups = contents.optimizers["main"]["groups"]
    assert [group["params"] for group in groups] == [
        [name for name, _ in named[3:]],
        [name for name, _ in named[:3]],
    ]
    assert [group["lr"] for group in groups] == [0.2, 0.1]
    momentum = contents.optimizer_states()["main"]["state"]
    for name, parameter in named:
        expected = with_names.state[parameter]["momentum_buffer"]
        assert torch.equal(momentum[name]["momentum_buffer"], expected), name

    for group in state["optimizer"]["param_groups"]:
        del group["param_names"]
    torch.save(state, tmp_path / "numbered.pt")
    with pytest.raises(ConfigError, match="--parameters FILE"):
        import_file(Import(tmp_path / "numbered.pt", tmp_path / "numbered"))
    assert not (tmp_path / "numbered").exists()


def test_a_number_is_not_taken_for_a_weight_of_another_shape(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 5))
    optimizer = torch.optim.Adam([*model[1].parameters(), *model[0].parameters()])
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    file = tmp_path / "turned.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    with pytest.raises(ConfigError, match="has shape"):
        import_file(Import(file, tmp_path / "in"))
    names = tmp_path / "names.txt"
    names.write_text("1.weight 1.bias 0.weight 0.bias")
    path, _ = import_file(Import(file, tmp_path / "in", parameters=names))
    read = Contents.open(path, verified=True).optimizer_states()["main"]["state"]
    for name, parameter in model.named_parameters():
        assert torch.equal(read[name]["exp_avg"], optimizer.state[parameter]["exp_avg"])


@pytest.mark.parametrize("name", ["torch", "lightning"])
def test_what_was_exported_comes_back_the_same(name, half, tmp_path):
    wanted = options(tmp_path / "file", format=name, optimizer=name == "torch", prefix="model.")
    (file,), _ = export(half, wanted)
    back, _ = import_file(Import(file, tmp_path / "in", strip="model."))
    before, after = (Contents.open(path, verified=True) for path in (half, back))
    found = comparing.compare(before, after)
    assert found.differences == []
    assert found.changed == {}
    assert found.compared.keys() == {"model", "optimizer main"}
    assert found.only[1] == []  # the average and the random numbers stay behind
    rates = {f"engine.optimizer.main.groups[{i}].lr" for i in range(2)}
    changed = {key for key in found.values if key.startswith(("engine.optimizer", "position"))}
    initial = {f"engine.optimizer.main.groups[{i}].initial_lr" for i in range(2)}
    assert changed - initial == rates  # that of the update to come


# -- Lightning ------------------------------------------------------------------------------------


class Lit(LightningModule):
    """The same training as a LightningModule, its batches in our order."""

    def __init__(self, scheduler: str = "lambda") -> None:
        super().__init__()
        self.model = Net()
        self.scheduler = scheduler
        self.losses: list[float] = []

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss = F.mse_loss(self.model(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        trained = [(n, p) for n, p in self.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for _, p in trained if p.ndim > 1]},
            {"params": [p for _, p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=ADAMW.lr, weight_decay=0.1)
        if self.scheduler == "lambda":
            schedule: Any = LambdaLR(optimizer, lambda update: Cosine().factor(update, WHOLE))
        else:
            schedule = CosineAnnealingLR(optimizer, T_max=WHOLE)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Ordered(Dataset):
    """Our batches from a step on, each a sample."""

    def __init__(self, first: int) -> None:
        self.batches = batches(first, WHOLE)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, i: int) -> list[Tensor]:
        return self.batches[i]


def lightning(folder: Path, steps: int) -> LightningTrainer:
    return LightningTrainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def loader(first: int) -> DataLoader:
    return DataLoader(Ordered(first), batch_size=None)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.parametrize("scheduler", ["lambda", "cosine"])
def test_lightning_goes_on_from_an_export(scheduler, whole, half, tmp_path):
    (file,), notes = export(
        half, options(tmp_path / "model.ckpt", format="lightning", prefix="model.")
    )
    assert notes == []
    found = Lit.load_from_checkpoint(file, map_location="cpu")
    assert_same(dict(found.model.state_dict()), saved_model(half))

    module = Lit(scheduler)
    trainer = lightning(tmp_path, WHOLE)
    trainer.fit(module, loader(HALF), ckpt_path=file)
    assert trainer.global_step == WHOLE
    assert module.losses == pytest.approx(whole.losses[HALF:], rel=1e-5)
    torch.testing.assert_close(module.model.state_dict(), whole.model.state_dict())


@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
def test_a_run_goes_on_from_what_lightning_saved_with_its_schedule(tmp_path):
    torch.manual_seed(5)
    module = Lit("cosine")
    trainer = lightning(tmp_path, HALF)
    trainer.fit(module, loader(0))
    trainer.save_checkpoint(tmp_path / "lit.ckpt")
    trained = [n for n, p in module.model.named_parameters() if p.requires_grad]
    shapes = dict(module.model.named_parameters())
    names = [n for n in trained if shapes[n].ndim > 1] + [n for n in trained if shapes[n].ndim < 2]
    (tmp_path / "names.txt").write_text("\n".join(names))
    path, _ = import_file(
        Import(
            tmp_path / "lit.ckpt",
            tmp_path / "in",
            strip="model.",
            parameters=tmp_path / "names.txt",
            samples=HALF * BATCH,
        )
    )
    found = train(
        tmp_path / "run",
        WHOLE,
        schedule=TorchSchedule(scheduler="CosineAnnealingLR", options={"T_max": WHOLE}),
        checkpoint=CheckpointOptions(resume=str(path)),
        frozen=("frozen.*",),
    )

    torch.manual_seed(5)
    undisturbed = Lit("cosine")
    lightning(tmp_path, WHOLE).fit(undisturbed, loader(0))
    assert found.losses == pytest.approx(undisturbed.losses[HALF:], rel=1e-5)
    torch.testing.assert_close(found.model.state_dict(), undisturbed.model.state_dict())


def test_an_average_goes_to_lightning_as_weights_alone(whole, tmp_path):
    wanted = options(tmp_path / "ema.ckpt", format="lightning", prefix="model.", ema=True)
    (file,), notes = export(whole.checkpoint, wanted)
    assert "weights alone" in notes[0]
    found = Lit.load_from_checkpoint(file, map_location="cpu").model.state_dict()
    export(whole.checkpoint, options(tmp_path / "ema.safetensors", ema=True))
    assert_same(dict(found), load_file(tmp_path / "ema.safetensors"))


# -- what may not be read -------------------------------------------------------------------------


class Bomb:
    """Unpickling this makes a file: the sign that code was run."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __reduce__(self) -> Any:
        return Path.touch, (self.sign,)


@pytest.mark.parametrize("suffix", [".pt", ".ckpt", ".bin"])
def test_a_file_crafted_to_run_code_is_refused_and_runs_none(suffix, tmp_path):
    sign, file = tmp_path / "sign", tmp_path / f"evil{suffix}"
    torch.save({"state_dict": Net().state_dict(), "optimizer_states": [Bomb(sign)]}, file)
    torch.load(file, weights_only=False)
    assert sign.exists()  # the bomb is live
    sign.unlink()
    with pytest.raises(ConfigError, match="can run code"):
        import_file(Import(file, tmp_path / "in"))
    assert not sign.exists()
    assert not (tmp_path / "in").exists()


def test_a_bare_pickle_is_refused_too(tmp_path):
    sign, file = tmp_path / "sign", tmp_path / "evil.pt"
    file.write_bytes(pickle.dumps({"model": Bomb(sign)}))
    with pytest.raises(ConfigError):
        import_file(Import(file, tmp_path / "in"))
    assert not sign.exists()


@pytest.mark.parametrize(
    ("content", "more", "says"),
    [
        ({"epoch": 3}, {}, "holds no weights, but epoch"),
        ([1, 2], {}, "holds no weights"),
        ({"model": {"a": torch.ones(2)}, "optimizer": {"state": 1}}, {}, "no state_dict of torch"),
        ({"a": torch.ones(2)}, {"strip": "b."}, "begins so"),
        ({"a": torch.ones(2)}, {"optimizers": ("main",)}, "without an optimizer"),
        ({"a": torch.ones(2)}, {"step": -1}, "below 0"),
        ({"a": torch.ones(2)}, {"output": "step-00000001"}, "is a checkpoint"),
        ({"a": torch.ones(2)}, {"output": "file.pt"}, "is a file"),
    ],
)
def test_a_file_that_makes_no_checkpoint_is_refused(content, more, says, tmp_path):
    torch.save(content, tmp_path / "file.pt")
    (tmp_path / "step-00000001").mkdir()
    output = tmp_path / more.pop("output", "in")
    with pytest.raises(ConfigError, match=says):
        import_file(Import(tmp_path / "file.pt", output, **more))
    assert not (tmp_path / "in").exists()


def test_weights_alone_say_how_to_start_from_them_and_can_be_evaluated(half, tmp_path):
    expected = saved_model(half)
    save_file({k: v.clone() for k, v in expected.items()}, tmp_path / "w.safetensors")
    path, notes = import_file(Import(tmp_path / "w.safetensors", tmp_path / "in"))
    assert any("trainer.pretrained" in note for note in notes)
    assert_same(saved_model(path), expected)
    with pytest.raises(ConfigError, match="exists"):
        import_file(Import(tmp_path / "w.safetensors", tmp_path / "in"))
    own = Trainer(task=Fitting(ADAMW), strategy="single", run_dir=tmp_path / "run", max_steps=1)
    metrics = own.evaluate(str(path)).metrics
    model = Net().eval()
    model.load_state_dict(expected)
    with torch.no_grad():
        assert metrics["loss"] == pytest.approx(F.mse_loss(model(X[:10]), Y[:10]).item())


def test_a_wrappers_prefix_is_told(tmp_path):
    weights = {f"module.{name}": tensor for name, tensor in Net().state_dict().items()}
    torch.save(weights, tmp_path / "ddp.pt")
    _, notes = import_file(Import(tmp_path / "ddp.pt", tmp_path / "in"))
    assert any("--strip module." in note for note in notes)
    path, _ = import_file(Import(tmp_path / "ddp.pt", tmp_path / "stripped", strip="module."))
    assert saved_model(path).keys() == Net().state_dict().keys()
