"""Words of a command line are for a script what argparse itself makes of them."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from torsh_trainer.translate.base import TranslationRequest
from torsh_trainer.translate.launch.translator import LaunchTranslator

SCRIPT = """
import argparse
import horovod.torch as hvd
import torch

parser = argparse.ArgumentParser()
{}
args = parser.parse_args()
hvd.init()
model = torch.nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr={})
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
torch.nn.functional.cross_entropy(model(x), y).backward()
optimizer.step()
"""
LR = "parser.add_argument('-l', '--learning-rate', type=float, default=0.5)"
RATES = "parser.add_argument('--rates', type=float, nargs='+', default=[0.5, 0.25])"
WARM = "parser.add_argument('--warm', action='store_true')"
SWITCH = "parser.add_argument('--fast', action=argparse.BooleanOptionalAction, default=True)"
MODE = "parser.add_argument('--mode', nargs='?', const='0.125', default='0.5')"

TRUTH = (
    "def truth(word):\n    return word.lower() in ('yes', 'true')\n"
    "parser.add_argument('--warm', type=truth, default='no')"
)
SHORT_TRUTH = "parser.add_argument('--warm', type=lambda word: word == 'yes', default=False)"
BOOL = "parser.add_argument('--warm', type=bool, default=False)"
PAIR = (
    "parser.add_argument('--warm', dest='warm', action='store_true', default=True)\n"
    "parser.add_argument('--cold', dest='warm', action='store_false')"
)


@pytest.mark.parametrize(
    ("declared", "rate", "words"),
    [
        (LR, "args.learning_rate", ""),
        (LR, "args.learning_rate", "--learning-rate 0.1"),
        (LR, "args.learning_rate", "--learning-rate=0.1"),
        (LR, "args.learning_rate", "--learn 0.1"),
        (LR, "args.learning_rate", "--learning-r=0.1"),
        (LR, "args.learning_rate", "-l 0.1"),
        (LR, "args.learning_rate", "-l0.1"),
        (LR, "args.learning_rate", "--learning-rate 0.1 --learning-rate 0.2"),
        (RATES, "args.rates[1]", ""),
        (RATES, "args.rates[1]", "--rates 0.1 0.2 0.3"),
        (RATES, "args.rates[0]", "--rat 0.4"),
        (WARM, "0.1 if args.warm else 0.2", ""),
        (WARM, "0.1 if args.warm else 0.2", "--warm"),
        (WARM, "0.1 if args.warm else 0.2", "--wa"),
        (SWITCH, "0.1 if args.fast else 0.2", ""),
        (SWITCH, "0.1 if args.fast else 0.2", "--no-fast"),
        (SWITCH, "0.1 if args.fast else 0.2", "--fast"),
        (MODE, "float(args.mode)", "--mode 0.25"),
        (MODE, "float(args.mode)", "--mode"),
        (TRUTH, "0.1 if args.warm else 0.2", ""),
        (TRUTH, "0.1 if args.warm else 0.2", "--warm yes"),
        (TRUTH, "0.1 if args.warm else 0.2", "--warm no"),
        (SHORT_TRUTH, "0.1 if args.warm else 0.2", ""),
        (SHORT_TRUTH, "0.1 if args.warm else 0.2", "--warm yes"),
        (SHORT_TRUTH, "0.1 if args.warm else 0.2", "--warm no"),
        (BOOL, "0.1 if args.warm else 0.2", ""),
        (BOOL, "0.1 if args.warm else 0.2", "--warm False"),
        (PAIR, "0.1 if args.warm else 0.2", ""),
        (PAIR, "0.1 if args.warm else 0.2", "--cold"),
        (PAIR, "0.1 if args.warm else 0.2", "--cold --warm"),
        (PAIR, "0.1 if args.warm else 0.2", "--warm --cold"),
        (LR, "args.learning_rate", "-l 0.3 --learning-rate 0.1"),
        (LR, "args.learning_rate", "--learning-rate 0.1 -l 0.3"),
    ],
)
def test_they_are_what_argparse_makes_of_them(tmp_path, monkeypatch, declared, rate, words):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT.format(declared, rate))
    parser = argparse.ArgumentParser()
    exec(declared, {"parser": parser, "argparse": argparse})
    expected = eval(rate, {"args": parser.parse_args(words.split())})
    line = f"mpirun -np 2 python train.py {words}".strip()
    [plan] = LaunchTranslator().translate_jobs("", TranslationRequest(command=line))
    assert not plan.facts
    assert plan.values["optimizer.lr"] == expected
    own = [finding for finding in plan.findings if finding.rule == "script.own"]
    assert all("the script reads it" in finding.why for finding in own)
