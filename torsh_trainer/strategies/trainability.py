"""Which parameters train, where a hook or a callback has freed or frozen some since the start.

An engine asks before the backward that communicates. Processes answer alike, for they run the same
hooks; what was freed on some of them alone is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError, Unsupported
from torsh_trainer.strategies.base import Strategy

Parameters = Sequence[nn.Parameter]
_TRAINS = attrgetter("requires_grad")


class Change(NamedTuple):
    """What differs from the last time, by name and in the model's order.

    ``trained`` are those whose gradients count from here on, ``others`` the rest. ``frozen`` are no
    longer among the former; ``held`` are frozen too, and still have a gradient that a step is to
    apply.
    """

    trained: list[nn.Parameter]
    others: list[nn.Parameter]
    freed: dict[str, nn.Parameter]
    frozen: dict[str, nn.Parameter]
    held: dict[str, nn.Parameter]


class Trainable:
    """The parameters of ``model`` that train, and the others, as an engine has followed them."""

    def __init__(self, model: nn.Module) -> None:
        self.named = dict(model.named_parameters())
        self.parameters = [p for p in self.named.values() if p.requires_grad]
        self.others = [p for p in self.named.values() if not p.requires_grad]
        self.at_start = {name: p.requires_grad for name, p in self.named.items()}

    def find_change(self, *, shrinks: bool) -> Change | None:
        """What was freed or frozen since ``take``; without ``shrinks`` nothing that is frozen is
        dropped. None where nothing was, or where nothing trains any more: the loss has no gradient
        then, which is said later."""
        if not has_changed(self.parameters, self.others, shrinks=shrinks):
            return None
        change = change_of(self.named, self.parameters, shrinks=shrinks)
        return change if change.trained else None

    def take(self, change: Change) -> None:
        """Goes on from ``change``."""
        self.parameters, self.others = change.trained, change.others

    def note(self) -> dict[str, bool]:
        """Whether they train now, by name, of those parameters that did otherwise at the start."""
        return {
            name: p.requires_grad
            for name, p in self.named.items()
            if p.requires_grad != self.at_start[name]
        }

    def replay(self, optimizers: Mapping[str, Optimizer], saved: Mapping[str, Any]) -> None:
        """Frees and freezes what ``saved``, an engine's state, has noted.

        What was given to an optimizer meanwhile is given to it again, in groups of its own.
        """
        named = self.named
        for name, trains in saved.get("trains", {}).items():
            if name in named:
                named[name].requires_grad_(trains)
        freed = {name for name, trains in saved.get("trains", {}).items() if trains}
        for name, optimizer in optimizers.items() if freed else ():
            known = {p for group in optimizer.param_groups for p in group["params"]}
            for group in saved.get("optimizer", {}).get(name, {}).get("groups", ()):
                new = [named[n] for n in group["params"] if n in freed and named[n] not in known]
                if new:
                    optimizer.add_param_group({**group, "params": new})


def has_changed(trained: Parameters, others: Parameters, *, shrinks: bool) -> bool:
    """Whether one of ``others`` trains or, with ``shrinks``, one of ``trained`` does not."""
    return any(map(_TRAINS, others)) or (shrinks and not all(map(_TRAINS, trained)))


def change_of(named: Mapping[str, nn.Parameter], trained: Parameters, *, shrinks: bool) -> Change:
    """What has changed in a model's parameters since ``trained`` were those that train.

    Without ``shrinks`` those that were frozen stay among them until others are freed.
    """
    before = set(trained)
    held = {p for p in before if not p.requires_grad and p.grad is not None}
    freed = any(p.requires_grad for p in named.values() if p not in before)
    stays = held if freed or shrinks else before
    now = {name: p for name, p in named.items() if p.requires_grad or p in stays}
    return Change(
        trained=list(now.values()),
        others=[p for name, p in named.items() if name not in now],
        freed={name: p for name, p in now.items() if p not in before},
        frozen={name: p for name, p in named.items() if p in before and name not in now},
        held={name: p for name, p in now.items() if p in held},
    )


def agree(change: Change, comm: Communicator) -> None:
    """Makes sure that all processes have freed and frozen the same; collective.

    Raises:
        ConfigError: they have not.
    """
    told = comm.all_gather_object((list(change.freed), list(change.frozen)))
    if any(one != told[0] for one in told):
        raise ConfigError(
            "the processes have freed or frozen different parameters: "
            + "; ".join(
                f"rank {rank} freed {_few(freed)}, and froze {_few(frozen)}"
                for rank, (freed, frozen) in enumerate(told[:4])
            ),
            fix="let requires_grad depend on what is the same on every process (the epoch, the "
            "step, a metric logged with sync_dist=True)",
        )


def change_error(knobs: Strategy, change: Change, *, use: str) -> Unsupported:
    """The error for what was freed, or else frozen, where an engine cannot follow."""
    how = SINCE_FREED if change.freed else SINCE_FROZEN
    names = list(change.freed or change.frozen or change.held)
    return knobs.refuse(f"parameters that {how}: {_few(names)}", use=use)


def check_cut(knobs: Strategy, change: Change, at_start: Mapping[str, bool]) -> None:
    """For an optimizer that was cut over processes with what trained ``at_start``.

    Raises:
        Unsupported: others are freed.
    """
    if not all(at_start[name] for name in change.freed):
        raise change_error(
            knobs,
            change,
            use="set strategy.zero1=false, or free them before the run at a rate of 0",
        )


SINCE_FREED = "were frozen at the start and train now"
SINCE_FROZEN = "trained at the start and are frozen now"


def _few(names: Sequence[str]) -> str:
    return (", ".join(names[:4]) + (", ..." if len(names) > 4 else "")) or "none"
