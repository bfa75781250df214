"""Bad input gets one sentence and a next move, exit code 2, and leaves nothing behind."""

from __future__ import annotations

import json
import sys

import pytest

pytestmark = pytest.mark.usefixtures("warm_interpreters")

QUICK = "+recipe=quick.yaml"

# What is typed, and what the one line must hold.
BAD = [
    # names
    (["+recipe=digitz"], ["unknown recipe 'digitz'", "did you mean 'digits'?"]),
    ([QUICK, "strategy=dpp"], ["unknown strategy 'dpp'", "'ddp'"]),
    (
        [QUICK, "strategy=zzzz"],
        [
            "unknown strategy",
            "auto, ddp, deepspeed, dp, fsdp, gloo, horovod, mpi, nccl, parallel, single",
        ],
    ),
    ([QUICK, "precision=fp8"], ["unknown precision 'fp8'", "bf16_mixed, bf16_true, fp16_mixed"]),
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
    # values
    ([QUICK, "trainer.max_steps=abc"], ["trainer.max_steps: expected a whole number or null"]),
    ([QUICK, "trainer.max_steps=1.5"], ["trainer.max_steps: expected a whole number", "1.5"]),
    ([QUICK, "trainer.max_steps=true"], ["trainer.max_steps: expected a whole number", "true"]),
    (
        [QUICK, "trainer.compile=1"],
        ["trainer.compile: expected true or false or auto, got 1", "auto"],
    ),
    ([QUICK, "trainer.device=gpu"], ["expected one of auto, cpu, cuda", "did you mean 'cpu'?"]),
    ([QUICK, "trainer.stages=fit"], ["trainer.stages", "a list", "trainer.stages=[...]"]),
    ([QUICK, "trainer.stages=[fit,eval]"], ["trainer.stages[1]", "did you mean 'evaluate'?"]),
    ([QUICK, "checkpoint.resume=7"], ["checkpoint.resume: expected a text", "in quotes"]),
    (
        [QUICK, "precision.loss_scaling.scale=x"],
        ["precision.loss_scaling.scale: expected a number"],
    ),
    ([QUICK, "precision.compute=fp8"], ["precision.compute: expected one of fp32, bf16, fp16"]),
    ([QUICK, "callbacks.console.enabled=no_"], ["callbacks.console.enabled", "auto"]),
    # of what is disabled as of what is enabled
    ([QUICK, "callbacks.early_stopping.patience=-3"], ["callbacks.early_stopping.patience"]),
    ([QUICK, "callbacks.early_stopping.patience=x"], ["callbacks.early_stopping.patience", "'x'"]),
    ([QUICK, "callbacks.early_stopping.min_delta=.nan"], ["callbacks.early_stopping.min_delta"]),
    ([QUICK, "callbacks.profiler.rows=0"], ["callbacks.profiler.rows=0", "1 or more"]),
    ([QUICK, "logger.csv.filename=../x.csv"], ["logger.csv.filename"]),
    ([QUICK, "mesh.tp=2"], ["mesh: tp=2 does not divide the 1 processes"]),
    ([QUICK, "mesh.pp=-1"], ["mesh.pp=-1", "set mesh.pp=1"]),
    ([QUICK, "mesh.dp_shard=0"], ["mesh.dp_shard=0 is not a number of processes", "-1"]),
    ([QUICK, "mesh={dp_shard: -1, dp_replicate: -1}"], ["are both -1"]),
    ([QUICK, "mesh.model_replicate=2"], ["unknown knob mesh.model_replicate"]),
    ([QUICK, "logger.wandb.mode=onlin"], ["logger.wandb.mode", "'online'"]),
    ([QUICK, "log_level=loud"], ["log_level=loud", "debug, error, info, warning"]),
    ([QUICK, "optimizer.groups=1_000"], ["optimizer.groups: expected a list, each a mapping"]),
    ([QUICK, "optimizer.others=[]"], ["optimizer.others: expected a mapping, got []"]),
    ([QUICK, 'optimizer.foreach="<script>"'], ["optimizer.foreach: expected true or false"]),
    ([QUICK, "log_level= 1"], ["log_level: expected one of debug, info, warning, error, got 1"]),
    ([QUICK, "++comm._target_=builtins.dict"], ["builtins.dict is no CommOptions"]),
    ([QUICK, "schedule={_target_: builtins.list}"], ["builtins.list is no Schedule"]),
    # not finite
    *(
        ([QUICK, *knobs, f"{knob}={number}"], [f"{knob}={number} is not a finite number"])
        for number in ("nan", "inf", "-inf")
        for knob, *knobs in (
            ["comm.timeout_s"],
            ["optimizer.eps"],
            ["optimizer.ns_steps", "optimizer=muon"],
            ["schedule.final", "schedule=cosine"],
            ["trainer.max_grad_norm"],
            ["callbacks.console.refresh_per_second", "callbacks.console.enabled=true"],
            ["launcher.grace_s", "launcher=local"],
        )
    ),
    ([QUICK, "optimizer.betas=[0.9,nan]"], ["optimizer.betas[1]=nan is not a finite number"]),
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
    ([QUICK, 'strategy.plan={"a.*": colwise}'], ["without quotes: 'strategy.plan={a.*: colwise}'"]),
    ([QUICK, "strategy=fsdp", "strategy.plan=3"], ["got 3; write 'strategy.plan={NAME: VALUE}'"]),
    ([QUICK, "trainer.pretrained=a=b c:"], ["cannot be read as NAME=VALUE", "quotes"]),
    # files
    (["+recipe=nowhere.yaml"], ["recipe=nowhere.yaml: there is no such file in"]),
    (["+recipe=" + "a" * 5000 + ".yaml"], ["cannot be looked for: File name too long"]),
    (["+recipe=" + "a" * 5000], ["File name too long; correct the name"]),
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
    ([QUICK, "hydra.run.dir=file:///there"], ["is a URL", "name a folder"]),
    ([QUICK, "checkpoint.dir=memory://x"], ["gone with it", "name a folder"]),
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


def test_what_is_refused_by_the_classes_leaves_no_directory_either(door, home):
    for knob in ("comm.timeout_s=nan", "data.batch_size=5000", "model.hidden=big"):
        assert door(QUICK, "logger.tensorboard.enabled=true", knob).code == 2
        assert not (home / "runs").exists(), knob
    # Who names a folder reads the error there.
    assert door(QUICK, "data.batch_size=5000", "hydra.run.dir=mine/deep").code == 2
    assert json.loads((home / "mine/deep/result.json").read_text())["error"]


def test_a_refusal_leaves_what_was_there_before(door, home):
    assert door(QUICK, "hydra.run.dir=out").code == 0
    before = {path for path in home.rglob("*") if path.is_file()}
    assert door(QUICK, "hydra.run.dir=out", "data.batch_size=5000").code == 2
    assert {path for path in home.rglob("*") if path.is_file()} >= before
    (home / "full").mkdir()
    (home / "full/mine.txt").write_text("mine")
    assert door(QUICK, "hydra.run.dir=full").code == 2
    assert (home / "full/mine.txt").read_text() == "mine"


def test_a_mapping_is_given_whole(door, home):
    knob = "checkpoint.storage_options={endpoint_url: 'http://host:9000'}"
    config = door(QUICK, knob, "--cfg", "job").config
    assert config["checkpoint"]["storage_options"] == {"endpoint_url": "http://host:9000"}
    answer = door(QUICK, "trainer.compile_optionss={mode: x}")
    assert (
        "unknown knob trainer.compile_optionss; did you mean trainer.compile_options" in answer.err
    )


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "grows too large by its aliases"),
        ("".join(BOMB.splitlines(keepends=True)[:4]), "grows too large by its aliases"),
        ("a: &a [*a]\n", "is nested too deep"),
        ("a: " + "[" * 2000 + "]" * 2000 + "\n", "nested too deep"),
    ],
    ids=["large", "10,000 leaves", "within itself", "deep"],
)
def test_a_file_that_grows_without_end_is_refused(door, home, text, words):
    (home / "bomb.yaml").write_text(text)
    for typed in (["+recipe=bomb.yaml"], [QUICK, "model=bomb.yaml"]):
        answer = door(*typed)
        assert answer.code == 2
        assert "bomb.yaml" in answer.err
        assert words in answer.err


def test_anchors_that_say_something_once_are_read(door, home):
    (home / "knobs.yaml").write_text("vars: {a: &a {x: 1, y: 2}, b: {<<: *a, y: 3}, c: *a}\n")
    config = door("+recipe=knobs.yaml", "--cfg", "job").config
    assert config["vars"] == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": {"x": 1, "y": 2}}


def test_an_objective_that_is_no_metric_is_refused_at_the_first_evaluation(door, home):
    typed = [QUICK, "trainer.eval_every=1", "hydra.run.dir=out", "trainer.max_steps=3"]
    answer = door(*typed, "trainer.objective=acurracy")
    assert answer.code == 2
    assert "trainer.objective=acurracy: the run has no such metric; did you mean 'accuracy'" in (
        answer.err
    )
    assert '"step": 2' not in (home / "out/metrics.jsonl").read_text()
    answer = door(*typed, "trainer.objective=test_accuracy", "hydra.run.dir=out2")
    assert answer.code == 2
    tested = [*typed, "trainer.objective=test_accuracy", "trainer.stages=[fit,test]"]
    assert door(*tested, "hydra.run.dir=out3").code == 0


def test_a_folder_that_is_gone_is_told(run_command, home):
    program = (
        "import os, sys; os.mkdir('x'); os.chdir('x'); os.rmdir('../x')\n"
        "from torsh_trainer.__main__ import main; sys.exit(main(['--help']))"
    )
    answer = run_command([sys.executable, "-c", program], cwd=home)
    assert answer.returncode == 2
    assert answer.stderr == "error: the current directory is gone; cd to a folder that exists\n"


def test_advice_about_too_few_samples_is_taken_once(door, home):
    (home / "few_of_door.py").write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\n"
        "from torsh_trainer import DataSource\n\n\n"
        "class Few(DataSource):\n    def __init__(self):\n"
        "        self.train = TensorDataset(torch.zeros(5, 64), torch.zeros(5).long())\n"
    )
    own = ["data._target_=few_of_door.Few", "trainer.max_steps=1", "trainer.eval_every=null"]
    for knobs in (
        ["data.batch_size=32"],
        ["data.micro_batch_size=32", "data.batch_size=null"],
        ["data.batch_size=32", "data.micro_batch_size=8"],
        ["data.batch_size=null", "data.micro_batch_size=4", "trainer.accumulate=3"],
    ):
        answer = door(QUICK, *own, *knobs)
        assert answer.code == 2, answer
        advice = answer.err.partition("; set ")[2].removesuffix("\n").removesuffix(" or less")
        assert door(QUICK, *own, *knobs, *advice.split()).code == 0, (knobs, answer.err)


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
