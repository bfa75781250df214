"""Of several jobs in a file or a folder one is chosen by its name: ``--job``."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import yaml
from own_task_cases import DIGITS, write

from torsh_trainer.__main__ import main

TWO = """\
horovodrun -np 2 python train.py --lr 0.1 --hidden 8
horovodrun -np 4 python train.py --lr 0.2 --hidden 24
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    write(
        tmp_path, {**DIGITS, "run.sh": TWO, "jobs/again.sh": "horovodrun -np 3 python train.py\n"}
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("source", "job", "processes", "hidden"),
    [
        ("run.sh", "2", 4, 24),
        ("run.sh", "run.sh:1", 2, 8),
        (".", "run.sh:2", 4, 24),
        (".", "again.sh", 3, 16),
    ],
)
def test_its_task_and_recipe_are_written(project, capsys, source, job, processes, hidden):
    words = ["--job", job, "--task", "my_task.py", "--output", "job.yaml"]
    main(["translate", source, *words])
    recipe = yaml.safe_load(Path("job.yaml").read_text())
    assert recipe["launcher"]["num_processes"] == processes
    assert recipe["task"]["_target_"] == "my_task.ScriptTask"
    given = [
        word.value.value
        for node in ast.walk(ast.parse(Path("my_task.py").read_text()))
        if isinstance(node, ast.Call)
        for word in node.keywords
        if word.arg == "hidden" and isinstance(word.value, ast.Constant)
    ]
    given = given or [
        node.args[0].value
        for node in ast.walk(ast.parse(Path("my_task.py").read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Net"
    ]
    assert given == [hidden]


def test_it_is_chosen_without_a_task_too(project, capsys):
    assert main(["translate", "run.sh", "--job", "2", "--output", "job.yaml"]) in (0, 10)
    assert "optimizer.lr=0.8" in capsys.readouterr().out
    assert Path("job.yaml").exists()
    assert not Path("job-1.yaml").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["run.sh", "--task", "my_task.py", "--output", "job.yaml"],
            "run.sh starts 2 jobs: run.sh:1, run.sh:2; choose one of them: --job run.sh:1",
        ),
        (["run.sh", "--job", "7"], "--job 7 is no job of run.sh: they are run.sh:1, run.sh:2"),
        ([".", "--job", "gone.sh"], "--job gone.sh is no job of .: they are "),
        (
            [".", "--task", "my_task.py", "--output", "job.yaml"],
            "choose one by its name in the table: --job run.sh",
        ),
    ],
)
def test_a_name_that_is_missing_or_of_none_is_one_sentence(project, capsys, words, said):
    assert main(["translate", *words]) == 2
    assert said in capsys.readouterr().err
    assert not Path("my_task.py").exists()
