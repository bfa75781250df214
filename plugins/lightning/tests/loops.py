"""One case under one loop: what was recorded."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import runpy
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
import torch.distributed as dist
from cases import CASES, Case, nothing
from lightning.pytorch.callbacks import Checkpoint
from modules.data import write_corpus
from recorder import Keeper, Ledger, Reader, Recording, Witness, watch
from torsh_trainer_lightning import TorshStrategy
from torsh_trainer_lightning.task import LightningTask

from torsh_trainer import CheckpointOptions, Trainer
from torsh_trainer.__main__ import main
from torsh_trainer.environments.world import World
from torsh_trainer.optim.precision import Precision
from torsh_trainer.testing.ranks import torchrun_variables

SEED = 7

Watched = Literal["hooks", "numbers", "nothing"]
"""Every hook; what is logged and what callbacks can read; what is logged alone.

A loop may take a shorter way where nobody has defined a hook, so that all three are looked at.
"""


def under_lightning(
    case: Case,
    folder: Path,
    *,
    strategy: Any = "auto",
    devices: int = 1,
    seed: int = SEED,
    watched: Watched = "hooks",
    resume: Path | None = None,
) -> Recording:
    """What ``lightning.Trainer`` does with the case; ``resume`` is a ``.ckpt`` to go on from.

    ``strategy`` is what Lightning takes, or the name and the knobs of one of ours.
    """
    if isinstance(strategy, tuple):
        name, knobs = strategy
        strategy = TorshStrategy(name, **knobs)
    quiet()
    recording = Recording()
    settle(folder)
    L.seed_everything(seed, verbose=False)
    data, module = case.data(), case.module()
    callbacks = [*case.callbacks(), *watchers(watched, recording)]
    attach(watched, recording, module, data)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        logger=Ledger(recording),
        callbacks=callbacks,
        default_root_dir=folder,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"log_every_n_steps": 1, **case.flags},
    )
    for stage in case.stages:
        resumed = {"ckpt_path": resume} if stage == "fit" else {}
        answer = getattr(trainer, stage)(module, datamodule=data, **resumed)
        if stage == "predict":
            recording.predictions = _flat(answer)
    return recording


def under_our_loop(
    case: Case,
    folder: Path,
    *,
    strategy: Any = "single",
    devices: int = 1,
    seed: int = SEED,
    watched: Watched = "hooks",
    resume: Path | None = None,
    trusted: bool = False,
    without: tuple[str, ...] = (),
) -> Recording:
    """What our loop does with the case, ``without`` these stages of it.

    ``trusted`` lets ``resume`` run code.
    """
    case = replace(case, stages=tuple(stage for stage in case.stages if stage not in without))
    quiet()
    run_dir = folder / "run"
    recording = Recording()
    settle(folder)
    made: dict[str, Any] = {}

    def data() -> Any:
        made["data"] = case.data()
        return made["data"]

    def module() -> Any:
        made["module"] = case.module()
        attach(watched, recording, made["module"], made.get("data"))
        return made["module"]

    ours, theirs = in_our_words(case.flags)
    task = LightningTask(
        module,
        None if case.data is nothing else data,
        callbacks=[*case.callbacks(), *watchers(watched, recording)],
        loggers=[Ledger(recording)],
        ckpt_path=None if resume is None else str(resume),
        trust_ckpt=trusted,
        **theirs,
    )
    trainer = Trainer(
        task=task,
        strategy=strategy,
        seed=seed,
        stages=tuple("evaluate" if stage == "validate" else stage for stage in case.stages),
        run_dir=run_dir,
        checkpoint=CheckpointOptions(resume="never", at_end=False),
        **{"log_every": 1, **ours},
    )
    trainer.run()
    predictions = run_dir / "predictions.pt"
    if predictions.exists():
        recording.predictions = _flat(torch.load(predictions))
    return recording


OURS = {
    "max_epochs": "max_epochs",
    "max_steps": "max_steps",
    "accumulate_grad_batches": "accumulate",
    "check_val_every_n_epoch": "eval_every_epochs",
    "log_every_n_steps": "log_every",
    "overfit_batches": "overfit_batches",
    "fast_dev_run": "fast_dev_run",
    "precision": "precision",
}
"""Flags of ``lightning.Trainer`` that are knobs of a run; the others keep their names."""


def in_our_words(flags: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Flags of ``lightning.Trainer`` as arguments of our trainer, and of the task."""
    rest = dict(flags)
    ours = {OURS[name]: rest.pop(name) for name in flags if name in OURS}
    if "precision" in ours:
        ours["precision"] = PRECISIONS[ours["precision"]]
    value = rest.pop("gradient_clip_val", None)
    if value is not None:
        how = rest.pop("gradient_clip_algorithm", "norm")
        ours[f"max_grad_{how}"] = value
    return ours, rest


PRECISIONS = {
    "bf16-mixed": Precision(compute="bf16"),
    "bf16-true": Precision(params="bf16", compute="bf16"),
}


def watchers(watched: Watched, recording: Recording) -> list[L.Callback]:
    """The callbacks that note what is to be noted; the last keeps the final parameters."""
    if watched == "hooks":
        return [Witness(recording), Witness(recording, "second"), Keeper(recording)]
    return [*([Reader(recording)] if watched == "numbers" else []), Keeper(recording)]


def attach(watched: Watched, recording: Recording, module: Any, data: Any) -> None:
    """Has the module and its data noted, where every hook is."""
    if watched == "hooks":
        watch(module, recording, who="module")
        if data is not None:
            watch(data, recording, who="data")


def settle(folder: Path) -> None:
    """Makes ``folder`` the current one, and puts there what Lightning's demos would download."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    write_corpus(folder)


def quiet() -> None:
    """Lightning speaks at length of what every test does on purpose."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def _flat(value: Any) -> list[float]:
    """The numbers in tensors and lists of them, in their order."""
    if isinstance(value, torch.Tensor):
        return value.double().flatten().tolist()
    return [number for part in value for number in _flat(part)]


# -- on ranks -------------------------------------------------------------------------------------


def as_torchrun(world: World, port: int, folder: Path) -> None:
    """Gives this rank the place and the variables that torchrun would have started it with."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    os.environ.update(torchrun_variables(world, port))


def as_alone(folder: Path) -> None:
    """As one process that nobody has started."""
    os.chdir(folder)
    for name in torchrun_variables(World(), 0):
        os.environ.pop(name, None)


def recorded(
    world: World, port: int, folder: Path, names: Sequence[str], loop: str, options: dict[str, Any]
) -> dict[str, Recording | str]:
    """Each case by its name under ``loop`` (a function of this module), on this rank.

    A case that raises has what was said in the place of a recording.
    """
    told: dict[str, Recording | str] = {}
    for number, name in enumerate(names):
        as_torchrun(world, port, folder / f"{loop}-{number}")
        try:
            told[name] = globals()[loop](CASES[name], Path.cwd(), devices=world.size, **options)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
            told[name] = f"{type(error).__name__}: {error}"
    if dist.is_initialized():
        dist.destroy_process_group()
    return told


def typed(
    world: World, port: int, folder: Path, args: Sequence[str], processes: int
) -> tuple[int, str]:
    """``python -m torsh_trainer ARGS`` or ``python FILE.py``, as this rank of a job.

    A command for one process is typed on the first rank alone.
    """
    if processes == 1:
        as_alone(folder)
        if world.rank:
            return 0, ""
    else:
        as_torchrun(world, port, folder)
    said = io.StringIO()
    sys.path.insert(0, str(folder))
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            if args[-1].endswith(".py"):
                runpy.run_path(args[-1], run_name="__main__")
                code = 0
            else:
                code = main(list(args))
    finally:
        sys.path.remove(str(folder))
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(str(folder)):
                del sys.modules[name]  # the next folder has others of that name
    if dist.is_initialized():
        dist.destroy_process_group()
    return code, said.getvalue()
