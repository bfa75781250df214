"""Checkpoints taken to other formats: other programs open them, and nothing is lost on the way."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from formats.fitting import Net, assert_same, options, saved_model, train
from full_disk import files_of_at_most
from safetensors.torch import load_file
from torch import Tensor

from torsh_trainer.checkpoint.cli.export import export
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.tasks.weights import load_pretrained

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
