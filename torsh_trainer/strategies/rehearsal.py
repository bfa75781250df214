"""Whether an optimizer may be cut: tried on small stand-ins before the first step.

A user's optimizer, or a hook on one, may look at all parameters at once (a global norm, an
estimate of the distance as in Prodigy). Nothing but a step shows it. The optimizer itself, its
parameters and the random number generators stay as they are.
"""

from __future__ import annotations

import copy
import math
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_trainer.checkpoint.rng import rng_state, set_rng_state
from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import Unsupported
from torsh_trainer.strategies.state import own_attributes

_APART = (
    *(torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.Adam),
    *(torch.optim.AdamW, torch.optim.Adamax, torch.optim.ASGD, torch.optim.Muon),
    *(torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop),
    *(torch.optim.SGD, torch.optim.SparseAdam),
)
"""Known to step every parameter by itself."""
_BY_ELEMENT = tuple(
    kind
    for kind in _APART
    if kind not in (torch.optim.Adafactor, torch.optim.Rprop, torch.optim.SparseAdam)
)
"""Known to do to shards what they do to whole parameters: Muon to the precision of its bf16."""
_FUSED_SHARDED = (torch.optim.Adam, torch.optim.AdamW)

_SCALES = (1e-3, 1.0, 1e3, 0.1, 10.0, 1.0, 1e-2, 1.0)
"""The size of gradients by step: below and above the bounds that a rule may have."""
_MOST_PARTS = 32


def refuse_joint(
    optimizer: Optimizer,
    *,
    asked_by: str = "strategy.zero1=true",
    use: str = "use strategy=ddp with strategy.zero1=false",
) -> None:
    """For engines that cut an optimizer by whole parameters.

    Raises:
        Unsupported: what it does to a parameter is not what it would do to it alone.
    """
    if _is_known(optimizer, _APART):
        return
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    parts = [set(range(first, count, _MOST_PARTS)) for first in range(min(count, _MOST_PARTS))]

    def find(stand_ins: _StandIns) -> str:
        whole = _Rehearsal(optimizer, stand_ins.make(), range(count)).step_through()
        if not whole.moved:
            return "it could not be seen to move anything"
        for part in parts:
            alone = _Rehearsal(optimizer, stand_ins.make(), part).step_through()
            if whole.differs(alone):
                return "its step of one parameter depends on others, or on chance"
        return ""

    why = _try_stand_ins(optimizer, find)
    if why:
        raise Unsupported(
            f"{asked_by} steps parameters on several processes, and optimizer "
            f"{type(optimizer).__name__} cannot be cut so: {why}",
            fix=use,
        )


def refuse_unsharded(optimizer: Optimizer, comm: Communicator) -> None:
    """For engines whose parameters are DTensors; collective where the optimizer is not known.

    Raises:
        Unsupported: it does not do to shards what it does to whole parameters.
    """
    if _is_known(optimizer, _BY_ELEMENT) and not _is_fused_elsewhere(optimizer):
        return
    # Imported here: it pulls in what only runs over shards have.
    from torch.distributed.tensor.experimental import implicit_replication

    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not parameters:
        return

    def find(stand_ins: _StandIns) -> str:
        every = range(len(parameters))
        whole = _Rehearsal(optimizer, stand_ins.make(), every).step_through()
        if not whole.moved:
            return "it could not be seen to move anything"
        try:
            shards = _Rehearsal(optimizer, stand_ins.make(), every, like=parameters)
            with implicit_replication():  # some may be whole
                shards.step_through()
            differs = whole.differs(shards)
            why = "its step of shards is not that of whole parameters, or depends on chance"
        except Exception as error:  # noqa: BLE001 - whatever it is, it would come in the first step
            differs, why = True, f"its step of shards fails ({_describe_error(error)})"
        return next((told for told in comm.all_gather_object(why if differs else "") if told), "")

    why = _try_stand_ins(optimizer, find)
    if why:
        raise Unsupported(
            f"optimizer {type(optimizer).__name__} cannot step parameters that are sharded: {why}",
            fix="use strategy=ddp without zero1, or another optimizer",
        )


def _is_known(optimizer: Optimizer, kinds: Collection[type[Optimizer]]) -> bool:
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    return type(optimizer) in kinds and not any(hooks)


def _is_fused_elsewhere(optimizer: Optimizer) -> bool:
    """Whether it takes a fused step, of a kernel that knows no DTensor."""
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return fused and type(optimizer) not in _FUSED_SHARDED


def _try_stand_ins(optimizer: Optimizer, find: Callable[[_StandIns], str]) -> str:
    """What ``find`` says over the first stand-ins that the optimizer takes at all."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    device = parameters[0].device if parameters else torch.device("cpu")
    kept = rng_state(device)
    failed = ""
    try:
        for small, wide in ((True, True), (True, False), (False, False)):
            try:
                return find(_StandIns(parameters, small=small, wide=wide))
            except Exception as error:  # noqa: BLE001 - a user's code: the next may suit it
                failed = _describe_error(error)
    finally:
        set_rng_state(kept, device)
    return f"it cannot be tried before the first step ({failed})"


def _describe_error(error: Exception) -> str:
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0]:.120}" if first else type(error).__name__


class _StandIns:
    """Values to begin with, and gradients by step, in the place of ``parameters``.

    ``small`` keeps the number of dimensions alone, ``wide`` makes real ones float64.
    """

    def __init__(self, parameters: Sequence[Tensor], *, small: bool, wide: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self._values: list[Tensor] = []
        self.gradients: list[list[Tensor]] = []
        ranks = _shard_count(parameters)
        for parameter in parameters:
            shape = tuple(parameter.shape)
            if small:  # rows that do not divide by the number of shards
                sizes = (ranks + 1, *(4 + place for place in range(len(shape) - 1)))
                shape = tuple(min(most, had) for most, had in zip(sizes, shape, strict=True))
            real = parameter.dtype.is_floating_point and wide
            dtype = torch.float64 if real else parameter.dtype
            drawn = [_draw(shape, dtype, generator) for _ in range(2 + len(_SCALES))]
            value, trend, *noise = (one.to(parameter.device) for one in drawn)
            self._values.append(value)
            self.gradients.append(
                [s * (trend + 0.3 * one) for s, one in zip(_SCALES, noise, strict=True)]
            )

    def make(self) -> _StandIns:
        """The same ones, with tensors of their own."""
        other = copy.copy(self)
        other._values = [value.clone() for value in self._values]
        return other

    def whole(self) -> list[Tensor]:
        return [nn.Parameter(value) for value in self._values]

    def shards(self, like: Sequence[Any]) -> list[Tensor]:
        """This rank's parts, placed as ``like``."""
        return [nn.Parameter(_shard(v, one)) for v, one in zip(self._values, like, strict=True)]


class _Rehearsal:
    """Steps a copy of ``optimizer`` over some of its parameters, and keeps how each has moved.

    ``like`` gives the DTensors that stand-ins are to be cut as; None leaves them whole.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        stand_ins: _StandIns,
        chosen: Collection[int],
        *,
        like: Sequence[Tensor] | None = None,
    ) -> None:
        self._chosen = set(chosen)
        self._like = like
        self._gradients = stand_ins.gradients
        self._held = stand_ins.whole() if like is None else stand_ins.shards(like)
        self._optimizer = _copy_optimizer(optimizer, self._held, self._chosen)
        self._positions: list[dict[int, Tensor]] = []
        self._settings: list[list[dict[str, float]]] = []

    def step_through(self) -> _Rehearsal:
        self._note()
        for number in range(len(_SCALES)):
            for place, held in enumerate(self._held):
                gradient = self._gradients[place][number]
                like = None if self._like is None else self._like[place]
                held.grad = gradient.clone() if like is None else _shard(gradient, like)
                if isinstance(self._optimizer, torch.optim.SparseAdam):
                    held.grad = held.grad.to_sparse(1)
            self._optimizer.step()
            self._note()
        return self

    @property
    def moved(self) -> bool:
        first, last = self._positions[0], self._positions[-1]
        return any(not torch.equal(first[place], last[place]) for place in first)

    def differs(self, part: _Rehearsal) -> bool:
        """Whether ``part``, which has some of the parameters, or shards of them, went elsewhere."""
        steps = zip(self._positions, self._positions[1:], part._positions[1:], strict=False)
        for before, after, found in steps:
            for place, position in found.items():
                like = None if part._like is None else part._like[place]
                ways = [before[place], after[place]]
                begun, expected = ways if like is None else [_own_rows(w, like) for w in ways]
                if not _is_close(expected, position, begun):
                    return True
        pairs = zip(self._settings, part._settings, strict=True)
        return any(
            not _is_same(value, other.get(key))
            for ours, theirs in pairs
            for group, other, kept in zip(ours, theirs, part._optimizer.param_groups, strict=True)
            for key, value in group.items()
            if kept["params"]
        )

    @torch.no_grad()
    def _note(self) -> None:
        held = {place: self._held[place] for place in self._chosen}
        self._positions.append({place: _local(p).detach().clone() for place, p in held.items()})
        self._settings.append(
            [
                {key: float(value) for key, value in group.items() if _is_number(value)}
                for group in self._optimizer.param_groups
            ]
        )


def _copy_optimizer(
    optimizer: Optimizer, held: Sequence[Tensor], chosen: Collection[int]
) -> Optimizer:
    """The same optimizer over those of ``held`` that are ``chosen``, sharing nothing with it."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    memo: dict[int, Any] = {id(p): new for p, new in zip(own, held, strict=True)}
    new_of = dict(memo)
    mine = {id(held[place]) for place in chosen}
    copied: Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = copied
    for name, value in own_attributes(optimizer).items():
        if name in ("param_groups", "state"):
            continue
        hooks = isinstance(value, dict) and name.endswith("_hooks")
        new = {k: _own_function(f, memo) for k, f in value.items()} if hooks else value
        vars(copied)[name] = type(value)(new) if hooks else copy.deepcopy(value, memo)
    copied.state = defaultdict(dict)
    for p in own:
        if id(new_of[id(p)]) in mine and optimizer.state.get(p):
            copied.state[new_of[id(p)]] = {
                key: copy.deepcopy(_fit_slot(slot, p, new_of[id(p)]), memo)
                for key, slot in optimizer.state[p].items()
            }
    copied.param_groups = []
    for group in optimizer.param_groups:
        settings = {k: copy.deepcopy(v, memo) for k, v in group.items() if k != "params"}
        if "lr" in settings and not float(settings["lr"]):
            settings["lr"] = 1e-3
        params = [new_of[id(p)] for p in group["params"] if id(new_of[id(p)]) in mine]
        copied.param_groups.append({**settings, "params": params})
    return copied


def _own_function(function: Any, memo: dict[int, Any]) -> Any:
    """A hook over the stand-ins: what it closes over is copied, which deepcopy does not do."""
    if not isinstance(function, types.FunctionType) or not function.__closure__:
        return copy.deepcopy(function, memo)
    cells = (types.CellType(copy.deepcopy(c.cell_contents, memo)) for c in function.__closure__)
    own = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(cells),
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def _fit_slot(slot: Any, parameter: Tensor, new: Tensor) -> Any:
    """State from the constructor, of the size of the stand-in."""
    if not isinstance(slot, Tensor) or slot.shape != parameter.shape:
        return slot
    mine = _local(new)
    cut = _local(slot)[tuple(slice(0, size) for size in mine.shape)]
    if cut.shape != mine.shape:
        cut = cut.new_zeros(mine.shape)
    cut = cut.detach().clone().to(mine.dtype)
    return cut if mine is new else _as_shard(cut, new, tuple(new.shape))


def _draw(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype.is_complex or dtype.is_floating_point:
        # In float32 or wider: other kinds have no normal numbers of their own.
        wide = torch.promote_types(dtype, torch.float32)
        return torch.randn(shape, dtype=wide, generator=generator).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def _is_close(expected: Tensor, found: Tensor, before: Tensor) -> bool:
    if not expected.numel():
        return True
    if not bool(torch.isfinite(expected.abs()).all()):
        return True  # steps of this size lead nowhere, whole or cut
    moved = float((expected - before).abs().max())
    bound = torch.finfo(expected.dtype).eps
    size = float(expected.abs().max())
    return float((expected - found).abs().max()) <= math.sqrt(bound) * moved + 4 * bound * size


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _is_same(one: float, other: float | None) -> bool:
    return other is not None and (math.isclose(one, other, rel_tol=1e-6) or math.isnan(one))


def _shard_count(parameters: Sequence[Any]) -> int:
    meshes = [p.device_mesh for p in parameters if hasattr(p, "device_mesh")]
    return max((int(mesh.size(-1)) for mesh in meshes), default=2)


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _is_shard(tensor: Any) -> bool:
    return hasattr(tensor, "placements")


def _own_rows(whole: Tensor, like: Any) -> Tensor:
    """This rank's part of ``whole``, cut as the DTensor ``like`` is."""
    # Imported here: it pulls in what only runs over shards have.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not _is_shard(like):
        return whole
    sizes, begins = compute_local_shape_and_global_offset(
        whole.shape, like.device_mesh, like.placements
    )
    return whole[tuple(slice(b, b + s) for b, s in zip(begins, sizes, strict=True))]


def _shard(whole: Tensor, like: Any) -> Tensor:
    return _as_shard(_own_rows(whole, like).clone(), like, tuple(whole.shape))


def _as_shard(part: Tensor, like: Any, shape: tuple[int, ...]) -> Tensor:
    from torch.distributed.tensor import DTensor  # imported here: see _own_rows

    if not _is_shard(like):
        return part
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=torch.Size(shape),
        stride=stride,
    )  # fmt: skip
