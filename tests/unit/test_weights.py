"""Pretrained weights arrive as they were saved, or the difference is told; nothing runs code."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.tasks.weights import freeze, load_pretrained


class Net(nn.Module):
    def __init__(self, *, classes: int = 3) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
        self.head = nn.Linear(6, classes)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.output = nn.Linear(4, 5, bias=False)
        self.output.weight = self.embedding.weight


def net(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    made = Net(**options)
    made.encoder(torch.randn(8, 4))  # running statistics of its own
    return made


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def save_sharded(state: dict[str, Tensor], path: Path) -> Path:
    names = sorted(state)
    parts = {"part-1.safetensors": names[::2], "part-2.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: state[name] for name in held}, path / file)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {n: f for f, held in parts.items() for n in held}}))
    return index


def saver(wrap: Callable[[dict], Any], name: str = "weights.pt", **options: Any) -> Any:
    def save(state: dict[str, Tensor], folder: Path) -> Path:
        torch.save(wrap(state), folder / name, **options)
        return folder / name

    return save


def as_safetensors(state: dict[str, Tensor], folder: Path) -> Path:
    save_file(state, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def in_folder(state: dict[str, Tensor], folder: Path) -> Path:
    save_file(state, folder / "model.safetensors")
    return folder


def prefixed(prefix: str) -> Callable[[dict], dict]:
    return lambda state: {prefix + name: tensor for name, tensor in state.items()}


FORMATS = {
    "safetensors": as_safetensors,
    "a folder": in_folder,
    "shards": save_sharded,
    "torch": saver(lambda state: state),
    "torch before zip": saver(lambda state: state, _use_new_zipfile_serialization=False),
    "torch, a .bin": saver(lambda state: state, "pytorch_model.bin"),
    "nested under state_dict": saver(lambda state: {"epoch": 3, "state_dict": state}, "last.ckpt"),
    "nested under model": saver(lambda state: {"model": state, "optimizer": {"state": {}}}),
    "nested twice": saver(lambda state: {"model": {"state_dict": state}}),
    "of DDP": saver(prefixed("module.")),
    "of a LightningModule": saver(lambda s: {"state_dict": prefixed("model.")(s), "epoch": 1}),
    "compiled and wrapped": saver(prefixed("module._orig_mod.")),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_loads_what_was_saved(name: str, tmp_path: Path) -> None:
    source, target = net(1), net(2)
    report = load_pretrained(target, FORMATS[name](source.state_dict(), tmp_path))
    assert_equal(target.state_dict(), source.state_dict())
    assert report.complete
    assert set(report.loaded) == set(source.state_dict())
    assert str(report).startswith(f"{len(report.loaded)} of {len(report.loaded)} tensors (100.0%")


def test_values_are_cast_to_the_models_dtype(tmp_path: Path) -> None:
    source, target = net(1), net(2)
    path = as_safetensors({k: v.half() for k, v in source.state_dict().items()}, tmp_path)
    load_pretrained(target, path)
    wanted = {k: v.half().to(v.dtype) for k, v in source.state_dict().items()}
    assert_equal(target.state_dict(), wanted)


def test_a_prefix_takes_a_part_of_the_file(tmp_path: Path) -> None:
    source, target = net(1), net(2)
    before = copied(target.head.state_dict())
    report = load_pretrained(
        target.encoder, saver(lambda s: s)(source.state_dict(), tmp_path), prefix="encoder."
    )
    assert report.complete
    assert_equal(target.encoder.state_dict(), source.encoder.state_dict())
    assert_equal(target.head.state_dict(), before)


def test_renaming_is_by_regular_expressions_in_order(tmp_path: Path) -> None:
    source, target = net(1), net(2)
    odd = {k.replace("encoder.0", "enc.first"): v for k, v in source.state_dict().items()}
    rename = {r"^enc\.": "encoder.", r"encoder\.first\.(\w+)$": r"encoder.0.\1"}
    assert load_pretrained(target, as_safetensors(odd, tmp_path), rename=rename).complete
    assert_equal(target.state_dict(), source.state_dict())


@pytest.mark.parametrize(
    ("rename", "words"),
    [
        ({"(": "x"}, "not a regular expression"),
        ({"weight": r"\7"}, "not a regular expression"),
        ({"nothing_of_it": "x"}, "matches nothing"),
        ({"weight|bias": "x"}, "one name"),
    ],
)
def test_a_bad_rename_is_refused(rename: dict[str, str], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        load_pretrained(net(), as_safetensors(net(1).state_dict(), tmp_path), rename=rename)


def test_tied_weights_may_be_stored_once(tmp_path: Path) -> None:
    source, target = Tied(), Tied()
    stored = {"embedding.weight": source.embedding.weight.detach()}
    report = load_pretrained(target, as_safetensors(stored, tmp_path))
    assert report.complete
    assert torch.equal(target.output.weight, source.embedding.weight)


# -- files that do not fit -----------------------------------------------------------------------


def other_file(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """Of another head, with one tensor too few and one too many."""
    state = net(1, classes=7).state_dict()
    del state["encoder.0.bias"]
    state["encoder.0.biass"] = torch.zeros(6)
    return as_safetensors(state, tmp_path), state


def test_a_strict_load_tells_all_differences_and_changes_nothing(tmp_path: Path) -> None:
    path, _ = other_file(tmp_path)
    target = net(2)
    before = copied(target.state_dict())
    with pytest.raises(ConfigError) as caught:
        load_pretrained(target, path)
    text = str(caught.value)
    assert "not in the file: encoder.0.bias;" in text
    assert "not in the model: encoder.0.biass;" in text
    assert "head.weight ([7, 6] in the file, [3, 6] in the model)" in text
    assert "encoder.0.biass -> encoder.0.bias" in text
    assert "trainer.pretrained_strict=false" in text
    assert_equal(target.state_dict(), before)


def test_a_partial_load_takes_what_fits_and_reports_the_rest(tmp_path: Path) -> None:
    path, state = other_file(tmp_path)
    target = net(2)
    before = copied(target.state_dict())
    report = load_pretrained(target, path, strict=False)
    assert report.missing == ("encoder.0.bias",)
    assert report.unexpected == ("encoder.0.biass",)
    assert {mismatch.name for mismatch in report.mismatched} == {"head.weight", "head.bias"}
    left = {*report.missing, "head.weight", "head.bias"}
    wanted = {k: before[k] if k in left else state[k] for k in before}
    assert_equal(target.state_dict(), wanted)
    total = sum(tensor.numel() for tensor in before.values())
    assert report.elements == (total - sum(before[name].numel() for name in left), total)
    assert "not in the file: encoder.0.bias" in str(report)


def test_a_file_of_which_nothing_fits_is_refused_even_when_not_strict(tmp_path: Path) -> None:
    path = as_safetensors({"something.else": torch.zeros(2)}, tmp_path)
    with pytest.raises(ConfigError, match="does not fit the model"):
        load_pretrained(net(), path, strict=False)


def test_a_prefix_that_nothing_has_offers_those_that_there_are(tmp_path: Path) -> None:
    path = as_safetensors(net(1).state_dict(), tmp_path)
    with pytest.raises(ConfigError, match=r"did you mean 'encoder\.'"):
        load_pretrained(net().encoder, path, prefix="encodr.")


class Malicious:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(
    zipped: bool, tmp_path: Path
) -> None:
    state = {"state_dict": net(1).state_dict(), "extra": Malicious(tmp_path / "owned")}
    path = tmp_path / "weights.pt"
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ConfigError, match=r"holds pickled objects \(posix\.mkdir\).*run code"):
        load_pretrained(net(), path)
    assert not (tmp_path / "owned").exists()
    torch.load(path, weights_only=False)  # it was not harmless
    assert (tmp_path / "owned").exists()


def test_a_whole_pickled_module_is_refused(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "model.pt")
    with pytest.raises(ConfigError, match=r"pickled objects .*Linear"):
        load_pretrained(nn.Linear(2, 2), tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.pt", b"this is no weights file", "cannot be read as a file of torch.save"),
        ("a.pt", b"", "cannot be read as a file of torch.save"),
        ("a.pt", b"PK\x03\x04 cut off", "cannot be read as a file of torch.save"),
        ("a.safetensors", b"no header at all", "not a whole safetensors file"),
        ("a.safetensors", b"", "not a whole safetensors file"),
        ("m.index.json", b"{}", "not an index of shards"),
        ("m.index.json", b"[1", "not an index of shards"),
        ("m.index.json", b'{"weight_map": {"w": "../x.safetensors"}}', "outside its folder"),
        ("m.index.json", b'{"weight_map": {"w": "gone.safetensors"}}', "there is no such file"),
    ],
)
def test_a_broken_file_is_told_in_words(
    name: str, content: bytes, words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        load_pretrained(net(), tmp_path / name)


def test_a_file_without_weights_is_told(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "optimizer": {}}, tmp_path / "a.pt")
    with pytest.raises(ConfigError, match="holds a dict without weights: epoch, optimizer"):
        load_pretrained(net(), tmp_path / "a.pt")


def test_a_path_that_is_not_there_offers_its_neighbours(tmp_path: Path) -> None:
    as_safetensors(net().state_dict(), tmp_path)
    with pytest.raises(ConfigError, match=r"no such file; did you mean 'weights\.safetensors'"):
        load_pretrained(net(), tmp_path / "weight.safetensors")
    with pytest.raises(ConfigError, match="no such file; correct the path"):
        load_pretrained(net(), tmp_path / "nowhere" / "weight.safetensors")


def test_only_what_may_hold_weights_is_offered(tmp_path: Path) -> None:
    for name in (".git", "conf"):
        (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match="no such file; correct the path"):
        load_pretrained(net(), tmp_path / "nofile")


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").symlink_to("/proc/self/mem")  # unreadable for root, too
    with pytest.raises(ResourceError, match=r"trainer\.pretrained=.*cannot be read: .*permissions"):
        load_pretrained(net(), tmp_path / "weights.pt")


def test_a_file_without_any_tensor_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.pretrained=.* holds no tensors"):
        load_pretrained(net(), as_safetensors({}, tmp_path))


def test_a_folder_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has none of model\.safetensors.* no checkpoint"):
        load_pretrained(net(), tmp_path)


# -- freezing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "trains"),
    [
        (["encoder.*"], {"head.weight", "head.bias"}),
        (["*", "!head.*"], {"head.weight", "head.bias"}),
        (["*.bias", "encoder.1.*"], {"encoder.0.weight", "head.weight"}),
        (["*", "!*.bias", "head.bias"], {"encoder.0.bias", "encoder.1.bias"}),
        ([], {name for name, _ in Net().named_parameters()}),
    ],
)
def test_patterns_freeze_and_free_in_order(patterns: list[str], trains: set[str]) -> None:
    model = net()
    frozen = freeze(model, patterns)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trains
    assert frozen == [name for name, _ in model.named_parameters() if name not in trains]


def test_what_was_frozen_before_stays_frozen() -> None:
    model = net()
    model.head.bias.requires_grad_(False)
    assert freeze(model, ["encoder.0.*"]) == ["encoder.0.weight", "encoder.0.bias", "head.bias"]


@pytest.mark.parametrize("pattern", ["encodr.*", "!encodr.*"])
def test_a_pattern_that_matches_nothing_offers_names(pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.frozen: the pattern .* did you mean 'encoder"):
        freeze(net(), [pattern])
