"""What other programs saved becomes a checkpoint; plain PyTorch goes on, and is gone on from."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from formats.fitting import (
    ADAMW,
    BATCH,
    HALF,
    WHOLE,
    Fitting,
    Net,
    X,
    Y,
    assert_same,
    options,
    plainly,
    saved_model,
    train,
)
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from torsh_trainer import (
    CheckpointOptions,
    OptimizerSpec,
    Trainer,
)
from torsh_trainer.checkpoint.cli import comparing
from torsh_trainer.checkpoint.cli.contents import Contents
from torsh_trainer.checkpoint.cli.export import export
from torsh_trainer.checkpoint.cli.importing import Import, import_file
from torsh_trainer.errors import ConfigError
from torsh_trainer.optim.schedule.shapes import Cosine


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
