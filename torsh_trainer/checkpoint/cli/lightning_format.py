"""What ``lightning.pytorch`` saves, written by ``checkpoint export --format lightning``."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torsh_trainer.checkpoint.cli.contents import Contents, TensorEntry
from torsh_trainer.checkpoint.cli.exporting import (
    Export,
    ExportFormat,
    read_counts,
    read_model,
    read_optimizers,
    save_torch,
)
from torsh_trainer.checkpoint.marks import resolve_marks

LIGHTNING_VERSION = "2.0.0"
"""The oldest release that names the parts of its loops as ``_loops`` does."""


class LightningExport(ExportFormat):
    """A .ckpt that Lightning's Trainer goes on from."""

    holds_optimizer = True
    file_name = "model.ckpt"

    def notes(self, contents: Contents, wanted: Export) -> list[str]:
        if _goes_on(contents, wanted):
            return []
        why = "the optimizer does not belong to the average" if wanted.ema else "no optimizer"
        return [f"weights alone ({why}): load_from_checkpoint reads them, fit cannot go on"]

    def write(
        self, contents: Contents, chosen: Mapping[str, TensorEntry], wanted: Export, path: Path
    ) -> list[str]:
        save_torch(_lightning_content(contents, chosen, wanted), path)
        return []


def _lightning_content(
    contents: Contents, chosen: Mapping[str, TensorEntry], wanted: Export
) -> dict[str, Any]:
    """What ``lightning.pytorch`` saves; of an average, or without an optimizer, weights alone."""
    counts = read_counts(contents)
    content: dict[str, Any] = {
        "epoch": counts["epoch"],
        "global_step": counts["updates"],
        "samples": counts["samples"],
        "pytorch-lightning_version": LIGHTNING_VERSION,
        "state_dict": read_model(contents, chosen, wanted),
    }
    own = _lightnings_own(contents, content, wanted)
    if not _goes_on(contents, wanted):
        settings = {
            key: value
            for key, value in own.items()
            if "hyper_parameters" in key or key == "state_dict"
        }
        return {**content, **settings}
    states = read_optimizers(contents, wanted)
    if own:
        numbers = [number_parameters(state) for state in states.values()]
        return {**content, **own, "optimizer_states": numbers}
    return {
        **content,
        "loops": {"fit_loop": _loops(counts["updates"], counts["epoch"], len(states))},
        "callbacks": {},
        "optimizer_states": [number_parameters(state) for state in states.values()],
        "lr_schedulers": _schedulers(contents, states, counts["updates"]),
    }


def _lightnings_own(
    contents: Contents, content: Mapping[str, Any], wanted: Export
) -> dict[str, Any]:
    """What a run of a LightningModule has saved as Lightning does, all but its optimizers.

    The weights are those of ``content``, unless its hooks have made others of them.
    """
    saved = contents.plain.get("task", {}).get("lightning")
    if saved is None:
        return {}
    found = torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True)
    weights = content["state_dict"]
    own: dict[str, Any] = resolve_marks(found, lambda name: weights.get(wanted.name(name)))
    changed = own.pop("torsh_trainer").get("changed_weights", False) and not wanted.ema
    left = own["state_dict"] if changed else {}
    named = {wanted.name(n): v for n, v in left.items() if n.startswith(wanted.strip)}
    return {**own, "state_dict": named if changed else weights}


def _goes_on(contents: Contents, wanted: Export) -> bool:
    """Whether training can go on from a Lightning file: the optimizer belongs to its weights."""
    return not wanted.ema and any(o.get("groups") for o in contents.optimizers.values())


def number_parameters(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state with parameters by number, as ``Optimizer.state_dict`` has them.

    ``param_names`` keeps the names; torch's ``load_state_dict`` takes no harm from it.
    """
    names = [name for group in state["groups"] for name in group["params"]]
    number = {name: i for i, name in enumerate(names)}
    return {
        "state": {number[name]: slots for name, slots in state["state"].items()},
        "param_groups": [
            {**g, "params": [number[n] for n in g["params"]], "param_names": list(g["params"])}
            for g in state["groups"]
        ],
    }


def _schedulers(
    contents: Contents, states: Mapping[str, Any], updates: int
) -> list[dict[str, Any]]:
    """One scheduler an optimizer: torch's own where the run had one, else where it stands.

    What else a scheduler's state holds are its settings, which the module that loads this has.
    """
    running = contents.plain.get("schedule", {}).get("running", {}).get("schedulers", {})
    if running:
        return [dict(running[name]) for name in states if name in running]
    return [
        {
            "base_lrs": [group["initial_lr"] for group in state["groups"]],
            "last_epoch": updates,
            "_step_count": updates + 1,
            "_last_lr": [group["lr"] for group in state["groups"]],
            "lr_lambdas": [None for _ in state["groups"]],
        }
        for state in states.values()
    ]


def _loops(updates: int, epoch: int, optimizers: int) -> dict[str, Any]:
    """Progress of Lightning's fit loop at the beginning of ``epoch``, after ``updates``."""

    def both(total: int, current: int, *more: str) -> dict[str, dict[str, int]]:
        keys = ("ready", "completed", *more)
        return {"total": dict.fromkeys(keys, total), "current": dict.fromkeys(keys, current)}

    batches = both(updates, 0, "started", "processed")
    return {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": updates},
        "epoch_loop.batch_progress": {**batches, "is_last_batch": False},
        "epoch_loop.scheduler_progress": both(updates, 0),
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {"step": both(updates, 0), "zero_grad": both(updates, 0, "started")}
        },
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": both(updates * optimizers, 0),
        "epoch_progress": both(epoch, epoch, "started", "processed"),
    }
