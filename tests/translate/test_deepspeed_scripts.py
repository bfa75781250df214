"""Scripts that call deepspeed.initialize: their configuration, and all else that they do."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from torsh_trainer.__main__ import main
from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.base import TranslationRequest
from torsh_trainer.translate.deepspeed.source import Options
from torsh_trainer.translate.deepspeed.translator import translate
from torsh_trainer.translate.engines import work_of
from torsh_trainer.translate.plan import Finding, Plan

CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}
BY_ARGUMENTS = """\
import argparse
import deepspeed
import torch

def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()

def main():
    args = parse()
    deepspeed.init_distributed()
    net = torch.nn.Linear(4, 4)
    engine, optimizer, loader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=net.parameters(), training_data=[]
    )
    for epoch in range(args.epochs):
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
        engine.save_checkpoint("out")

main()
"""
BY_FUNCTION = """\
import argparse
import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup
from settings import make_config

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--stage", type=int, default=0)
parser.add_argument("--offload", action="store_true")
parser.add_argument("--warmup", type=int, default=5)
args = parser.parse_args()
config = make_config(stage=args.stage)
config["train_micro_batch_size_per_gpu"] = args.batch
config["train_batch_size"] = args.batch * torch.distributed.get_world_size() * args.accumulate
model = torch.nn.Linear(4, 4)
kind = DeepSpeedCPUAdam if args.offload else FusedAdam
optimizer = kind(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
loader = DataLoader([], batch_size=args.batch)
scheduler = get_cosine_schedule_with_warmup(
    optimizer=optimizer, num_warmup_steps=args.warmup, num_training_steps=100
)
model, optimizer, *_ = deepspeed.initialize(
    model=model, optimizer=optimizer, config=config, lr_scheduler=scheduler
)
for batch in loader:
    loss = model(batch).mean() / 3
    model.backward(loss)
    model.step()
"""
SETTINGS = """\
def make_config(stage=2):
    return {
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "overlap_comm": True},
    }
"""


def plan_of(path: Path, command: str | None = None, **options) -> Plan:
    return work_of(path, TranslationRequest(command=command, **options)).translate()


def finding(plan: Plan, key: str) -> Finding:
    [found] = [finding for finding in plan.findings if finding.key == key]
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(json.dumps(CONFIG))
    Path("by_arguments.py").write_text(BY_ARGUMENTS)
    Path("by_function.py").write_text(BY_FUNCTION)
    Path("settings.py").write_text(SETTINGS)
    return tmp_path


def test_the_configuration_of_the_line_is_that_of_the_script(folder):
    line = "deepspeed --num_gpus 2 by_arguments.py --deepspeed_config ds.json --epochs 3"
    plan = plan_of("", line)
    alone = translate(folder / "ds.json", Options(world_size=2))
    assert plan.choices == alone.choices
    assert plan.values == {**alone.values, "trainer.max_epochs": 3}
    assert {f.key: f.verdict for f in alone.findings}.items() <= {
        f.key: f.verdict for f in plan.findings
    }.items()
    assert finding(plan, "zero_optimization.stage").file == "ds.json"
    assert finding(plan, "engine.backward").where == "by_arguments.py:22"
    assert "a script for DeepSpeed, its configuration in ds.json" in plan.taken_for


def test_a_configuration_that_nobody_names_is_asked_for_by_its_name(folder, capsys):
    [fact] = plan_of(folder / "by_arguments.py").facts
    assert (fact.name, fact.value, fact.line) == ("deepspeed_config", "FILE", 16)
    assert main(["translate", "by_arguments.py"]) == 13
    assert "--set deepspeed_config=FILE" in capsys.readouterr().out
    plan = plan_of(folder / "by_arguments.py", settings={"deepspeed_config": "ds.json"})
    assert plan.facts == ()
    assert plan.values["data.batch_size"] == 16


def test_a_dictionary_is_followed_through_functions_modules_and_changes(folder):
    plan = plan_of(folder / "by_function.py", world_size=8)
    assert plan.values["data.batch_size"] == 4 * 8 * 2
    assert plan.values["trainer.max_grad_norm"] == 0.5
    assert finding(plan, "gradient_clipping").where == "settings.py:3"
    assert finding(plan, "train_batch_size").where == "19"
    # As DeepSpeed would take the same optimizer from a configuration.
    same = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 0, "overlap_comm": True},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
    }
    alone = translate(same, Options(world_size=8))
    assert (
        plan.values.items()
        >= {
            key: value for key, value in alone.values.items() if key.startswith("optimizer.")
        }.items()
    )
    assert plan.choices["schedule"] == "cosine"
    assert plan.values["schedule.warmup_steps"] == 5
    assert finding(plan, "loss / ...").verdict == "yours"


def test_an_argument_that_is_changed_under_a_condition_is_not_known(folder):
    change = "import elsewhere\nif elsewhere.small():\n    args.stage = 3\nconfig = make"
    Path("by_function.py").write_text(BY_FUNCTION.replace("config = make", change))
    names = [fact.name for fact in plan_of(folder / "by_function.py", world_size=2).facts]
    assert names == ["zero_optimization.stage"]


def test_the_number_of_processes_is_one_question(folder):
    facts = plan_of(folder / "by_function.py").facts
    assert [(fact.name, fact.value) for fact in facts] == [("world_size", "N")]
    plan = plan_of(folder / "by_function.py", settings={"world_size": "2"})
    assert plan.facts == ()
    assert plan.values["data.batch_size"] == 16
    line = "deepspeed --num_gpus 2 by_function.py --batch 8 --stage 2 --offload"
    plan = plan_of("", line)
    assert plan.values["data.batch_size"] == 32
    assert plan.choices["strategy"] == "fsdp"


@pytest.mark.parametrize(
    ("more", "key", "verdict"),
    [
        ("from deepspeed.pipe import PipelineModule\nPipelineModule(layers=[])", "pipe", "refused"),
        ("deepspeed.moe.layer.MoE(hidden_size=4)", "moe.layer.MoE", "refused"),
        ("with deepspeed.zero.Init():\n    pass", "zero.Init", "performance-only"),
        ("with deepspeed.zero.GatheredParameters([]):\n    pass", "zero.Gather", "yours"),
        ("deepspeed.init_inference(engine)", "init_inference", "yours"),
        ("deepspeed.compression.compress.init_compression(engine)", "compression", "refused"),
        ("deepspeed.checkpointing.configure(None)", "checkpointing", "performance-only"),
        ("deepspeed.comm.barrier()", "comm.barrier", "yours"),
        ("deepspeed.tomorrow(1)", "tomorrow", "refused"),
        ("engine.train_batch()", "engine.train_batch", "refused"),
        ("engine.load_checkpoint('x')", "engine.load_checkpoint", "exact"),
        ("engine.get_lr()", "engine.get_lr", "yours"),
        ("deepspeed.initialize(model=None, config={})", "deepspeed.initialize (6)", "refused"),
    ],
)
def test_every_call_of_deepspeed_has_a_verdict_with_its_line(folder, more, key, verdict):
    text = (
        "import deepspeed, torch\nmodel = torch.nn.Linear(2, 2)\n"
        "engine = deepspeed.initialize(\n"
        f"    model=model, model_parameters=model.parameters(), config={CONFIG!r}\n)[0]\n{more}\n"
    )
    Path("one.py").write_text(text)
    found = [f for f in plan_of(Path("one.py")).findings if key in f.key]
    assert [f.verdict for f in found] == [verdict]
    assert found[0].line >= 6


def test_what_hangs_on_a_condition_that_nobody_can_tell_is_asked_for(folder):
    text = (
        "import deepspeed\nfrom elsewhere import big\n"
        f"config = {CONFIG!r}\n"
        "if big():\n    config['zero_optimization']['stage'] = 3\n"
        "config['gradient_clipping'] = big()\n"
        "deepspeed.initialize(model=None, config=config)\n"
    )
    Path("one.py").write_text(text)
    facts = plan_of(Path("one.py")).facts
    assert [fact.name for fact in facts] == ["zero_optimization.stage", "gradient_clipping"]
    stated = {"zero_optimization.stage": "3", "gradient_clipping": "0.5"}
    plan = plan_of(Path("one.py"), settings=stated)
    assert plan.facts == ()
    assert plan.choices["strategy"] == "fsdp"
    assert plan.values["trainer.max_grad_norm"] == 0.5


BAD = {
    "import deepspeed\ndeepspeed.init_inference(None)\n": "only infers",
    "import deepspeed\nfrom transformers import Trainer\n": "by Hugging Face's Trainer",
    "import deepspeed\nfrom accelerate import Accelerator\n": "trains by accelerate",
    "import deepspeed\nprint('x'": "cannot parse it",
    "import deepspeed\nx = 1\n": "makes no engine",
    BY_ARGUMENTS.replace("args=args,", "args=args, config={},").replace(
        "return parser.parse_args()", "return parser.parse_args(['x'])"
    ): "DeepSpeed stops there",
}


@pytest.mark.parametrize("text", BAD, ids=lambda text: BAD[text])
def test_what_trains_nothing_here_is_one_sentence_with_a_next_move(folder, text, capsys):
    Path("bad.py").write_text(text)
    line = "deepspeed bad.py --deepspeed_config ds.json"
    args = ["--command", line] if "stops" in BAD[text] else ["bad.py"]
    assert main(["translate", *args]) == 2
    said = capsys.readouterr().err
    assert BAD[text] in said
    assert "; " in said
    assert "Traceback" not in said


def test_a_setting_that_nothing_hangs_on_is_refused(folder):
    with pytest.raises(ConfigError, match="nothing of this script hangs on it"):
        plan_of(folder / "by_function.py", world_size=2, settings={"optimiser.lr": "1"})


def test_reading_executes_nothing(folder):
    Path("by_arguments.py").write_text("open('ran', 'w')\n" + BY_ARGUMENTS)
    assert ast.parse(Path("by_arguments.py").read_text())
    plan_of(folder / "by_arguments.py")
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("for key in read():\n    config[key] = 1", "config[key]"),
        ("config.update(read())", "config.update(read())"),
        ("del config[read()]", "del config[read()]"),
        ("if read():\n    del config['optimizer']", "del config['optimizer']"),
    ],
)
def test_a_change_whose_key_cannot_be_told_is_refused_by_name(folder, change, key):
    call = "deepspeed.initialize(model=None, config=config)\n"
    text = f"import deepspeed\nfrom elsewhere import read\nconfig = {CONFIG!r}\n{change}\n{call}"
    Path("one.py").write_text(text)
    assert finding(plan_of(Path("one.py")), key).verdict == "refused"
    told = text.replace(change, "del config['optimizer']\nconfig.update(gradient_clipping=2.0)")
    Path("one.py").write_text(told)
    plan = plan_of(Path("one.py"))
    assert plan.values["trainer.max_grad_norm"] == 2.0
    assert not [f for f in plan.findings if f.key == "optimizer.type" and f.given]


def test_a_script_that_is_too_long_to_follow_says_so(folder):
    text = "\n".join(["import deepspeed, torch", *["x = 1"] * 21_000, BY_ARGUMENTS])
    Path("long.py").write_text(BY_ARGUMENTS + "\n".join(["x = 1"] * 21_000))
    plan = plan_of(Path("long.py"), settings={"deepspeed_config": "ds.json"})
    assert any("more statements than are followed" in note for note in plan.notes)
    Path("late.py").write_text(text)
    with pytest.raises(ConfigError, match="where reading does not get to"):
        plan_of(Path("late.py"))


LOOP = """
for x in loader:
    engine.backward(engine(x))
    engine.step()
"""
MADE = "engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), {})\n"


def read_script(folder: Path, text: str, **named) -> Plan:
    (folder / "train.py").write_text(f"import json, os, deepspeed, torch\n{text}{LOOP}")
    return plan_of(folder / "train.py", **named)


WRITES = """\
def write(rate):
    config = json.load(open("ds.json"))
    config["optimizer"]["params"]["lr"] = rate
    path = os.path.join("/tmp", "made.json")
    WRITE
    return path

"""


@pytest.mark.parametrize(
    "write",
    [
        "with open(path, 'w') as file:\n        json.dump(config, file, indent=2)",
        "with open(path, 'w') as file:\n        file.write(json.dumps(config))",
        "if torch.distributed.get_rank() == 0:\n        json.dump(config, open(path, 'w'))",
    ],
)
def test_a_configuration_that_the_script_writes_is_read_as_it_writes_it(folder, write):
    text = WRITES.replace("WRITE", write) + MADE.format("config=write(0.25)")
    plan = read_script(folder, text)
    assert not plan.facts
    assert plan.values["optimizer.lr"] == 0.25
    assert "in the script, which writes it" in plan.taken_for
    assert finding(plan, "zero_optimization.stage").file == "ds.json"


def test_a_file_that_the_script_changes_counts_before_the_file_of_the_line(folder):
    text = """\
path = "ds.json"
config = json.load(open(path))
config["optimizer"]["params"]["lr"] = 0.125
if os.path.exists(path):
    json.dump(config, open(path, "w"))
"""
    plan = read_script(folder, text + MADE.format("config=path"))
    assert plan.values["optimizer.lr"] == 0.125
    unsure = text.replace("os.path.exists(path)", "torch.cuda.is_available()")
    [fact] = read_script(folder, unsure + MADE.format("config=path")).facts
    assert fact.name == "deepspeed_config"
    assert "line 6 writes it" in fact.look


def test_a_configuration_that_stands_in_a_text_is_read(folder):
    text = f"TEXT = '''{json.dumps(CONFIG)}'''\n"
    loaded = read_script(folder, text + MADE.format("config=json.loads(TEXT)"))
    written = "with open('other.json', 'w') as file:\n    file.write(TEXT)\n"
    plan = read_script(folder, text + written + MADE.format("config='other.json'"))
    assert plan.values == loaded.values
    assert plan.values["optimizer.lr"] == CONFIG["optimizer"]["params"]["lr"]


@pytest.mark.parametrize(
    "path",
    [
        "os.path.join(os.path.dirname(os.path.abspath(__file__)), 'deep', 'ds.json')",
        "str(Path(__file__).resolve().parent / 'deep' / 'ds.json')",
        "'deep/xx.json'.replace('xx', 'ds')",
    ],
)
def test_a_path_beside_the_script_is_followed(folder, path):
    (folder / "deep").mkdir()
    (folder / "deep" / "ds.json").write_text(json.dumps(CONFIG | {"gradient_clipping": 0.5}))
    plan = read_script(folder, "from pathlib import Path\n" + MADE.format(f"config={path}"))
    assert plan.values["trainer.max_grad_norm"] == 0.5


def test_the_path_that_a_script_takes_out_of_its_arguments_is_given_once(folder):
    text = """\
import argparse
parser = argparse.ArgumentParser()
parser = deepspeed.add_config_arguments(parser=parser)
args = parser.parse_args()
config = json.load(open(args.deepspeed_config))
del args.deepspeed_config
"""
    (folder / "train.py").write_text(
        f"import json, deepspeed\n{text}{MADE.format('args=args, config=config')}{LOOP}"
    )
    plan = plan_of("", "deepspeed train.py --deepspeed_config ds.json")
    assert not plan.facts
    assert plan.values["data.micro_batch_size"] == 4
    assert finding(plan, "zero_optimization.stage").file == "ds.json"


def test_a_copy_of_a_dictionary_leaves_the_first_as_it_is(folder):
    text = """\
import copy
first = json.load(open("ds.json"))
second = copy.deepcopy(first)
second["optimizer"]["params"]["lr"] = 9.0
"""
    plan = read_script(folder, text + MADE.format("config=first"))
    assert plan.values["optimizer.lr"] == CONFIG["optimizer"]["params"]["lr"]


def test_an_optimizer_that_reading_does_not_get_to_is_asked_for(folder):
    made = MADE.format("config='ds.json', optimizer=wrap(net)")
    plan = read_script(folder, made)
    assert [fact.name for fact in plan.facts] == ["optimizer.type", "optimizer.params.lr"]
    assert finding(plan, "optimizer").verdict == "dead"
    stated = {"optimizer.type": "Adam", "optimizer.params.lr": "0.5"}
    plan = read_script(
        folder, MADE.format("config='ds.json', optimizer=wrap(net)"), settings=stated
    )
    assert plan.values["optimizer.lr"] == 0.5


def test_a_scheduler_that_is_handed_over_counts_before_the_configuration(folder):
    config = CONFIG | {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}}}
    (folder / "ds.json").write_text(json.dumps(config))
    own = "opt = torch.optim.SGD(net.parameters(), lr=0.1)\nown = {}\n"
    made = MADE.format("config='ds.json', optimizer=opt, lr_scheduler=own")
    torchs = read_script(folder, own.format("torch.optim.lr_scheduler.StepLR(opt, 3)") + made)
    assert torchs.choices["schedule"] == "torch"
    assert "schedule.warmup_steps" not in torchs.values
    assert finding(torchs, "scheduler").verdict == "dead"
    assert finding(torchs, "optimizer").verdict == "dead"
    kind = (
        "deepspeed.runtime.lr_schedules.WarmupDecayLR(opt, warmup_num_steps=9, total_num_steps=99)"
    )
    theirs = read_script(folder, own.format(kind) + made)
    assert theirs.values["schedule.warmup_steps"] == 9
    unread = read_script(folder, own.format("make(opt)") + made)
    assert finding(unread, "lr_scheduler").verdict == "refused"
    assert not [f for f in unread.findings if f.key == "scheduler.type"]


def test_the_adam_of_transformers_has_its_own_defaults(folder):
    text = "from transformers import AdamW\nown = AdamW(net.parameters(), lr=0.1)\n"
    plan = read_script(folder, text + MADE.format("config='ds.json', optimizer=own"))
    assert plan.values["optimizer.weight_decay"] == 0.0
    assert plan.values["optimizer.eps"] == 1e-6
    assert finding(plan, "transformers.AdamW").verdict == "approximate"


def test_groups_of_parameters_are_told_where_the_engine_is_given_them(folder):
    text = "groups = [{'params': net.a, 'weight_decay': 0.0}, {'params': net.b}]\n"
    made = MADE.replace("net.parameters()", "groups").format("config='ds.json'")
    assert finding(read_script(folder, text + made), "optimizer.params").verdict == "refused"


def test_a_condition_is_asked_for_rather_than_what_the_script_does_on_it(folder):
    text = """\
config = json.load(open("ds.json"))
if settings.cut:
    config["zero_optimization"] = {"stage": 3}
"""
    made = text + MADE.format("config=config")
    [fact] = read_script(folder, made).facts
    assert fact.name == "settings.cut"
    plan = read_script(folder, made, settings={"settings.cut": "true"})
    assert finding(plan, "zero_optimization.stage").value == 3
    plan = read_script(folder, made, settings={"settings.cut": "false"})
    assert finding(plan, "zero_optimization.stage").value == 2


def test_a_loop_over_a_known_list_is_walked_for_each(folder):
    text = """\
config = json.load(open("ds.json"))
for block, key in (("bf16", "enabled"), ("zero_optimization", "overlap_comm")):
    config.setdefault(block, {})[key] = True
"""
    plan = read_script(folder, text + MADE.format("config=config"))
    assert plan.choices["precision"] == "bf16_true"
    assert finding(plan, "zero_optimization.overlap_comm").value is True


def test_an_engine_that_is_made_on_a_condition_alone_is_asked_for_by_it(folder, capsys):
    text = """\
import argparse
parser = argparse.ArgumentParser()
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
if args.deepspeed:
    if net.fits:
        amp.initialize(net)
    else:
        MADE
else:
    engine = net
"""
    made = MADE.format("config='ds.json'")
    text = text.replace("MADE", made.strip())
    plan = read_script(folder, text)
    assert [(fact.name, fact.value) for fact in plan.facts] == [
        ("args.deepspeed", "true"),
        ("net.fits", "false"),
    ]
    assert not plan.findings
    assert main(["translate", "train.py"]) == 13
    assert "verdict" not in capsys.readouterr().out
    stated = {"args.deepspeed": "true", "net.fits": "false"}
    plan = read_script(folder, text, settings=stated)
    assert plan.values["data.micro_batch_size"] == 4
    line = plan_of("", "deepspeed train.py --deepspeed", settings={"net.fits": "false"})
    assert line.values["data.micro_batch_size"] == 4


def test_a_file_that_has_no_part_in_the_configuration_is_not_named_for_it(folder):
    text = "other = json.load(open(args.vocabulary))\n"
    [fact] = read_script(folder, text + MADE.format("config=settings.deepspeed")).facts
    assert fact.look == "the file or the values that the script makes of settings.deepspeed"


def test_modules_that_are_not_read_are_one_note_for_each_reason(folder):
    for number in range(9):
        (folder / f"part{number}.py").write_text("def x(:\n")
    names = ", ".join(f"part{number}" for number in range(9))
    text = f"import {names}\n" + MADE.format("config='ds.json'")
    notes = [note for note in read_script(folder, text).notes if note.startswith("not read")]
    assert len(notes) == 9  # each is wrong at its own place
    many = [f"p{number}" for number in range(60)]
    for name in many:
        (folder / f"{name}.py").write_text("x = 1\n")
    text = f"import {', '.join(many)}\n" + MADE.format("config='ds.json'")
    [note] = [note for note in read_script(folder, text).notes if note.startswith("not read")]
    assert " and 16 more: the project is larger than is read" in note


def test_what_a_script_asks_for_is_stated_beside_its_launch_file(folder):
    text = "if settings.cut:\n    engine, *_ = deepspeed.initialize(model=net, config='ds.json')\n"
    (folder / "train.py").write_text(f"import deepspeed\nsettings = None\n{text}{LOOP}")
    (folder / "run.sh").write_text("deepspeed --num_gpus 2 train.py\n")
    plan = plan_of(folder / "run.sh", settings={"settings.cut": "true"})
    assert plan.values["data.micro_batch_size"] == 4
    with pytest.raises(ConfigError, match=r"--set optimizer.params.lrr: nothing of this job"):
        plan_of(folder / "run.sh", settings={"optimizer.params.lrr": "1"})


def test_the_condition_between_a_file_and_a_dictionary_is_asked_for(folder):
    text = """\
path = os.environ.get("CONFIG")
if path:
    config = json.load(open(path))
else:
    config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}}
"""
    made = text + MADE.format("config=config")
    [fact] = read_script(folder, made).facts
    assert (fact.name, fact.line) == ("path", 3)
    plan = read_script(folder, made, settings={"path": "false"})
    assert plan.values["data.micro_batch_size"] == 2


def test_an_engine_that_nothing_steps_is_told(folder):
    text = "import deepspeed\n" + MADE.format("config='ds.json'")
    (folder / "train.py").write_text(text)
    assert any("nothing steps the engine" in note for note in plan_of(folder / "train.py").notes)
    trainer = "import transformers\ntransformers.Trainer(model=engine).train()\n"
    (folder / "train.py").write_text(text + trainer)
    plan = plan_of(folder / "train.py")
    assert finding(plan, "Trainer").verdict == "refused"
    assert not any("nothing steps the engine" in note for note in plan.notes)


def test_a_rate_that_is_made_elsewhere_is_told(folder):
    text = """\
from elsewhere import cosine_lr, load
own = torch.optim.SGD(net.parameters(), lr=0.1)
load(own)
scheduler = cosine_lr(own, 0.1, 10)
"""
    plan = read_script(folder, text + MADE.format("config='ds.json', optimizer=own"))
    assert finding(plan, "cosine_lr").verdict == "refused"
    assert not [f for f in plan.findings if f.key == "load"]


def test_a_script_that_speaks_of_the_engine_alone_is_not_one(folder, capsys):
    text = '"""Instead of deepspeed.initialize()."""\nimport torch\n# deepspeed.initialize(x)\n'
    (folder / "train.py").write_text(text)
    assert main(["translate", "train.py"]) == 2
    assert "it speaks of DeepSpeed, and never calls deepspeed.ini" in capsys.readouterr().err
    (folder / "run.sh").write_text("deepspeed --num_gpus 2 train.py\n")
    [plan] = work_of(folder / "run.sh", TranslationRequest()).translate_jobs()
    assert not plan.facts


def test_auto_is_dropped_where_deepspeed_drops_it_and_asked_for_elsewhere(folder):
    config = CONFIG | {
        "train_batch_size": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "sub_group_size": "auto"},
    }
    (folder / "ds.json").write_text(json.dumps(config))
    plan = read_script(folder, MADE.format("config='ds.json'"))
    [fact] = plan.facts
    assert (fact.name, fact.look) == (
        "train_batch_size",
        'it is "auto" there: the value that the run has',
    )
    assert finding(plan, "bf16.enabled").value is False
    assert "DeepSpeed drops" in finding(plan, "bf16.enabled").why


def test_the_size_of_a_job_is_its_launchers_whatever_a_file_exports(folder):
    made = "import os\nimport deepspeed\n" + MADE.format(
        "config={'train_batch_size': 4 * int(os.environ['WORLD_SIZE']), "
        "'train_micro_batch_size_per_gpu': 4}"
    )
    (folder / "train.py").write_text(f"{made}{LOOP}")
    for line in ("deepspeed --num_gpus 2", "torchrun --nproc_per_node 2"):
        (folder / "run.sh").write_text(f"export WORLD_SIZE=8\n{line} train.py\n")
        assert plan_of(folder / "run.sh").values["data.batch_size"] == 8
