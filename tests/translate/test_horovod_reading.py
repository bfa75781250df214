"""What is taken for a job of Horovod's, and what one job consists of."""

from __future__ import annotations

import contextlib
import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from torsh_trainer.__main__ import main
from torsh_trainer.errors import ConfigError
from torsh_trainer.translate import report
from torsh_trainer.translate.base import TranslationRequest
from torsh_trainer.translate.engines import translator_of, work_of
from torsh_trainer.translate.horovod.job import Options
from torsh_trainer.translate.horovod.translator import HorovodTranslator, original, translate

SCRIPT = """\
import argparse
import os
import horovod.torch as hvd
from torch.optim import AdamW
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--base-lr", dest="lr", type=float, default=0.01)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--fp16", action="store_true")
args = parser.parse_args()
rate = args.lr * hvd.size() if os.environ.get("SCALE") is None else float(os.environ["RATE"])


class Trainer:
    def __init__(self, lr):
        self.optimizer = AdamW(model.parameters(), lr, weight_decay=0.1)
        compression = hvd.Compression.fp16 if args.fp16 else hvd.Compression.none
        self.optimizer = hvd.DistributedOptimizer(self.optimizer, compression=compression)
        hvd.broadcast_optimizer_state(self.optimizer, root_rank=0)

    def train(self):
        loader = DataLoader(data, batch_size=args.batch, sampler=DistributedSampler(data))
        for batch in loader:
            model(batch).backward()
            self.optimizer.step()


Trainer(rate).train()
"""
UNTOLD = 'os.environ.get("SCALE") is None'
LINE = "horovodrun -np 2 python train.py"
WRAPPED = "DistributedOptimizer:\n  op: Average\n  backward_passes_per_step: 2\n"


@pytest.fixture
def job(write):
    """``job(line)``: a launch line with its script and its settings beside it."""
    write(SCRIPT.replace(UNTOLD, "True"), "train.py")
    write("params: {fusion_threshold_mb: 8, cycle_time_ms: 2}\n", "settings.yaml")

    def written(line: str):
        return write(line, "run.sh")

    return written


def findings(plan, key):
    return [f for f in plan.findings if f.key == key]


@pytest.mark.parametrize(
    ("name", "text", "horovod"),
    [
        ("run.sh", LINE, True),
        (
            "launch.txt",
            "#!/bin/sh\nset -e\nexec /opt/bin/horovodrun -np 2 \\\n  python a.py\n",
            True,
        ),
        ("c.yaml", "params:\n  cycle_time_ms: 2\n", True),
        ("d.yml", WRAPPED, True),
        ("job.env", "# settings\nexport HOROVOD_CYCLE_TIME=2\n", True),
        ("train.py", SCRIPT, True),
        ("train", "#!/usr/bin/env python\nimport horovod.torch\n", True),
        ("ds.json", '{"train_batch_size": 8}', False),
        ("ds.yaml", "train_batch_size: 8\n", False),
        ("accelerate.yaml", "deepspeed_config: {zero_stage: 2}\n", False),
        ("neox.yml", "num-layers: 2\nhidden-size: 8\n", False),
        ("ds", '{"train_batch_size": 8}', False),
    ],
)
def test_the_engine_is_told_by_the_content(write, name, text, horovod):
    assert (translator_of(write(text, name)).name == "horovod") is horovod


@pytest.mark.parametrize(
    ("name", "text"),
    [("notes.txt", "hello"), ("values.yaml", "ssh: {port: 22}\nworker: {number: 3}\n")],
)
def test_a_file_of_neither_is_named_with_what_is_known(write, name, text):
    with pytest.raises(ConfigError, match="nothing that translate knows") as caught:
        translator_of(write(text, name))
    assert "DeepSpeed's JSON" in caught.value.fix
    assert "imports horovod.torch" in caught.value.fix


def test_a_launch_line_is_read_with_the_script_and_the_settings_that_it_names(job):
    path = job(
        "export HOROVOD_CYCLE_TIME=9\n"
        "HOROVOD_CACHE_CAPACITY=7 horovodrun -np 2 --config-file settings.yaml "
        "--fusion-threshold-mb=4 python train.py --base-lr 0.5 --fp16 --batch=16\n"
    )
    plan = translate(path)
    assert plan.world_size == 2
    assert plan.values["strategy.bucket_cap_mb"] == 4
    assert plan.values["optimizer.lr"] == 1.0
    assert plan.values["precision.reduce"] == "fp16"
    assert plan.values["data.micro_batch_size"] == 16
    [overridden] = findings(plan, "params.fusion_threshold_mb")
    assert (overridden.verdict, overridden.rule) == ("dead", "overridden")
    assert "--fusion-threshold-mb counts before it" in overridden.why
    assert overridden.file == "settings.yaml"
    [variable] = findings(plan, "HOROVOD_CYCLE_TIME")
    assert "params.cycle_time_ms counts before it" in variable.why
    [read] = findings(plan, "--config-file")
    assert read.rule == "launch.config-file"
    [rate] = findings(plan, "optimizer.lr")
    assert (rate.file, rate.line) == ("train.py", 18)


def test_a_hostfile_is_read_from_beside_the_line_and_its_slots_are_counted(write):
    write("first slots=4\nsecond slots=4\n", "hosts.txt")
    path = write("horovodrun -np 6 --hostfile hosts.txt python a.py", "run.sh")
    plan = translate(path)
    [hosts] = findings(plan, "hosts")
    assert (hosts.file, hosts.line, hosts.value) == ("hosts.txt", 1, "first:4,second:4")
    [same] = [f for f in translate("", Options(command=INLINE)).findings if f.key == "-H"]
    assert (hosts.verdict, hosts.why) == (same.verdict, same.why)
    assert [f.rule for f in findings(plan, "--hostfile")] == ["launch.hostfile"]
    # four slots suffice, and nothing runs elsewhere
    few = translate(write("horovodrun -np 4 --hostfile hosts.txt python a.py", "run.sh"))
    assert findings(few, "hosts")[0].verdict == "approximate"
    assert few.values["launcher.num_processes"] == 4


INLINE = "horovodrun -np 6 -H first:4,second:4 python a.py"
WRONG_HOSTS = {
    "": ("hosts.txt:1:1: no host stands in it", "add HOST slots=N"),
    "a slots=2\n\nb slots=2\n": ("hosts.txt:2:1: '' is not HOST slots=N", "nor empty lines"),
    "# mine\na slots=2\n": ("hosts.txt:1:1: '# mine' is not HOST slots=N", "neither remarks"),
    "a:2\n": ("'a:2' is not HOST slots=N", "correct it"),
    "a slots=two\n": ("'a slots=two' is not HOST slots=N", "correct it"),
    "a slots=0\n": ("'a slots=0' is not HOST slots=N", "correct it"),
    "a slots=2\nb slots=1\n": ("run.sh:1:12: -np 4 is more than the 3 slots of hosts.txt", "few"),
}


@pytest.mark.parametrize("text", WRONG_HOSTS)
def test_a_wrong_hostfile_is_an_error_with_its_place(write, text):
    words, fix = WRONG_HOSTS[text]
    write(text, "hosts.txt")
    with pytest.raises(ConfigError) as caught:
        translate(write("horovodrun -np 4 -hostfile hosts.txt python a.py", "run.sh"))
    assert words in str(caught.value)
    assert fix in caught.value.fix


def test_a_script_and_its_line_may_be_given_apart(job, tmp_path):
    command = "horovodrun -np 4 python train.py --base-lr 0.5"
    plan = translate(tmp_path / "train.py", Options(command=command))
    assert plan.values["optimizer.lr"] == 2.0
    assert plan.values["launcher.num_processes"] == 4
    alone = translate("", Options(command="horovodrun -np 3 --cycle-time-ms 2 ./a.out"))
    assert alone.values["launcher.num_processes"] == 3


def test_a_rate_for_each_process_needs_no_number_of_processes(job, tmp_path):
    plan = translate(tmp_path / "train.py")
    assert plan.values["optimizer.lr"] == pytest.approx(0.01)
    assert plan.values["optimizer.lr_scaling"] == "linear"
    assert "launcher.num_processes" not in plan.values
    [state] = findings(plan, "broadcast_optimizer_state")
    assert (state.verdict, "state --world-size" in state.why) == ("approximate", True)


def test_what_reading_cannot_tell_is_named_with_its_line_and_stated_by_set(write, capsys):
    path = write(SCRIPT, "train.py")
    [fact] = translate(path, Options(world_size=2)).facts
    assert (fact.name, fact.line) == ("optimizer.lr", 18)
    assert "train.py:18" in fact.used
    assert main(["translate", str(path), "--world-size", "2"]) == 13
    assert "--set optimizer.lr=VALUE" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"is not known: optimizer\.lr"):
        HorovodTranslator().content(path, TranslationRequest(world_size=2))
    for name, value in (("optimizer.lr", "0.3"), ("rate", "0.3"), (ast_text(UNTOLD), "true")):
        plan = translate(path, Options(world_size=2, settings={name: value}))
        assert plan.values["optimizer.lr"] == pytest.approx(0.3 if value == "0.3" else 0.02)
    args = ["translate", str(path), "--world-size", "2", "--set", f"{ast_text(UNTOLD)}=true"]
    assert main(args) == 10
    assert "optimizer.lr=0.02" in capsys.readouterr().out


def ast_text(expression: str) -> str:
    """As Python writes it."""
    return expression.replace('"', "'")


def test_a_call_under_a_condition_that_cannot_be_told_is_named(write):
    text = SCRIPT.replace(UNTOLD, "True").replace(
        "        hvd.broadcast_optimizer_state",
        "        if fresh():\n            hvd.broadcast_optimizer_state",
    )
    path = write(text, "train.py")
    [fact] = translate(path, Options(world_size=2)).facts
    assert fact.name == "fresh()"
    assert "calling broadcast_optimizer_state" in fact.used
    without = translate(path, Options(world_size=2, settings={"fresh()": "false"}))
    assert "trainer.phantom_lr" not in without.values


ROUNDS = """\
        for k, batch in enumerate(loader):
            (model(batch) / 2).backward()
            if (k + 1) % 2 == 0:
                self.optimizer.step()
                scheduler.step()
"""


def test_a_step_in_every_so_many_rounds_is_one_of_so_many_passes(write):
    body = SCRIPT[SCRIPT.index("        for batch") : SCRIPT.index("\n\nTrainer(")]
    text = SCRIPT.replace(UNTOLD, "True").replace(body, ROUNDS)
    text = text.replace("compression=compression", "backward_passes_per_step=2")
    text = text.replace(
        "Trainer(rate)", "scheduler = torch.optim.lr_scheduler.StepLR(o, 1)\nTrainer(rate)"
    )
    text = f"import torch\n{text}"
    plan = translate(write(text, "train.py"), Options(world_size=2))
    assert plan.values["trainer.accumulate"] == 2
    assert "strategy.backward_passes_per_step" not in plan.values
    assert plan.values["schedule.interval"] == "step"
    early = text.replace("                scheduler.step()", "            scheduler.step()")
    for wrong, words in (
        (early, "the scheduler steps 2 times with every step"),
        (text.replace("% 2", "% 3"), "happens in every 3 rounds, and a step has 2"),
    ):
        with pytest.raises(ConfigError, match=words):
            translate(write(wrong, "train.py"), Options(world_size=2))


def test_what_verify_gives_to_horovod_is_what_the_script_says(job):
    said = original(job(f"{LINE} --fp16"))
    assert said["optimizer"] == {"class": "AdamW", "options": {"lr": 0.02, "weight_decay": 0.1}}
    assert said["wrapper"] == {"compression": "fp16"}
    assert said["broadcast_optimizer_state"] == "of the wrapped optimizer"


WRONG = {
    "horovodrun -np two python a.py": ("run.sh:1:16: -np should be a whole number", "correct"),
    "horovodrun -np 0 python a.py": ("-np should be a number of processes, 1 or more", "correct"),
    "horovodrun python a.py": ("horovodrun wants -np", "add -np N"),
    "horovodrun -np 2": ("given no command to start", "add it"),
    "horovodrun -np 2 --fusion-treshold-mb 4 a": (
        "no option --fusion-treshold-mb",
        "'--fusion-thr",
    ),
    "horovodrun -np 2 --autotune-gaussian-process-noise 2 a": ("a number from 0 to 1", "correct"),
    "horovodrun -np 2 --log-level LOUD a": ("one of TRACE, DEBUG", "correct"),
    "horovodrun -np 2 --cycle-time-ms": ("--cycle-time-ms wants a value", "add it"),
    "horovodrun -np 2 --gloo --mpi a": ("--mpi and --gloo exclude each other", "keep one"),
    "horovodrun -np 2 -H here a": ("a list host:slots", "correct"),
    "horovodrun -np $NP python a.py": ("only a shell knows $NP", "--set NP=VALUE"),
    "horovodrun -np 2 'a": ("a quotation mark ' that nothing closes", "close it"),
    "horovodrun -np 2 a\nhorovodrun -np 4 a": ("stands there 2 times, in lines 1, 2", "keep one"),
    "horovodrun -np 4 -H a:2,b:1 a": ("-np 4 is more than the 3 slots of -H", "ask for fewer"),
    "horovodrun -np 2 --hostfile no.txt a": ("--hostfile no.txt: there is no such file", "where"),
    "horovodrun -np 2 --config-file no.yaml a": ("no.yaml: there is no such file", "where it is"),
    "HOROVOD_CYCLE_TIME=fast horovodrun -np 2 a": ("HOROVOD_CYCLE_TIME should be a number", "corr"),
    "HOROVOD_CYCLETIME=1 horovodrun -np 2 a": ("reads no variable HOROVOD_CYCLETIME", "--lenient"),
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_line_is_an_error_with_its_place(write, line):
    words, fix = WRONG[line]
    with pytest.raises(ConfigError) as caught:
        translate(write(line, "run.sh"))
    assert words in str(caught.value)
    assert fix in caught.value.fix


WRONG_YAML = {
    "params: {fusion_treshold_mb: 4}": "'params.fusion_threshold_mb'",
    "params: {enabled: true}": "'autotune.enabled'",
    "params: {cycle_time_ms: -1}": "a number, 0 or more",
    "autotune: {enabled: 'yes'}": "true or false",
    "controller: ucx": "gloo or mpi",
    "params: 3": "'params'",
    "op: Mean": "one of average, sum",
    "compression: bf16": "one of none, fp16",
    "op: Sum\nbackward_passes_per_step: 0": "1 or more",
    "op: Sum\ndevice_dense: gpu": "remove it: it is TensorFlow's",
    "op: Sum\ngradient_predivide_factor: 2": "with op average alone",
    "op: Sum\nop: Sum": "stands twice",
}


@pytest.mark.parametrize("text", WRONG_YAML)
def test_wrong_yaml_is_an_error_that_says_what_would_be_right(write, text):
    with pytest.raises(ConfigError) as caught:
        work_of(write(text, "c.yaml"), TranslationRequest()).translate()
    assert WRONG_YAML[text] in str(caught.value)


def test_lenient_passes_over_what_horovod_passes_over(write):
    path = write("params: {fusion_treshold_mb: 4, cycle_time_ms: 2}\n", "c.yaml")
    plan = translate(path, Options(lenient=True))
    [unknown] = findings(plan, "params.fusion_treshold_mb")
    assert (unknown.verdict, unknown.rule) == ("dead", "unknown")
    assert "fusion_threshold_mb" in plan.warnings[0]


NESTED = """\
import argparse
import torch
import horovod.torch as hvd
from torch.utils.data import DataLoader

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    hvd.init()
    loader = DataLoader([], batch_size=args.batch)
    model = torch.nn.Linear(4, 4)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    steps = 0

    def one_epoch():
        nonlocal steps
        for x, y in loader:
            with torch.cuda.amp.autocast(enabled=args.amp):
                loss = model(x).sum()
            loss.backward()
            optimizer.step()
            steps += 1

    for epoch in range(2):
        one_epoch()

main()
"""
WRONG_SCRIPTS = {
    "import horovod.torch as hvd\nprint 'x'": "2:1: this Python cannot parse it",
    "import horovod.tensorflow as hvd\n": "imports horovod.tensorflow",
    "print(1)\n": "is no job on Horovod",
    "import horovod\n": "does not import horovod.torch",
    "import horovod.torch as hvd\nhvd.init()\n": "nothing in it calls hvd.DistributedOptimizer",
    SCRIPT.replace("compression=compression", "op=hvd.Mean"): "op should be one of average",
    SCRIPT.replace("compression=compression", "reduction=1"): "takes no 'reduction'",
}


def test_an_optimizer_that_is_made_elsewhere_is_asked_for(write):
    text = SCRIPT.replace("AdamW(model", "build(model").replace(UNTOLD, "True")
    path = write(text, "train.py")
    plan = translate(path, Options(world_size=2))
    assert [fact.name for fact in plan.facts] == ["optimizer", "optimizer.lr"]
    assert "build(model.parameters()" in plan.facts[0].look
    stated = {"optimizer": "Adam", "optimizer.lr": "0.5"}
    plan = translate(path, Options(world_size=2, settings=stated))
    assert (plan.choices["optimizer"], plan.values["optimizer.lr"]) == ("adam", 0.5)
    assert not plan.facts


ON_A_CONDITION = """\
import argparse
import torch
import horovod.torch as hvd
parser = argparse.ArgumentParser()
parser.add_argument("--horovod", action="store_true")
args = parser.parse_args()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if args.horovod:
    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer)
for x in range(3):
    model(x).backward()
    optimizer.step()
"""


def test_a_wrapper_on_a_condition_alone_is_asked_for_by_it(write):
    path = write(ON_A_CONDITION, "train.py")
    plan = translate(path, Options(world_size=2))
    [fact] = plan.facts
    assert (fact.name, fact.value, plan.findings) == ("args.horovod", "true", ())
    stated = Options(world_size=2, settings={"args.horovod": "true"})
    assert not translate(path, stated).facts


LIST_OF_SCHEDULERS = """\
import torch
import horovod.torch as hvd
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 3)]
for epoch in range(3):
    for x in loader:
        model(x).backward()
        optimizer.step()
    for scheduler in schedulers:
        scheduler.step()
"""


def test_a_scheduler_in_a_list_is_stepped(write):
    plan = translate(write(LIST_OF_SCHEDULERS, "train.py"), Options(world_size=2))
    assert plan.choices["schedule"] == "torch"
    assert plan.values["schedule.interval"] == "epoch"


def test_flags_of_absl_are_read_with_what_the_line_says_of_them(write):
    text = """\
import torch
import horovod.torch as hvd
from absl import app, flags
FLAGS = flags.FLAGS
flags.DEFINE_float("rate", 0.5, "how fast")
flags.DEFINE_integer("passes", None, "how many")
def main(_):
    optimizer = torch.optim.SGD(model.parameters(), lr=FLAGS.rate)
    optimizer = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=FLAGS.passes)
    model(1).backward()
    optimizer.step()
app.run(main)
"""
    path = write(text, "train.py")
    plan = translate(path, Options(world_size=2))
    assert plan.values["optimizer.lr"] == 0.5
    [fact] = plan.facts
    assert fact.name == "DistributedOptimizer.backward_passes_per_step"
    line = write("horovodrun -np 2 python train.py --rate=0.25 --passes 4\n", "run.sh")
    plan = translate(line, Options())
    assert (plan.values["optimizer.lr"], plan.values["trainer.accumulate"]) == (0.25, 4)


def test_a_function_within_a_function_knows_the_names_around_it(write):
    plan = translate(write(NESTED, "train.py"), Options(world_size=2))
    assert not plan.facts
    [batch] = findings(plan, "DataLoader.batch_size")
    assert batch.value == 32
    [autocast] = findings(plan, "autocast.enabled")
    assert autocast.verdict == "dead"


@pytest.mark.parametrize("text", WRONG_SCRIPTS)
def test_a_wrong_script_is_an_error_with_its_place(write, text):
    with pytest.raises(ConfigError) as caught:
        translate(write(text.replace(UNTOLD, "True"), "train.py"), Options(world_size=2))
    assert WRONG_SCRIPTS[text] in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"settings": {"nothing": "1"}}, "--set nothing: nothing of this job hangs on it"),
        ({"world_size": 3}, "--world-size 3 is not -np 2"),
    ],
)
def test_an_option_that_means_nothing_is_an_error(job, options, words):
    with pytest.raises(ConfigError, match=words):
        translate(job(LINE), Options(**options))


def test_the_door_says_what_means_nothing_to_horovod(write, capsys):
    path = str(write(LINE, "run.sh"))
    for args, words in (
        ((path, "--context", "accelerate"), "is about DeepSpeed's files"),
        ((path, "--source-version", "0.20"), "speak of 0.28.1, its last release"),
        ((path, "--command", LINE), "starts a job, and so does --command"),
        ((), "translate wants a file"),
    ):
        assert main(["translate", *args]) == 2
        assert words in capsys.readouterr().err


def test_the_recipe_composes_and_its_report_keeps_the_schema(job, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = job("horovodrun -np 2 --timeline-filename t.json python train.py --fp16\n")
    code = main(["translate", str(path), "-o", "recipe.yaml", "--report", "report.json"])
    assert code == 10
    said = json.loads((tmp_path / "report.json").read_text())
    schema = json.loads(report.schema_text())
    assert set(said) == set(schema["required"])
    assert said["engine"] in schema["properties"]["engine"]["enum"]
    wanted = set(schema["properties"]["findings"]["items"]["required"])
    assert all(set(finding) == wanted for finding in said["findings"])
    assert "train.py:18" in capsys.readouterr().out
    parts = ["task=classification", "model=mlp", "data=digits", "trainer.max_steps=2"]
    assert main(["+recipe=recipe.yaml", *parts, "--cfg", "job"]) == 0
    composed = yaml.safe_load(capsys.readouterr().out)
    for dotted, value in said["values"].items():
        found = composed
        for key in dotted.split("."):
            found = found[key]
        assert found == value, dotted
    assert composed["optimizer"]["_target_"] == "torch.optim.AdamW"
    assert main(["translate", str(path), "--report", "report.html"]) == 10
    assert "train.py:18" in (tmp_path / "report.html").read_text()


def test_public_configurations_are_taken_whole(repository):
    files = sorted((repository.parent / "shared" / "corpus" / "horovod").glob("*.yaml"))
    for path in files:
        if "helm" in path.name:
            with pytest.raises(ConfigError, match="nothing that translate knows"):
                work_of(path, TranslationRequest())
            continue
        plan = work_of(path, TranslationRequest()).translate()
        assert plan.engine == "horovod"
        assert plan.counts["refused"] == 0


FRAGMENTS = st.sampled_from(
    [
        *(
            "horovodrun",
            "-np",
            "2",
            "--gloo",
            "-H",
            "a:1,b:2",
            "$X",
            "'",
            '"',
            "\\",
            "\n",
            ";",
            "=",
        ),
        *(
            "python",
            "train.py",
            "HOROVOD_CYCLE_TIME=1",
            "--cycle-time-ms",
            "#",
            "$(x",
            "`",
            "-",
            "&",
        ),
    ]
)
STATEMENTS = st.sampled_from(
    [
        "lr = 0.1 * hvd.size()",
        "lr = lr ** lr",
        "lr = [lr] * 3",
        "o = torch.optim.SGD(m.parameters(), lr=lr)",
        "o = hvd.DistributedOptimizer(o, op=hvd.Sum)",
        "def f(x):\n    return f(x)",
        "f(f)",
        "for lr in f(1):\n    lr.backward()",
        "if unknown():\n    lr = 1 // 0",
        "class K:\n    def __init__(self):\n        self.k = K()",
        "k = K()",
        "a, *b = 1, 2, lr",
        "d = {**d, 'lr': lr}",
        "while lr:\n    break",
        "lr = lr[0]['x'].y(*lr, **lr)",
        "try:\n    f()\nexcept E:\n    raise",
        "x = max(1, 'a') or not lr < 'b' < None",
        "p = argparse.ArgumentParser()",
        "p.add_argument('--x', type=int, default='y')",
        "z = p.parse_args()",
        "hvd.broadcast_optimizer_state(o, 0)",
        "s = torch.optim.lr_scheduler.StepLR(o, lr)\ns.step()",
    ]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(FRAGMENTS, max_size=14).map(" ".join))
def test_any_line_is_translated_or_an_error_in_words(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("line") / "run.sh"
    path.write_text(f"horovodrun {text}")
    with contextlib.suppress(ConfigError):
        translate(path)


@settings(max_examples=150, deadline=None)
@given(st.lists(STATEMENTS, max_size=12).map("\n".join))
def test_any_script_is_translated_or_an_error_in_words(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(f"import argparse, torch\nimport horovod.torch as hvd\n{text}\n")
    with contextlib.suppress(ConfigError):
        first = translate(path, Options(world_size=2))
        assert translate(path, Options(world_size=2)) == first


STARTED = """\
import horovod.torch as hvd
import torch
def main():
    hvd.init()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    other = torch.optim.Adam(head.parameters(), lr=0.5)
    optimizer = hvd.DistributedOptimizer({wrapped})
    for epoch in range(4):
        for batch in torch.utils.data.DataLoader(data, batch_size=8):
            net(batch).backward()
            optimizer.step()
{start}
"""


@pytest.mark.parametrize(("wrapped", "rate"), [("optimizer", 0.1), ("other", 0.5)])
def test_the_optimizer_that_is_wrapped_is_the_jobs(write, wrapped, rate):
    """Wherever it stands among those that the script makes."""
    path = write(STARTED.format(wrapped=wrapped, start="main()"), "train.py")
    assert translate(path, Options(world_size=2)).values["optimizer.lr"] == rate


@pytest.mark.parametrize(
    "start",
    [
        "from sparkdl import HorovodRunner\nHorovodRunner(np=2).run(main)",
        "import horovod\nhorovod.run(main, np=2)",
    ],
)
def test_what_a_runner_starts_is_the_job(write, start):
    text = STARTED.format(wrapped="optimizer", start=start).replace("lr=0.1", "lr=0.1 * hvd.size()")
    plan = translate(write(text, "train.py"))
    assert plan.facts == ()
    assert (plan.values["trainer.max_epochs"], plan.values["launcher.num_processes"]) == (4, 2)
    assert plan.values["optimizer.lr"] == 0.2


def test_the_size_that_mpi_says_is_the_number_of_processes(write):
    text = STARTED.replace("lr=0.1", "lr=0.1 * comm.Get_size()")
    text = text.format(wrapped="optimizer", start="main()")
    text = text.replace("    hvd.init()", "    comm = MPI.COMM_WORLD\n    hvd.init(comm)")
    path = write(f"from mpi4py import MPI\n{text}", "train.py")
    assert translate(path, Options(world_size=2)).values["optimizer.lr"] == 0.2
