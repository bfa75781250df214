"""Bad input gets one sentence and a next move, exit code 2, and leaves nothing behind."""

from __future__ import annotations

import pytest

QUICK = "+recipe=quick.yaml"

# What is typed, and what the one line must hold.
BAD = [
    # names
    (["+recipe=digitz"], ["unknown recipe 'digitz'", "did you mean 'digits'?"]),
    ([QUICK, "strategy=dpp"], ["unknown strategy 'dpp'", "'ddp'"]),
    (
        [QUICK, "strategy=zzzz"],
        ["unknown strategy", "auto, ddp, deepspeed, dp, fsdp, gloo, horovod, mpi, nccl, single"],
    ),
    ([QUICK, "stratgy=ddp"], ["there is no group or setting 'stratgy'", "'strategy'"]),
    ([QUICK, "+stratgy=ddp"], ["there is no group or setting 'stratgy'", "'strategy'"]),
    ([QUICK, "++stratgy.overlap=true"], ["there is no group 'stratgy'", "'strategy'"]),
    ([QUICK, "trainer.max_stepz=3"], ["unknown knob trainer.max_stepz", "trainer.max_steps"]),
    ([QUICK, "+trainer.max_stepz=3"], ["unknown knob trainer.max_stepz", "trainer.max_steps"]),
    ([QUICK, "strategy=ddp", "strategy.overlp=1"], ["strategy.overlp", "strategy.overlap?"]),
    ([QUICK, "data.batch_sise=3"], ["unknown knob data.batch_sise", "data.batch_size"]),
    ([QUICK, "+data.batch_sise=3"], ["unknown knob data.batch_sise", "data.batch_size"]),
    (
        [QUICK, "checkpoint.storage_options.endpoint_url=http://x"],
        ["checkpoint.storage_options is empty", "+checkpoint.storage_options.endpoint_url=VALUE"],
    ),
    ([QUICK, "hydra.run.dirr=x"], ["unknown knob hydra.run.dirr", "hydra.run.dir?"]),
    (["model.depth=8"], ["model.depth: no model is chosen", "where the task says its own"]),
    (["data.batch_size=8"], ["nothing says what to train"]),
    ([QUICK, "trainer.strategy=ddp"], ["strategy is a group of its own: strategy=NAME"]),
    ([QUICK, "+trainer.strategy=ddp"], ["strategy is a group of its own: strategy=NAME"]),
    ([QUICK, "recipe.max_steps=3"], ["a recipe has no knobs", "max_steps=3"]),
    ([QUICK, "trainer={max_stepz: 3}"], ["trainer={...} sets a knob that trainer does not have"]),
    ([QUICK, "optimizer.momentum=0.9"], ["unknown knob optimizer.momentum", "+optimizer.momentum"]),
    ([QUICK, "+optimizer.momentum=0.9"], ["momentum", "AdamW"]),
    ([QUICK, "-m", "hydra/launcher=jobbib"], ["hydra/launcher 'jobbib'", "'joblib'"]),
    ([QUICK, "~trainer.max_stepz"], ["~trainer.max_stepz", "nothing of that name"]),
    (["quick"], ["'quick' is neither a verb nor an override", "report, rerun"]),
    ([QUICK, "rerun"], ["'rerun' sets nothing"]),
    (["--multirum", QUICK], ["unknown flag --multirum", "--multirun"]),
    (["--max-steps", "3"], ["unknown flag --max-steps", "a knob is no flag"]),
    (["--trainer.max_steps=3"], ["has no dashes: write trainer.max_steps=3"]),
    (["--cfg", "jobb"], ["invalid choice", "job"]),
    (
        ["--config-path", "conf"],
        ["--config-path is ", "write python -m torsh_trainer --config-dir conf"],
    ),
    # values
    ([QUICK, "trainer.max_steps=abc"], ["trainer.max_steps: expected a whole number or null"]),
    ([QUICK, "trainer.max_steps=1.5"], ["trainer.max_steps: expected a whole number", "1.5"]),
    ([QUICK, "trainer.max_steps=true"], ["trainer.max_steps: expected a whole number", "true"]),
    ([QUICK, "trainer.compile=1"], ["trainer.compile: expected true or false, got 1", "false"]),
    ([QUICK, "trainer.device=gpu"], ["expected one of auto, cpu, cuda", "did you mean 'cpu'?"]),
    ([QUICK, "trainer.stages=fit"], ["trainer.stages", "a list", "trainer.stages=[...]"]),
    ([QUICK, "trainer.stages=[fit,eval]"], ["trainer.stages[1]", "did you mean 'evaluate'?"]),
    ([QUICK, "checkpoint.resume=7"], ["checkpoint.resume: expected a text", "in quotes"]),
    (
        [QUICK, "precision.loss_scaling.scale=x"],
        ["precision.loss_scaling.scale: expected a number"],
    ),
    ([QUICK, "callbacks.console.enabled=no_"], ["callbacks.console.enabled", "auto"]),
    ([QUICK, "log_level=loud"], ["log_level=loud", "debug, error, info, warning"]),
    # ranges
    ([QUICK, "trainer.max_steps=0"], ["trainer.max_steps=0 is below 1"]),
    ([QUICK, "launcher=local", "launcher.num_processes=0"], ["launcher.num_processes=0"]),
    ([QUICK, "optimizer.lr=-1"], ["optimizer.lr=-1"]),
    # missing, or too many
    (["strategy=ddp"], ["nothing says what to train", "+recipe=NAME", "digits"]),
    ([QUICK, "trainer.max_steps"], ["'trainer.max_steps' sets nothing", "trainer.max_steps=VALUE"]),
    ([QUICK, "trainer.max_steps=???"], ["trainer.max_steps has no value"]),
    ([QUICK, "data=csv"], ["data.path has no value", "data.path=VALUE"]),
    ([QUICK, "~model"], ["needs model, and none is chosen", "model=NAME"]),
    ([QUICK, "trainer.max_steps=${trainer.nix}"], ["${trainer.nix} names nothing"]),
    ([QUICK, "strategy=ddp,fsdp"], ["names several values", "add -m"]),
    ([QUICK, "trainer.frozen=a,b"], ["names several values", "trainer.frozen=[a,b]"]),
    ([QUICK, "trainer.max_steps.x=3"], ["trainer.max_steps is a value and holds no knobs"]),
    # syntax
    ([QUICK, "trainer.frozen=[a"], ["cannot be read as NAME=VALUE", "brackets"]),
    ([QUICK, "trainer.pretrained=a=b c:"], ["cannot be read as NAME=VALUE", "quotes"]),
    # files
    (["+recipe=nowhere.yaml"], ["recipe=nowhere.yaml: there is no such file in"]),
    (["+recipe=quik.yaml"], ["no such file", "did you mean 'quick.yaml'?"]),
    ([QUICK, "strategy=my/ddp.yaml"], ["strategy=my/ddp.yaml: there is no such file"]),
    ([QUICK, "+stratgy=quick.yaml"], ["there is no group 'stratgy'", "'strategy'"]),
    ([QUICK, "stratgy=quick.yaml"], ["there is no group 'stratgy'", "'strategy'"]),
    ([QUICK, "+trainer.recipe=quick.yaml"], ["unknown knob trainer.recipe"]),
    (["+recipe=quick"], ["unknown recipe 'quick'", "did you mean the file quick.yaml?"]),
    (["--config-dir", "nowhere", QUICK], ["--config-dir nowhere is not a folder"]),
    # classes
    ([QUICK, "task._target_=nix.Task"], ["task._target_=nix.Task", "no module 'nix'"]),
    (
        [QUICK, "model._target_=torsh_trainer.tasks.models.MPL"],
        ["has no 'MPL'", "did you mean 'MLP'?"],
    ),
    ([QUICK, "task._target_=pathlib.Path", "~model"], ["which is no Task"]),
    (["--cfg", "job", QUICK, "--package", "tariner"], ["--package tariner", "'trainer'"]),
    # sweeps
    ([QUICK, "hydra/launcher=joblib"], ["is for a sweep, and this is a single run", "add -m"]),
    ([QUICK, "hydra.sweep.dir=x"], ["is for a sweep, and this is a single run"]),
    ([QUICK, "-m", "trainer.seed=1,2", "hydra.run.dir=x"], ["is for a single run", "sweep.dir"]),
    ([QUICK, "-m", "optimizer.lr=interval(0.1,1)"], ["interval(...)", "hydra/sweeper=optuna"]),
    ([QUICK, "-m", "trainer.max_stepz=1,2"], ["unknown knob trainer.max_stepz"]),
    (
        [QUICK, "-m", "strategy=ddp,single", "strategy.overlap=false"],
        ["strategy.overlap is not a knob of every option that is swept over"],
    ),
]

INTERNALS = ("struct", "Hydra", "hydra.errors", "OmegaConf", "ConfigKeyError", "Traceback")


@pytest.mark.parametrize(("typed", "said"), BAD, ids=lambda value: " ".join(value)[:60])
def test_it_is_told_in_one_line_with_the_next_move(door, typed, said):
    answer = door(*typed)
    assert answer.code == 2, answer
    (line,) = answer.err.splitlines()
    assert line.startswith("error: ")
    assert "; " in line  # what is wrong, and the next move
    for words in said:
        assert words in line
    assert not any(word in line for word in INTERNALS)


def test_what_is_refused_before_training_leaves_no_directory(door, home):
    for typed in (["strategy=ddp"], ["+recipe=quick.yaml", "stratgy=ddp"], ["+recipe=nix"]):
        assert door(*typed).code == 2
    assert [path.name for path in home.iterdir()] == ["quick.yaml"]


def test_debug_shows_the_traceback_before_the_sentence(door):
    answer = door("+recipe=quick.yaml", "trainer.max_stepz=3", "debug=true")
    assert answer.code == 2
    assert "Traceback" in answer.err
    assert answer.err.splitlines()[-1].startswith("error: unknown knob trainer.max_stepz")


def test_debug_in_a_recipe_shows_the_traceback_once(door, home):
    text = (home / "quick.yaml").read_text()
    (home / "quick.yaml").write_text(text + "debug: true\n")
    for given in ([], ["debug=true"]):
        answer = door("+recipe=quick.yaml", "trainer.max_steps=abc", *given)
        assert answer.err.count("Traceback (most recent call last)") == 1
        assert answer.err.splitlines()[-1].startswith("error: trainer.max_steps: expected")


FILES = {
    "broken": ("trainer:\n  max_steps: [1\n  a: 2\n", ["broken.yaml:3:", "this is not YAML"]),
    "twice": ("trainer: {seed: 1}\ntrainer: {seed: 2}\n", ["twice.yaml:2:", "duplicate key"]),
    "a_list": ("- a\n", ["a_list.yaml holds no mapping"]),
    "option": ("defaults:\n  - override /task: klassification\n", ["task 'klassification'", "did"]),
    "group": ("defaults:\n  - override /tsk: classification\n", ["no group 'tsk'", "'task'"]),
    "top": ("optimzer:\n  lr: 3\n", ["no group or setting 'optimzer'", "'optimizer'", "vars"]),
    "knob": (
        "defaults: [/recipe/digits]\ntrainer:\n  max_stepz: 3\n",
        ["unknown knob trainer.max_stepz", "trainer.max_steps"],
    ),
    "order": (
        "defaults:\n  - override /task: classification\n  - /recipe/digits\n",
        ["order.yaml", "at the end of its defaults"],
    ),
    "again": ("defaults:\n  - /recipe: digits\n", ["recipe is chosen more than once", "/recipe/"]),
    "bytes": (b"\xff\xfe\x00", ["bytes.yaml cannot be read"]),
}


@pytest.mark.parametrize("name", FILES)
def test_a_recipe_file_that_is_wrong_is_told_with_its_place(door, home, name):
    text, said = FILES[name]
    path = home / f"{name}.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    answer = door(f"+recipe={name}.yaml")
    assert answer.code == 2, answer
    (line,) = answer.err.splitlines()
    assert all(words in line for words in said), line
    assert not any(word in line for word in INTERNALS)
