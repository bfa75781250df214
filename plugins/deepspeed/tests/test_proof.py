"""``verify --source``: the door, with real runs behind it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torsh_trainer import __main__ as door
from torsh_trainer.assemble import proving

pytestmark = pytest.mark.usefixtures("warm_interpreters")

CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
}


@pytest.fixture
def verify(tmp_path, monkeypatch, capfd):
    def run(*more: str, **changed: Any) -> tuple[int, str, dict[str, Any]]:
        monkeypatch.chdir(tmp_path)
        Path("ds_config.json").write_text(json.dumps({**CONFIG, **changed}, indent=1))
        words = ["verify", "--source", "ds_config.json", "--world-size", "1"]
        code = door.main([*words, "verify.dir=out", "verify.steps=3", *more])
        found = Path("out/verify.json")
        captured = capfd.readouterr()
        text = captured.out + captured.err
        return code, text, json.loads(found.read_text()) if found.exists() else {}

    return run


def test_a_translation_is_tried_against_the_engine_and_agrees(verify):
    code, text, content = verify("verify.ladder=[recipe]")
    assert code == 0, text
    (rung,) = content["rungs"]
    original, translation = rung["strategies"]
    assert (original["status"], translation["status"]) == ("reference", "agrees")
    assert translation["largest"]["loss"]["absolute"] == 0
    assert translation["largest"]["lr"]["absolute"] == 0
    assert len({row["lr"] for row in original["rows"][1:]}) > 1  # the file's own warm-up
    assert content["translation"]["mode"] == "exact"
    assert Path("out/verify.html").exists()
    for quantity in ("loss", "gradient norm", "learning rate", "parameters"):
        assert quantity in text


def test_a_recipe_lends_task_model_and_data_and_nothing_of_what_is_translated(verify):
    code, text, content = verify("+recipe=digits", "verify.ladder=[recipe]")
    assert code == 0, text
    assert content["recipe"] == "digits"
    _, translation = content["rungs"][0]["strategies"]
    assert translation["largest"]["loss"]["absolute"] == 0


def test_a_rule_that_is_switched_off_ends_with_12_and_its_name(verify):
    code, text, content = verify("verify.ladder=[sgd]", "precision.rounded_start=false")
    assert code == 12, text
    assert "parameters parts first, before the first step. Suspect: initialisation" in text
    assert "rules under suspicion: precision.bf16" in text
    assert content["translation"]["suspected_rules"]["sgd"][0] == "precision.bf16"


def test_what_has_no_translation_is_named_and_not_tried(verify):
    code, text, content = verify(optimizer={"type": "Lamb", "params": {"lr": 0.1}})
    assert (code, content) == (11, {})
    assert "optimizer.type: not in this release: LAMB" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("strategies=[single]",), "the two that are compared"),
        (("strategy=ddp",), "strategy=ddp means nothing to verify"),
        (("--world-size", "0"), "--world-size 0 is no number of processes"),
    ],
)
def test_what_means_nothing_beside_a_file_is_an_error(verify, words, said):
    code, text, _ = verify(*words)
    assert code == 2
    assert said in text


def test_without_the_plugin_one_error_names_it_and_how_to_get_it(verify, monkeypatch):
    monkeypatch.setattr(proving, "find_spec", lambda name: None)
    code, text, _ = verify()
    assert code == 1
    assert "torsh-trainer-deepspeed is not installed" in text
    assert "pip install torsh-trainer-deepspeed" in text
