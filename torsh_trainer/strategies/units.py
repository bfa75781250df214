"""In which order the processes gather and reduce the units of FSDP2, the same on all of them.

FSDP2 begins a collective where a forward or a backward comes to a unit, and takes for granted that
every process comes to the same. Where a forward goes different ways on different processes, what
belongs to different parameters would be mixed up.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.failures import CommunicationError
from torsh_trainer.errors import ConfigError

FIX = "set strategy.find_unused_parameters=true, or have every process run the same modules"


def units_of(root: Any) -> list[Any]:
    """FSDP2's groups of parameters below ``root``, in the order of their first modules."""
    return [unit for _, unit in _name_units(root)]


def list_gathered(root: Any) -> Iterator[tuple[str, Tensor]]:
    """The whole parameters that forwards below ``root`` see, by name; none before the first one.

    They hold values in a forward alone. Gathering does not count as a write to them, all else does.
    """
    for unit in units_of(root):
        for part in unit.fsdp_params:
            if getattr(part, "_unsharded_param", None) is not None:
                yield part._param_fqn or "?", part._unsharded_param


def find_merged_states(root: Any) -> list[Any]:
    """What FSDP2 knows of each unit below ``root`` that consists of several modules."""
    cut = (module for module in root.modules() if hasattr(module, "_get_fsdp_state"))
    states = dict.fromkeys(module._get_fsdp_state() for module in cut)
    return [state for state in states if len(state._modules) > 1]


def forget_forward(state: Any) -> None:
    """Ends a forward that some of a unit's modules have not been called in.

    FSDP2 waits for them: a hook that calls one module alone would leave the unit in its forward.
    """
    if state._modules_to_run_forward:
        state._modules_to_run_forward.clear()
        state._training_state = type(state._training_state).IDLE
        for unit in state._fsdp_param_groups:
            unit._training_state = type(unit._training_state).IDLE
        if state._state_ctx.iter_forward_root is state:
            state._state_ctx.iter_forward_root = None


def forget_order(root: Any) -> None:
    """Ends a forward below ``root`` that no backward follows, before another one begins.

    FSDP2 gathers ahead in a backward by the order of the forwards since the last one.
    """
    for unit in units_of(root):
        unit._post_forward_indices.clear()
        unit.comm_ctx.post_forward_order.clear()


class WholePass:
    """For forwards that go different ways: no collective depends on what a process comes to.

    All units below a root are gathered when its forward begins, and stay until ``reduce``, which
    reduces their gradients in the order of the modules after the backward. ``overlaps`` says that
    forwards begin before the backwards of others have ended.
    """

    def __init__(self, roots: Sequence[Any], comm: Communicator, *, overlaps: bool = False) -> None:
        self._comm = comm
        self._overlaps = overlaps
        self._roots = [(root, units_of(root)) for root in roots]
        for root, units in self._roots:
            root.set_requires_gradient_sync(False)
            root.set_reshard_after_backward(False)
            root.set_is_last_backward(not overlaps)
            gather = functools.partial(self._gather, root, units)
            root.register_forward_pre_hook(gather, prepend=True)

    def _gather(self, root: Any, units: Sequence[Any], *_: Any) -> None:
        root._get_fsdp_state()._lazy_init()
        for unit in units:
            if not unit.is_unsharded:
                unit.unshard()
                unit.wait_for_unshard()

    def reduce(self, *, syncs: bool) -> None:
        """Ends a backward: averages gradients, where it ``syncs``, and lets parameters go.

        A gradient that another rank has and this one has not is zero here; one that no rank has
        stays None.
        """
        if syncs:
            self._fill_in()
        for root, units in self._roots:
            if syncs:
                root.set_requires_gradient_sync(True)
                root.set_is_last_backward(True)
                root._get_fsdp_state()._root_post_backward_final_callback()
                root.set_is_last_backward(not self._overlaps)
                root.set_requires_gradient_sync(False)
            for unit in units:
                unit.reshard()

    def _fill_in(self) -> None:
        """Gradients of zero where another rank has one: then every rank reduces the same."""
        for root, units in self._roots:
            if any(not hasattr(part, "_unsharded_param") for u in units for part in u.fsdp_params):
                self._gather(root, units)  # a root that no forward of ours has come to
        parts = [
            part
            for _, units in self._roots
            for unit in units
            for part in unit.fsdp_params
            if part.sharded_param.requires_grad
        ]
        used = self._comm.to_device(torch.tensor([float(_has_gradient(part)) for part in parts]))
        self._comm.all_reduce(used, op="max")
        for part, anywhere in zip(parts, used.tolist(), strict=True):
            if anywhere and not _has_gradient(part):
                part.unsharded_param.grad = torch.zeros_like(part.unsharded_param)
                part.to_accumulated_grad_if_needed()  # in the dtype that the others have by now


def _has_gradient(part: Any) -> bool:
    if getattr(part, "_unsharded_param", None) is None:
        return False
    held = part.unsharded_accumulated_grad
    return held is not None or part.unsharded_param.grad is not None


class CommonOrder:
    """Stops before a collective that other processes would not begin as well.

    A collective that has always followed the two before it is begun without a word. A backward
    gathers the units of its forward again, so the two are told apart, and so is the beginning of a
    micro-batch. At any other place the processes first tell each other which they are about to
    begin. All of them know the same order, so a process that leaves it waits there for the others:
    it is told apart when ``timeout_s`` of the communicator has passed.
    """

    def __init__(self, roots: Sequence[Any], comm: Communicator) -> None:
        self._comm = comm.duplicate()
        self._roots = list(roots)
        self._followers: dict[Any, set[tuple[Any, ...]]] = {}
        self._last_two: tuple[Any, ...] = ((), ())
        names = {id(unit): name for root in roots for name, unit in _name_units(root)}
        for root in self._roots:
            for unit in units_of(root):
                self._guard(unit, names[id(unit)])

    def _guard(self, unit: Any, name: str) -> None:
        gather, reduce = unit._all_gather_comm, unit.post_backward

        def announce_gather() -> None:
            self._begin(("gather", name, unit._training_state.name))

        unit._all_gather_comm = _Guarded(gather, announce_gather)

        def check_reduce(*unused: Any) -> None:
            if not all(hasattr(part, "_unsharded_param") for part in unit.fsdp_params):
                return  # no forward has come to it yet, which FSDP2 trips over
            if unit.reduce_grads:
                having = tuple(i for i, p in enumerate(unit.fsdp_params) if _has_gradient(p))
                if having:
                    self._begin(("reduce", name, having), unit)
            reduce(*unused)

        unit.post_backward = check_reduce

    def close(self) -> None:
        self._comm.close()

    def begin_micro_batch(self) -> None:
        """Before the forward of a micro-batch, of which all processes have as many."""
        self._last_two = (self._last_two[1], ("micro-batch",))

    def _begin(self, what: tuple[Any, ...], unit: Any = None) -> None:
        """Before the collective ``what``.

        Raises:
            ConfigError: another process is about to begin another one.
        """
        place = (self._last_two, self._roots[0].training)
        known = self._followers.setdefault(place, set())
        if known != {what}:
            self._agree(what, unit)
            known.add(what)
        self._last_two = (self._last_two[1], what)

    def _agree(self, what: tuple[Any, ...], unit: Any) -> None:
        if self._comm.size == 1:
            return
        mine = torch.tensor([zlib.crc32(repr(what).encode())], dtype=torch.int64)
        try:
            told = self._comm.all_gather(self._comm.to_device(mine))
        except CommunicationError as error:  # the others wait elsewhere, or are gone
            raise type(error)(
                f"{error.sentence}; this process {_words(what, unit)}",
                fix=f"{error.fix}; if the others run other modules, {FIX}",
                **error.facts,
            ) from error
        if len(set(torch.cat(list(told)).tolist())) > 1:
            raise _apart(self._comm.all_gather_object(_words(what, unit)))


def _apart(words: Sequence[str]) -> ConfigError:
    said = "; ".join(f"rank {rank} {text}" for rank, text in enumerate(words[:4]))
    return ConfigError(f"the processes have come to different parts of the model: {said}", fix=FIX)


def _words(what: tuple[Any, ...], unit: Any) -> str:
    kind, name, *_ = what
    if kind == "gather":
        return f"runs {name}"
    names = [part._param_fqn or "?" for part in unit.fsdp_params if _has_gradient(part)]
    return f"has gradients of {', '.join(names[:8])}" + (", ..." if len(names) > 8 else "")


def _name_units(root: Any) -> list[tuple[str, Any]]:
    names: dict[Any, list[str]] = {}
    for name, module in root.named_modules():
        if hasattr(module, "_get_fsdp_state"):
            for unit in module._get_fsdp_state()._fsdp_param_groups:
                names.setdefault(unit, []).append(name or type(module).__mro__[2].__name__)
    return [("..".join([each[0], *each[1:][-1:]]), unit) for unit, each in names.items()]


class _Guarded:
    """FSDP2's all-gather, with a look before each."""

    def __init__(self, gather: Any, before: Callable[[], None]) -> None:
        self._gather, self._before = gather, before

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        made: Tensor = self._gather.allocate(size, dtype=dtype, device=device)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._before()
        return self._gather(*args, **kwargs)
