"""Scripts started by the verb: what they see, and how they end."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torsh_trainer.__main__ import main

pytestmark = pytest.mark.usefixtures("warm_interpreters")

SEEN = """
import json, os, subprocess, sys
from pathlib import Path

import torch.multiprocessing as mp

import helper
import horovod
import horovod.torch as hvd
from horovod.torch.mpi_ops import Average
from horovod.common.util import gloo_built
import horovod.torch.elastic.sampler


def child(queue):
    import horovod.torch as inner
    queue.put(inner.__file__)


if __name__ == "__main__":
    hvd.init()
    hvd.init()
    print("hello from", hvd.rank())
    queue = mp.get_context("spawn").Queue()
    if hvd.rank() == 0:
        process = mp.get_context("spawn").Process(target=child, args=(queue,))
        process.start()
        spawned = queue.get()
        process.join()
        typed = subprocess.run(
            [sys.executable, "-c", "import horovod.torch as h; print(h.__file__, h.rank)"],
            check=True, capture_output=True, text=True,
        ).stdout
        try:
            import horovod.tensorflow
        except ImportError as error:
            refused = str(error)
        try:
            hvd.start_timeline("t.json")
        except Exception as error:
            timeline = str(error)
        Path("seen.json").write_text(json.dumps({
            "argv": sys.argv,
            "file": __file__,
            "path": sys.path[0],
            "cwd": os.getcwd(),
            "main": sys.modules["__main__"].hvd is hvd,
            "helper": helper.hvd is hvd,
            "same": Average is hvd.Average and horovod.torch is hvd,
            "module": hvd.__file__,
            "version": horovod.__version__,
            "spawned": spawned,
            "typed": typed,
            "refused": refused,
            "timeline": timeline,
            "rank": os.environ["HOROVOD_RANK"],
            "others": sorted(n for n in sys.modules if n.startswith("horovod.") and
                             "dropin" not in (sys.modules[n].__file__ or "")),
        }))
    hvd.barrier()
    sys.exit(0)
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip())
        return path

    return write


def test_a_script_sees_what_python_would_show_it_and_horovod_is_ours(write, tmp_path, capfd):
    write("my/seen.py", SEEN)
    write("my/helper.py", "import horovod.torch as hvd\n")
    before = set(sys.modules)
    line = f"horovodrun -np 2 {sys.executable} my/seen.py --lr 0.1 'a b'"
    assert main(["drop-in", "--comm", "gloo", "--command", line]) == 0
    out = capfd.readouterr().out
    assert out.splitlines()[0] == (
        "drop-in: my/seen.py on 2 processes, communicating by gloo; horovod is "
        "torsh_trainer.dropin.horovod, in this job alone"
    )
    assert "hello from 0" in out
    assert "[1] hello from 1" in out
    seen: dict[str, Any] = json.loads((tmp_path / "seen.json").read_text())
    ours = str(Path("torsh_trainer", "dropin", "horovod", "torch", "__init__.py"))
    assert seen["argv"] == ["my/seen.py", "--lr", "0.1", "a b"]
    assert (seen["file"], seen["cwd"]) == (str(tmp_path / "my" / "seen.py"), str(tmp_path))
    assert seen["path"] == str(tmp_path / "my")
    assert seen["main"]
    assert seen["helper"]
    assert seen["same"]
    assert seen["module"].endswith(ours)
    assert seen["spawned"].endswith(ours)
    assert ours in seen["typed"]
    assert seen["version"] == "0.28.1"
    assert seen["refused"].startswith("horovod.tensorflow is for TensorFlow")
    assert "start_timeline is not there" in seen["timeline"]
    assert seen["rank"] == "0"
    assert seen["others"] == []
    assert not {name for name in set(sys.modules) - before if name.startswith("horovod")}


FAILING = """
import sys
import horovod.torch as hvd
import torch


def compute(batch):
    if hvd.rank() == 1:
        raise KeyError("no such batch")
    return hvd.allreduce(batch, name="loss")


hvd.init()
if "exit" in sys.argv:
    sys.exit(5 * hvd.rank())
compute(torch.ones(2))
"""


def test_the_rank_that_failed_is_told_with_the_scripts_own_lines(write, capfd):
    file = write("fails.py", FAILING)
    assert main(["drop-in", "-np", "2", "--comm", "gloo", "fails.py"]) == 3
    told = capfd.readouterr().err
    assert "error: rank 1 failed with KeyError: 'no such batch'" in told
    trace = told[told.index("Traceback") :]
    assert trace.splitlines()[1].strip().startswith(f'File "{file}", line 15, in <module>')
    assert 'raise KeyError("no such batch")' in trace
    assert "torsh_trainer" not in trace.partition("KeyError: ")[0]


def test_an_exit_code_is_a_failure_of_its_rank(write, capfd):
    write("fails.py", FAILING)
    assert main(["drop-in", "-np", "2", "--comm", "gloo", "fails.py", "exit"]) == 3
    told = capfd.readouterr().err
    assert "error: rank 1: fails.py ended with exit code 5" in told
    assert "Traceback" not in told


def test_one_process_needs_no_others(write, run_door):
    file = write(
        "alone.py",
        """
        import torch
        import horovod.torch as hvd
        hvd.init()
        net = torch.nn.Linear(2, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        hvd.broadcast_parameters(net.state_dict(), 0)
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        print(hvd.size(), hvd.allreduce(torch.ones(2)).tolist(), hvd.join())
        hvd.allreduce(torch.ones(2).bool())
        """,
    )
    done = run_door(["drop-in", "-np", "1", "--comm", "gloo", "alone.py"])
    assert done.returncode == 3
    assert "1 [1.0, 1.0] 0" in done.stdout
    assert "error: rank 0 failed with ValueError: Tensor type torch.BoolTensor" in done.stderr
    assert f'File "{file}", line 10, in <module>' in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "drop-in is given no script"),
        (("-np", "2", "absent.py"), "absent.py is not there"),
        (("-np", "0", "train.py"), "-np 0 is no number of processes"),
        (("-np", "x", "train.py"), "-np x is no number of processes"),
        (("-np",), "expected one argument"),
        (("train.py",), "is not told how many processes; write -np 2"),
        (("-np", "2", "."), ". is a folder"),
        (("-np", "2", "-m", "train"), "drop-in"),
        (("-np", "2", "--comm", "glo", "train.py"), "--comm glo is unknown; did you mean 'gloo'?"),
        (("-np", "2", "--command", "horovodrun -np 2 python a.py", "train.py"), "give one of them"),
        (("--command", "python train.py"), "no command of it is horovodrun"),
        (("-np", "2", "binary.py"), "binary.py"),
        (("-np", "2", "book.ipynb"), "book.ipynb is a notebook"),
        (("-np", "2", "torch2.py"), "torch2.py:2: "),
        (("-np", "2", "flow.py"), "flow.py:1: horovod.tensorflow is for TensorFlow"),
        (("-np", "2", "unknown.py"), "unknown.py:3: horovod.torch.allredduce is not there"),
    ],
)
def test_what_cannot_be_run_is_one_sentence(write, tmp_path, capfd, words, told):
    write("train.py", "print(1)\n")
    write("book.ipynb", "{}")
    write("torch2.py", "import torch\nprint 'hello'\n")
    write("flow.py", "import horovod.tensorflow as hvd\n")
    write("unknown.py", "import horovod.torch as hvd\nhvd.init()\nhvd.allredduce(1)\n")
    (tmp_path / "binary.py").write_bytes(b"\x00\xff\x00")
    assert main(["drop-in", *words]) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: ")
    assert told in err
    assert err.count("\n") == 1
