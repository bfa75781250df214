"""translate --task: the written task imports the user's code, and trains to the losses of his loop.

The script itself runs beside it, under engines that are plain torch on one process. Both take the
samples in the order of the data set (shuffle off).
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from own_task_cases import DIGITS, ENGINES, ROWS, TEXTS, small, write

from torsh_trainer.__main__ import main

pytestmark = pytest.mark.usefixtures("warm_interpreters")


@pytest.fixture
def engines(tmp_path) -> Path:
    return write(tmp_path / "engines", ENGINES)


@pytest.fixture
def translate(tmp_path, monkeypatch, capsys):
    """``translate(files, *words)``: (exit code, what is printed, the text of the task)."""

    def run(files, *words, task="my_task.py", folder="project") -> tuple[int, str, str]:
        write(tmp_path / folder, files)
        monkeypatch.chdir(tmp_path / folder)
        monkeypatch.setenv("COLUMNS", "200")
        code = main(["translate", *words, "--task", task, "--output", "job.yaml"])
        said = capsys.readouterr()
        path = Path(task)
        return code, said.out + said.err, path.read_text() if path.exists() else ""

    return run


@pytest.fixture
def losses_of(tmp_path, engines, run_command, warm_python):
    """``losses_of(command)``: the loss of every step of a run that the printed command starts."""

    def run(said: str, *overrides: str, cwd: Path | None = None) -> list[float]:
        [typed] = re.findall(r"start it with: (.*)", said)
        first, *words = shlex.split(typed)
        paths = [str(engines)]
        if first.startswith("PYTHONPATH="):
            paths = [*first.partition("=")[2].split(":"), *paths]
            first, *words = words
        folder = cwd or Path.cwd()
        runs = set(folder.glob("runs/*/*/metrics.jsonl"))
        more = [
            "trainer.log_every=1",
            "trainer.eval_every_epochs=null",
            "callbacks.console.enabled=false",
        ]
        line = [warm_python, *words, *more, *overrides]
        done = run_command(line, cwd=folder, env=path_with(paths))
        assert done.returncode == 0, done.stdout + done.stderr
        [metrics] = set(folder.glob("runs/*/*/metrics.jsonl")) - runs
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        return [row["loss"] for row in rows if row["split"] == "train"]

    return run


@pytest.fixture
def losses_of_script(engines, run_command, warm_python):
    """``losses_of_script(*words)``: what the user's own loop prints, without any engine."""

    def run(*words: str) -> list[float]:
        line = [warm_python, *words]
        done = run_command(line, cwd=Path.cwd(), env=path_with([str(engines)]))
        assert done.returncode == 0, done.stderr
        return [float(loss) for loss in re.findall(r"^loss (\S+)", done.stdout, re.MULTILINE)]

    return run


def path_with(folders: list[str]) -> dict[str, str]:
    known = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join([*folders, *filter(None, [known])])}


def test_a_script_of_horovod_trains_to_its_own_losses(translate, losses_of, losses_of_script):
    code, said, text = translate(DIGITS, "train.py", "--world-size", "1")
    assert code == 0
    assert "nothing is missing" in said
    assert "class Net" not in text
    assert "from train import Net" in text
    assert "data.view(-1, 64)" in text
    assert "cuda" not in text
    expected = losses_of_script("train.py")
    assert len(expected) == 12  # 44 samples: 5 whole batches and a tail of 4, twice
    assert losses_of(said) == pytest.approx(expected, rel=1e-6)
    other = losses_of(said, "optimizer.lr=0.11")  # the comparison sees a rate
    assert other != pytest.approx(expected, rel=1e-4)


def test_one_of_deepspeed_with_modules_and_arguments_does_too(
    translate, losses_of, losses_of_script
):
    words = "train.py --width 24 --data-path there --deepspeed_config ds.json"
    code, said, text = translate(ROWS, "--command", f"deepspeed --num_gpus 1 {words}")
    assert code == 0
    assert "nothing is missing" in said
    assert "net = Net(24, depth=1)" in text
    assert "p.requires_grad = False" in text
    assert "net.head.weight.data.mul_(2.0)" in text
    assert "Smooth(0.1)" in text
    expected = losses_of_script(*words.split())
    steps = [(one + two) / 2 for one, two in zip(expected[::2], expected[1::2], strict=True)]
    assert losses_of(said) == pytest.approx(steps, rel=1e-6)
    my_task = Path("my_task.py")
    my_task.write_text(text.replace("net.head.weight.data.mul_(2.0)", "pass"))
    assert losses_of(said) != pytest.approx(steps, rel=1e-4)  # and a line of the model


def test_a_model_with_a_loss_of_its_own_does_too(translate, losses_of, losses_of_script):
    code, said, text = translate(TEXTS, "--command", "deepspeed --num_gpus 1 finetune.py --width 6")
    assert code == 0
    assert "nothing is missing" in said
    assert "return model(**batch)" in text
    assert "loss = outputs.loss" in text
    assert "config.tied = True" in text
    assert "self.eval = eval_data" in text
    expected = losses_of_script("finetune.py", "--width", "6")
    assert losses_of(said) == pytest.approx(expected, rel=1e-6)


def test_an_evaluation_before_the_training_does_not_set_its_batches(translate):
    script = TEXTS["finetune.py"]
    script = script.replace("(eval_data, batch_size=4)", "(eval_data, batch_size=8)")
    loop = script[script.index("        model.eval()") : script.index("\n\nif __name__")]
    before = "\n".join(line[4:] for line in loop.splitlines())
    script = script.replace("    for epoch in range(2):", f"{before}\n    for epoch in range(2):")
    words = ("--command", "deepspeed --num_gpus 1 finetune.py")
    code, said, text = translate({**TEXTS, "finetune.py": script}, *words)
    assert code == 0, said
    assert "micro_batch_size: 4" in Path("job.yaml").read_text()
    assert "self.train = train_data" in text


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    "project",
    [
        small("a = model(x)\nb = model(x + 1)\nloss = F.cross_entropy(a, y) + F.mse_loss(a, b)"),
        small("loss = loss_of(model, (x, y), args)", model="make(args)"),
        small(
            "loss = criterion(model(x), y)",
            setup="criterion = nn.CrossEntropyLoss(label_smoothing=0.2)\n"
            "model.fc2 = nn.Linear(args.hidden, 4, bias=False)",
        ),
        small(
            "with torch.no_grad():\n    t = teacher(x)\nloss = F.mse_loss(model(x), t)",
            setup="torch.manual_seed(9)\nteacher = Net(32)\nteacher.eval()",
        ),
    ],
    ids=["two forwards", "a helper", "a changed model", "a teacher"],
)
def test_steps_as_people_write_them_train_alike(translate, losses_of, losses_of_script, project):
    launch = "horovodrun -np 1 python train.py --path here"
    code, said, _ = translate(project, "--command", launch)
    assert code in (0, 10)
    assert "nothing is missing" in said
    expected = losses_of_script("train.py", "--path", "here")
    assert losses_of(said) == pytest.approx(expected, rel=1e-6)


def test_the_task_may_lie_elsewhere_with_spaces(translate, losses_of, losses_of_script, tmp_path):
    where = tmp_path / "of mine"
    where.mkdir()
    code, said, _text = translate(
        DIGITS,
        "train.py",
        "--world-size",
        "1",
        task=str(where / "my_task.py"),
        folder="a project",
    )
    assert code == 0
    [typed] = re.findall(r"start it with: (.*)", said)
    assert shlex.split(typed)[0] == f"PYTHONPATH={where}"
    expected = losses_of_script("train.py")
    assert losses_of(said) == pytest.approx(expected, rel=1e-6)


def test_a_script_elsewhere_is_found_by_the_printed_command(
    translate, losses_of, tmp_path, monkeypatch, capsys
):
    write(tmp_path / "scripts", DIGITS)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    words = ["../scripts/train.py", "--world-size", "1", "--task", "my_task.py"]
    assert main(["translate", *words, "--output", "job.yaml"]) == 0
    said = capsys.readouterr().out
    assert f"PYTHONPATH={tmp_path / 'scripts'}" in said
    assert len(losses_of(said)) == 12


# -- what is missing ------------------------------------------------------------------------------


def places(text: str) -> list[str]:
    """What the fill_in of a written file say."""
    return [
        call.args[0].value
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "fill_in"
        and isinstance(call.args[0], ast.Constant)
    ]


def test_a_script_without_a_guard_is_not_imported(translate, engines, run_command):
    code, said, text = translate(small(end="main()"), "train.py", "--world-size", "1")
    assert code == 13
    assert "2 places to fill in" in said
    assert "from train import" not in text
    assert all(
        "importing train.py would run main(), and so parser.parse_args()" in place
        and 'called under `if __name__ == "__main__":`' in place
        for place in places(text)
    )
    done = run_command(
        [sys.executable, "-m", "torsh_trainer", "+recipe=job.yaml", "trainer.max_steps=1"],
        cwd=Path.cwd(),
        env=path_with([str(engines)]),
    )
    assert done.returncode != 0
    assert "fill this in: train.py:44: make_data cannot be imported" in done.stderr


def test_data_that_cannot_be_found_are_filled_in_by_the_user(
    translate, losses_of, losses_of_script
):
    files = small(data="data")
    script = files["train.py"]
    files["train.py"] = script.replace(
        "loader = DataLoader(data, batch_size=8, shuffle=False)",
        'loader = __import__("shop").batches(data)',
    )
    files["shop.py"] = (
        "from torch.utils.data import DataLoader\n"
        "def batches(data):\n    return DataLoader(data, batch_size=8)\n"
    )
    launch = "horovodrun -np 1 python train.py --path here"
    code, said, text = translate(files, "--command", launch)
    assert code == 13
    [place] = places(text)
    assert "which data set loader loads cannot be told" in place
    assert place.startswith("train.py:")
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if "        fill_in(" in line)
    lines[at] = "        self.train = __import__('train').make_data(40)"
    Path("my_task.py").write_text("\n".join(lines))
    expected = losses_of_script("train.py", "--path", "here")
    more = ("data.micro_batch_size=8", "data.shuffle=false")
    assert losses_of(said, *("+" * ("micro" in m) + m for m in more)) == pytest.approx(
        expected, rel=1e-6
    )


@pytest.mark.parametrize(
    ("project", "said"),
    [
        (
            small("loss = F.cross_entropy(model(x), y)\nif torch.isnan(loss):\n    continue"),
            "a batch is left out if torch.isnan(loss)",
        ),
        (small(after="if i > 3:\n    break"), "the loop ends if i > 3"),
        (
            small(after="for p in model.parameters():\n    p.grad.mul_(0.5)"),
            "gradients are changed by hand",
        ),
        (small(after="model.fc1.weight.grad *= 0.5"), "gradients are changed by hand"),
        (
            small(after="for p in model.parameters():\n    p.data.clamp_(-1, 1)"),
            "parameters are changed by hand in every step",
        ),
        (
            small(
                "out = model(x, h)\nh = out.detach()\nloss = F.cross_entropy(out, y)",
                setup="h = torch.zeros(8, 4)",
            ),
            "h is carried from one batch to the next",
        ),
        (
            small(
                "loss = F.cross_entropy(model(x) + other(x), y)",
                setup="other = Net(4)\nopt = torch.optim.SGD(other.parameters(), lr=0.1)",
            ),
            "a second model is trained: other",
        ),
        (
            small("first = model(x).mean()\nfirst.backward()\nloss = F.cross_entropy(model(x), y)"),
            "a second backward pass in the same step",
        ),
        (
            small(
                "loss = crit(model(x), y)",
                setup="def crit(a, b):\n    return F.cross_entropy(a, b)",
            ),
            " is defined within a function; move crit to the top level",
        ),
        (small(data="make_data(len(args.path))"), "what args.path is cannot be told"),
        (
            small(setup="def later():\n    pass\ndata.tensors = data.tensors[:2]"),
            "data is changed after its loader is made",
        ),
        (small(model="Net(args.hidden)", setup="model.to(torch.float16)"), "a dtype of the engine"),
        (small(setup="model.half()"), "half precision by hand"),
        (
            small("model.fc1.eval()\nloss = F.cross_entropy(model(x), y)"),
            "model.fc1.eval() changes",
        ),
        (small(after="freeze(model)"), "freeze() changes the model that is being trained"),
        (small(model="Net(args.hidden).half()"), "half precision by hand, and the recipe has fp32"),
        (small("loss = F.cross_entropy(x, y)"), "the loss is not computed by the model"),
    ],
)
def test_what_would_change_the_result_is_named_where_it_stands(translate, project, said):
    code, printed, text = translate(project, "train.py", "--world-size", "1")
    assert code == 13
    assert said in printed
    assert any(said in place for place in places(text)), text


def test_what_only_looks_at_the_model_is_no_matter(translate):
    script = small(after="report(model)\nmodel.train()")["train.py"]
    script = script.replace("def main():", "def report(net):\n    print(net)\n\n\ndef main():")
    code, said, text = translate({"train.py": script}, "train.py", "--world-size", "1")
    assert code in (0, 10), said
    assert not places(text)


def test_a_place_names_the_line_of_the_script(translate):
    project = small(after="for p in model.parameters():\n    p.grad.mul_(0.5)")
    _, _, text = translate(project, "train.py", "--world-size", "1")
    [place] = places(text)
    lines = project["train.py"].splitlines()
    assert place.startswith(f"train.py:{lines.index('                p.grad.mul_(0.5)') + 1}: ")


def test_phases_with_other_arguments_are_named(translate):
    project = {
        "train.py": small()["train.py"]
        .replace("def main():", "def main(data):")
        .replace("    data = make_data(40)\n", "")
        .replace("    main()", "    main(make_data(40))\n    main(make_data(8))")
    }
    code, said, text = translate(project, "train.py", "--world-size", "1")
    assert code == 13
    assert "main is called again with other arguments" in said
    assert "self.train = data" in text


def test_a_model_that_a_function_returns_is_the_same_model(translate, losses_of, losses_of_script):
    script = small()["train.py"]
    start = script.index("    model = Net(")
    end = script.index("    for epoch in")
    batches = "    model, optimizer = prepare(args)\n    batches = iter(loader)\n"
    script = script[:start] + batches + script[end:]
    script = script.replace(
        "def main():",
        """\
def prepare(args):
    net = Net(args.hidden)
    net.fc2.bias.data.zero_()
    made = torch.optim.SGD(net.parameters(), lr=args.lr)
    made = hvd.DistributedOptimizer(made, named_parameters=net.named_parameters())
    return net, made


def main():""",
    )
    script = script.replace(
        "for epoch in range(2):\n        for i, (x, y) in enumerate(loader):",
        "for epoch in range(1):\n        for i in range(5):\n            x, y = next(batches)",
    )
    launch = "horovodrun -np 1 python train.py --path here"
    code, said, text = translate({"train.py": script}, "--command", launch)
    assert code in (0, 10), said
    assert "net.fc2.bias.data.zero_()" in text
    expected = losses_of_script("train.py", "--path", "here")
    assert losses_of(said) == pytest.approx(expected, rel=1e-6)


def test_a_loss_divided_by_its_passes_is_a_mean_again(translate, losses_of, losses_of_script):
    project = small("loss = F.cross_entropy(model(x), y) / 2")
    script = project["train.py"].replace(
        "named_parameters=model.named_parameters())",
        "named_parameters=model.named_parameters(), backward_passes_per_step=2)",
    )
    script = (
        script.replace("            optimizer.zero_grad()\n", "")
        .replace(
            "            optimizer.step()",
            "            if (i + 1) % 2 == 0:\n"
            "                optimizer.step()\n                optimizer.zero_grad()",
        )
        .replace("make_data(40)", "make_data(64)")
    )
    launch = "horovodrun -np 1 python train.py --path here"
    code, said, text = translate({"train.py": script}, "--command", launch)
    assert code in (0, 10)
    assert "/ 2" not in text
    expected = losses_of_script("train.py", "--path", "here")
    steps = [one + two for one, two in zip(expected[::2], expected[1::2], strict=True)]
    assert losses_of(said) == pytest.approx(steps, rel=1e-6)


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--task", "my_task.py"], "none is written; add --output recipe.yaml"),
        (["--task", "my-task.py", "--output", "j.yaml"], "no name of a Python module"),
        (["--task", "json.py", "--output", "j.yaml"], "there is a module json already"),
        (
            ["--task", "train.py", "--output", "j.yaml", "--force"],
            "has the name of a module beside",
        ),
        (["--task", "sub/helper.py", "--output", "j.yaml"], "has the name of a module beside"),
        (["--task", "there.py", "--output", "j.yaml"], "may hold your own changes; name another"),
    ],
)
def test_a_task_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch, capsys, words, said):
    write(tmp_path, {**DIGITS, "helper.py": "", "there.py": "mine = 1\n"})
    monkeypatch.chdir(tmp_path)
    assert main(["translate", "train.py", "--world-size", "1", *words]) == 2
    assert said in capsys.readouterr().err
    assert Path("there.py").read_text() == "mine = 1\n"
    assert "class Net" in Path("train.py").read_text()
    assert not Path("j.yaml").exists()


def test_a_file_that_is_there_is_replaced_with_force(tmp_path, monkeypatch):
    write(tmp_path, {**DIGITS, "there.py": "mine = 1\n"})
    monkeypatch.chdir(tmp_path)
    words = ["--task", "there.py", "--output", "j.yaml", "--force"]
    assert main(["translate", "train.py", "--world-size", "1", *words]) == 0
    assert "class ScriptTask" in Path("there.py").read_text()


def test_a_configuration_alone_or_a_folder_has_no_task(tmp_path, monkeypatch, capsys):
    write(tmp_path, ROWS)
    monkeypatch.chdir(tmp_path)
    for source, said in (("ds.json", "leads to none that was read"), (".", "is a folder")):
        words = ["translate", source, "--task", "my_task.py", "--output", "j.yaml"]
        assert main(words) == 2
        assert said in capsys.readouterr().err


def test_what_is_asked_comes_first(tmp_path, monkeypatch, capsys):
    files = small()
    files["train.py"] = files["train.py"].replace("lr=args.lr", "lr=args.lr * np.sqrt(hvd.size())")
    write(tmp_path, files)
    monkeypatch.chdir(tmp_path)
    words = ["translate", "train.py", "--task", "my_task.py", "--output", "j.yaml"]
    assert main(words) == 13
    assert "--task my_task.py" in capsys.readouterr().out  # in the command that is to be filled in
    assert not Path("my_task.py").exists()
