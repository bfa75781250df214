"""Our engines in Lightning's Trainer: the same numbers, and what Lightning alone cannot."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import Precision as LightningPrecision
from lightning.pytorch.strategies import StrategyRegistry
from loops import as_torchrun, quiet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torsh_trainer_lightning import TorshStrategy
from torsh_trainer_lightning.names import NAMES

from torsh_trainer.comm.compression import FP16, TopK
from torsh_trainer.errors import ConfigError, ResourceError, Unsupported
from torsh_trainer.optim.precision import Precision

STEPS, SAVED_AT = 6, 4
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "gloo": ("gloo", {}),
    "gloo, sharded optimizer": ("gloo", {"zero1": True}),
    "ddp, sharded optimizer": ("ddp", {"zero1": True}),
    "ddp, after backward": ("ddp", {"overlap": False}),
    "fsdp": ("fsdp", {}),
    "fsdp, zero2": ("fsdp", {"reshard_after_forward": False}),
    "horovod": ("horovod", {}),
    "deepspeed, stage 2": ("deepspeed", {"stage": 2}),
    "deepspeed, stage 3": ("deepspeed", {"stage": 3}),
}
SHARDED = ("fsdp", "ddp, sharded optimizer", "deepspeed, stage 2", "deepspeed, stage 3")


class Net(L.LightningModule):
    """A classifier with batch normalisation, momentum and a schedule; it calls itself by name."""

    def __init__(self, *, kind: str = "AdamW", norm: bool = True) -> None:
        super().__init__()
        self.kind = kind
        kept = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.body = nn.Sequential(nn.Linear(6, 8, bias=False), kept, nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)
        self.losses: list[float] = []

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val", nn.functional.cross_entropy(self.head(self.body(x)), y), sync_dist=True)

    def configure_optimizers(self):
        kinds = {
            "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05),
            "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=2),
        }
        optimizer = kinds[self.kind](self.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class ByHand(Net):
    """Two optimizers, stepped within the training step."""

    def __init__(self, *, own: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        if own:
            self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, batch, batch_idx):
        x, y = batch
        for optimizer in self.optimizers():
            loss = nn.functional.cross_entropy(self(x), y)
            self.losses.append(float(loss.detach()))
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()

    def configure_optimizers(self):
        return [
            torch.optim.SGD(self.body.parameters(), lr=0.1, momentum=0.9),
            torch.optim.AdamW(self.head.parameters(), lr=0.05),
        ]


def loader(samples: int = 48) -> DataLoader:
    """Labelled points; the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 6, generator=generator)
    y = torch.randint(0, 3, (samples,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4)


def fitted(
    strategy: Any, module: L.LightningModule, folder: Path, *, devices: int = 1, **flags: Any
) -> L.Trainer:
    """A Trainer that has fitted ``module``; ``flags`` are its own and ``ckpt_path``."""
    quiet()
    ckpt_path = flags.pop("ckpt_path", None)
    trainer = L.Trainer(
        strategy=strategy,
        devices=devices,
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_steps": STEPS, "limit_val_batches": 0, "enable_checkpointing": False, **flags},
    )
    trainer.fit(module, loader(), loader(16), ckpt_path=ckpt_path)
    return trainer


def net(kind: str = "AdamW", *, norm: bool = True) -> Net:
    """The same module whenever it is asked for."""
    L.seed_everything(11, verbose=False)
    return Net(kind=kind, norm=norm)


def told(trainer: L.Trainer, module: Any, folder: Path) -> dict[str, Any]:
    """Losses, and the checkpoint that rank 0 writes of this state."""
    path = folder / "told.ckpt"
    trainer.save_checkpoint(path)
    trainer.strategy.barrier()
    return {"losses": module.losses, "saved": torch.load(path, weights_only=True)}


class Saves(Callback):
    """Writes a checkpoint at a step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == SAVED_AT and not self.path.exists():
            trainer.save_checkpoint(self.path)


class Leaves:
    """On ranks: each case in the group that its Trainer makes, which ends with it."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if dist.is_initialized():
            dist.destroy_process_group()


def trained(world, port, folder, engine, flags) -> dict[str, Any]:
    """One rank's training by an engine; None is Lightning's own DDP."""
    as_torchrun(world, port, folder)
    with Leaves():
        strategy: Any = "ddp"
        if engine is not None:
            strategy = TorshStrategy(engine[0], **engine[1])
        module = net()
        trainer = fitted(strategy, module, folder, devices=world.size, **flags)
        return told(trainer, module, folder)


def same(one: Mapping[str, Any], other: Mapping[str, Any], *, relative: float = 1e-4) -> None:
    """Makes sure that two trainings have told the same."""
    torch.testing.assert_close(one["losses"], other["losses"], rtol=relative, atol=1e-5)
    for kind in ("state_dict", "optimizer_states"):
        _close(one["saved"][kind], other["saved"][kind], relative)


def _close(one: Any, other: Any, relative: float) -> None:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        torch.testing.assert_close(
            torch.as_tensor(one).float(), torch.as_tensor(other).float(), rtol=relative, atol=1e-5
        )
    elif isinstance(one, Mapping):
        for key in one.keys() & other.keys():
            _close(one[key], other[key], relative)
        assert set(one) <= set(other) | {"maximize", "foreach", "capturable", "differentiable"}
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            _close(a, b, relative)
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=relative)


CLIPPED = {
    "gradient_clip_val": 0.1,
    "accumulate_grad_batches": 2,
    "max_steps": 3,
    "limit_val_batches": 2,
}


@pytest.fixture(scope="module")
def lightnings(on_ranks, tmp_path_factory) -> dict[str, Any]:
    """What Lightning's own DDP does on two processes."""
    folder = tmp_path_factory.mktemp("lightning")
    return on_ranks(trained, folder, None, CLIPPED)[0]


@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_trains_as_lightnings_ddp_clipping_and_accumulating(
    on_ranks, lightnings, tmp_path, name
):
    ours = on_ranks(trained, tmp_path, ENGINES[name], CLIPPED)[0]
    same(lightnings, ours)


def test_without_clipping_the_result_is_another(on_ranks, lightnings, tmp_path):
    flags = {**CLIPPED, "gradient_clip_val": None}
    ours = on_ranks(trained, tmp_path, ("fsdp", {}), flags)[0]
    with pytest.raises(AssertionError):
        same(lightnings, ours)


def fit_in_order(module: Net, folder: Path, batch_size: int, rank: int = 0, **flags: Any) -> None:
    """On every ``devices``-th sample, from this rank's on."""
    x, y = loader().dataset.tensors
    mine = slice(rank, None, flags.get("devices", 1))
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
        limit_val_batches=0,
        **flags,
    )
    trainer.fit(module, DataLoader(TensorDataset(x[mine], y[mine]), batch_size=batch_size))


def fit_synchronised(world, port, folder, engine) -> tuple[list[float], dict[str, Any], str]:
    """Losses, weights, and the class of the norm afterwards."""
    as_torchrun(world, port, folder)
    with Leaves():
        module = net("SGD")
        flags = {"devices": world.size, "sync_batchnorm": True}
        strategy = TorshStrategy(engine[0], **engine[1])
        fit_in_order(module, folder, 4, world.rank, strategy=strategy, **flags)
        return module.losses, module.state_dict(), type(module.body[1]).__name__


@pytest.mark.matrix(2)
@pytest.mark.parametrize("name", ["gloo", "ddp, after backward", "fsdp", "horovod"])
def test_batch_normalisation_over_all_processes_is_that_of_one(on_ranks, tmp_path, name):
    alone = net("SGD")
    fit_in_order(alone, tmp_path, 8)
    ranks = on_ranks(fit_synchronised, tmp_path, ENGINES[name])
    losses = [sum(pair) / 2 for pair in zip(*(rank[0] for rank in ranks), strict=True)]
    assert losses == pytest.approx(alone.losses, rel=1e-4)
    for _, weights, kind in ranks:
        assert kind == "BatchNorm1d"
        for key, value in alone.state_dict().items():
            torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=1e-5)


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """Lightning on one process from beginning to end, and its checkpoint halfway."""
    folder = tmp_path_factory.mktemp("one")
    path, module = folder / "half.ckpt", net()
    trainer = fitted("auto", module, folder, callbacks=[Saves(path)])
    return path, told(trainer, module, folder)


def carried_on(world, port, folder, engine, path) -> dict[str, Any]:
    """A rank that goes on from a checkpoint of one process, with its share of each batch."""
    as_torchrun(world, port, folder)
    with Leaves():
        module = net()
        trainer = fitted(
            TorshStrategy(engine[0], **engine[1]),
            module,
            folder,
            devices=world.size,
            ckpt_path=path,
            max_steps=SAVED_AT,  # nothing is left to train: what was loaded is what is told
        )
        return told(trainer, module, folder)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("name", SHARDED)
def test_a_checkpoint_of_lightnings_is_cut_over_ranks_and_put_together_again(
    on_ranks, whole_run, tmp_path, name
):
    path, _ = whole_run
    ours = on_ranks(carried_on, tmp_path, ENGINES[name], path)[0]["saved"]
    theirs = torch.load(path, weights_only=True)
    for kind in ("state_dict", "optimizer_states", "lr_schedulers"):
        _close(theirs[kind], ours[kind], 1e-6)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("name", SHARDED)
def test_lightning_goes_on_from_a_checkpoint_written_under_sharding(
    on_ranks, lightnings, tmp_path, name
):
    path = tmp_path / "half.ckpt"
    flags = {"max_steps": SAVED_AT, "callbacks": [Saves(path)]}
    on_ranks(trained, tmp_path, ENGINES[name], flags)
    module = net()
    trainer = fitted("auto", module, tmp_path, ckpt_path=path)
    assert trainer.global_step == STEPS
    assert len(module.losses) == STEPS - SAVED_AT


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path):
    path = tmp_path / "some.ckpt"
    path.write_bytes(b"not one")
    with pytest.raises(ConfigError, match="no checkpoint of Lightning's; give"):
        fitted(TorshStrategy("single"), net(), tmp_path, ckpt_path=path)
    torch.save({"weights": torch.ones(1)}, path)
    with pytest.raises(ConfigError, match="no checkpoint of Lightning's"):
        fitted(TorshStrategy("single"), net(), tmp_path, ckpt_path=path)
    missing = tmp_path / "none.ckpt"
    with pytest.raises(ResourceError, match="there is no checkpoint file") as ours:
        fitted(TorshStrategy("single"), net(), tmp_path, ckpt_path=missing)
    with pytest.raises(FileNotFoundError) as lightnings:
        fitted("auto", net(), tmp_path, ckpt_path=missing)
    assert isinstance(ours.value, lightnings.type)
    assert str(pickle.loads(pickle.dumps(ours.value))) == str(ours.value)


def test_a_checkpoint_that_carries_code_needs_a_word(tmp_path, whole_run):
    path, _ = whole_run
    content = torch.load(path, weights_only=True)
    content["brought"] = TensorDataset(torch.ones(1))
    odd = tmp_path / "odd.ckpt"
    torch.save(content, odd)
    with pytest.raises(ConfigError, match=r"would run code in it: .*weights_only=False"):
        fitted(TorshStrategy("single"), net(), tmp_path, ckpt_path=odd)
    module = net()
    trainer = L.Trainer(
        strategy=TorshStrategy("single"),
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(), ckpt_path=odd, weights_only=False)
    lightnings = net()
    fitted("auto", lightnings, tmp_path, ckpt_path=path)
    assert module.losses == lightnings.losses


# -- manual optimization, precision, compression ---------------------------------------------------


def by_hand(world, port, folder, engine) -> list[float]:
    """Losses of a module that steps two optimizers itself; None is Lightning's own DDP."""
    as_torchrun(world, port, folder)
    with Leaves():
        L.seed_everything(11, verbose=False)
        module = ByHand()
        strategy: Any = "ddp"
        if engine is not None:
            strategy = TorshStrategy(engine[0], **engine[1])
        fitted(strategy, module, folder, devices=world.size, max_steps=8)
        return module.losses


def test_two_optimizers_step_by_hand_under_every_engine_that_can(on_ranks, tmp_path):
    theirs = on_ranks(by_hand, tmp_path, None)
    for name in ("ddp, after backward", "gloo", "fsdp", "horovod"):
        ours = on_ranks(by_hand, tmp_path, ENGINES[name])
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5, msg=name)


def in_bf16(world, port, folder, engine) -> list[float]:
    """Losses with fp32 masters under a forward in bf16."""
    as_torchrun(world, port, folder)
    with Leaves():
        precision = Precision(params="bf16", compute="bf16")
        strategy = TorshStrategy(engine[0], precision=precision, **engine[1])
        module = net("SGD", norm=False)
        fitted(strategy, module, folder, devices=world.size)
        assert all(p.dtype == torch.float32 for p in module.parameters())
        return module.losses


def test_masters_stay_fp32_under_a_forward_in_bf16_on_every_engine(on_ranks, tmp_path):
    ddp = on_ranks(in_bf16, tmp_path, ("ddp", {}))[0]
    fsdp = on_ranks(in_bf16, tmp_path, ("fsdp", {}))[0]
    torch.testing.assert_close(ddp, fsdp, rtol=0.02, atol=0.01)
    module = net("SGD", norm=False)
    fitted(TorshStrategy("single"), module, tmp_path, max_steps=1)
    assert [float(torch.tensor(loss).bfloat16()) for loss in ddp] == ddp, "it came in bf16"
    assert float(torch.tensor(module.losses[0]).bfloat16()) != module.losses[0]


def sent(world, port, folder, compression, accumulate) -> tuple[int, list[float]]:
    """Bytes of gradients that a rank has sent, and its losses."""
    as_torchrun(world, port, folder)
    with Leaves():
        strategy = TorshStrategy("gloo", compression=compression)
        counter = Traffic()
        module = net("SGD")
        fitted(
            strategy,
            module,
            folder,
            devices=world.size,
            max_steps=2,
            accumulate_grad_batches=accumulate,
            callbacks=[counter],
        )
        return counter.sent, module.losses


class Traffic(Callback):
    """How many bytes an engine says that it has sent."""

    sent = 0

    def on_train_end(self, trainer, module):
        self.sent = trainer.strategy.engine.traffic().sent_bytes


def test_compressed_gradients_travel_once_a_step_however_many_batches_it_has(on_ranks, tmp_path):
    half, losses = on_ranks(sent, tmp_path, FP16(min_size=0), 1)[0]
    again, _ = on_ranks(sent, tmp_path, FP16(min_size=0), 3)[0]
    few, _ = on_ranks(sent, tmp_path, TopK(0.1, min_size=0), 1)[0]
    assert half == again
    assert few < half
    assert losses[0] > 0


class SavesAtOnce(Saves):
    """Writes what was loaded, before anything is trained."""

    def on_train_start(self, trainer, *_):
        trainer.save_checkpoint(self.path)


def owing(world, port, folder, name, path) -> dict[str, Any]:
    """The checkpoint of a rank that compresses: halfway, or as it was loaded from ``path``."""
    as_torchrun(world, port, folder)
    with Leaves():
        told, goes_on = folder / "told.ckpt", path.exists()
        trainer = fitted(
            TorshStrategy(name, compression=TopK(0.1, min_size=0)),
            net("SGD"),
            folder,
            devices=world.size,
            callbacks=[SavesAtOnce(told) if goes_on else Saves(told)],
            ckpt_path=path if goes_on else None,
        )
        trainer.strategy.barrier()
        saved: dict[str, Any] = torch.load(told, weights_only=True)
        trainer.strategy.barrier()
        if world.is_rank_zero:
            told.unlink()
        return saved


@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", ["ddp", "gloo"])
def test_what_compression_owes_is_in_a_checkpoint(on_ranks, tmp_path, name):
    path, key = tmp_path / "half.ckpt", "torsh_trainer.compression"
    content = on_ranks(owing, tmp_path, name, path)[0]
    owed = content[key]["residual"]
    assert owed["head.weight"].shape == (2, 3, 8)
    assert owed["head.weight"].any(dim=(1, 2)).all()
    torch.save(content, path)
    again = on_ranks(owing, tmp_path, name, path)[0]
    torch.testing.assert_close(again[key]["residual"], owed, rtol=0, atol=0)
    assert again[key]["step"] == SAVED_AT
    fitted("auto", net("SGD"), tmp_path, ckpt_path=path)  # Lightning itself passes it over
    torch.save({k: v for k, v in content.items() if k != key}, path)
    without = on_ranks(owing, tmp_path, name, path)[0]
    assert not without[key]["residual"]["head.weight"].any()


# -- what is refused -------------------------------------------------------------------------------


def refused(world, port, folder, engine, module, flags) -> str:
    """The sentence by which a fit is refused on this rank, before the first step."""
    as_torchrun(world, port, folder)
    with Leaves(), pytest.raises(Unsupported) as error:
        fitted(TorshStrategy(engine[0], **engine[1]), module, folder, devices=world.size, **flags)
    assert not module.losses
    return str(error.value)


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("engine", "module", "flags", "words"),
    [
        ("fsdp", Net(kind="LBFGS"), {}, "optimizer LBFGS cannot step parameters"),
        ("fsdp", ByHand(own=True), {}, "the parameter 'scale' of a module that steps"),
        ("deepspeed, stage 2", ByHand(), {}, "2 optimizers"),
        (
            "deepspeed, stage 2",
            Net(),
            {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
            'gradient_clip_algorithm="value"',
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_an_engine_cannot_is_refused_before_the_first_step(
    on_ranks, tmp_path, engine, module, flags, words
):
    assert words in on_ranks(refused, tmp_path, ENGINES[engine], module, flags)[0]


def test_an_optimizer_with_a_closure_of_its_own_steps_as_lightnings(tmp_path):
    theirs, ours = net("LBFGS"), net("LBFGS")
    fitted("auto", theirs, tmp_path, max_steps=3)
    fitted(TorshStrategy("single"), ours, tmp_path, max_steps=3)
    assert theirs.losses == ours.losses
    assert len(theirs.losses) > 3


def test_knobs_and_names_are_checked_where_the_strategy_is_made(tmp_path):
    with pytest.raises(ConfigError, match="no knob 'bucket_cap'; did you mean 'bucket_cap_mb'"):
        TorshStrategy("ddp", bucket_cap=1)
    with pytest.raises(ConfigError, match="unknown strategy 'fsdpp'; did you mean 'fsdp'"):
        TorshStrategy("fsdpp")
    with pytest.raises(ConfigError, match="one process, and this job has 2"):
        L.Trainer(strategy="torsh_single", devices=2, accelerator="cpu")
    strategy = TorshStrategy("single", precision=Precision(compute="bf16"))
    with pytest.raises(ConfigError, match="precision=bf16-mixed, and the strategy"):
        L.Trainer(strategy=strategy, devices=1, accelerator="cpu", precision="bf16-mixed")
    odd = [OddPrecision()]
    with pytest.raises(Unsupported, match="the precision plugin OddPrecision"):
        L.Trainer(strategy=TorshStrategy("single"), devices=1, accelerator="cpu", plugins=odd)


class OddPrecision(LightningPrecision):
    """One that no engine knows."""

    precision = "odd"


def test_every_strategy_has_a_registered_name():
    for name in NAMES:
        made = StrategyRegistry.get(f"torsh_{name}")
        assert isinstance(made, TorshStrategy)
        assert made.chosen.name == name
