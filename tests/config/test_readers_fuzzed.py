"""Real files, changed at random: every reader answers in a sentence, and comes to an end."""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from torsh_trainer.__main__ import main

pytestmark = pytest.mark.timeout(280)

RUN = [
    *("+recipe=digits", "model=mlp", "launcher=inline", "trainer.stages=[fit]"),
    *("trainer.max_steps=2", "hydra.run.dir=run", "logger.csv.enabled=true"),
    "callbacks.console.enabled=false",
]
NAMES = [
    name
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException)
]
BARE = re.compile(rf"\b({'|'.join(NAMES)}|Traceback|UnpicklingError|YAMLError)\b")

ODD = (
    *("null", "true", "-1", "Infinity", "NaN", "1e400", "-1e308", "5e-324", "1" + "0" * 400),
    *('"x"', "[]", "{}", "[[[[]]]]", '{"a": {"b": [1]}}', '""', "[" * 3000, "&a [*a]", "*a"),
    *(
        "!!timestamp x",
        r'"\u001b[2J\ud800"',
        "\x1b[2J",
        "\0",
        '"../.."',
        "a: b: c",
        "0x" + "f" * 5000,
    ),
)
TOKEN = re.compile(rb'"[^"\n]{0,60}"|-?\d[\d.e+-]*|\b[\w./-]+\b')


@st.composite
def changes(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """A change to a file's bytes: one token for another, or a piece cut, doubled or scrambled."""
    kind = draw(st.sampled_from(("token", "token", "token", "cut", "double", "flip", "end", "all")))
    at, size = draw(st.floats(0, 1, exclude_max=True)), draw(st.integers(1, 40))
    odd = draw(st.sampled_from(ODD)).encode()

    def change(content: bytes) -> bytes:
        place = int(at * len(content))
        if kind == "token" and (tokens := list(TOKEN.finditer(content))):
            token = tokens[int(at * len(tokens))]
            return content[: token.start()] + odd + content[token.end() :]
        if kind == "cut":
            return content[:place] + content[place + size :]
        if kind == "double":
            return content[:place] + content[place : place + size] * 2 + content[place + size :]
        if kind == "flip":
            piece = bytes(byte ^ (1 << (size % 8)) for byte in content[place : place + 4])
            return content[:place] + piece + content[place + 4 :]
        return odd if kind == "all" else content[:place]

    return change


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the readers are given: a run with its checkpoint, and files of other programs."""
    home = tmp_path_factory.mktemp("originals")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert main(RUN) == 0
    shutil.copytree(home / "run", home / "same")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "global_step": 1}
    (home / "theirs").mkdir()
    torch.save(content, home / "theirs" / "one.pt")
    torch.save(content, home / "theirs" / "old.pt", _use_new_zipfile_serialization=False)
    save_file(model.state_dict(), home / "theirs" / "weights.safetensors")
    make_deepspeed(home / "deepspeed")
    (home / "shards").mkdir()
    torch.save(model.state_dict(), home / "shards" / "a.bin")
    index = {
        "metadata": {"total_size": 1},
        "weight_map": dict.fromkeys(model.state_dict(), "a.bin"),
    }
    (home / "shards" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (home / "engines").mkdir()
    for name, text in ENGINES.items():
        (home / "engines" / name).write_text(text)
    return home


def make_deepspeed(folder: Path) -> None:
    """What DeepSpeed leaves at stage 1, of one process."""
    flat = torch.ones(4)
    inner = {"state": {0: {"exp_avg": flat, "step": 3}}, "param_groups": [{"lr": 1, "params": [0]}]}
    step = folder / "global_step3"
    step.mkdir(parents=True)
    (folder / "latest").write_text(step.name)
    model = {
        "module": {"w": flat[:2], "v": flat[2:]},
        "global_steps": 3,
        "param_shapes": [{"w": torch.Size([2]), "v": torch.Size([2])}],
    }
    optimizer = {
        "partition_count": [1],
        "single_partition_of_fp32_groups": [flat],
        "base_optimizer_state": inner,
    }
    torch.save(model, step / "mp_rank_00_model_states.pt", _use_new_zipfile_serialization=False)
    torch.save(
        {"optimizer_state_dict": optimizer}, step / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    )


ENGINES = {
    "ds.json": json.dumps(
        {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.99]}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
            "zero_optimization": {"stage": 2},
            "bf16": {"enabled": True},
        },
        indent=1,
    ),
    "accelerate.yaml": "deepspeed_config: {zero_stage: 2, gradient_clipping: 1.0}\n"
    "num_processes: 2\nmixed_precision: bf16\n",
    "job.sh": "horovodrun -np 2 -H a:1,b:1 --fusion-threshold-mb 32 python train.py\n",
    "train.py": "import horovod.torch as hvd\nimport torch\nhvd.init()\n"
    "opt = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())\n"
    "opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=2)\n",
}


def newest(run: Path) -> str:
    return str(next((run / "checkpoints").glob("step-*")))


# Reader -> the files that are changed, and the command lines that then read them in ``at``.
READERS: dict[str, tuple[str, Callable[[Path], list[list[str]]]]] = {
    "report": ("run/*.*", lambda at: [["report", str(at / "run"), "--output", "page.html"]]),
    "checkpoint": (
        "run/checkpoints/step-*/*",
        lambda at: [
            ["checkpoint", "list", str(at / "run")],
            ["checkpoint", "show", newest(at / "run"), "--all"],
            ["checkpoint", "verify", newest(at / "run")],
            ["checkpoint", "diff", newest(at / "run"), newest(at / "same")],
        ],
    ),
    "import": (
        "theirs/*",
        lambda at: [
            ["checkpoint", "import", str(file), "--output", "out"]
            for file in sorted(at.glob("theirs/*"))
        ],
    ),
    "import of folders": (
        "[sd][he]*/**/*",  # shards, deepspeed
        lambda at: [
            ["checkpoint", "import", str(at / "shards"), "--output", "out"],
            ["checkpoint", "import", str(at / "deepspeed"), "--output", "more"],
        ],
    ),
    "translate": (
        "engines/*",
        lambda at: [["translate", str(file)] for file in sorted(at.glob("engines/*"))],
    ),
    "rerun": ("run/.hydra/*", lambda at: [["rerun", str(at / "run"), "--cfg", "job"]]),
}
EXAMPLES = {"rerun": 25}


@contextlib.contextmanager
def changed(file: Path, change: Callable[[bytes], bytes]) -> Iterator[None]:
    """Within the block ``file`` holds something else; the current folder is a new one."""
    content = file.read_bytes()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        file.write_bytes(change(content))
        try:
            yield
        finally:
            file.write_bytes(content)


def said_by(command: list[str]) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = main(command)
        except SystemExit as error:
            code = error.code
    return code, out.getvalue()


@pytest.mark.matrix(3)
@pytest.mark.parametrize("reader", READERS)
def test_a_changed_file_is_read_or_refused_in_a_sentence(reader, originals):
    pattern, commands = READERS[reader]
    files = sorted(file for file in originals.glob(pattern) if file.is_file())
    assert files

    @settings(
        max_examples=EXAMPLES.get(reader, 60),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(file=st.sampled_from(files), change=changes())
    def read_changed(file, change):
        with changed(file, change):
            for command in commands(originals):
                code, said = said_by(command)
                assert isinstance(code, int), said
                assert not BARE.search(said), said
                assert said.replace("\n", "").isprintable(), said

    read_changed()
