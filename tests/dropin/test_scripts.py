"""What is found out about a script before anything starts, and how a line of horovodrun is read."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from torsh_trainer.dropin import script
from torsh_trainer.dropin.launch_line import honour_variables, read_command
from torsh_trainer.dropin.names import PUBLIC, ROOT
from torsh_trainer.dropin.order import Order
from torsh_trainer.errors import ConfigError


def look_at(folder: Path, text: str) -> script.Script:
    path = folder / "train.py"
    path.write_text(text)
    return script.read(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import torch\ndef f(:\n    pass\n", "train.py:2: "),
        ("x = 1\nprint 'hello'\n", "train.py:2: \"print 'hello'\" is Python 2; 2to3"),
        ("try:\n    x = 1\nexcept ValueError, e:\n    pass\n", "train.py:3: "),
        ("import horovod.tensorflow as hvd\n", "train.py:1: horovod.tensorflow is for TensorFlow"),
        ("import horovod.keras as hvd\n", "train.py:1: horovod.keras is for Keras"),
        ("import horovod.tensorflow.keras as hvd\n", "horovod.tensorflow is for TensorFlow"),
        ("from horovod import mxnet\n", "train.py:1: horovod.mxnet is for MXNet"),
        ("from horovod.spark import run\n", "train.py:1: horovod.spark is for Spark"),
        ("import horovod\nhorovod.nope(f)\n", "train.py:2: horovod.nope is not there"),
        ("import horovod.torch as hvd\nhvd.init()\nhvd.sync()\n", "train.py:3: horovod.torch.sync"),
        ("import horovod.torch\nhorovod.torch.nope\n", "train.py:2: horovod.torch.nope is not"),
        ("from horovod.torch import allreduce, nope\n", "train.py:1: horovod.torch.nope is not"),
        ("from horovod import torch as hvd\nhvd.nope()\n", "train.py:2: horovod.torch.nope is not"),
        ("import horovod.torch as hvd\nhvd.elastic.nope\n", "horovod.torch.elastic.nope is not"),
        ("import horovod.torch as hvd\ndef f():\n    return hvd.nope\n", "train.py:3: "),
    ],
)
def test_what_cannot_run_is_refused_with_its_line(tmp_path, text, words):
    with pytest.raises(ConfigError) as refusal:
        look_at(tmp_path, text)
    assert words in str(refusal.value)
    assert "; " in str(refusal.value)


@pytest.mark.parametrize(
    "text",
    [
        "import horovod.torch as hvd\nhvd.init()\nhvd.elastic.run(f)\nhvd.Compression.fp16\n",
        "try:\n    import horovod.tensorflow as hvd\nexcept ImportError:\n    hvd = None\n",
        "import horovod.torch as hvd\ntry:\n    hvd.nope\nexcept AttributeError:\n    pass\n",
        "from horovod.torch.mpi_ops import Average, rank\n",
        "import sys\nif sys.argv:\n    import horovod.tensorflow as hvd\n",
        "def f():\n    from horovod import keras\n",
        "import horovod\nif False:\n    horovod.run(print)\n",
        "from horovod.common.util import gloo_built\nfrom horovod.torch import *\n",
        "class hvd:\n    nope = 1\nhvd.nope\n",
        "import horovod.torch as hvd\nhvd.__name__\n",
    ],
)
def test_what_may_run_is_not_refused(tmp_path, text):
    look_at(tmp_path, text)


def test_whether_a_script_is_for_horovod_is_known(tmp_path):
    assert look_at(tmp_path, "from horovod.torch import init\n").uses == ("horovod",)
    assert not look_at(tmp_path, "import torch\n").uses


@pytest.mark.parametrize("module", PUBLIC)
def test_every_name_that_is_promised_is_there(module):
    for each in PUBLIC:
        importlib.import_module(f"{ROOT}.{each}".removesuffix("."))
    ours = importlib.import_module(f"{ROOT}.{module}".removesuffix("."))
    lacking = [name for name in PUBLIC[module] if not hasattr(ours, name)]
    assert lacking == []
    with pytest.raises(AttributeError, match="is not there under drop-in"):
        _ = ours.nope


def test_no_module_of_ours_is_forgotten():
    folder = Path(importlib.import_module(ROOT).__path__[0])
    found = {
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix("__init__").strip(".")
        for path in folder.rglob("*.py")
    }
    assert found - {"torch.buckets"} == set(PUBLIC)
    for path in folder.rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        imports = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert not [line for line in imports if line.startswith("from horovod")], path


# -- a line of horovodrun --------------------------------------------------------------------------


def test_a_line_says_the_script_its_arguments_and_how_many():
    order = read_command(
        "HOROVOD_CYCLE_TIME=2 horovodrun -np 3 -H localhost:3 --gloo --fusion-threshold-mb 32 "
        "--output-filename logs python3 -u my/train.py --lr 0.1 'a b' $HOME",
        env={"HOME": "there"},
    )
    assert (order.script, order.processes) == (Path("my/train.py"), 3)
    assert order.arguments == ("--lr", "0.1", "a b", "there")
    assert order.log_dir == Path("logs")
    (remark,) = order.remarks
    assert "--fusion-threshold-mb" in remark
    assert "HOROVOD_CYCLE_TIME" in remark


def test_an_elastic_line_says_that_processes_stay():
    order = read_command(
        "horovodrun -np 2 --min-np 1 --host-discovery-script ./h.sh python train.py", env={}
    )
    assert "processes stay" in order.remarks[0]
    assert "--min-np" in order.remarks[0]


def test_stalls_are_told_when_the_line_says():
    line = "horovodrun -np 2 --stall-check-warning-time-seconds 5 python train.py"
    assert read_command(line, env={}).stall_warning_s == 5
    line = "horovodrun -np 2 --no-stall-check python train.py"
    assert read_command(line, env={}).stall_warning_s == 0


def test_variables_do_what_they_say_or_are_told():
    order = Order(Path("train.py"), stall_warning_s=7.0)
    found = honour_variables(
        order,
        {
            "HOROVOD_STALL_CHECK_TIME_SECONDS": "3",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9",
            "HOROVOD_FUSION_THRESHOLD": "0",
            "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
            "HOROVOD_RANK": "1",
            "PATH": "/bin",
        },
    )
    assert (found.stall_warning_s, found.stall_shutdown_s) == (7.0, 9.0)
    assert found.remarks == ("without an effect here: HOROVOD_FUSION_THRESHOLD",)
    with pytest.raises(ConfigError, match="HOROVOD_STALL_CHECK_TIME_SECONDS should be"):
        honour_variables(order, {"HOROVOD_STALL_CHECK_TIME_SECONDS": "soon"})


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("python train.py", "no command of it is horovodrun"),
        ("horovodrun python train.py", "wants -np"),
        ("horovodrun -np 2", "is given no command"),
        ("horovodrun -np 0 python train.py", "-np should be"),
        ("horovodrun -np 2 --nope python train.py", "no option --nope"),
        ("horovodrun -np 2 -H a:1,b:1 python train.py", "no processes on a, b"),
        ("horovodrun -np 2 -hostfile hosts python train.py", "other hosts"),
        ("horovodrun -np 2 ./run.sh", "starts no script"),
        ("horovodrun -np 2 python -m pkg.train", "starts no script"),
        ("horovodrun -np 2 python train.py $NOBODY", "only a shell knows"),
        ("horovodrun -np 2 python train.py 'x", "nothing closes"),
        ("horovodrun --check-build", "starts no script"),
    ],
)
def test_a_line_that_cannot_be_honoured_is_refused(line, words):
    with pytest.raises(ConfigError) as refusal:
        read_command(line, env={})
    assert words in str(refusal.value)
