"""Who asks the world: never the meaning of a step, which asks its group of the mesh.

The world is there to start, to meet, to stop and to fail together. A step asks the communicator it
is given (``comm.size``), which is a group of the mesh.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "torsh_trainer"

WORLD = re.compile(r"(?<![a-z])world\.(size|rank)\b")
OF_THE_RUN = re.compile(
    r"\b(self|parts)\.(_context\.|_)?comm\.(size|rank|all_reduce|reduce_values|begin_sum)\b"
)
"""Of a communicator that is the run's, so all processes of the world."""

RUN = (
    "training/rank_run.py",
    "training/run_parts.py",
    "training/run_stages.py",
    "training/run_result.py",
    "training/restore.py",
    "training/loop_factory.py",
    "training/loop.py",
    "training/nonfinite.py",
    "training/process.py",
    "training/preview.py",
    "training/stopping.py",
    "training/trust.py",
)
"""Whose ``self.comm`` that is, or that of its ``parts``."""

ROOMS = {
    "environments/": "who and where a process is: what the world is made of",
    "doctor/": "looks at hosts before a job starts",
    "dropin/": "the interface of a product that knows the world and no mesh",
    "launchers/": "processes that start, fail and end",
    "rundir/": "a log for each process",
    "testing/": "the tests' own ranks",
}
"""Rooms that know nothing of a step."""

ALLOWED = {
    "assemble/__init__.py": (1, "all processes agree on one run directory before they begin"),
    "callbacks/formatting.py": (4, "the banner says how many processes there are"),
    "callbacks/profiler.py": (1, "a trace for each process"),
    "callbacks/throughput.py": (1, "the devices that all rates of FLOP/s are shares of"),
    "checkpoint/dcp.py": (5, "every process writes its pieces, and all agree on errors"),
    "checkpoint/saving.py": (3, "every process writes its pieces"),
    "comm/base.py": (2, "the size and rank of a communicator's own members"),
    "distributed/groups.py": (1, "a store for the library's groups"),
    "comm/local.py": (2, "a communicator of one process"),
    "comm/start.py": (16, "processes meet"),
    "training/program.py": (
        1,
        "the world of the communicator whose ranks a checkpoint's parts belong to",
    ),
    "mesh/axes.py": (4, "the mesh is made of the world"),
    "training/nonfinite.py": (
        2,
        "whether any process saw a loss that is not finite: all fail together",
    ),
    "training/out_of_memory.py": (2, "which process ran out of memory"),
    "training/preview.py": (
        2,
        "whether a launcher divides the cores, whether the strategy is open",
    ),
    "training/process.py": (4, "processes fail together"),
    "training/run_result.py": (
        2,
        "it tells of all processes, and the peak of FLOP/s is of all devices",
    ),
    "training/stopping.py": (3, "all processes stop after the same step"),
    "strategies/base.py": (1, "how far a sum exceeds a mean: on the world that it is asked about"),
    "strategies/dividing.py": (3, "the mesh is made of the world"),
    "strategies/dp.py": (2, "one process alone"),
    "strategies/fsdp.py": (1, "the mesh of the data is made of the world it is asked about"),
    "strategies/single.py": (2, "one process alone"),
    "verify/witness.py": (1, "what a trial tells of its processes"),
}
"""File -> how often, and why it may."""


def uses() -> dict[str, int]:
    found: dict[str, int] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith(tuple(ROOMS)):
            continue
        lines = [line for line in path.read_text().splitlines() if WORLD.search(line)]
        if name in RUN:
            lines += [line for line in path.read_text().splitlines() if OF_THE_RUN.search(line)]
        if lines:
            found[name] = len(lines)
    return found


def test_only_what_is_not_of_a_step_asks_the_world() -> None:
    """A line that is missing here was put somewhere else: take it off the list."""
    assert uses() == {name: count for name, (count, _) in ALLOWED.items()}


def test_every_room_that_may_ask_does() -> None:
    for room in ROOMS:
        files = (PACKAGE / room).rglob("*.py")
        assert any(WORLD.search(path.read_text()) for path in files), f"{room}: off the list"


ENGINES = ("training/run_parts.py", "training/finders.py")
"""Where a run makes its engines."""


def engines_made(source: str) -> Iterator[str]:
    """The communicators that calls of ``prepare`` and ``resolve`` of a strategy are given."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr in ("prepare", "resolve") and len(node.args) == 2:
            yield ast.unparse(node.args[1])


def test_a_run_gives_its_engines_the_processes_that_see_other_samples() -> None:
    sources = [(PACKAGE / name).read_text() for name in ENGINES]
    given = [communicator for source in sources for communicator in engines_made(source)]
    assert len(given) == 4, "an engine is made elsewhere too, or no longer"
    assert set(given) == {"self.groups.data", "context.groups.data"}


def test_the_search_sees_what_it_is_to_see() -> None:
    assert WORLD.search("factor = 1.0 / comm.world.size")
    assert WORLD.search("mine = parts[self.world.rank]")
    assert not WORLD.search("options.world.sizes")
    assert OF_THE_RUN.search("total = self.comm.reduce_values([mine])[0]")
    assert OF_THE_RUN.search("total = parts.comm.reduce_values([mine])[0]")
    assert not OF_THE_RUN.search("total = self.groups.loss.reduce_values([mine])[0]")
    assert list(engines_made("strategy.prepare(job, self.comm)")) == ["self.comm"]
