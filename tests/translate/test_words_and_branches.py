"""Idioms that decide on numbers past argparse: fire, match, exec, options of param_groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from torsh_trainer.translate.base import TranslationRequest
from torsh_trainer.translate.launch.translator import LaunchTranslator

LOOP = """\
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    for x in data:
        engine.backward(engine(x).sum())
        engine.step()
"""
HEAD = "import deepspeed\nimport fire\nimport torch\n"
FIRE = f"""{HEAD}
def train(lr: float = 1e-4, batch_size=8, kind="SGD"):
    model = torch.nn.Linear(4, 2)
    optimizer = {{"type": kind, "params": {{"lr": lr}}}}
    config = {{"train_micro_batch_size_per_gpu": batch_size, "optimizer": optimizer}}
{LOOP}
if __name__ == "__main__":
    fire.Fire(train)
"""
MATCH = f"""{HEAD}
def train(kind="CASE"):
    model = torch.nn.Linear(4, 2)
    match kind:
        case "big" | "huge":
            lr = 0.3
        case "small":
            lr = 0.1
        case _:
            lr = 0.2
    config = {{
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {{"type": "SGD", "params": {{"lr": lr}}}},
    }}
{LOOP}
train()
"""


@pytest.fixture
def plan_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(script: str, words: str = ""):
        Path("train.py").write_text(script)
        line = f"deepspeed --num_gpus 2 train.py {words}".strip()
        [plan] = LaunchTranslator().translate_jobs("", TranslationRequest(command=line))
        return plan

    return run


@pytest.mark.parametrize(
    ("words", "rate", "size"),
    [("", 1e-4, 8), ("--lr 0.1", 0.1, 8), ("--lr=3e-4 --batch-size 2", 3e-4, 2)],
)
def test_words_are_those_of_fire(plan_of, words, rate, size):
    plan = plan_of(FIRE, words)
    assert not plan.facts
    assert plan.values["optimizer.lr"] == rate
    assert plan.values["data.micro_batch_size"] == size


@pytest.mark.parametrize("kind", ["big", "huge", "small", "other"])
def test_a_case_is_that_which_python_takes(plan_of, kind):
    names: dict = {"kind": kind}
    body = MATCH.split("Linear(4, 2)\n")[1].split("    config")[0]
    exec("\n".join(line[4:] for line in body.splitlines()), names)
    plan = plan_of(MATCH.replace("CASE", kind))
    assert not plan.facts
    assert plan.values["optimizer.lr"] == names["lr"]


def test_a_subject_that_cannot_be_told_is_asked_for(plan_of):
    plan = plan_of(
        MATCH.replace('train(kind="CASE")', "train(kind=None)").replace(
            "train()\n", "train(input())\n"
        )
    )
    [fact] = plan.facts
    assert fact.name == "optimizer.params.lr"


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("    config = ", "    exec(text())\n    config = ", "exec(text())"),
        (
            "        engine.step()\n",
            (
                "        engine.step()\n        for g in engine.optimizer.param_groups:\n"
                "            g['weight_decay'] = 0.1\n"
            ),
            "param_group.weight_decay",
        ),
    ],
)
def test_what_changes_a_value_past_reading_is_refused(plan_of, old, new, key):
    script = MATCH.replace("CASE", "big")
    assert key not in {finding.key for finding in plan_of(script).findings}
    [said] = [f for f in plan_of(script.replace(old, new, 1)).findings if f.key == key]
    assert said.verdict == "refused"
