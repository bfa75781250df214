"""Secrets on the command line: they reach what needs them, and no file and no page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.config.test_run import Recorder, train
from torsh_trainer.report import main as report

SECRETS = (
    "+vars.k=${oc.env:HF_TOKEN}",
    "+vars.again=before-${vars.k}",
    "+checkpoint.storage_options.password=hush-typed",
    "++checkpoint.storage_options.nested={key: hush-key, region: x}",
    "+vars.uri='postgresql://me:hush-url@host/db'",
)


@pytest.fixture
def run(door, home, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hush-environment")
    answer = door("+recipe=quick.yaml", *SECRETS, "hydra.run.dir=out", "logger.csv.enabled=true")
    assert answer.code == 0, answer.err
    assert "hush" not in answer.out + answer.err
    return home / "out"


def files_of(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file()]


def test_no_file_of_a_run_holds_a_secret(run, door):
    report([str(run)])
    answer = door("rerun", "out", "--dry-run", "+vars.x=1", *SECRETS[2:])
    assert [file for file in files_of(run) if b"hush" in file.read_bytes()] == []
    assert "hush" not in answer.out + answer.err
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["vars"]["k"] == "${oc.env:HF_TOKEN}"
    assert config["vars"]["again"] == "before-${vars.k}"
    assert config["vars"]["uri"] == "postgresql://me:***@host/db"
    assert config["checkpoint"]["storage_options"] == {
        "password": "***",
        "nested": {"key": "***", "region": "x"},
    }
    command = json.loads((run / "provenance.json").read_text())["command"]
    assert "++vars.k=${oc.env:HF_TOKEN}" in command
    assert any(word.endswith("storage_options.password=***") for word in command)


def test_a_rerun_asks_the_environment_again_and_for_what_was_not_kept(run, door, home, monkeypatch):
    refused = door("rerun", "out", "hydra.run.dir=again")
    assert refused.code == 2
    assert "secret in checkpoint.storage_options.password, which was not written" in refused.err
    monkeypatch.setenv("HF_TOKEN", "another")
    recorder = Recorder()
    monkeypatch.setattr("torsh_trainer.assemble.run", recorder)
    answer = door("rerun", "out", *SECRETS[2:], "hydra.run.dir=again")
    assert answer.code == 0, answer.err
    (call,) = recorder.calls
    assert call["config"]["vars"]["k"] == "another"
    assert call["config"]["vars"]["again"] == "before-another"
    assert call["config"]["checkpoint"]["storage_options"]["password"] == "hush-typed"


def test_a_node_that_is_taken_over_whole_keeps_the_reference(home, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hush-environment")
    recorder = Recorder()
    given = ["+vars.a.k=${oc.env:HF_TOKEN}", "+vars.b=${vars.a}", "hydra.run.dir=out"]
    assert train("+recipe=quick.yaml", *given, run=recorder) == 0
    (call,) = recorder.calls
    assert call["config"]["vars"]["b"] == {"k": "hush-environment"}
    assert call["written"]["vars"]["b"] == {"k": "${oc.env:HF_TOKEN}"}


def test_no_file_of_a_sweep_holds_a_secret(door, home, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hush-environment")
    given = [*SECRETS, "+vars.other_password=hush one", "trainer.seed=1,2"]
    answer = door("-m", "+recipe=quick.yaml", *given, "hydra.sweep.dir=sweep")
    assert answer.code == 0, answer.err
    files = files_of(home / "sweep")
    assert {"multirun.yaml", "sweep.csv", "job.json"} <= {file.name for file in files}
    assert [file for file in files if b"hush" in file.read_bytes()] == []
    assert "hush" not in answer.out + answer.err


def test_the_configuration_that_is_shown_has_its_passwords_masked(door):
    told = door("--info", "all", "+recipe=quick.yaml", *SECRETS[2:])
    assert told.code == 0, told.err
    assert "hush" not in told.out + told.err
    answer = door("--cfg", "job", "+recipe=quick.yaml", *SECRETS[2:])
    assert "hush" not in answer.out
    assert answer.config["checkpoint"]["storage_options"]["password"] == "***"
