"""(k) A step of a script by drop-in beside the same step under the engine that it is written for.

Both are in the same two processes, on one gloo group a process of theirs, and take their blocks of
steps in turns. Each has a model and an optimizer of its own, made as a script makes them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.comparing import Blocks, Spread, on_ranks, one_by_one
from benchmarks.work import BATCH, Samples, build_model, table
from torsh_trainer.comm.base import CommOptions, Communicator
from torsh_trainer.dropin.negotiation.connection import StallCheck
from torsh_trainer.dropin.session import Seat, session
from torsh_trainer.environments.world import World

TITLE = "a step by drop-in"
WARM_UP = 3
Steps = tuple[Communicator, Callable[[int], None], Callable[[int], None]]


@dataclass(frozen=True)
class Case:
    """A script's engine and what it trains: so many square layers of a width.

    ``stage`` is ZeRO's, of DeepSpeed alone; ``accumulate`` micro-batches make a step.
    """

    engine: str
    model: str
    width: int
    layers: int
    block: int
    stage: int = 0
    accumulate: int = 1
    rounds: int = 60

    @property
    def what(self) -> str:
        """In the words of the table."""
        stage = f", ZeRO stage {self.stage}" if self.engine == "DeepSpeed" else ""
        passes = f", {self.accumulate} micro-batches" if self.accumulate > 1 else ""
        return f"{self.engine}{stage}{passes}"


SMALL = {"model": "25k (6 x 64)", "width": 64, "layers": 6, "block": 10}
LARGE = {"model": "1.6M (6 x 512)", "width": 512, "layers": 6, "block": 4}
CASES = (
    Case("Horovod", **SMALL),  # type: ignore[arg-type]
    Case("Horovod", **LARGE),  # type: ignore[arg-type]
    *(Case("DeepSpeed", **SMALL, stage=stage) for stage in range(4)),  # type: ignore[arg-type]
    *(Case("DeepSpeed", **LARGE, stage=stage) for stage in range(4)),  # type: ignore[arg-type]
    Case("DeepSpeed", **LARGE, stage=2, accumulate=4),  # type: ignore[arg-type]
)


def measure(*, quick: bool, device: str) -> list[dict[str, Any]]:
    """A row for each case: the ratio of a step by drop-in to the engine's beside it.

    On CPUs, whatever ``device`` is.
    """
    return one_by_one(
        CASES,
        lambda case: _row(case, 4 if quick else case.rounds),
        lambda row: f"{row['what']}, {row['model']}: {row['ratio']['value']:.2f} of the engine's",
    )


def text(rows: list[dict[str, Any]]) -> str:
    """The table, in Markdown."""
    head = ("script for", "model", "of the engine's step", "95% interval", "its step (ms)", "pairs")
    cells = [
        (
            row["what"],
            row["model"],
            *Spread(**row["ratio"]).cells(".2f"),
            f"{row['bare_us'] / 1000:.1f}",
            row["blocks"],
        )
        for row in rows
    ]
    title = "### (k) A step of a script by drop-in, beside the engine that it is written for"
    return f"{title}\n\n{table(head, cells)}"


def _row(case: Case, rounds: int) -> dict[str, Any]:
    found = on_ranks(2, _rank, case, rounds)
    return {
        "what": case.what,
        "model": case.model,
        "ratio": asdict(found.ratio),
        "bare_us": found.bare_us,
        "blocks": len(found.contender),
    }


def _rank(world: World, case: Case, rounds: int, folder: Path) -> Blocks:
    session.set_place(Seat(world, CommOptions(backend="gloo"), StallCheck()))
    make_steps = make_horovod_steps if case.engine == "Horovod" else make_deepspeed_steps
    with contextlib.ExitStack() as running:
        comm, theirs, ours = make_steps(case, running)

        def time_block(run: Callable[[int], None]) -> float:
            comm.barrier()
            began_s = time.perf_counter()
            run(case.block)
            comm.barrier()
            return (time.perf_counter() - began_s) / case.block

        for _ in range(WARM_UP):
            time_block(theirs), time_block(ours)
        found = Blocks(bare=[time_block(theirs)])
        for _ in range(rounds):
            found.contender.append(time_block(ours))
            found.bare.append(time_block(theirs))
    return found


def _batch(case: Case) -> Any:
    return Samples(features=case.width).__getitems__(list(range(BATCH)))


def _model(case: Case) -> torch.nn.Module:
    return build_model((case.width,) * (case.layers + 1))


def make_horovod_steps(case: Case, running: contextlib.ExitStack) -> Steps:
    """The processes, and what takes so many steps under Horovod, and by drop-in."""
    # Imported here, in the processes of this case: each loads its engine.
    from torsh_trainer_horovod.runtime import start

    from torsh_trainer.dropin.horovod import torch as ours

    ours.init()
    theirs = running.enter_context(start(session.comm, {}))

    def steps_of(hvd: Any) -> Callable[[int], None]:
        model, (x, y) = _model(case), _batch(case)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01),
            named_parameters=model.named_parameters(),
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)

        def run(steps: int) -> None:
            for _ in range(steps):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

        return run

    return session.comm, steps_of(theirs), steps_of(ours)


def make_deepspeed_steps(case: Case, running: contextlib.ExitStack) -> Steps:
    """The same for DeepSpeed, which ends with its process."""
    # Imported here, as above.
    from torsh_trainer_deepspeed import library

    from torsh_trainer.dropin import deepspeed as ours
    from torsh_trainer.dropin.zero.processes import meet

    comm = meet()
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": case.accumulate,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": case.stage},
        "steps_per_print": 10**9,
    }

    def steps_of(deepspeed: Any) -> Callable[[int], None]:
        model, (x, y) = _model(case), _batch(case)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=dict(config))[0]

        def run(steps: int) -> None:
            for _ in range(steps * case.accumulate):
                engine.backward(F.cross_entropy(engine(x), y))
                engine.step()

        return run

    theirs = library.load(comm)
    theirs.init_distributed(dist_backend="gloo", verbose=False)
    return comm, steps_of(theirs), steps_of(ours)
