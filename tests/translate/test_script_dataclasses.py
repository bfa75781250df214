"""Words of a command line are for a script's dataclasses what HfArgumentParser makes of them."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import transformers

from torsh_trainer.translate.base import TranslationRequest
from torsh_trainer.translate.engines import work_of
from torsh_trainer.translate.launch.translator import LaunchTranslator
from torsh_trainer.translate.python.training_arguments import TRAINING_ARGUMENTS, UNSTEADY

CLASSES = """
from dataclasses import dataclass, field
from typing import List, Literal, Optional, Union
from transformers import HfArgumentParser, TrainingArguments


@dataclass
class Rates:
    lr: float = field(default=0.5, metadata={"help": "rate", "aliases": ["--rate", "-r"]})
    rates: List[float] = field(default_factory=lambda: [0.5, 0.25])
    warm: bool = False
    cool: bool = field(default=True)
    maybe: Optional[bool] = field(default=None)
    big_step: Optional[float] = field(default=None, metadata={"help": "rate"})
    low: "float | None" = 0.125
    mode: Literal["slow", "fast"] = "slow"
    fixed: float = field(default=3.0, init=False)

    def __post_init__(self):
        self.twice = self.lr * 2


@dataclass
class More(Rates):
    lr: float = 0.75
    steps: Optional[int] = field(default=4)


@dataclass
class Own(TrainingArguments):
    optim: str = field(default="adamw_torch")
    learning_rate: float = field(default=0.03)
"""
SCRIPT = """
import sys, os
import horovod.torch as hvd
import torch
{classes}
parser = HfArgumentParser({types})
{parse}
hvd.init()
model = torch.nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr={rate})
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
torch.nn.functional.cross_entropy(model(x), y).backward()
optimizer.step()
"""
FIRST = "args = parser.parse_args_into_dataclasses()[0]"
OR_FILE = """
if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
    args, = parser.parse_json_file(json_file=os.path.abspath(sys.argv[1]))
else:
    args, = parser.parse_args_into_dataclasses()
"""
RATES, MORE = "Rates", "(More,)"


def write(types: str, parse: str, rate: str) -> None:
    Path("train.py").write_text(SCRIPT.format(classes=CLASSES, types=types, parse=parse, rate=rate))


def plan_of(words: str):
    line = f"mpirun -np 2 python train.py {words}".strip()
    [plan] = LaunchTranslator().translate_jobs("", TranslationRequest(command=line))
    return plan


def ask_library(monkeypatch, types: str, parse: str, rate: str, words: str) -> float:
    """What the library makes of the same words; the line of ``words`` is the one of the process."""
    monkeypatch.setattr(sys, "argv", ["train.py", *words.split()])
    module = type(sys)("declared")
    monkeypatch.setitem(sys.modules, "declared", module)
    names = module.__dict__
    exec(CLASSES, names)
    exec(f"import os, sys\nparser = HfArgumentParser({types})\n{parse}", names)
    return eval(rate, names)


@pytest.mark.parametrize(
    ("types", "rate", "words"),
    [
        (RATES, "args.lr", ""),
        (RATES, "args.lr", "--lr 0.1"),
        (RATES, "args.lr", "--lr=0.1 --lr 0.2"),
        (RATES, "args.lr", "-r 0.1"),
        (RATES, "args.lr", "--rate 0.1 --lr 0.3"),
        (RATES, "args.lr", "--lr 0.3 --rate 0.1"),
        (RATES, "args.twice", "--lr 0.3"),
        (RATES, "args.rates[1]", ""),
        (RATES, "args.rates[1]", "--rates 0.1 0.2 0.3"),
        (RATES, "0.1 if args.warm else 0.2", ""),
        (RATES, "0.1 if args.warm else 0.2", "--warm"),
        (RATES, "0.1 if args.warm else 0.2", "--warm False"),
        (RATES, "0.1 if args.warm else 0.2", "--warm yes"),
        (RATES, "0.1 if args.cool else 0.2", ""),
        (RATES, "0.1 if args.cool else 0.2", "--no_cool"),
        (RATES, "0.1 if args.cool else 0.2", "--no-cool"),
        (RATES, "0.1 if args.cool else 0.2", "--no_cool --cool"),
        (RATES, "0.1 if args.cool else 0.2", "--cool false"),
        (RATES, "0.1 if args.maybe is None else 0.2", ""),
        (RATES, "0.1 if args.maybe is None else 0.2", "--maybe true"),
        (RATES, "args.big_step or 0.4", ""),
        (RATES, "args.big_step or 0.4", "--big-step 0.1"),
        (RATES, "args.big_step or 0.4", "--big_st 0.1"),
        (RATES, "args.low", "--low 0.25"),
        (RATES, "0.1 if args.mode == 'fast' else 0.2", "--mode fast"),
        (RATES, "args.lr", "--mode fast"),
        (MORE, "args.lr", ""),
        (MORE, "args.lr / args.steps", "--steps 8"),
        (MORE, "args.twice", "--rates 1 2"),
        ("Own", "args.learning_rate", ""),
        ("Own", "args.learning_rate", "--learning_rate 0.2"),
        ("Own", "0.1 / args.per_device_train_batch_size", ""),
        ("TrainingArguments", "args.learning_rate", ""),
        (
            "TrainingArguments",
            "args.learning_rate / args.gradient_accumulation_steps",
            "--gradient_accumulation_steps 4",
        ),
    ],
)
@pytest.mark.parametrize("parse", [FIRST, OR_FILE], ids=["words", "or a file"])
def test_they_are_what_the_library_makes_of_them(tmp_path, monkeypatch, types, rate, words, parse):
    monkeypatch.chdir(tmp_path)
    write(types, parse, rate)
    expected = ask_library(monkeypatch, types, parse, rate, words)
    plan = plan_of(words)
    assert not plan.facts
    assert plan.values["optimizer.lr"] == expected
    own = [finding for finding in plan.findings if finding.rule == "script.own"]
    assert all("the script reads it" in finding.why for finding in own)


def test_a_file_that_the_line_names_takes_the_place_of_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(RATES, OR_FILE, "args.twice")
    Path("rates.json").write_text('{"lr": 0.25}')
    assert ask_library(monkeypatch, RATES, OR_FILE, "args.twice", "rates.json") == 0.5
    plan = plan_of("rates.json")
    assert plan.values["optimizer.lr"] == 0.5
    Path("rates.json").unlink()
    assert "optimizer.lr" not in plan_of("rates.json").values  # asked for, not the default
    assert plan_of("rates.json").facts


def test_a_file_of_words_beside_the_script_comes_before_the_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(RATES, FIRST, "args.lr / args.rates[0]")
    Path("train.args").write_text("--lr 0.1 --rates 2 4")
    expected = ask_library(monkeypatch, RATES, FIRST, "args.lr / args.rates[0]", "--lr 0.2")
    assert plan_of("--lr 0.2").values["optimizer.lr"] == expected == 0.1


def test_what_no_default_tells_is_asked_for_by_the_name_that_the_script_uses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    needed = CLASSES.replace("lr: float = 0.75", "lr: float").replace(
        "class More(Rates)", "class More"
    )
    Path("train.py").write_text(
        SCRIPT.format(classes=needed, types=MORE, parse=FIRST, rate="args.lr")
    )
    [fact] = plan_of("").facts
    assert fact.used.startswith("optimizer.lr=args.lr (train.py:")
    request = TranslationRequest(settings={"args.lr": "0.1"}, world_size=2)
    assert work_of(Path("train.py"), request).translate().values["optimizer.lr"] == 0.1


def test_defaults_of_the_trainers_arguments_are_those_of_the_library():
    fields = {one.name: one for one in dataclasses.fields(transformers.TrainingArguments)}
    compared = 0
    for name, (kind, default) in TRAINING_ARGUMENTS.items():
        if name not in fields:
            assert default is UNSTEADY, name  # of another version
            continue
        if default is not UNSTEADY:
            assert fields[name].default == default, name
            compared += 1
        if kind in ("int", "float", "bool") and isinstance(fields[name].type, type):
            assert fields[name].type.__name__ == kind, name
    assert compared > 30


TRAINERS = """
{classes}
from transformers import Trainer
args = HfArgumentParser(Own).parse_args_into_dataclasses()[0]
Trainer(model=model, args=args).train()
"""
LINE = "torchrun --nproc_per_node 2 train.py --bf16 --save_strategy no --weight_decay 0.1 "


def test_a_default_of_the_scripts_own_counts_where_the_line_says_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAINERS.format(classes=CLASSES))
    lines = Path("train.py").read_text().split("\n")
    at = 1 + lines.index("    learning_rate: float = field(default=0.03)")
    [plan] = LaunchTranslator().translate_jobs("", TranslationRequest(command=LINE))
    expected = ask_library(monkeypatch, "Own", FIRST, "args.learning_rate", "")
    assert plan.values["optimizer.lr"] == expected == 0.03
    [said] = [finding for finding in plan.findings if finding.key == "learning_rate"]
    assert said.where == f"train.py:{at}"
    asked = TranslationRequest(command=f"{LINE} --learning_rate 0.2")
    [plan] = LaunchTranslator().translate_jobs("", asked)
    assert plan.values["optimizer.lr"] == 0.2
    Path("train.py").write_text(TRAINERS.format(classes=CLASSES.replace("0.03", "rate()")))
    [plan] = LaunchTranslator().translate_jobs("", TranslationRequest(command=LINE))
    assert f"train.py:{at}: the script computes learning_rate: state it in the line" in plan.notes


@pytest.mark.parametrize(
    ("classes", "said"),
    [("TrainingArguments", "nothing was read but the defaults"), ("", "was not read")],
)
def test_a_note_says_whether_the_scripts_defaults_were_looked_at(
    tmp_path, monkeypatch, classes, said
):
    monkeypatch.chdir(tmp_path)
    parsed = f"HfArgumentParser({classes}).parse_args_into_dataclasses()\n" if classes else ""
    Path("train.py").write_text(
        f"from transformers import HfArgumentParser, Trainer, TrainingArguments\n{parsed}"
    )
    [plan] = LaunchTranslator().translate_jobs("", TranslationRequest(command=LINE))
    assert [note for note in plan.notes if "the script itself" in note and said in note]


def test_arguments_of_another_librarys_class_are_said_to_have_defaults_of_its_own(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    script = "import trl\nfrom transformers import HfArgumentParser, Trainer\n"
    Path("train.py").write_text(f"{script}HfArgumentParser((trl.SFTConfig, trl.ModelConfig))\n")
    [plan] = LaunchTranslator().translate_jobs("", TranslationRequest(command=LINE))
    [note] = [note for note in plan.notes if "trl." in note]
    assert "a trl.SFTConfig, whose defaults may be others" in note


def test_a_script_that_makes_an_engine_itself_is_read_whatever_its_arguments_are_called(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(
        '{"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.5,'
        ' "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}'
    )
    Path("train.py").write_text(
        f"import deepspeed\n{CLASSES}\n"
        "args = HfArgumentParser(Own).parse_args_into_dataclasses()[0]\n"
        "import json\n"
        "config = json.load(open(args.deepspeed))\n"
        "config['optimizer']['params']['lr'] = args.learning_rate\n"
        "config['gradient_accumulation_steps'] = args.gradient_accumulation_steps\n"
        "engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(),"
        " config=config)\n"
        "for x in data:\n    engine.backward(engine(x))\n    engine.step()\n"
    )
    line = (
        "deepspeed --num_gpus 2 train.py --deepspeed ds.json --per_device_train_batch_size 16 "
        "--gradient_accumulation_steps 2 --logging_steps 1"
    )
    [plan] = LaunchTranslator().translate_jobs("", TranslationRequest(command=line))
    assert not plan.facts
    assert plan.values["optimizer.lr"] == 0.03  # the script's own default, not the Trainer's
    assert plan.values["data.micro_batch_size"] == 4  # the file's: the script reads no other
    assert plan.values["trainer.accumulate"] == 2
    assert plan.values["trainer.max_grad_norm"] == 0.5
