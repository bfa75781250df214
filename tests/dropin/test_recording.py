"""What is recorded of a script from outside, beside plain torch, and how it is compared."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torsh_trainer.__main__ import main
from torsh_trainer.dropin.recorded import recording
from torsh_trainer.dropin.verifying import ScriptRun, compare_runs

SCRIPT = """
import json, sys
import torch

class Wrapper(torch.optim.SGD):
    \"\"\"Reduces gradients first, as engines do: only what it steps with counts.\"\"\"
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)
        return super().step(closure)

model = torch.nn.Linear(3, 2)
optimizer = Wrapper(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
seen = [[p.tolist() for p in model.parameters()]]
for step in range(5):
    optimizer.zero_grad()
    losses = [model(torch.rand(4, 3)).pow(2).mean() for _ in range(2)]
    for loss in losses:
        loss.backward()
    seen.append([float(loss.detach()) for loss in losses])
    with open("seen.json", "w") as file:
        json.dump(seen, file)
    optimizer.step()
    schedule.step()
    seen.append([p.tolist() for p in model.parameters()])
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "sitecustomize.py").write_text("import os\nos.environ['BEHIND'] = '1'\n")
    ours = Path(recording.__file__).parent
    path = os.pathsep.join([str(ours), str(folder)])
    env = {
        **os.environ,
        "RANK": "0",
        "PYTHONPATH": path,
        recording.FOLDER: str(folder),
        recording.STEPS: "3",
        recording.SEED: "7",
    }
    for name in ("HOROVOD_RANK", "WORLD_SIZE", "HOROVOD_SIZE"):
        env.pop(name, None)
    subprocess.run([sys.executable, "train.py"], cwd=folder, env=env, check=True, timeout=300)
    rows = [json.loads(line) for line in (folder / "rank-0.jsonl").open()]
    return rows, json.loads((folder / "seen.json").read_text())


def test_losses_rates_and_parameters_are_those_of_the_script(recorded):
    rows, seen = recorded
    assert [row["step"] for row in rows] == [0, 1, 2, 3]  # the process ended after three
    assert len(seen) == 6  # within the third step, of the five that the script would take
    assert [row["losses"] for row in rows[1:]] == [seen[1], seen[3], seen[5]]
    assert [row["lr"] for row in rows[1:]] == [[0.1], [0.05], [0.025]]
    for row, parameters in zip(rows, (seen[0], seen[2], seen[4]), strict=False):
        for found, values in zip(row["parameters"], parameters, strict=True):
            flat = torch.tensor(values).double().flatten()
            assert found[0] == pytest.approx(float(flat.norm()), rel=1e-12)
            assert found[2:] == flat.tolist()


def test_the_gradient_norm_is_that_of_the_inner_step_and_the_seed_is_the_one_asked_for(recorded):
    rows, _ = recorded
    torch.manual_seed(7)
    model = torch.nn.Linear(3, 2)
    assert rows[0]["parameters"][0][2:] == model.weight.detach().flatten().tolist()
    for _ in range(2):
        model(torch.rand(4, 3)).pow(2).mean().backward()
    halves = [p.grad.double().mul(0.5).pow(2).sum() for p in model.parameters()]
    assert rows[1]["grad_norm"] == pytest.approx(math.sqrt(float(sum(halves))), rel=1e-6)


def row(step, loss=1.0, norm=2.0, lr=0.1, parameters=((5.0, 3.0, 4.0),)):
    found = {"step": step, "parameters": [list(one) for one in parameters]}
    return found if step == 0 else {**found, "losses": [loss], "grad_norm": norm, "lr": [lr]}


def judged(mine, expected):
    found = compare_runs(ScriptRun((tuple(mine),)), ScriptRun((tuple(expected),)), bound=1e-6)
    return {quantity: apart.first[0] for quantity, apart in found.items() if apart.first}


def test_what_is_within_a_bound_that_grows_agrees_and_the_first_step_beyond_it_is_named():
    expected = [row(0), row(1), row(2), row(3)]
    assert judged(expected, expected) == {}
    assert judged([row(0), row(1), row(2, loss=1 + 1.5e-6), row(3)], expected) == {}
    assert judged([row(0), row(1, loss=1 + 1.5e-6), row(2), row(3)], expected) == {"loss": 1}
    assert judged([row(0), row(1), row(2, lr=0.1 + 1e-8), row(3)], expected) == {"learning rate": 2}
    assert judged([row(0), row(1), row(2, norm=None), row(3)], expected) == {"gradient norm": 2}
    moved = row(3, parameters=((5.0, 3.0, 4.01),))
    assert judged([row(0), row(1), row(2), moved], expected) == {"parameters": 3}
    other = row(0, parameters=((5.0, 3.0, 4.0), (1.0, 1.0, 1.0)))
    assert judged([other, row(1), row(2), row(3)], expected) == {"parameters": 0}


def test_what_is_not_finite_is_only_equal_to_itself():
    nan, inf = float("nan"), float("inf")
    assert judged([row(0), row(1, loss=nan)], [row(0), row(1, loss=nan)]) == {}
    assert judged([row(0), row(1, loss=nan)], [row(0), row(1)]) == {"loss": 1}
    assert judged([row(0), row(1, loss=inf)], [row(0), row(1, loss=-inf)]) == {"loss": 1}
    lost = row(1, parameters=((nan, nan, nan),))
    assert judged([row(0), lost], [row(0), row(1)]) == {"parameters": 1}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--command", "horovodrun -np 2"], "is given no command to start"),
        (["--command", "horovodrun -np 2 python train.py", "--steps", "-1"], "count from 0"),
        (["--command", "horovodrun -np 2 python train.py", "--stepz", "1"], "--stepz"),
        (["--command", "horovodrun -H other:2 -np 2 python train.py"], "no processes on other"),
    ],
)
def test_bad_input_is_one_sentence(args, words, capsys):
    assert main(["verify", *args]) == 2
    assert words in capsys.readouterr().err


def test_an_engine_that_is_not_installed_is_named_with_what_to_do(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert main(["verify", "--command", "horovodrun -np 2 python train.py"]) == 1
    assert "horovodrun is not installed here" in capsys.readouterr().err
