"""The verb ``checkpoint``: what it prints, what it exits with, and what it does not load."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from torsh_trainer.checkpoint.cli.contents import Contents
from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.checkpoint.store.finding import find
from torsh_trainer.checkpoint.store.places import RemotePath, StoragePath, parse_storage_path
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.errors import ResourceError


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory, warm_command) -> Path:
    """A run of four steps on two processes under FSDP, saved after two and after four."""
    folder = tmp_path_factory.mktemp("fsdp")
    args = [
        *("+recipe=digits", "strategy=fsdp", "trainer.max_steps=4", "checkpoint.every_steps=2"),
        *("trainer.eval_every=4", "trainer.stages=[fit]", "hydra.run.dir=run"),
    ]
    answer = warm_command(args, processes=2, cwd=folder)
    assert answer.returncode == 0, answer.stderr
    return folder / "run"


@pytest.fixture
def run(fsdp, home) -> Path:
    """A copy of that run as ``run`` in the current directory, to be spoilt."""
    shutil.copytree(fsdp, home / "run")
    return home / "run"


@pytest.fixture
def newest(run) -> Path:
    return run / "checkpoints" / "step-00000004"


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def saved(folder: StoragePath, state: dict, step: int = 1) -> StoragePath:
    """A checkpoint of any state."""
    saver = DcpCheckpointer(folder, LocalCommunicator())
    path = saver.save(step, state, {})
    saver.close()
    return path


# -- list and verify ------------------------------------------------------------------------------


def test_list_shows_steps_metrics_and_which_is_the_newest(door, run):
    answer = door("checkpoint", "list", "run")
    assert answer.code == 0, answer.err
    first, head, *rows = answer.out.splitlines()
    assert first == "run/checkpoints"
    assert head.split() == ["step", "saved", "processes", "strategy", "size", "metrics", "state"]
    assert [row.split()[0] for row in rows] == ["2", "4"]
    assert all(" 2  fsdp " in row for row in rows)
    assert "newest" not in rows[0]
    assert rows[1].endswith("complete, newest")
    found = json.loads(door("checkpoint", "list", "run", "--json").out)
    assert [one["step"] for one in found] == [2, 4]
    files = (run / "checkpoints" / "step-00000004").iterdir()
    sizes = sum(path.stat().st_size for path in files if path.name != "manifest.json")
    assert found[1]["size_bytes"] == sizes


def test_list_takes_a_run_its_folder_a_checkpoint_and_a_folder_of_runs(door, run, home):
    shutil.copytree(run, home / "sweep" / "1")
    shutil.copytree(run, home / "sweep" / "0")
    for path in ("run", "run/checkpoints"):
        assert door("checkpoint", "list", path).out.startswith("run/checkpoints\n")
    assert len(json.loads(door("checkpoint", "list", "sweep", "--json").out)) == 4
    only = json.loads(door("checkpoint", "list", "run/checkpoints/step-00000002", "--json").out)
    assert [one["step"] for one in only] == [2]
    # Whether another one is newer was not asked.
    assert "newest" not in door("checkpoint", "list", "run/checkpoints/step-00000002").out
    several = door("checkpoint", "list", "sweep/0", "run", "sweep").out
    folders = [line for line in several.splitlines() if line.endswith("checkpoints")]
    assert folders == ["sweep/0/checkpoints", "run/checkpoints", "sweep/1/checkpoints"]


@pytest.mark.parametrize(
    "args",
    [
        ["list", "run"],
        ["list", "run", "--json"],
        ["verify", "run"],
        ["show", "run/nothing"],
        ["export", "run", "--format", "none", "--output", "x"],
        ["--help"],
    ],
)
def test_what_needs_no_torch_loads_none(args, run, run_command, home):
    script = (
        "import sys\nfrom torsh_trainer.__main__ import main\n"
        f"try: main({['checkpoint', *args]!r})\nexcept SystemExit: pass\n"
        "print(*sorted({'torch', 'numpy', 'hydra'} & set(sys.modules)))"
    )
    answer = run_command([sys.executable, "-c", script], cwd=home)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines()[-1] == ""


def test_verify_says_that_all_is_whole(door, run):
    answer = door("checkpoint", "verify", "run")
    assert answer.code == 0
    assert re.findall(r"^whole +(\S+)", answer.out, re.MULTILINE) == [
        "run/checkpoints/step-00000002",
        "run/checkpoints/step-00000004",
    ]


def test_verify_names_every_damaged_file_and_list_what_sizes_tell(door, run, newest):
    files = sorted(path.name for path in newest.glob("*.distcp"))
    flip_a_bit(newest / files[0])
    (newest / files[1]).write_bytes((newest / files[1]).read_bytes()[:-1])
    (newest / "notes.txt").write_text("mine")
    answer = door("checkpoint", "verify", "run")
    assert answer.code == 1
    assert answer.err == ""
    whole, damaged = answer.out.split("damaged", 1)
    assert "step-00000002" in whole
    assert "CRC-32" in re.search(f".*{files[0]}.*", damaged)[0]
    assert "were written" in re.search(f".*{files[1]}.*", damaged)[0]
    assert "not part of it: notes.txt" in damaged
    listed = json.loads(door("checkpoint", "list", "run", "--json").out)
    assert [one["complete"] for one in listed] == [True, False]
    assert files[1] in listed[1]["problem"]


@pytest.mark.parametrize("name", ["manifest.json", "state.json", ".metadata", "__0_0.distcp"])
def test_verify_misses_a_file_that_is_gone(name, door, run, newest):
    (newest / name).unlink()
    answer = door("checkpoint", "verify", "run/checkpoints/step-00000004")
    assert answer.code == 1
    assert name in answer.out
    assert "complete, newest" in door("checkpoint", "list", "run").out.splitlines()[2]


def test_a_checkpoint_of_a_newer_release_is_not_called_damaged(door, run, newest):
    content = json.loads((newest / "manifest.json").read_text())
    (newest / "manifest.json").write_text(json.dumps({**content, "version": 99}))
    says = "has format 99, and this release reads up to"
    answer = door("checkpoint", "verify", str(newest))
    assert answer.code == 1
    assert answer.out.startswith(f"newer    {newest}\n         {says}")
    assert says in door("checkpoint", "list", "run").out
    answer = door("checkpoint", "show", str(newest))
    assert answer.code == 2
    assert answer.err.startswith(f"error: the checkpoint {newest} {says}")
    assert answer.err.endswith("; upgrade torsh-trainer to the release that saved it\n")
    older = door("checkpoint", "show", "run")
    assert older.out.startswith("run/checkpoints/step-00000002")
    assert f"passed over run/checkpoints/step-00000004: {says}" in older.err


def test_damage_met_while_looking_does_not_talk_of_resuming(door, run, newest):
    flip_a_bit(newest / "__0_0.distcp")
    answer = door("checkpoint", "diff", "run", "run")
    assert answer.code == 1
    assert "__0_0.distcp is not what was written" in answer.err
    assert answer.err.endswith("; name another, or copy this one again\n")


# -- show -----------------------------------------------------------------------------------------


def test_show_has_every_tensor_with_the_shape_and_type_that_plain_torch_finds(door, run, newest):
    found = json.loads(door("checkpoint", "show", "run", "--json").out)
    assert found["step"] == 4
    assert found["plain"]["position"]["step"] == 4
    tensors = {one["name"]: one for one in found["tensors"]}
    metadata = dcp.FileSystemReader(newest).read_metadata().state_dict_metadata
    assert tensors.keys() == metadata.keys()
    for name, entry in metadata.items():
        assert tensors[name]["shape"] == list(entry.size)
        assert tensors[name]["dtype"] == str(entry.properties.dtype).removeprefix("torch.")


def test_the_pieces_of_a_tensor_make_up_the_whole_and_lie_where_it_says(door, run, newest):
    found = json.loads(door("checkpoint", "show", "run", "--json").out)
    cut = 0
    for tensor in found["tensors"]:
        covered = torch.zeros(tensor["shape"], dtype=torch.int)
        for piece in tensor["pieces"]:
            corner = [slice(o, o + n) for o, n in zip(piece["offset"], piece["shape"], strict=True)]
            covered[tuple(corner)] += 1
            assert (newest / piece["file"]).is_file()
        assert bool((covered == 1).all()), tensor["name"]
        cut += len(tensor["pieces"]) > 1
    assert cut > 8  # FSDP cuts parameters and both of Adam's slots


def test_show_prints_settings_position_and_parts(door, run):
    answer = door("checkpoint", "show", "run")
    assert answer.code == 0, answer.err
    assert answer.out.splitlines()[0] == "run/checkpoints/step-00000004"
    assert re.search(r"position +step 4, updates 4, samples 256", answer.out)
    assert re.search(r"optimizer main +4 parameters: [^:]*weight_decay 0.01", answer.out)
    first, second = re.findall(r"parameters: (\w+) ", answer.out)
    assert first == second  # settings come in one order
    assert re.search(r"head\.5\.weight +10 x 128 +float32 +5 KiB +__0_0, __1_0", answer.out)
    assert re.search(r"\*\.exp_avg +8 tensors +float32", answer.out)
    assert max(map(len, answer.out.splitlines())) <= 100


def test_show_selects_by_pattern_and_lists_pieces(door, run):
    answer = door("checkpoint", "show", "run", "--only", "head.5.*", "--pieces")
    names = re.findall(r"^  (head\S+|stages\S+)", answer.out, re.MULTILINE)
    assert {name.split(".")[1] for name in names} == {"5"}
    assert "head.5.weight.exp_avg" in names
    assert "[5:10, 0:128] in __1_0.distcp" in answer.out
    missed = door("checkpoint", "show", "run", "--only", "heat.5.bias")
    assert missed.code == 2
    assert "did you mean 'head.5.bias'" in missed.err


def test_show_of_a_thousand_tensors_fits_a_screen(door, home):
    blocks = {
        f"blocks.{i}.{name}": torch.zeros(2, 2) for i in range(500) for name in ("norm", "linear")
    }
    saved(home / "many", {"engine": {"model": blocks}, "position": {"step": 1}})
    answer = door("checkpoint", "show", "many")
    assert len(answer.out.splitlines()) < 20
    assert re.search(r"blocks\.\*\.norm +500 of 2 x 2", answer.out)
    assert "1,000 tensors" in answer.out
    assert len(door("checkpoint", "show", "many", "--all").out.splitlines()) > 1000


def test_of_a_run_the_newest_that_is_whole_is_taken_and_the_rest_told(door, run, newest):
    (newest / "__1_0.distcp").write_bytes(b"")
    answer = door("checkpoint", "show", "run")
    assert answer.code == 0
    assert answer.out.startswith("run/checkpoints/step-00000002")
    assert "passed over" in answer.err
    assert "__1_0.distcp" in answer.err
    direct = door("checkpoint", "show", "run/checkpoints/step-00000004")
    assert direct.code == 1
    assert "__1_0.distcp" in direct.err


# -- diff -----------------------------------------------------------------------------------------


def model_at(path: Path) -> dict[str, torch.Tensor]:
    """The weights as plain PyTorch reads them."""
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    names = [name for name in entries if name.startswith("engine.model.")]
    state = {name: torch.empty(entries[name].size) for name in names}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def test_diff_finds_the_largest_differences_that_plain_torch_finds(door, run, newest):
    older = newest.with_name("step-00000002")
    found = json.loads(door("checkpoint", "diff", str(older), "run", "--json").out)
    a, b = model_at(older), model_at(newest)
    by_name = {one["name"]: one for one in found["differences"]}
    for name in a:
        apart = (a[name].double() - b[name].double()).abs()
        relative = apart / torch.maximum(a[name].abs(), b[name].abs())
        assert by_name[name]["absolute"] == apart.max().item()
        assert by_name[name]["relative"] == pytest.approx(relative.nan_to_num(0).max().item())
        assert by_name[name]["differing"] == int((a[name] != b[name]).sum())
    assert found["values"]["position.step"] == [2, 4]
    assert found["only_in_a"] == found["only_in_b"] == []
    text = door("checkpoint", "diff", str(older), "run", "--top", "3").out
    assert "model           8 of 8 tensors differ" in text
    assert re.search(r"position\.step +2 +4", text)
    assert "more (--top" in text


def test_diff_tells_values_as_they_are_configured(door, home):
    for name, task in {
        "one": {"flag": True, "limit": None, "rate": 0.1, "stream": bytes(700)},
        "other": {"flag": False, "limit": 3, "rate": 0.1 + 1e-16, "stream": bytes([1] * 700)},
    }.items():
        state = {"engine": {"model": {"a": torch.tensor([float(task["flag"])])}}, "task": task}
        saved(home / name, state)
    text = door("checkpoint", "diff", "one", "other").out
    assert "1 of 1 tensor differs  by up to 1" in text
    for row in (
        r"task\.flag +true +false",
        r"task\.limit +null +3",
        rf"task\.rate +0\.1 +{0.1 + 1e-16!r}",
        r"task\.stream +700 bytes +700 bytes",
    ):
        assert re.search(row, text), row


def test_diff_exits_with_1_only_when_asked(door, run, newest):
    older = str(newest.with_name("step-00000002"))
    assert door("checkpoint", "diff", older, "run").code == 0
    assert door("checkpoint", "diff", older, "run", "--exit-code").code == 1
    same = door("checkpoint", "diff", "run", str(newest), "--exit-code")
    assert same.code == 0
    assert "the same" in same.out


def test_diff_tells_what_is_on_one_side_and_what_is_of_another_shape_or_type(door, home):
    nan, inf = float("nan"), float("inf")
    one = {"a": torch.ones(3), "b": torch.ones(2), "c": torch.ones(2), "n": torch.tensor([nan, 1])}
    other = {"a": torch.ones(4), "b": torch.ones(2).half(), "d": torch.ones(2)}
    other |= {"n": torch.tensor([nan, inf])}
    saved(home / "one", {"engine": {"model": one}, "task": {"flag": 1, "note": "x"}})
    saved(home / "other", {"engine": {"model": other}, "task": {"flag": True}})
    found = json.loads(door("checkpoint", "diff", "one", "other", "--json").out)
    model = "engine.model."
    assert found["only_in_a"] == [model + "c"]
    assert found["only_in_b"] == [model + "d"]
    assert found["changed"] == {
        model + "a": ["[3] float32", "[4] float32"],
        model + "b": ["[2] float32", "[2] float16"],
    }
    (difference,) = found["differences"]  # one half is the same in both types
    assert difference["name"] == model + "n"
    assert difference["differing"] == 1  # NaN equals NaN
    assert difference["absolute"] is None  # JSON has no infinity
    assert found["values"].keys() >= {"task.flag", "task.note"}  # 1 is not True
    text = door("checkpoint", "diff", "one", "other").out
    assert "only in a: 1" in text
    assert "inf" in text


# -- export and import ----------------------------------------------------------------------------


def test_what_two_ranks_cut_is_exported_whole(door, run, newest):
    answer = door("checkpoint", "export", "run", "--format", "torch", "--output", "out/model.pt")
    assert answer.code == 0, answer.err
    assert answer.out == "out/model.pt\n"
    found = torch.load("out/model.pt", weights_only=True)
    expected = model_at(newest)
    assert {f"engine.model.{name}" for name in found} == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[f"engine.model.{name}"])


def test_a_run_starts_from_an_export_and_goes_on_from_an_import_of_it(door, run):
    quick = ("+recipe=digits", "launcher=inline", "strategy=single", "trainer.stages=[fit]")
    quick += ("trainer.max_steps=5", "log_level=warning", "callbacks.console.enabled=false")
    export = ("checkpoint", "export", "run", "--output")
    assert door(*export, "w.safetensors", "--format", "safetensors").code == 0
    answer = door(*quick, "trainer.pretrained=w.safetensors", "hydra.run.dir=fresh")
    assert answer.code == 0, answer.err
    assert json.loads(Path("fresh/result.json").read_text())["steps"] == 5

    assert door(*export, "all.pt", "--format", "torch", "--optimizer").code == 0
    imported = door("checkpoint", "import", "all.pt", "--output", "in")
    assert imported.code == 0, imported.err
    assert imported.out == "in/step-00000004\n"
    assert "checkpoint.resume=in/step-00000004" in imported.err
    answer = door(*quick, "checkpoint.resume=in/step-00000004", "hydra.run.dir=on")
    assert answer.code == 0, answer.err
    result = json.loads(Path("on/result.json").read_text())
    assert result["steps"] == 5
    assert result["samples"] == 5 * 64


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        ([], 2, "required"),
        (["lsit", "run"], 2, "did you mean 'list'"),
        (["list"], 2, "required"),
        (["list", "nowhere"], 2, "nowhere is not there"),
        (["list", "rum"], 2, "did you mean 'run'"),
        (["list", "quick.yaml"], 2, "is a file"),
        (["verify", "empty"], 2, "no checkpoint in empty"),
        (["show", "two"], 2, "2 runs"),
        (["show", "run", "--wrong"], 2, "--wrong"),
        (["diff", "run"], 2, "required"),
        (["diff", "run", "run", "--by", "size"], 2, "invalid choice"),
        (["diff", "run", "run", "--top", "many"], 2, "invalid int"),
        (["diff", "run", "run", "--top", "0"], 2, "--top 0 is below 1"),
        (["export", "run", "--format", "torhc", "--output", "x"], 2, "did you mean 'torch'"),
        (["export", "run", "--format", "torch", "--output", "empty"], 2, "empty/model.pt"),
        (["export", "run", "--format", "torch", "--output", "quick.yaml"], 2, "--force"),
        (["export", "run", "--format", "torch", "--output", "/proc/no/x"], 1, "cannot write"),
        (["export", "run", "--format", "hf", "--output", "run"], 2, "not empty"),
        (["import", "nowhere.pt", "--output", "x"], 2, "no such file"),
        (["import", "quick.yaml", "--output", "x"], 2, "cannot be read"),
        (["import", "run", "--output", "x"], 2, "is a checkpoint of a run"),
    ],
)
def test_bad_input_is_one_sentence_with_the_next_move(args, code, says, door, run, home):
    (home / "empty").mkdir()
    (home / "two").mkdir()
    for name in ("a", "b"):
        (home / "two" / name).symlink_to(run)
    answer = door("checkpoint", *args)
    assert answer.code == code
    assert says in answer.err
    assert answer.err.startswith("error: ")
    assert len(answer.err.splitlines()) == 1
    assert ";" in answer.err
    assert answer.out == ""


@contextmanager
def no_longer_root(home: Path) -> Iterator[None]:
    """Root may read everything; within the block this process may not. Paths are relative."""
    home.chmod(0o755)
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if was_root:
            os.seteuid(0)


def test_what_may_not_be_read_is_told_as_such(door, run, home):
    (home / "secret.pt").write_bytes(b"")
    closed = [run / "checkpoints" / "step-00000004", home / "secret.pt", run]
    commands = {
        ("checkpoint", "list", "run"): "run",
        ("checkpoint", "diff", "run", "run"): "run",
        ("checkpoint", "import", "secret.pt", "--output", "x"): "secret.pt",
        ("rerun", "run", "--dry-run"): "run/.hydra/overrides.yaml",
    }
    for command in commands:  # what this imports is root's too
        assert "cannot read run" not in door(*command).err
    for path in closed:
        path.chmod(0)
    with no_longer_root(home):
        answers = [door(*command) for command in commands]
        with pytest.raises(ResourceError, match=r"cannot read run.*may not read it"):
            find("run", home)
    for path in reversed(closed):
        path.chmod(0o755)
    for answer, file in zip(answers, commands.values(), strict=True):
        assert answer.code == 1
        assert answer.err.startswith(f"error: cannot read {file}")
        assert "Permission denied; this user may not read it: change its permissions" in answer.err
        assert len(answer.err.splitlines()) == 1


def test_a_run_that_cannot_be_read_does_not_hide_the_others(door, run, home):
    for name in ("a", "b", "c"):
        shutil.copytree(run, home / "runs" / name)
    shutil.copytree(run, home / "more")
    (home / "empty").mkdir()
    door("checkpoint", "verify", "run")  # what this imports is root's too
    closed = [home / "runs" / "a", home / "runs" / "b" / "checkpoints"]
    for path in closed:
        path.chmod(0)
    with no_longer_root(home):
        lists = [door("checkpoint", word, "runs") for word in ("list", "verify")]
        as_json = door("checkpoint", "list", "runs", "--json")
        empty = door("checkpoint", "list", "runs/c", "empty", "more")
        nothing = door("checkpoint", "list", "runs/a")
    for path in closed:
        path.chmod(0o755)
    for answer in lists:
        assert answer.code == 1
        assert "runs/c/checkpoints" in answer.out
        first, second = answer.err.splitlines()
        assert first.startswith("left out: cannot read runs/a: Permission denied; this user")
        assert second.startswith("left out: cannot read runs/b/checkpoints: Permission denied;")
    entries = json.loads(as_json.out)
    assert [(one["complete"], one["path"].split("/")[1]) for one in entries] == [
        *((True, "c"), (True, "c"), (False, "a"), (False, "b"))
    ]
    assert "runs/c/checkpoints\n" in empty.out
    assert "more/checkpoints\n" in empty.out
    assert (empty.code, empty.err.count("\n")) == (2, 1)
    assert "left out: no checkpoint in empty" in empty.err
    assert nothing.code == 1
    assert nothing.err.startswith("error: cannot read runs/a")


def test_an_import_that_cannot_be_written_names_its_own_option(door, home):
    torch.save({"a": torch.ones(2)}, "a.pt")
    answer = door("checkpoint", "import", "a.pt", "--output", "/proc/x")
    assert answer.code == 1
    assert answer.err.endswith("(--output)\n")


def test_a_checkpoint_of_an_odd_model_can_be_looked_at(door, home):
    """Names with dots and digits, no dimensions, no elements, complex numbers, nested slots."""
    model = nn.ModuleDict({"0": nn.Linear(1, 1, dtype=torch.complex64)}).state_dict()
    slots = {"0.weight": {"inner": {"square": torch.ones(1), "count": 3}}}
    state = {
        "engine": {
            "model": {**model, "empty": torch.empty(0, 4), "scalar": torch.tensor(2.5)},
            "optimizer": {
                "main": {"state": slots, "groups": [{"lr": 0.1, "params": ["0.weight"]}]}
            },
        },
        "position": {"step": 1},
    }
    path = saved(home / "odd", state)
    assert door("checkpoint", "show", "odd").code == 0
    assert door("checkpoint", "diff", "odd", "odd", "--exit-code").code == 0
    states = Contents.open(path, verified=True).optimizer_states()
    assert states["main"]["state"] == slots
    for name in ("safetensors", "torch", "lightning", "hf"):
        answer = door("checkpoint", "export", "odd", "--format", name, "--output", f"out.{name}")
        assert answer.code == 0, answer.err


# -- a remote store -------------------------------------------------------------------------------


@pytest.fixture
def remote(request) -> RemotePath:
    """A folder of a store that fsspec keeps in this process's memory."""
    found = parse_storage_path(f"memory://{request.node.name}")
    assert isinstance(found, RemotePath)
    return found


def test_every_word_takes_a_url(door, remote, home):
    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)}
    for step in (1, 2):
        model = {name: tensor * step for name, tensor in weights.items()}
        saved(remote / "run" / "checkpoints", {"engine": {"model": model}}, step)
    url = f"{remote}/run"
    listed = json.loads(door("checkpoint", "list", str(remote), "--json").out)
    assert [(one["step"], one["complete"]) for one in listed] == [(1, True), (2, True)]
    assert door("checkpoint", "verify", url).code == 0
    assert "a       2 x 3" in door("checkpoint", "show", url).out
    older = f"{url}/checkpoints/step-00000001"
    found = json.loads(door("checkpoint", "diff", older, url, "--json").out)
    assert {one["name"]: one["absolute"] for one in found["differences"]} == {
        "engine.model.a": 5.0,
        "engine.model.b": 1.0,
    }
    answer = door("checkpoint", "export", url, "--format", "torch", "--output", "model.pt")
    assert answer.code == 0, answer.err
    exported = torch.load("model.pt", weights_only=True)
    assert torch.equal(exported["a"], weights["a"] * 2)
    answer = door("checkpoint", "import", "model.pt", "--output", f"{remote}/back")
    assert answer.code == 0, answer.err
    assert answer.out == f"{remote}/back/step-00000000\n"
    back = json.loads(door("checkpoint", "diff", url, answer.out.strip(), "--json").out)
    assert back["differences"] == back["only_in_a"] == back["only_in_b"] == []


def test_verify_names_a_damaged_object(door, remote):
    path = saved(remote / "run", {"engine": {"model": {"a": torch.ones(9)}}})
    content = bytearray((path / "__0_0.distcp").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "__0_0.distcp").write_bytes(bytes(content))
    answer = door("checkpoint", "verify", str(path))
    assert answer.code == 1
    assert "__0_0.distcp" in answer.out
    (path / "state.json").unlink()
    assert "state.json" in door("checkpoint", "list", str(path)).out


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["list", "memory://nothing/here"], 2, "is not there"),
        (["list", "s33://bucket"], 2, "did you mean"),
        (["list", "memory://x", "--storage", "endpoint"], 2, "--storage endpoint is no setting"),
        (["export", "x", "--format", "hf", "--output", "s3://bucket/x"], 2, "is a URL"),
        (["import", "s3://bucket/x.pt", "--output", "x"], 2, "is a URL"),
    ],
)
def test_a_url_that_leads_nowhere_is_told_as_such(args, code, says, door):
    answer = door("checkpoint", *args)
    assert answer.code == code
    assert says in answer.err
