"""The verb comm: measurements that add up, mistakes in one sentence, and the page's programs."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from torsh_trainer.distributed.bench import BUS_FACTORS, COLLECTIVES
from torsh_trainer.distributed.tuning import AlgorithmTable

pytestmark = pytest.mark.usefixtures("warm_interpreters")

FILE = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MPIRUN = str(Path(sys.executable).with_name("mpirun"))  # where the wheel of Open MPI puts it
RUNNERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "mpirun": [MPIRUN, *(["--allow-run-as-root"] if os.geteuid() == 0 else [])],
    "python": [sys.executable],
}


def test_every_collective_is_measured_checked_and_written_down(run_door, tmp_path):
    args = ["--max", "16K", "--factor", "16", "--iterations", "3", "--warmup", "1"]
    args += ["--seconds", "60"]
    files = ["--json", "t.json", "--png", "t.png"]
    answer = run_door(["comm", "bench", "--processes", "3", *args, *files])
    assert answer.returncode == 0, answer.stdout + answer.stderr
    document = json.loads((tmp_path / "t.json").read_text())
    records = document["records"]
    gloo = [record for record in records if record["backend"] == "gloo"]
    assert {record["collective"] for record in gloo} == set(COLLECTIVES)
    assert len(gloo) == 2 * len(COLLECTIVES)
    for record in gloo:
        assert (record["wrong"], record["processes"], record["iterations"]) == (0, 3, 3)
        algbw = record["bytes"] / record["time_us"] / 1e3
        assert record["algbw_gb_s"] == pytest.approx(algbw)
        factor = BUS_FACTORS[record["collective"]](3)
        assert record["busbw_gb_s"] == pytest.approx(algbw * factor)
    assert {record["backend"] for record in records} | {*document["left_out"]} == {
        *("gloo", "mpi", "nccl")
    }
    assert "mpi" not in document["left_out"]
    lines = answer.stdout.splitlines()
    tables = [line for line in lines if not re.match(r"\w+: left out", line)]
    assert max(map(len, tables)) <= 100
    assert sum(line.strip().startswith("size") for line in lines) == len(COLLECTIVES)
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        ("benc", 2, "no such word; write comm bench"),
        ("bench --min 5X", 2, "--min 5X is no size; write 4096, 64K, 256M or 1G"),
        ("bench --min 1M --max 1K", 2, "--min 1M is above --max 1K"),
        ("bench --factor 1", 2, "give 2 or more"),
        ("bench --collectives allreduce", 2, "did you mean 'all_reduce'"),
        ("bench --dtype float3", 2, "did you mean 'float32'"),
        ("bench --processes none", 2, "--processes none is no count"),
        ("bench --iterations 0", 2, "--iterations 0 is no count"),
        ("bench --seconds 0", 2, "--seconds 0.0 is not positive"),
        ("bench --timeout nan", 2, "--timeout nan is not positive"),
        ("bench --warmup -1", 2, "--warmup -1 is below 0"),
        ("bench --warmup some", 2, "invalid int value: 'some'; comm bench --help shows"),
        ("bench --sizes 1K", 2, "unrecognized arguments: --sizes 1K"),
        ("", 2, "comm: the following arguments are required: bench"),
        ("bench --backends ,", 2, "--backends names nothing"),
        ("bench --json .", 2, "--json . cannot be a file"),
        ("bench --png nowhere/t.png", 2, "name one in a folder that exists"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(door, args, code, words):
    answer = door("comm", *shlex.split(args))
    assert answer.code == code
    assert words in answer.err
    assert answer.err.count("\n") == 1


def test_a_backend_that_was_named_and_is_missing_is_an_error(run_door):
    answer = run_door(["comm", "bench", "--backends", "gloo,glo", "--max", "1K"])
    assert answer.returncode == 2
    told = answer.stderr.splitlines()[-1]
    assert "--backends glo is unknown to torch.distributed; did you mean 'gloo'?" in told


@pytest.mark.exhaustive
def test_mpi_stands_beside_gloo(run_door, tmp_path):
    args = ["--collectives", "all_reduce,all_to_all", "--max", "4K", "--iterations", "2"]
    answer = run_door(["comm", "bench", "--backends", "gloo,mpi", *args, "--json", "t.json"])
    assert answer.returncode == 0, answer.stdout + answer.stderr
    records = json.loads((tmp_path / "t.json").read_text())["records"]
    found = [(r["backend"], r["collective"], r["bytes"], r["wrong"]) for r in records]
    expected = [
        (backend, collective, size, 0)
        for backend in ("gloo", "mpi")
        for collective in ("all_reduce", "all_to_all")
        for size in (1024, 4096)
    ]
    assert sorted(found) == sorted(expected)
    assert "gloo (cpu)" in answer.stdout
    assert "mpi (cpu)" in answer.stdout


@pytest.fixture(scope="module")
def page(repository) -> str:
    return (repository / "docs" / "collectives.md").read_text()


@pytest.mark.exhaustive
def test_every_command_of_the_page_works(page, run_command, warm_script, tmp_path):
    for name, text in FILE.findall(page):
        (tmp_path / name).write_text(text)
    lines = "".join(COMMANDS.findall(page)).splitlines()
    assert {line.split()[-1] for line in lines} >= {name for name, _ in FILE.findall(page)}
    torchrun = "torchrun --standalone --nproc-per-node=2 "
    for line in lines:
        if line.startswith(torchrun) and line != lines[0]:  # the first one, by torchrun itself
            warm_script(line.removeprefix(torchrun), processes=2, cwd=tmp_path)
            continue
        program, *arguments = shlex.split(line.replace(" python ", f" {sys.executable} "))
        answer = run_command([*RUNNERS[program], *arguments], cwd=tmp_path)
        assert answer.returncode == 0, (line, answer.stdout + answer.stderr)
    table = AlgorithmTable.from_file(tmp_path / "table.json", backend="gloo", world_size=2)
    assert set(table.times_us) == {"flat", "ring", "tree", "hierarchical"}
