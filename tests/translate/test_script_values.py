"""Values that scripts keep in classes, records, files of YAML and the environment; and how long a
script trains by its loops."""

from __future__ import annotations

import functools
import json
import os
import types
from pathlib import Path

import pytest

from torsh_trainer.translate.base import TranslationRequest
from torsh_trainer.translate.engines import work_of
from torsh_trainer.translate.plan import Plan

TRAINS = """\
net = torch.nn.Linear(4, 4)
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config={
    "train_micro_batch_size_per_gpu": BATCH,
    "optimizer": {"type": "AdamW", "params": {"lr": RATE, "torch_adam": True}},
})
for epoch in range(3):
    for batch in loader:
        engine.backward(engine(batch).sum())
        engine.step()
"""
IMPORTS = """\
import argparse, functools, os, sys, types
import deepspeed
import torch
"""
"""What a script is made of: ``SOURCE`` makes RATE and BATCH in between."""

SOURCES = {
    "a class": "class C:\n    lr = 3e-4\n    batch = 4 * 2\nRATE, BATCH = C.lr, C().batch",
    "a class within": "class C:\n    class opt:\n        lr = 3e-4\nRATE, BATCH = C.opt.lr, 8",
    "a base": "class B:\n    lr = 3e-4\nclass C(B):\n    batch = 8\nRATE, BATCH = C.lr, C.batch",
    "set anew": (
        "class C:\n    lr = 1\nC.lr = 3e-4\nc = C()\nc.batch = 8\nRATE, BATCH = C.lr, c.batch"
    ),
    "a property": (
        "class C:\n    half = 1.5e-4\n"
        "    @property\n    def lr(self):\n        return 2 * self.half\n"
        "    @classmethod\n    def size(cls):\n        return cls.half and 8\n"
        "RATE, BATCH = C().lr, C.size()"
    ),
    "asked for by name": (
        "class C:\n    def __init__(self):\n        self.d = {'lr': 3e-4, 'batch': 8}\n"
        "    def __getattr__(self, name):\n        return self.d[name]\n"
        "c = C()\nRATE, BATCH = c.lr, getattr(c, 'batch')"
    ),
    "a namespace": "c = types.SimpleNamespace(lr=3e-4, batch=8)\nRATE, BATCH = c.lr, c.batch",
    "attributes": (
        "c = types.SimpleNamespace()\nvars(c).update({'lr': 3e-4})\nsetattr(c, 'batch', 8)\n"
        "RATE, BATCH = c.lr, c.batch"
    ),
    "items": (
        "c = types.SimpleNamespace(lr=1, batch=2)\n"
        "for k, v in {'lr': 3e-4, 'batch': 8}.items():\n    setattr(c, k, v)\n"
        "RATE, BATCH = c.lr, c.batch"
    ),
    "the environment": (
        "os.environ['SIZE'] = '8'\nRATE = float(os.environ.get('RATE', '3e-4'))\n"
        "BATCH = int(os.environ['SIZE'])"
    ),
    "a function half called": (
        "def times(a, b):\n    return a * b\nRATE = functools.partial(times, 1.5e-4)(2)\n"
        "BATCH = functools.partial(times, b=2)(4)"
    ),
    "a lambda": "double = lambda x: x * 2\nRATE, BATCH = double(1.5e-4), double(4)",
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in ("RATE", "SIZE"):
        os.environ.pop(name, None)
    return tmp_path


def plan_of(source: str, *, trains: str = TRAINS, name: str = "train.py", **asked) -> Plan:
    Path("train.py").write_text(f"{IMPORTS}{source}\n{trains}")
    [plan] = work_of(name, TranslationRequest(**asked)).translate_jobs()
    return plan


def value_of(plan: Plan, key: str):
    [found] = [one.value for one in plan.findings if one.key == key]
    return found


def run(source: str) -> tuple[float, int]:
    """What Python itself has for RATE and BATCH."""
    names = {"functools": functools, "os": os, "types": types, "__name__": "made"}
    exec(source, names)
    return names["RATE"], names["BATCH"]


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_values_are_those_that_python_has(source):
    plan = plan_of(source)
    assert not plan.facts
    read = plan.values["optimizer.lr"], plan.values["data.micro_batch_size"]
    assert read == run(source) == (3e-4, 8)


@pytest.mark.parametrize(
    "source",
    [
        "from settings import Base\nclass C(Base):\n    lr = 3e-4\nRATE, BATCH = C().lr, 8",
        "class C:\n    lr = 3e-4\n    if sys.argv:\n        lr = 1\nRATE, BATCH = C.lr, 8",
        "class C:\n    lr = 3e-4\nfor n in sys.path:\n    setattr(C, n, 1)\nRATE, BATCH = C.lr, 8",
        "c = types.SimpleNamespace(lr=3e-4)\nvars(c).update(more())\nRATE, BATCH = c.lr, 8",
        "class C:\n    lr = 3e-4\nif sys.path:\n    C.lr = 1\nRATE, BATCH = C.lr, 8",
        "RATE, BATCH = float(os.environ.get('SLURM_RATE', '3e-4')), 8",
        "RATE, BATCH = os.environ.get('RATE'), 8",
    ],
)
def test_what_another_may_have_set_is_asked_for(source):
    [fact] = plan_of(source).facts
    assert fact.name == "optimizer.params.lr"


def test_a_variable_that_nobody_sets_is_told_and_one_that_the_line_sets_counts():
    source = "RATE, BATCH = float(os.getenv('RATE', '3e-4')), int(os.environ.get('SIZE', 8))"
    plan = plan_of(source)
    assert any("defaults count: RATE, SIZE (--set RATE=VALUE" in note for note in plan.notes)
    plan = plan_of(source, settings={"SIZE": "2"})
    assert (plan.values["data.micro_batch_size"], plan.values["optimizer.lr"]) == (2, 3e-4)
    Path("run.sh").write_text("export SIZE=16\nRATE=1e-3 deepspeed --num_gpus 2 train.py\n")
    plan = plan_of(source, name="run.sh")
    assert (plan.values["data.micro_batch_size"], plan.values["optimizer.lr"]) == (16, 1e-3)
    assert not any("defaults count" in note for note in plan.notes)
    Path("run.sh").write_text("export SIZE=$(wc -l < x)\ndeepspeed --num_gpus 2 train.py\n")
    [fact] = plan_of(source, name="run.sh").facts
    assert fact.name == "train_micro_batch_size_per_gpu"


def test_omegaconf_is_read_as_it_reads():
    from omegaconf import OmegaConf

    Path("base.yaml").write_text("train: {lr: 1e-4, batch: 4, name: '${oc.env:USER}'}\n")
    Path("more.yaml").write_text("train:\n  batch: 8\n")
    source = (
        "from omegaconf import OmegaConf\n"
        "cfg = OmegaConf.merge(OmegaConf.load('base.yaml'), OmegaConf.load('more.yaml'), "
        "OmegaConf.from_cli())\nRATE, BATCH = cfg.train.lr, cfg['train'].batch"
    )
    real = OmegaConf.merge(OmegaConf.load("base.yaml"), OmegaConf.load("more.yaml"))
    plan = plan_of(source)
    assert plan.values["optimizer.lr"] == real.train.lr == 1e-4
    assert plan.values["data.micro_batch_size"] == real.train.batch == 8
    Path("run.sh").write_text("deepspeed --num_gpus 2 train.py train.lr=3e-4\n")
    assert plan_of(source, name="run.sh").values["optimizer.lr"] == 3e-4


def test_hydra_is_read_as_it_composes():
    from hydra import compose, initialize

    Path("conf/opt").mkdir(parents=True)
    Path("conf/config.yaml").write_text("defaults: [_self_, opt: slow]\nbatch: 8\nopt: {lr: 1}\n")
    Path("conf/opt/slow.yaml").write_text("lr: 1e-4\n")
    Path("conf/opt/fast.yaml").write_text("lr: 1e-3\n")
    source = 'import hydra\n@hydra.main(config_path="conf", config_name="config")\ndef main(cfg):\n'
    body = f"RATE, BATCH = cfg.opt.lr, cfg.batch\n{TRAINS}"
    source += "".join(f"    {line}\n" for line in body.splitlines()) + "main()\n"
    Path("run.sh").write_text("deepspeed --num_gpus 2 train.py opt=fast +batch=2\n")
    for name, words in (("train.py", []), ("run.sh", ["opt=fast", "batch=2"])):
        with initialize(
            version_base=None, config_path=os.path.relpath("conf", Path(__file__).parent)
        ):
            real = compose("config", overrides=words)
        plan = plan_of(source, trains="", name=name)
        assert plan.values["optimizer.lr"] == real.opt.lr
        assert plan.values["data.micro_batch_size"] == real.batch


def test_a_file_with_a_block_for_deepspeed_is_read_whole_by_a_script():
    """It is taken for accelerate's where it is translated by itself."""
    held = {"lr": 3e-4, "deepspeed_config": {"train_micro_batch_size_per_gpu": 8}}
    Path("c.json").write_text(json.dumps(held))
    source = "import json\nc = json.load(open('c.json'))\nRATE = c['lr']\n"
    source += "BATCH = c['deepspeed_config']['train_micro_batch_size_per_gpu']"
    assert plan_of(source).values["optimizer.lr"] == 3e-4


def test_a_key_that_the_script_keeps_there_for_itself_is_its_own():
    config = '{"train_micro_batch_size_per_gpu": 8, "block_size": 64}'
    trains = TRAINS.partition("config=")[0] + "config=config)\n"
    read = f"config = {config}\nT = config['block_size']"
    found = [one for one in plan_of(read, trains=trains).findings if one.key == "block_size"]
    assert [one.verdict for one in found] == ["yours"]
    with pytest.raises(Exception, match="knows no key 'block_size'"):
        plan_of(f"config = {config}", trains=trains)


def test_a_block_whose_switch_is_asked_for_is_not_called_dead():
    config = '{"train_micro_batch_size_per_gpu": 8, "fp16": {"enabled": on(), "loss_scale": 8}}'
    plan = plan_of("", trains=TRAINS.partition("config=")[0] + f"config={config})\n")
    [found] = [one for one in plan.findings if one.key == "fp16.loss_scale"]
    assert (found.verdict, "asked below" in found.why) == ("refused", True)


@pytest.mark.parametrize(
    "made", ["Args()", "Args", "types.SimpleNamespace(deepspeed_config='ds.json')"]
)
def test_arguments_may_be_any_object(made):
    Path("ds.json").write_text('{"train_micro_batch_size_per_gpu": 8}')
    source = f"class Args:\n    deepspeed_config = 'ds.json'\nargs = {made}"
    trains = TRAINS.partition("config=")[0] + "args=args)\n"
    assert plan_of(source, trains=trains).values["data.micro_batch_size"] == 8


@pytest.mark.parametrize(
    "made",
    [
        "functools.partial(torch.optim.SGD, lr=0.5)",
        "lambda parameters: torch.optim.SGD(parameters, lr=0.5)",
    ],
)
def test_what_makes_an_optimizer_may_be_handed_over(made):
    trains = TRAINS.replace("model=net,", f"model=net, optimizer={made},")
    plan = plan_of("RATE, BATCH = 1, 8", trains=trains)
    assert (plan.choices["optimizer"], plan.values["optimizer.lr"]) == ("sgd", 0.5)


# -- how long --------------------------------------------------------------------------------------

STEP = "engine.backward(engine(batch).sum())\n{}engine.step()\n"
LENGTHS = {
    "over data": ("for e in range(3):\n  for batch in loader:\n    S", "epochs", 3, "exact"),
    "twice over data": (
        "for a in range(2):\n for e in [1, 2, 3]:\n  for batch in loader:\n    S",
        *("epochs", 6, "exact"),
    ),
    "by index": (
        "for e in range(3):\n  for i in range(len(loader)):\n    batch = next(it)\n    S",
        *("epochs", 3, "exact"),
    ),
    "counting": ("for i in range(12):\n    batch = next(it)\n    S", "steps", 12, "exact"),
    "counting in rounds": (
        "for e in range(3):\n  for i in range(4):\n    batch = next(it)\n    S",
        *("steps", 12, "exact"),
    ),
    "once": ("for batch in torch.utils.data.DataLoader(d):\n    S", "epochs", 1, "exact"),
    "ended": (
        "for e in range(3):\n  for b in loader:\n    S\n    if done():\n      break",
        *("epochs", 3, "approximate"),
    ),
    "called by another file": ("def go():\n  for b in loader:\n    S", "epochs", None, "yours"),
    "handed": ("def go():\n  for b in loader:\n    S\nstart(go)", "epochs", 1, "exact"),
    "untold": ("for e in range(more()):\n  for batch in loader:\n    S", "epochs", None, "yours"),
    "while": ("while more():\n    batch = next(it)\n    S", "steps", None, "yours"),
    "twice": (
        "def go(b):\n  S\nfor e in range(3):\n  for b in l:\n    go(b)\nfor b in loader:\n  go(b)",
        *("epochs", None, "yours"),
    ),
}


@pytest.mark.parametrize(("loops", "key", "count", "verdict"), LENGTHS.values(), ids=LENGTHS)
def test_loops_say_how_long(loops, key, count, verdict):
    line = next(line for line in loops.splitlines() if line.strip() == "S")
    indent = line[: line.index("S")]
    text = loops.replace(line, indent + STEP.format(indent).rstrip())
    trains = TRAINS.partition("for epoch")[0] + text + "\n"
    plan = plan_of("RATE, BATCH = 1, 8", trains=trains)
    [found] = [one for one in plan.findings if one.key in ("epochs", "steps")]
    assert (found.key, found.verdict) == (key, verdict)
    assert plan.values.get(f"trainer.max_{key}") == count


def test_a_counter_of_rounds_is_not_known_in_a_loop():
    """Its first value decided whether a branch is taken, which then no round took."""
    source = "RATE, BATCH = 1, 8\nn = 0"
    trains = TRAINS.replace(
        "        engine.step()",
        "        n += 1\n        if n == 9:\n            engine.set_lr(2)\n        engine.step()",
    )
    assert value_of(plan_of(source, trains=trains), "engine.set_lr") is None


CURVE = """\
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
curve = transformers.{name}(optimizer, 5{end})
engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, lr_scheduler={handed}, config={{
    "train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": 2,
}})
for batch in loader:
    engine.backward(engine(batch).sum())
    engine.step()
    {then}
"""
CURVES = {
    "its end is told": ((", 90", "curve", ""), "num_training_steps", "approximate"),
    "its end is computed": ((", len(loader)", "curve", ""), "num_training_steps", "yours"),
    "the engine steps it": ((", 90", "curve", ""), "interval", "exact"),
    "both step it": ((", 90", "curve", "curve.step()"), "interval", "refused"),
    "twice an update": ((", 90", "None", "curve.step()"), "interval", "refused"),
    "nothing steps it": ((", 90", "None", ""), "interval", "refused"),
    "it ends nowhere": (("", "curve", ""), "num_training_steps", None),
}


@pytest.mark.parametrize(("given", "key", "verdict"), CURVES.values(), ids=CURVES)
def test_a_curve_of_transformers_says_where_it_ends_and_who_steps_it(given, key, verdict):
    end, handed, then = given
    name = "get_linear_schedule_with_warmup" if end else "get_constant_schedule_with_warmup"
    trains = CURVE.format(name=name, end=end, handed=handed, then=then)
    plan = plan_of("import transformers\nRATE, BATCH = 0.1, 8", trains=trains)
    assert {one.key: one.verdict for one in plan.findings}.get(key) == verdict


def test_what_nothing_calls_refuses_nothing():
    moe = "\ndef build():\n    return deepspeed.moe.layer.MoE(4)\n"
    found = plan_of(f"RATE, BATCH = 0.1, 8{moe}").findings
    assert [one.verdict for one in found if "moe" in one.key] == ["dead"]
    found = plan_of(f"RATE, BATCH = 0.1, 8{moe}build()").findings
    assert [one.verdict for one in found if "moe" in one.key] == ["refused"]


def test_a_batch_that_torch_would_refuse_is_refused():
    trains = TRAINS.replace("in loader", "in torch.utils.data.DataLoader(d, batch_size=16 / 2)")
    plan = plan_of("RATE, BATCH = 0.1, 8", trains=trains)
    assert value_of(plan, "DataLoader.batch_size") == 8.0
    [found] = [one for one in plan.findings if one.key == "DataLoader.batch_size"]
    assert found.verdict == "refused"


def test_the_size_that_the_launcher_sets_is_the_number_of_processes():
    source = (
        'RATE, BATCH = 0.1 * int(os.environ.get("WORLD_SIZE", 1)), int(os.environ["WORLD_SIZE"])'
    )
    plan = plan_of(source, world_size=4)
    assert value_of(plan, "optimizer.params.lr") == 0.4
    assert value_of(plan, "train_micro_batch_size_per_gpu") == 4
    assert plan_of(source).facts
