"""Odd and hostile files of others: each gets a sentence, and nothing is taken in silence."""

from __future__ import annotations

import io
import json
import math
import zipfile

import pytest
import torch
from torch import nn

from torsh_trainer.checkpoint.cli.importing import Import, import_file
from torsh_trainer.errors import ConfigError


def trained() -> dict:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def ring() -> dict:
    content = trained()
    content["lr_scheduler"] = content
    return content


def optimizer_of(state: object, groups: object) -> dict:
    return {**trained(), "optimizer": {"state": state, "param_groups": groups}}


def refusal(path, tmp_path, **options) -> str:
    with pytest.raises(ConfigError) as told:
        import_file(Import(path, tmp_path / "out", **options))
    assert not list(tmp_path.glob("out/step-*"))
    assert not any(word in str(told.value) for word in ("Error", "object", "NoneType"))
    return str(told.value)


# -- files of torch.save ---------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-5, math.inf, math.nan, "abc", 2**80, [1], 2.5])
@pytest.mark.parametrize("key", ["global_step", "samples", "epoch"])
def test_a_count_that_counts_nothing_is_refused(key, value, tmp_path):
    torch.save({**trained(), key: value}, tmp_path / "a.pt")
    assert f"{key} in the file is" in refusal(tmp_path / "a.pt", tmp_path)


def test_a_step_that_is_given_wins_over_one_that_counts_nothing(tmp_path):
    torch.save({**trained(), "global_step": -5}, tmp_path / "a.pt")
    path, _ = import_file(Import(tmp_path / "a.pt", tmp_path / "out", step=7))
    assert path.name == "step-00000007"


ODD = {
    "holds itself": (ring, "holds itself"),
    "device meta": (lambda: nn.Linear(2, 2, device="meta").state_dict(), "without values"),
    "expanded": (lambda: {"w": torch.zeros(1).expand(10**11)}, "stands for tensors of 381,470 MiB"),
    "a state that is a number": (
        lambda: optimizer_of({0: 3}, [{"params": [0, 1], "lr": 0.1}]),
        "is not laid out as",
    ),
    "a rate in words": (
        lambda: optimizer_of({}, [{"params": [0, 1], "lr": "fast"}]),
        "is not laid out as",
    ),
    "parameters that are lists": (
        lambda: optimizer_of({}, [{"params": [[1], [2]]}]),
        "is not laid out as",
    ),
    "steps without end": (
        lambda: optimizer_of({0: {"step": torch.tensor(math.inf)}}, [{"params": [0, 1]}]),
        "is not laid out as",
    ),
    "steps below 0": (
        lambda: optimizer_of({0: {"step": torch.tensor(-3.0)}}, [{"params": [0, 1]}]),
        "counts -3 steps",
    ),
    "nothing": (dict, "holds no weights"),
    "None": (lambda: None, "holds no weights"),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_content_is_refused_in_a_sentence(case, tmp_path):
    make, words = ODD[case]
    torch.save(make(), tmp_path / "a.pt")
    assert words in refusal(tmp_path / "a.pt", tmp_path)


def test_an_archive_that_unpacks_to_far_more_is_refused_before_it_does(tmp_path):
    plain = io.BytesIO()
    torch.save(trained(), plain)
    with (
        zipfile.ZipFile(plain) as archive,
        zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for part in archive.infolist():
            more = bytes(2**29) if part.filename.endswith("data.pkl") else b""
            bomb.writestr(part.filename, archive.read(part) + more)
    assert "unpacks to 512 MiB" in refusal(tmp_path / "a.pt", tmp_path)


# -- an index of shards ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [3, None, "", ".", "..", "a/b", "a\0b", ["a"]])
def test_an_index_names_files_beside_it_or_is_refused(name, tmp_path):
    index = tmp_path / "hf" / "model.safetensors.index.json"
    index.parent.mkdir()
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    assert str(index) in refusal(index.parent, tmp_path)


def test_a_tensor_that_the_index_has_and_no_shard_is_named(tmp_path):
    index = tmp_path / "hf" / "pytorch_model.bin.index.json"
    index.parent.mkdir()
    torch.save({"here": torch.ones(2)}, index.with_name("one.bin"))
    index.write_text(json.dumps({"weight_map": {"here": "one.bin", "gone": "one.bin"}}))
    assert "tensors that no shard holds: gone" in refusal(index.parent, tmp_path)


# -- folders of DeepSpeed --------------------------------------------------------------------------


def model_states(**changes) -> dict:
    content = {
        "module": {"w": torch.ones(2), "v": torch.ones(2)},
        "optimizer": None,
        "global_steps": 3,
        "skipped_steps": 0,
        "param_shapes": [{"w": torch.Size([2]), "v": torch.Size([2])}],
        **changes,
    }
    return {key: value for key, value in content.items() if value != "absent"}


def optimizer_states(**changes) -> dict:
    flat = torch.ones(4)
    return {
        "optimizer_state_dict": {
            "partition_count": [1],
            "single_partition_of_fp32_groups": [flat],
            "base_optimizer_state": {
                "state": {0: {"exp_avg": flat, "step": 3}},
                "param_groups": [{"lr": 0.1, "params": [0]}],
            },
            **changes,
        }
    }


def folder_of(tmp_path, model, optimizer=None):
    folder = tmp_path / "global_step3"
    folder.mkdir()
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    if optimizer is not None:
        torch.save(optimizer, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return folder


def test_a_whole_folder_of_deepspeed_is_read(tmp_path):
    folder = folder_of(tmp_path, model_states(), optimizer_states())
    path, _ = import_file(Import(folder, tmp_path / "out"))
    assert path.name == "step-00000003"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"module": "absent"}, "it has no 'module'"),
        ({"module": 3}, "is not laid out as"),
        ({"optimizer": "absent"}, "it has no 'optimizer'"),
        ({"global_steps": -3}, "global_steps is -3"),
        ({"global_steps": "many"}, "global_steps is many"),
        ({"skipped_steps": 9}, "skipped_steps is 9 of 3"),
        ({"global_samples": math.inf}, "global_samples is inf"),
    ],
)
def test_an_odd_file_of_the_model_is_refused_in_a_sentence(changes, words, tmp_path):
    assert words in refusal(folder_of(tmp_path, model_states(**changes)), tmp_path)


@pytest.mark.parametrize(
    ("model", "optimizer", "words"),
    [
        ({"param_shapes": "absent"}, {}, "it has no 'param_shapes'"),
        ({"param_shapes": [{"w": "2"}]}, {}, "is not laid out as"),
        ({"param_shapes": [{"w": [10**12]}]}, {}, "ends before a parameter of"),
        ({"param_shapes": [3]}, {}, "is not laid out as"),
        ({"shared_params": {"w": "v", "v": "w"}}, {}, "says that w is v, and that v is w"),
        ({}, {"param_alignment_paddings": [[-2, 0]]}, "has -2 in it, which is no gap"),
        ({}, {"partition_count": "x"}, "and x saved theirs"),
        ({}, {"base_optimizer_state": {}}, "it has no 'state'"),
        ({}, {"single_partition_of_fp32_groups": []}, "is not laid out as"),
    ],
)
def test_odd_files_of_deepspeed_are_refused_in_a_sentence(model, optimizer, words, tmp_path):
    folder = folder_of(tmp_path, model_states(**model), optimizer_states(**optimizer))
    assert words in refusal(folder, tmp_path)


@pytest.mark.parametrize("tag", ["", "..", "../global_step3", "/", "a\0b"])
def test_latest_names_a_folder_below_it(tag, tmp_path):
    folder_of(tmp_path, model_states())
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "latest").write_text(tag)
    assert "and no model lies there" in refusal(tmp_path / "below", tmp_path)
