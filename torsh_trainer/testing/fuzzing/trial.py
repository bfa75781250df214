"""One combination on real engines, beside what is right."""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from torsh_trainer.callbacks.base import Callback, StepReport
from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.data.loading import Loading
from torsh_trainer.environments.world import World
from torsh_trainer.errors import TorshError
from torsh_trainer.mesh import MeshOptions
from torsh_trainer.testing.fuzzing.drawing import Combination, EngineChoice
from torsh_trainer.testing.fuzzing.models import DrawnTask
from torsh_trainer.testing.fuzzing.plain import TrainingTrace, train_plainly
from torsh_trainer.testing.ranks import RankFailure, RankPool
from torsh_trainer.training.trainer import Trainer, run_in
from torsh_trainer.utils import registry

_REFUSAL = re.compile(r"torsh_trainer\.errors\.(Unsupported|ConfigError): (.*)")

Verdict = Literal["agrees", "refused", "told", "plain fails", "DIFFERS", "CRASHES"]
SILENT: tuple[Verdict, ...] = ("DIFFERS", "CRASHES")
"""What must not be."""


@dataclass(frozen=True)
class TrialOutcome:
    """What a combination came to, and in words why."""

    verdict: Verdict
    why: str = ""
    worst: float = 0.0


class Diary(Callback):
    """Loss and gradient norm of every step."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, float, float]] = []

    def on_step(self, report: StepReport) -> None:
        if report.metrics is not None:
            metrics = report.metrics
            self.rows.append((report.step, metrics["loss"], metrics["grad_norm"]))


def trainer_of(drawn: Combination, engine: EngineChoice, until: int, run_dir: Path) -> Trainer:
    """The run of one engine, which goes on from what lies in ``run_dir``."""
    knobs = dict(engine.knobs)
    return Trainer(
        task=DrawnTask(drawn),
        strategy=registry.strategy_class(engine.strategy)(**knobs),
        mesh=MeshOptions(**engine.mesh),
        loading=Loading(
            batch_size=drawn.batch_size,
            micro_batch_size=drawn.micro_batch,
            shuffle=drawn.shuffle,
            drop_last=drawn.drop_last,
            weighted=drawn.weighted_sampling,
        ),
        checkpoint=CheckpointOptions(dir=str(run_dir / "checkpoints")),
        callbacks=(Diary(),),
        run_dir=run_dir / f"until-{until}",
        stages=("fit", "evaluate"),
        max_steps=until,
        max_grad_norm=drawn.max_norm,
        max_grad_value=drawn.max_value,
        ema_decay=drawn.ema,
        activation_checkpointing=drawn.recompute,
        log_every=1,
        eval_every_epochs=None,
        log_level="error",
        device="cpu",
    )


def live(world: World, trainer: Trainer) -> Any:
    """One process of a run: what it has noted, or its refusal.

    Of a model in parts one process alone may refuse: it raises, which ends the others.
    """
    try:
        content = run_in(world, trainer).content
    except TorshError as error:
        if math.prod(trainer.mesh.model_sizes.values()) > 1:
            raise
        return {"refused": f"{type(error).__name__}: {error}"}
    (diary,) = [one for one in trainer.callbacks if isinstance(one, Diary)]
    return {"rows": diary.rows, **content}


class Fuzzer:
    """Pools of processes, each kept for many combinations."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __enter__(self) -> Fuzzer:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.close()

    def try_one(self, drawn: Combination, *, right: TrainingTrace | None = None) -> TrialOutcome:
        """The verdict on a combination; ``right`` is what plain PyTorch gives unless it is said."""
        try:
            right = right or train_plainly(drawn)
        except (RuntimeError, ValueError) as error:
            return TrialOutcome("plain fails", _first_line(error))
        with _folder() as folder:
            found = TrainingTrace()
            told: list[str] = []
            for engine, until in zip(drawn.engines, drawn.stops, strict=True):
                trainer = trainer_of(drawn, engine, until, folder)
                try:
                    answers = self._pool(engine.processes).run(live, trainer, timeout_s=60.0)
                except RankFailure as failure:
                    if refusal := _REFUSAL.search(str(failure)):
                        return TrialOutcome("refused", f"{refusal[1]}: {refusal[2]}")
                    return TrialOutcome("CRASHES", f"{engine}: {_last_error(str(failure))}")
                refused = [answer["refused"] for answer in answers if "refused" in answer]
                if refused:
                    return TrialOutcome("refused", _first_line(refused[0]))
                told += answers[0].get("changing_buffers", [])
                for step, loss, norm in answers[0]["rows"]:
                    found.losses[step], found.norms[step] = loss, norm
                found.metrics = answers[0]["metrics"]
            found.parameters = read_parameters(folder / "checkpoints", drawn.stops[-1])
        worst, where = compare(found, right, divides=not drawn.optimizer.startswith("SGD"))
        bound = tolerance(drawn)
        if worst <= bound:
            return TrialOutcome("agrees", worst=worst)
        if told:
            return TrialOutcome("told", f"changing buffers: {', '.join(sorted(set(told)))}", worst)
        return TrialOutcome("DIFFERS", f"{where} by {worst:.2g}, {bound:.0e} is rounding", worst)

    def _pool(self, processes: int) -> RankPool:
        if processes not in self._pools:
            self._pools[processes] = RankPool(processes, join=False)
        return self._pools[processes]


def read_parameters(folder: Path, step: int) -> dict[str, Tensor]:
    """The model of a checkpoint, read by torch alone."""
    state: dict[str, Any] = {}
    _load_state_dict(
        state,
        storage_reader=FileSystemReader(str(folder / f"step-{step:08d}")),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    return dict(_tensors(state["engine"]["model"]))


def _tensors(state: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Tensor]]:
    found = []
    for name, value in state.items():
        if isinstance(value, Tensor):
            found.append((prefix + name, value))
        elif isinstance(value, Mapping):
            found += _tensors(value, f"{prefix}{name}.")
    return found


def tolerance(drawn: Combination) -> float:
    """Rounding of so few steps, in what the model computes in."""
    return 2e-4 if DrawnTask(drawn).dtype == torch.float32 else 1e-7


def compare(
    found: TrainingTrace, right: TrainingTrace, *, divides: bool = False
) -> tuple[float, str]:
    """The largest difference, relative to what is right, and where it is.

    ``divides``: the optimizer divides by gradients, so that elements whose gradients are rounding
    are not compared.
    """
    rows: list[tuple[float, str]] = [(0.0, "")]
    numbers: list[tuple[str, Mapping[Any, float], Mapping[Any, float]]] = [
        ("loss", found.losses, right.losses),
        ("grad_norm", found.norms, right.norms),
        ("metric", found.metrics, right.metrics),
    ]
    for name, mine, others in numbers:
        if set(mine) != set(others):
            return math.inf, f"{name} of {sorted(mine)}, not {sorted(others)}"
        floor = 1e-2 if name == "grad_norm" else 1e-3
        rows += [(_apart(mine[k], others[k], floor), f"{name} {k}") for k in others]
    for name, tensor in right.parameters.items():
        mine_tensor = found.parameters.get(name)
        if mine_tensor is None or mine_tensor.shape != tensor.shape:
            return math.inf, f"parameter {name}"
        if tensor.numel():
            difference = (mine_tensor - tensor).abs()
            noise = right.is_rounding(name) if divides else None
            if noise is not None:
                difference = difference.masked_fill(noise, 0.0)
            apart = float(difference.max()) / max(0.1, float(tensor.abs().max()))
            rows.append((apart if math.isfinite(apart) else math.inf, f"parameter {name}"))
    return max(rows)


def _apart(mine: float, right: float, floor: float) -> float:
    if not math.isfinite(right) or not math.isfinite(mine):
        return 0.0 if str(mine) == str(right) else math.inf
    return abs(mine - right) / max(floor, abs(right))


@contextlib.contextmanager
def _folder() -> Any:
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _first_line(error: object) -> str:
    return str(error).strip().splitlines()[0][:300]


def _last_error(text: str) -> str:
    lines = [line for line in text.splitlines() if "Error" in line or "signal" in line]
    return (lines or text.splitlines())[-1].strip()[:300]
