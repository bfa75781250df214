"""docs/migrate/deepspeed.md, done as it says: its files written, its commands run.

The command that trains the original too is run beside DeepSpeed, by the tests of its plugin.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

FILE = re.compile(r'^```(?:json|python) title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^```bash\npython -m torsh_trainer (.*?)\n```$", re.MULTILINE)


@pytest.fixture(scope="module")
def page(repository) -> str:
    return (repository / "docs" / "migrate" / "deepspeed.md").read_text()


@pytest.fixture
def project(page, tmp_path) -> Path:
    for name, text in FILE.findall(page):
        (tmp_path / name).write_text(text)
    return tmp_path


def test_every_command_of_the_page_works(page, project, warm_door):
    commands = [shlex.split(line) for line in COMMAND.findall(page)]
    verbs = [args[0] for args in commands]
    assert verbs == ["translate", "+recipe=job.yaml", "verify", "translate"]
    for args in commands:
        if args[0] == "verify":
            continue
        processes = 2 if args[0].startswith("+recipe") else 1
        done = warm_door(args, project, processes=processes)
        assert done.returncode == 0, (args, done.stdout + done.stderr)
    assert "Every key" in (project / "report.html").read_text()
    (result,) = project.glob("runs/**/result.json")
    content = json.loads(result.read_text())
    assert (content["strategy"], content["world_size"], content["steps"]) == ("fsdp", 2, 100)
    assert content["metrics"]["accuracy"] > 0.8
    before, after = (json.loads((project / n).read_text()) for n in ("ds_config.json", "back.json"))
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        assert after[key] == before[key]
    assert after["zero_optimization"]["stage"] == before["zero_optimization"]["stage"]


def test_its_script_trains_on_two_processes(project, warm_script):
    script = project / "script.py"
    kept = 'Path("said.txt").write_text(str(model.updates))'
    text = script.read_text().replace(
        "import torch\n", "import torch\nfrom pathlib import Path\n", 1
    )
    script.write_text(re.sub(r'print\(f"\{model.updates\}.*', kept, text))
    warm_script("script.py", processes=2, cwd=project)
    assert (project / "said.txt").read_text() == "10"
