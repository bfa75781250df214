"""Words of a command line are for a script's command what click makes of them."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from torsh_trainer.translate.base import TranslationRequest
from torsh_trainer.translate.launch.translator import LaunchTranslator

COMMAND = """
@click.command()
@click.option("--lr", "-l", default=0.5, help="rate")
@click.option("--weight-decay", "decay", type=float, default="0.25", show_default=True)
@click.option("--warm", is_flag=True)
@click.option("--cool/--no-cool", "-c/-C", default=True)
@click.option("--maybe", type=bool, default=False)
@click.option("--fast", "mode", flag_value="fast", default="slow")
@click.option("--steps", type=click.IntRange(1, 100), default=4)
@click.option("--betas", nargs=2, type=float, default=(0.5, 0.25))
@click.option("--Kind-Of", type=click.Choice(["a", "b"]), default="a")
@click.option("--nothing", type=float)
@click.argument("folder", default="data")
def main(lr, decay, warm, cool, maybe, mode, steps, betas, kind_of, nothing, folder):
    {body}
"""
SCRIPT = """
import click
import horovod.torch as hvd
import torch
{command}

if __name__ == "__main__":
    main()
"""
BODY = """hvd.init()
    model = torch.nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr={rate})
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()"""


def plan_of(words: str):
    line = f"mpirun -np 2 python train.py {words}".strip()
    [plan] = LaunchTranslator().translate_jobs("", TranslationRequest(command=line))
    return plan


@pytest.mark.parametrize(
    ("rate", "words"),
    [
        ("lr", ""),
        ("lr", "--lr 0.1"),
        ("lr", "-l 0.1"),
        ("lr", "--lr=0.1 --lr 0.2"),
        ("decay", ""),
        ("decay", "--weight-decay 0.1"),
        ("0.1 if warm else 0.2", ""),
        ("0.1 if warm else 0.2", "--warm"),
        ("0.1 if cool else 0.2", ""),
        ("0.1 if cool else 0.2", "--no-cool"),
        ("0.1 if cool else 0.2", "-C"),
        ("0.1 if cool else 0.2", "--no-cool --cool"),
        ("0.1 if cool else 0.2", "--cool --no-cool"),
        ("0.1 if maybe else 0.2", ""),
        ("0.1 if maybe else 0.2", "--maybe yes"),
        ("0.1 if maybe else 0.2", "--maybe off"),
        ("0.1 if mode == 'fast' else 0.2", ""),
        ("0.1 if mode == 'fast' else 0.2", "--fast"),
        ("1 / steps", ""),
        ("1 / steps", "--steps 8"),
        ("betas[1]", ""),
        ("betas[1]", "--betas 0.1 0.2"),
        ("0.1 if kind_of == 'b' else 0.2", "--Kind-Of b"),
        ("0.1 if nothing is None else 0.2", ""),
        ("nothing", "--nothing 0.3"),
    ],
)
def test_they_are_what_click_makes_of_them(tmp_path, monkeypatch, rate, words):
    monkeypatch.chdir(tmp_path)
    command = COMMAND.format(body=BODY.format(rate=rate))
    Path("train.py").write_text(SCRIPT.format(command=command))
    names = {"click": click}
    exec(COMMAND.format(body=f"return {rate}"), names)
    expected = names["main"].main(words.split(), standalone_mode=False)
    plan = plan_of(words)
    assert not plan.facts
    assert plan.values["optimizer.lr"] == expected
    own = [finding for finding in plan.findings if finding.rule == "script.own"]
    assert all("the script reads it" in finding.why for finding in own)


@pytest.mark.parametrize(
    "option",
    [
        '"--lr", type=float, required=True',
        '"--lr", type=float, prompt=True',
        '"--lr", type=float, default=0.1, envvar="LR"',
        '"--lr", type=float, default=0.1, callback=check',
        '"--lr", type=Rate(), default="0.1"',
    ],
)
def test_what_reading_does_not_tell_is_asked_for(tmp_path, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    body = BODY.format(rate="lr")
    command = f"@click.command()\n@click.option({option})\ndef main(lr):\n    {body}\n"
    Path("train.py").write_text(SCRIPT.format(command=command))
    [fact] = plan_of("").facts
    assert (fact.name, fact.used) == ("optimizer.lr", "optimizer.lr=lr (train.py:10)")
