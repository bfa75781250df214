"""What a whole run asks of an accelerator between its reports, and what a report adds.

``python tests/gpu/test_counted_loops.py`` writes ``counted_loops.json`` anew. The loop reads a
dataset, counts weights where they are counted, takes steps in bf16 with clipping, accumulation and
an average of the weights, and reports every fifth step.
"""

import copy
import itertools
import json
import re
import tempfile
import time
import types
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torsh_trainer import Trainer
from torsh_trainer.callbacks.base import Callback
from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.data.loading import Loading
from torsh_trainer.optim.optimizers import OptimizerSpec
from torsh_trainer.optim.precision import Precision
from torsh_trainer.strategies.builtin import NCCL
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.single import Single
from torsh_trainer.tasks.base import Task
from torsh_trainer.testing.counting import Counts, watch
from torsh_trainer.testing.fake_accelerator import (
    FakeAccelerator,
    fake_accelerator,
    run_on_fake_accelerator,
)
from torsh_trainer.training import stopping
from torsh_trainer.training.rank_run import RankRun
from torsh_trainer.training.run_parts import RunParts

TABLE = Path(__file__).with_name("counted_loops.json")
STRATEGIES = {
    "single": Single(),
    "nccl": NCCL(),
    "ddp overlap=false": DDP(overlap=False),
    "fsdp": FSDP(),
}
LOG_EVERY, STEPS = 5, 8
QUIET = "a step without a report"
PERIOD = f"{LOG_EVERY} steps, one with a report"
KINDS = ("synchronisations", "copies", "collectives", "collective_bytes")


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 1024

    def __getitem__(self, index):
        return {"x": torch.full((4,), float(index)), "y": torch.tensor(index % 3)}


class Data:
    train = Numbers()
    eval = predict = test = collate = None


class Known(Task):
    sample_weight = 1.0
    data = Data()
    optimizer = OptimizerSpec("AdamW", lr=1e-3, fused=False, options={"foreach": True})

    def build_model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, model, batch):
        return model(batch["x"])

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs, batch["y"])


class Counted(Known):
    """Weights are known once a batch is read."""

    sample_weight = None

    def weight(self, batch):
        return float((batch["y"] > 0).sum())


@dataclass(frozen=True)
class Case:
    """A row."""

    strategy: str
    world_size: int
    counted: bool

    @property
    def name(self) -> str:
        weights = "counted" if self.counted else "known"
        return f"{self.strategy}, world {self.world_size}, weights {weights}"


PLACES = [
    ("single", 1),
    *itertools.product(("nccl", "ddp overlap=false", "fsdp"), (4, 8)),
]
CASES = [Case(*place, counted) for place in PLACES for counted in (False, True)]


class Noting(Callback):
    """All that has happened by the end of each step."""

    def __init__(self):
        self.seen: list[Counts] = []
        self.reported: list[bool] = []

    def on_step(self, report):
        self.seen.append(copy.deepcopy(watch.counts))
        self.reported.append(report.metrics is not None)


def count(accelerator: FakeAccelerator, case: Case, run_dir: str) -> dict[str, dict]:
    # Processes agree to stop about once a second: a clock that stands lets them do so at reports.
    stopping.time = types.SimpleNamespace(perf_counter=lambda: 0.0)
    world, comm = accelerator.comm.world, accelerator.comm
    strategy, noting = STRATEGIES[case.strategy], Noting()
    trainer = Trainer(
        task=Counted() if case.counted else Known(),
        strategy=strategy,
        max_steps=STEPS,
        log_every=LOG_EVERY,
        max_grad_norm=1.0,
        ema_decay=0.9,
        precision=Precision(compute="bf16"),
        compile=False,
        loading=Loading(batch_size=4 * world.size, micro_batch_size=2),
        checkpoint=CheckpointOptions(at_end=False),
        callbacks=[noting],
        run_dir=run_dir,
    )
    mesh = strategy.mesh(world)
    parts = RunParts(trainer, world, comm, mesh, strategy, Path(run_dir))
    with accelerator.count():
        RankRun(parts, began=time.perf_counter()).run()
    parts.close()
    assert noting.reported == [step in (1, LOG_EVERY, STEPS) for step in range(1, STEPS + 1)]
    return {
        QUIET: difference(noting.seen[1], noting.seen[2]),
        PERIOD: difference(noting.seen[1], noting.seen[1 + LOG_EVERY]),
    }


def difference(before: Counts, after: Counts) -> dict:
    """What has happened between the two, by function."""
    found: dict = {"operators": after.operators.total() - before.operators.total()}
    for kind in KINDS:
        places: Counter[str] = Counter()
        for place, times in (getattr(after, kind) - getattr(before, kind)).items():
            places[re.sub(r":\d+ in ", ".", place)] += times
        found[kind] = dict(sorted(places.items()))
    return found


def count_elsewhere(case: Case) -> dict[str, dict]:
    def counted(accelerator: FakeAccelerator, run_dir: str) -> dict[str, dict]:
        return count(accelerator, case, run_dir)

    with tempfile.TemporaryDirectory() as folder:
        return run_on_fake_accelerator(counted, folder, world_size=case.world_size)


def write() -> None:
    reasons = json.loads(TABLE.read_text())["reasons"] if TABLE.exists() else {}
    rows = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder, fake_accelerator(case.world_size) as one:
            rows[case.name] = count(one, case, folder)
        print(case.name, flush=True)
    TABLE.write_text(json.dumps({"reasons": reasons, "rows": rows}, indent=1) + "\n")


TABLED = json.loads(TABLE.read_text()) if TABLE.exists() else {"reasons": {}, "rows": {}}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_run_asks_for_what_the_table_says(case):
    """The operators may differ by two in a hundred: a release of torch decomposes otherwise."""
    found, tabled = count_elsewhere(case), copy.deepcopy(TABLED["rows"][case.name])
    for what in (QUIET, PERIOD):
        operators = found[what].pop("operators")
        assert operators == pytest.approx(tabled[what].pop("operators"), rel=0.02), AGAIN
    assert found == tabled, AGAIN


AGAIN = "python tests/gpu/test_counted_loops.py writes the table anew"


def test_the_table_has_a_row_for_every_case():
    assert list(TABLED["rows"]) == [case.name for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_step_without_a_report_waits_for_the_device_and_a_report_waits_once(case):
    """Whatever is written into the table anew; counted weights included."""
    row = TABLED["rows"][case.name]
    assert row[QUIET]["synchronisations"] == {}
    assert sum(row[PERIOD]["synchronisations"].values()) == 1


def test_every_wait_for_the_device_in_the_table_has_its_reason():
    rows = TABLED["rows"].values()
    waits = {place for row in rows for what in row.values() for place in what["synchronisations"]}
    assert waits == set(TABLED["reasons"])


if __name__ == "__main__":
    write()
