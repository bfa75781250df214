"""What the verb ``verify`` answers before anything is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from torsh_trainer.__main__ import main
from torsh_trainer.config import command_line, verifying
from torsh_trainer.utils import registry

DIGITS = "+recipe=digits"
PAIR = "strategies=[single,ddp]"


def refused(args: list[str], capsys: pytest.CaptureFixture[str], *, code: int = 2) -> str:
    """The one sentence that ``verify`` refuses ``args`` with."""
    assert main(["verify", *args]) == code
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([DIGITS], "verify compares strategies, and none is named; write strategies=["),
        ([DIGITS, "strategies=[]"], "none is named"),
        ([DIGITS, "strategies=[single,dpd]"], "unknown strategy 'dpd'; did you mean 'dp' or 'ddp'"),
        ([DIGITS, "strategies=[ddp,single,ddp]"], "strategies: ddp stands there twice; name it"),
        ([DIGITS, "strategies=[ddp]"], "strategies=[ddp] leaves nothing to compare ddp with"),
        ([DIGITS, "strategies=ddp"], "strategies=[ddp] leaves nothing to compare ddp with"),
        ([DIGITS, "strategies=single,ddp"], "write strategies=[single,ddp]"),
        ([DIGITS, "meshes=[tp]"], "meshes: 'tp' is no mesh; write 'meshes=[{tp:2}"),
        ([DIGITS, "meshes=[{zz:2}]"], "unknown knob mesh.zz"),
        ([DIGITS, "meshes=[{tp:3}]", "launcher.num_processes=4"], "tp=3 does not divide the 4"),
        ([DIGITS, "strategies=[single,4]"], "strategies: 4 is no strategy; write strategies=["),
        ([DIGITS, "strategies=[single,{ddp:1}]"], "{'ddp': 1} is no strategy"),
        (
            [DIGITS, "strategies=[single,{ddp:{zero2:true}}]"],
            "unknown knob strategy.zero2; did you mean strategy.zero1",
        ),
        ([PAIR], "verify trains a recipe, and none is named; add +recipe=NAME, one of"),
        (["+recipe=digit", PAIR], "unknown recipe 'digit'; did you mean 'digits'"),
        ([DIGITS, PAIR, "verify.steps=1"], "verify.steps=1 shows no update at work"),
        ([DIGITS, PAIR, "verify.steps=many"], "verify.steps: expected a whole number, got 'many'"),
        ([DIGITS, PAIR, "verify.step=5"], "unknown knob verify.step; did you mean verify.steps"),
        ([DIGITS, PAIR, "verify.ladder=[adam]"], "verify.ladder=['adam'] is no list of rungs"),
        ([DIGITS, PAIR, "verify.bound=0"], "verify.bound=0.0 is not positive"),
        ([DIGITS, PAIR, "strategy=fsdp"], "strategy=fsdp means nothing to verify; name it in"),
        ([DIGITS, PAIR, "trainer.max_steps=5"], "verify.steps says how many"),
        ([DIGITS, PAIR, "hydra.run.dir=here"], "verify.dir says where the runs go"),
        ([DIGITS, PAIR, "-m"], "verify trains and compares; leave -m"),
        ([DIGITS, PAIR, "data.batch_size=63"], "data.batch_size=63 does not divide"),
        ([DIGITS, PAIR, "optimizer.learning_rate=1"], "unknown knob optimizer.learning_rate"),
    ],
)
def test_bad_input_is_one_sentence_and_the_next_move(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in refused(args, capsys)
    assert list(tmp_path.iterdir()) == [], "nothing was written"


def test_a_folder_with_something_in_it_is_left_alone(capsys, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    said = refused([DIGITS, PAIR, f"verify.dir={tmp_path}"], capsys)
    assert f"verify.dir={tmp_path} is not empty; name a new folder" in said


def test_knobs_of_an_entry_reach_their_groups() -> None:
    asked = verifying.verification(command_line.parse([DIGITS, PAIR, "data.batch_size=32"]))
    knobs = {"wrap_modules": ["Block", "it's"], "shard_size": 2, "launcher.num_processes": 4}
    config = asked.config("fsdp", knobs)
    assert config["strategy"]["wrap_modules"] == knobs["wrap_modules"]
    assert config["strategy"]["shard_size"] == 2
    assert config["launcher"]["num_processes"] == 4
    assert config["data"]["batch_size"] == 32
    assert "verify" not in config
    assert asked.node["strategies"] == ["single", "ddp"]


def test_an_engine_that_is_not_installed_is_the_worlds_fault_and_names_its_plugin(
    capsys, monkeypatch
) -> None:
    missing = {("strategy", "warp"): "torsh-trainer-warp"}
    monkeypatch.setattr(registry, "DISTRIBUTIONS", missing)
    said = refused([DIGITS, "strategies=[single,warp]"], capsys, code=1)
    assert said == "error: unknown strategy 'warp'; pip install torsh-trainer-warp"


def test_one_of_several_processes_of_a_cluster_is_refused(capsys, monkeypatch) -> None:
    facts = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    facts |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in facts.items():
        monkeypatch.setenv(name, value)
    assert "start it from one process" in refused([DIGITS, PAIR], capsys)


def test_help_says_how_it_is_called_and_what_the_exit_codes_mean(capsys) -> None:
    assert main(["verify", "--help"]) == 0
    said = capsys.readouterr().out
    assert "strategies=[single,ddp,fsdp]" in said
    assert "12 a bound is broken" in said
    assert max(map(len, said.splitlines())) <= 100


def test_without_a_word_it_says_how_it_is_called(capsys) -> None:
    assert main(["verify"]) == 2
    assert "strategies=[" in capsys.readouterr().err


def test_the_group_of_its_knobs_is_not_for_runs_that_train(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([DIGITS, "+verify=default"]) == 2
    assert "verify" in capsys.readouterr().err
