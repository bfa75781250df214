"""Going on from a run by the command line: what is allowed, refused, and told beforehand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

TRAINED = (
    "+recipe=quick.yaml",
    "strategy=single",
    "schedule=cosine",
    "hydra.run.dir=runs/first",
)


@pytest.fixture
def first(door, home) -> Path:
    """A run of two steps, with its checkpoint."""
    answer = door(*TRAINED)
    assert answer.code == 0, answer.err
    return Path("runs/first")


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_goes_on_with_what_is_allowed_to_differ(door, first, home):
    refused = door(*TRAINED, "trainer.max_steps=4", "data.batch_size=16", "trainer.seed=3")
    assert refused.code == 2
    (line,) = [line for line in refused.err.splitlines() if line.startswith("error: ")]
    assert "trainer.seed was 0 and is 3. data.batch_size was 32 and is 16" in line
    assert line.endswith("or write checkpoint.allow=[seed,batch] to go on all the same")
    allowed = door(
        *TRAINED,
        "trainer.max_steps=4",
        "data.batch_size=16",
        "trainer.seed=3",
        "checkpoint.allow=[seed,batch]",
    )
    assert allowed.code == 0, allowed.err
    result = json.loads((home / "runs/first/result.json").read_text())
    assert (result["steps"], result["samples"]) == (4, 2 * 32 + 2 * 16)


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        (["trainer.max_epochs=2", "trainer.max_steps=null"], "trainer.max_epochs=2; raise trainer"),
        # The other one was raised, and this one ends the run all the same.
        (["trainer.max_epochs=2", "trainer.max_steps=900"], "trainer.max_epochs=2; raise trainer"),
        (
            ["trainer.max_epochs=null", "trainer.max_steps=80"],
            "trainer.max_steps=80; raise trainer",
        ),
        (
            ["trainer.max_epochs=2", "trainer.max_steps=80"],
            "trainer.max_steps=80 and trainer.max_epochs=2; raise trainer.max_steps and trainer.m",
        ),
    ],
)
def test_a_run_with_nothing_left_to_train_names_the_knob_to_raise(knobs, says, door, home):
    """Two epochs are 80 steps."""
    base = ("+recipe=quick.yaml", "strategy=single", "trainer.eval_every=null")
    base = (*base, "trainer.stages=[fit,test]", "checkpoint.at_end=true")
    answer = door(*base, "trainer.max_epochs=2", "trainer.max_steps=null", "hydra.run.dir=runs/a")
    assert answer.code == 0, answer.err
    assert json.loads((home / "runs/a/result.json").read_text())["steps"] == 80
    assert "nothing is left" not in (home / "runs/a/logs/rank-0.log").read_text()
    again = door(*base, *knobs, "checkpoint.resume=runs/a", "hydra.run.dir=runs/b")
    assert again.code == 0, again.err
    told = (home / "runs/b/logs/rank-0.log").read_text()
    assert f"nothing is left to train: step 80 has reached {says}" in told
    assert "test_accuracy" in json.loads((home / "runs/b/result.json").read_text())["metrics"]
    dry = door("rerun", "runs/a", "--dry-run", *knobs)
    assert f"Nothing is left to train: step 80 has reached {says}" in " ".join(dry.out.split())


def test_a_misspelt_word_is_answered_with_the_nearest(door, first):
    answer = door(*TRAINED, "checkpoint.allow=[optimiser]")
    assert answer.code == 2
    assert "checkpoint.allow=optimiser is unknown; did you mean 'optimizer'?" in answer.err


def test_a_dry_run_says_what_would_be_restored_and_writes_nothing(door, first, home):
    before = content_of(home)
    answer = door("rerun", str(first), "--dry-run")
    assert answer.code == 0, answer.err
    assert content_of(home) == before
    lines = answer.out.splitlines()
    assert lines[0] == "rerun runs/first begins at step 0, in a new directory."
    assert lines[1].startswith("rerun runs/first checkpoint.resume=runs/first goes on")
    said = " ".join(answer.out.split())
    assert "step-00000002 is whole; single on 1 process saved it" in said
    assert "optimizer main: AdamW of" in said
    assert "step 2 of 2, epoch 0, 64 samples" in said
    assert "Nothing is left to train: step 2 has reached trainer.max_steps=2; raise" in said
    assert "goes on in epoch 0 after 64 of" in said
    assert "Nothing is known that would make it differ from a run without a stop." in said


def test_a_dry_run_says_what_overrides_change_and_what_will_be_inexact(door, first):
    answer = door(
        "rerun",
        str(first),
        "--dry-run",
        "trainer.max_steps=9",
        "optimizer.lr=0.5",
        "data.micro_batch_size=8",
        "strategy=ddp",
        "launcher=local",
        "launcher.num_processes=2",
    )
    assert answer.code == 0, answer.err
    _, _, rest = answer.out.partition("as configured today\n")
    today, _, inexact = rest.partition("\ninexact\n")
    assert "and is 0.5 from here on" in today
    assert "the schedule was made for 2 steps and is for 9 from here on" in today
    assert "world_size was 1 and is 2" in inexact
    assert "data.micro_batch_size was 32 and is 8" in inexact
    assert "strategy was single and is ddp" in inexact
    assert "on 1 of 2 processes: the checkpoint has none of theirs" in inexact
    # What is shown may be typed as it is.
    changed = "rerun runs/first trainer.max_steps=9 optimizer.lr=0.5 data.micro_batch_size=8"
    for line in answer.out.splitlines()[:2]:
        assert line.startswith(changed)


def test_a_dry_run_names_what_would_be_refused_and_exits_as_the_run_would(door, first, home):
    changes = ("trainer.seed=3", "model.hidden=[7]", "hydra.run.dir=runs/second")
    answer = door("rerun", str(first), "--dry-run", *changes)
    assert answer.code == 2
    assert "trainer.seed was 0 and is 3  [seed]" in answer.out
    assert "other shapes: engine.model." in answer.out
    assert "restored" not in answer.out
    run = door("rerun", str(first), *changes, f"checkpoint.resume={first}")
    assert run.code == 2
    assert "trainer.seed was 0 and is 3. " in run.err
    assert "other shapes: engine.model." in run.err
    allowed = door("rerun", str(first), "--dry-run", "trainer.seed=3", "checkpoint.allow=[seed]")
    assert allowed.code == 0
    assert "allowed to differ\n  trainer.seed was 0 and is 3: the order of samples" in allowed.out


def test_a_dry_run_names_the_checkpoint_that_it_skipped_and_why(door, first):
    door(*TRAINED, "trainer.max_steps=4")
    newest = first / "checkpoints" / "step-00000004"
    (newest / "state.json").write_text("{}")
    answer = door("rerun", str(first), "--dry-run")
    assert answer.code == 0, answer.err
    assert "step-00000002 is whole" in answer.out
    assert "step-00000004 is damaged" in answer.out


def test_a_dry_run_of_a_run_without_a_checkpoint_says_so(door, home):
    door("+recipe=quick.yaml", "hydra.run.dir=runs/bare", "checkpoint.at_end=false")
    answer = door("rerun", "runs/bare", "--dry-run")
    assert answer.code == 0, answer.err
    assert "nothing is restored: there is no checkpoint in runs/bare" in answer.out


def test_a_dry_run_reports_on_the_checkpoint_that_an_override_names(door, first, home):
    door("+recipe=quick.yaml", "strategy=single", "hydra.run.dir=runs/other", "trainer.max_steps=3")
    answer = door("rerun", str(first), "--dry-run", "checkpoint.resume=runs/other")
    assert answer.out.startswith("runs/other/checkpoints/step-00000003 is whole")
    answer = door("rerun", str(first), "--dry-run", "checkpoint.resume=runs/nowhere")
    assert answer.code == 2
    assert "checkpoint.resume=runs/nowhere: nothing is there" in answer.err


def test_a_dry_run_of_an_evaluation_takes_the_model_alone(door, first):
    answer = door("rerun", str(first), "--dry-run", "trainer.stages=[test]", "trainer.seed=9")
    assert answer.code == 0, answer.err
    _, _, restored = answer.out.partition("restored\n")
    assert restored.split()[0] == "model"
    assert len(restored.splitlines()) == 1
    refused = door("rerun", str(first), "--dry-run", "trainer.stages=[test]", "model.hidden=[7]")
    assert refused.code == 2
    assert "other shapes: engine.model." in refused.out


def test_a_dry_run_that_begins_afresh_does_not_deny_the_checkpoint(door, first):
    answer = door("rerun", str(first), "--dry-run", "checkpoint.resume=never")
    assert (answer.code, answer.out) == (0, "nothing is restored: checkpoint.resume=never\n")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--dry-run"], "write rerun RUN_DIRECTORY --dry-run"),
        (["rerun", "--dry-run"], "none is named; write rerun RUN_DIRECTORY"),
        (["rerun", "runs/first", "--dry-run", "-m"], "leave -m, --cfg and --info out"),
    ],
)
def test_a_dry_run_that_means_nothing_is_refused(door, first, args, said):
    answer = door(*args)
    assert answer.code == 2
    assert said in answer.err


def test_help_says_how_to_repeat_and_how_to_go_on(door):
    said = door("rerun", "--help").out
    assert "add checkpoint.resume=RUN_DIRECTORY" in said
    assert "--dry-run trains nothing and writes nothing" in said
