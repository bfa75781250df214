"""A folder as a project: one table of jobs, one report, and what is passed over."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from torsh_trainer.__main__ import main

LAUNCH = """\
#!/bin/bash
deepspeed --num_gpus 2 train.py --deepspeed_config configs/ds.json --lr 1e-4
torchrun --nproc_per_node=$GPUS finetune.py --bf16 True --per_device_train_batch_size 4 \\
    --learning_rate 2e-5 --output_dir out
"""
USED = '{"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}'
ALONE = '{"train_batch_size": 8, "optimizer": {"type": "Lion", "params": {"lr": 0.1}}}'
HOROVOD = """\
import torch, horovod.torch as hvd
hvd.init()
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.rand(2, 2)).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    texts = {
        "scripts/run.sh": LAUNCH,
        "scripts/prepare.sh": "#!/bin/bash\nrm -rf data\npython prepare.py\n",
        "configs/ds.json": USED,
        "configs/alone.json": ALONE,
        "package.json": '{"name": "web"}',
        "train.py": "import argparse\n",
        "hvd.py": HOROVOD,
        ".venv/lib/other.json": ALONE,
        "broken.sh": "#!/bin/bash\ntorchrun --nproc_per_node=x train.py\n",
    }
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "weights.json").write_bytes(b"\xff\xfe{")
    return folder


def test_a_table_has_a_line_for_every_job_and_no_other(project, capsys):
    assert main(["translate", str(project)]) == 2  # one of the files is wrong
    out = capsys.readouterr().out
    assert "a project, read and not executed: 5 jobs" in out
    assert re.findall(r"^(\S+) +(?:launch file|script|configuration) ", out, re.MULTILINE) == [
        "broken.sh",
        "scripts/run.sh:2",
        "scripts/run.sh:3",
        "hvd.py",
        "configs/alone.json",
    ]
    assert "--nproc_per_node" in out
    below = out.partition("missing, and only you know it:")[2]
    assert re.search(r"^GPUS +scripts/run.sh:3", below, re.MULTILINE)
    assert "1 refused" in out


def test_a_page_and_json_hold_every_job(project, tmp_path, capsys):
    (project / "broken.sh").unlink()
    page, data = tmp_path / "report.html", tmp_path / "report.json"
    for path in (page, data):
        recipe = tmp_path / "job.yaml"
        assert main(["translate", str(project), "--report", str(path), "-o", str(recipe)]) == 13
    found = json.loads(data.read_text())
    assert [job["is"] for job in found["jobs"]] == [
        "launch file",
        "launch file",
        "script",
        "configuration",
    ]
    first, second, _, alone = (job["plan"] for job in found["jobs"])
    assert [Path(name).name for name in first["files"]] == ["ds.json", "train.py"]
    assert second["facts"][0]["name"] == "GPUS"
    assert alone["counts"]["refused"] == 1
    text = page.read_text()
    assert text.count("<h1") == 5
    # Recipes are numbered as the rows are; a job that lacks a fact has none.
    assert sorted(path.name for path in tmp_path.glob("job-*.yaml")) == [
        "job-1.yaml",
        "job-3.yaml",
        "job-4.yaml",
    ]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--set", "GPUS=2"], "--set belongs to one job"),
        (["--command", "torchrun x.py"], "--command belongs to one job"),
    ],
)
def test_what_belongs_to_one_job_is_refused(project, capsys, args, words):
    assert main(["translate", str(project), *args]) == 2
    assert words in capsys.readouterr().err


def test_a_folder_without_a_job_is_one_sentence(tmp_path, capsys):
    (tmp_path / "notes.json").write_text('{"a": 1}')
    assert main(["translate", str(tmp_path)]) == 2
    assert "holds no job: of 1 files none starts training" in capsys.readouterr().err


def test_a_row_names_few_files_as_seen_from_the_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "wide"
    folder.mkdir()
    names = [f"part{number}" for number in range(9)]
    for name in names:
        (folder / f"{name}.py").write_text("x = 1\n")
    (folder / "train.py").write_text(f"import {', '.join(names)}\n{HOROVOD}")
    (folder / "README").write_text("start it so:\ntorchrun --nproc_per_node 2 train.py\n")
    assert main(["translate", "wide"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"1 job, 1 from scripts", said)
    assert "part0.py, part1.py," in said
    assert " 5 more" in re.sub(r"\s+", " ", said)
    assert str(tmp_path) not in said
