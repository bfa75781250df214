"""The layers of one model that are cut over ``tp``: a part of the engine of ``fsdp``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torsh_trainer.comm.compression.base import NoCompression
from torsh_trainer.comm.model_check import check_alike
from torsh_trainer.errors import Unsupported
from torsh_trainer.mesh import Groups
from torsh_trainer.strategies.base import Job, Strategy
from torsh_trainer.strategies.tensor_parallel import layers
from torsh_trainer.strategies.tensor_parallel.agreeing import WholeAlike
from torsh_trainer.strategies.tensor_parallel.cutting import Cutting
from torsh_trainer.strategies.tensor_parallel.plan import (
    ParallelPlan,
    check_sizes,
    find_plan,
    list_whole,
    split_outside,
)
from torsh_trainer.strategies.tensor_parallel.watching import PartWatch

_BY_ELEMENT = (
    *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW),
    *(torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.RMSprop, torch.optim.SGD),
)
"""Known to do to every element the same, whatever lies beside it."""
_FUSED = (torch.optim.Adam, torch.optim.AdamW)
"""Whose fused kernels take tensors of two meshes."""


@dataclass(frozen=True)
class CutLayers:
    """How layers are cut over processes that have the same samples.

    ``names`` are the parameters that are, ``counts`` says whether this process counts parameters
    that are whole on all of them, and ``summary`` is a line on all of it, empty without ``tp``.
    """

    cutting: Cutting
    names: frozenset[str] = frozenset()
    counts: bool = True
    summary: str = ""
    alike: WholeAlike | None = None

    def end_step(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """After an optimizer step; ``parameters`` are all of the model, by name.

        Raises:
            TrainingError: see ``WholeAlike``.
        """
        if self.alike is not None:
            whole = {name: p for name, p in parameters.items() if name not in self.names}
            self.alike.check(whole)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raises Unsupported where it cannot step parameters that are cut in two ways."""
        if not self.names:
            return
        kind = type(optimizer)
        hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        if kind not in _BY_ELEMENT or hooked:
            why = ", which is not known to do the same to every element"
            use = "use adamw, adam or sgd, or set mesh.tp=1"
        elif any(group.get("fused") for group in optimizer.param_groups) and kind not in _FUSED:
            why, use = " with fused=true", "set optimizer.fused=false"
        else:
            return
        raise Unsupported(
            f"mesh.tp cannot cut layers under optimizer {kind.__name__}{why}", fix=use
        )


def cut_layers(
    model: nn.Module,
    job: Job,
    groups: Groups,
    knobs: Strategy,
    *,
    table: Mapping[str, Any],
    hooked: Collection[str],
    is_computed: Callable[[str], bool] = lambda name: True,
    splits_tokens: bool = False,
) -> CutLayers:
    """Finds the plan of ``model`` and has its layers compute on parts, which are not cut yet.

    ``table`` is ``strategy.plan``, ``hooked`` names parameters with hooks of a user.
    ``is_computed`` says which modules are this process's, by name. ``splits_tokens`` cuts tokens
    between pairs of layers, with the gradients of all whole parameters summed.

    Raises:
        ConfigError: there is no plan, or a size does not divide.
        Unsupported: something else that was asked for cannot be honoured beside it.
    """
    tp = groups.mesh.tp
    if tp == 1:
        return CutLayers(Cutting(model, {}, groups))
    check_alike(model, groups.stage)
    plan = find_plan(model, job.task, table, groups.mesh)
    plan = replace(plan, styles={n: s for n, s in plan.styles.items() if is_computed(n)})
    if splits_tokens:
        plan = split_outside(model, plan)
    layers.refuse_kinds(model, plan)
    check_sizes(model, plan, tp=tp, dp_shard=groups.mesh.dp_shard)
    cuts = layers.find_cuts(model, plan, is_computed)
    names = frozenset(name for name, p in model.named_parameters() if p in cuts)
    for name in sorted(names & set(hooked)):
        raise knobs.refuse(
            f"a hook on the parameter {name!r}, of which mesh.tp={tp} gives each process a part",
            use="leave its layer out of the plan",
        )
    layers.replace_forwards(model, plan, groups.tensor)
    PartWatch(model, groups.whole.device)
    return CutLayers(
        Cutting(model, cuts, groups),
        names,
        counts=groups.tensor.rank == 0,
        alike=WholeAlike(groups.tensor),
        summary=_summarise(model, plan, cuts, tp),
    )


def _summarise(
    model: nn.Module, plan: ParallelPlan, cuts: Collection[nn.Parameter], tp: int
) -> str:
    cut = sum(p.numel() for p in cuts)
    total = sum(p.numel() for p in model.parameters())
    whole = list(list_whole(model, plan))
    few = ", ".join(whole[:4]) + (", ..." if len(whole) > 4 else "")
    rest = f"; whole on each: {few}" if whole else ""
    if any(style.splits_tokens for style in plan.styles.values()):
        rest += "; tokens cut between pairs of layers"
    share = f"{cut / max(1, total):.0%} of the parameters"
    return f"layers cut over {tp} processes, {share}: {plan.summary}{rest}"


def refuse_beside(
    job: Job, knobs: Strategy, asked: Mapping[str, bool], *, axis: str = "tp"
) -> None:
    """Refuses what nobody has made right beside ``axis``; ``asked`` are knobs that are on, by name.

    Raises:
        Unsupported: names the first.
    """
    options = {
        **asked,
        f"compression={job.compression.name}": not isinstance(job.compression, NoCompression),
        "trainer.compile=true": job.compile is not None,
        "a task that steps its optimizers itself": job.manual,
    }
    for option, on in options.items():
        if on:
            knob = option.partition("=")[0]
            raise knobs.refuse(
                f"{option} beside mesh.{axis}", use=f"leave {knob} out, or set mesh.{axis}=1"
            )
