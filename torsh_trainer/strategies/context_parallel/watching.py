"""What a model does along its tokens outside of attention: wrong in silence once they are cut.

A convolution, a mean over tokens or a norm of batches on some of the tokens gives other numbers
and no error. So the model is run once more, on a few tokens, without gradients, and beside each
tensor go three others: with half of the tokens changed, with the other half changed, and with all
tokens in another order. A number that differs in both of the first depends on several tokens. What
comes out in another place, or depends on the number of a place among the own, is found at the end.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from torsh_trainer.comm.base import Communicator
from torsh_trainer.data.draws import forward_generators
from torsh_trainer.errors import Unsupported
from torsh_trainer.strategies.context_parallel.attending import (
    DROPOUTS,
    InsteadOfAttention,
    drop_out,
    read_call,
)
from torsh_trainer.strategies.context_parallel.exchanges import AttentionCall
from torsh_trainer.strategies.context_parallel.shares import TokenShare

MOST_TOKENS, MOST_SAMPLES = 16, 2
"""Of what is run once more."""
_TWINS = "_torsh_twins"
_HALF, _OTHER_HALF, _ELSEWHERE = range(3)
_READERS = frozenset(
    (
        *("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__contains__"),
        *("equal", "allclose", "is_nonzero", "numpy", "__array__"),
    )
)
"""What gives Python numbers of the values of a tensor."""
_SHAPES = frozenset(
    (
        *("size", "dim", "numel", "stride", "ndimension", "__len__", "is_contiguous", "__repr__"),
        *("is_floating_point", "is_complex", "get_device", "element_size", "data_ptr", "__hash__"),
        *("storage_offset", "is_inference", "requires_grad_", "nelement", "untyped_storage"),
        *("zeros_like", "ones_like", "empty_like", "full_like", "new_empty", "new_zeros"),
        *("new_ones", "new_full", "new_tensor"),
    )
)
"""What looks at no value of a tensor."""
_DIFFER = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
"""By how much a product may differ in another place, in parts of what tokens differ by."""


class ForwardFindings(NamedTuple):
    """What was found out: whether some attention is causal, some is not, and there is any."""

    is_causal: bool
    is_full: bool
    attends: bool


def watch_tokens(
    model: nn.Module,
    forward: Callable[..., Any],
    values: Mapping[str, Any],
    dims: Mapping[str, int],
    *,
    names: Callable[[nn.Module], str],
    device: torch.device,
    comm: Communicator,
    layers: TokenShare,
) -> ForwardFindings:
    """Runs ``forward`` of ``model`` on ``values``, which have few tokens along ``dims``.

    ``names`` gives a module's name, ``comm`` are processes that share layers, between which this
    one has its share ``layers`` of the tokens. Buffers and generators are afterwards as they were
    before.

    Raises:
        Unsupported: something outside of attention depends on other tokens, or on how many there
            are; in the words of the operation and of the module that it runs in.
    """
    name = next(iter(dims))
    tokens = values[name].shape[dims[name]]
    half = _pick_half(tokens, device)
    given = {
        key: _with_twins(value, dims[key], half, key) if key in dims else value
        for key, value in values.items()
    }
    generators = forward_generators(device)
    states = [generator.get_state() for generator in generators]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    follow = _Follow(half, names, generators, layers)
    caches = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # of weights without gradients, for a forward with them
    try:
        with torch.no_grad(), _follow_across(comm), follow:
            output = forward(**given)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                _check_output(leaf, half)
    finally:
        torch.set_autocast_cache_enabled(caches)
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
    return ForwardFindings(follow.is_causal, follow.is_full, follow.attends)


@contextlib.contextmanager
def _follow_across(comm: Communicator) -> Iterator[None]:
    """Within, what ``comm`` gathers and sums has the twins that other members have."""
    one: Any = comm
    gather, reduce, scatter = one.all_gather, one.all_reduce, one.reduce_scatter

    def gather_all(tensor: Tensor) -> list[Tensor]:
        twins = vars(tensor).get(_TWINS, ())
        with torch._C.DisableTorchFunction():
            found = gather(tensor)
            theirs = [gather(twin) for twin in twins]
        for i, leaf in enumerate(found if twins else ()):
            setattr(leaf, _TWINS, tuple(each[i] for each in theirs))
        return list(found)

    def reduce_all(tensor: Tensor, **options: Any) -> Any:
        twins = vars(tensor).get(_TWINS, ())
        with torch._C.DisableTorchFunction():
            for twin in twins:
                reduce(twin, **{**options, "async_op": False})
            return reduce(tensor, **options)

    def reduce_scatter(output: Tensor, tensors: Sequence[Tensor], **options: Any) -> None:
        known = [vars(tensor).get(_TWINS, ()) for tensor in tensors]
        with torch._C.DisableTorchFunction():
            scatter(output, tensors, **options)
            twins = tuple(torch.empty_like(output) for _ in known[0])
            for number, twin in enumerate(twins):
                scatter(twin, [each[number] for each in known], **options)
        if twins:
            setattr(output, _TWINS, twins)

    one.all_gather, one.all_reduce, one.reduce_scatter = gather_all, reduce_all, reduce_scatter
    try:
        yield
    finally:
        del one.all_gather, one.all_reduce, one.reduce_scatter


def _pick_half(tokens: int, device: torch.device) -> Tensor:
    """bool (tokens,): half of them, in no order that a shift would keep (Thue, Morse)."""
    return torch.tensor([bin(i).count("1") % 2 == 1 for i in range(tokens)], device=device)


def _with_twins(value: Tensor, dim: int, half: Tensor, name: str) -> Tensor:
    """``value``, as an object of its own, and what it is in the three other runs."""
    own = value.clone()
    moved = own.roll(1, dim)
    is_place = name in ("positions", "position_ids") or own.dtype == torch.bool
    other = own
    if own.is_floating_point():
        other = own * 1.5 + 0.25
    elif not is_place:
        other = own.roll(half.numel() // 2, dim)
    picked = half.view([-1 if d == dim else 1 for d in range(own.dim())])
    twins = (torch.where(picked, other, own), torch.where(picked, own, other), moved)
    setattr(own, _TWINS, twins)
    return own


class _Follow(InsteadOfAttention):
    """Computes the twins of everything that is computed from what has some."""

    def __init__(
        self,
        half: Tensor,
        names: Callable[[nn.Module], str],
        generators: Sequence[torch.Generator],
        layers: TokenShare,
    ) -> None:
        super().__init__()
        self._between = layers.take_own(half, 0)
        self._half = half
        self._names = names
        self._generators = generators
        self.is_causal = self.is_full = self.attends = False

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        what = getattr(func, "__name__", "")
        if what in _SHAPES:
            return func(*args, **kwargs)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func in DROPOUTS:
            return drop_out(func, args, kwargs, self._check_dropped)
        if not any(_TWINS in vars(leaf) for leaf in leaves):
            return self._draw(func, what, args, kwargs)
        return self._compute(what, func, args, kwargs, leaves)

    def attend(self, *args: Any, **kwargs: Any) -> Any:
        call = self._note(read_call(*args, **kwargs))
        return self._compute("attention", _stay, call[:3], {}, list(call[:3]))

    def _compute(
        self, what: str, func: Any, args: Any, kwargs: Any, leaves: Sequence[Tensor]
    ) -> Any:
        written = _find_target(what, args, kwargs)
        if written is not None and _TWINS not in vars(written):
            setattr(written, _TWINS, tuple(written.clone() for _ in range(3)))
        given = [tree_map(functools.partial(_twin, number), (args, kwargs)) for number in range(3)]
        known = _versions(leaves)
        found = self._draw(func, what, args, kwargs)
        restored = _Restored(known)
        twins = []
        for more, named in given:
            twins.append(func(*more, **named))
            restored.put_back()
        if what in _READERS:
            self._check_number(what, found, twins)
            return found
        theirs = [tree_leaves(twin) for twin in twins]
        for i, leaf in enumerate(tree_leaves(found)):
            if isinstance(leaf, Tensor):
                self._mark(what, leaf, tuple(each[i] for each in theirs))
        return found

    def _mark(self, what: str, leaf: Tensor, twins: tuple[Tensor, ...]) -> None:
        if any(twin.shape != leaf.shape for twin in twins):
            raise self._refuse(what, "gives as many numbers as the values of its tokens say")
        setattr(leaf, _TWINS, twins)
        if bool((_differs(leaf, twins[_HALF]) & _differs(leaf, twins[_OTHER_HALF])).any()):
            raise self._refuse(what, "puts tokens together")

    def _check_number(self, what: str, found: Any, twins: Sequence[Any]) -> None:
        if any(bool(found != twin) for twin in twins):
            raise self._refuse(what, "reads a number of its tokens")

    def _refuse(self, what: str, does: str) -> Unsupported:
        return Unsupported(
            f"mesh.cp: {what}{self._place()} {does}, of which a process has some: on one "
            "process it would be another result",
            fix="set mesh.cp=1, or do it in the task (loss, evaluate), which has what the model "
            "gives for all tokens",
        )

    def _place(self) -> str:
        """The innermost module at work, in words."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module):
                name = self._names(owner)
                kind = type(owner).__name__.removeprefix("FSDP")
                return f" in {name!r} ({kind})" if name else f" in {kind}"
            frame = frame.f_back
        return ""

    def _draw(self, func: Any, what: str, args: Any, kwargs: Any) -> Any:
        before = [generator.get_state() for generator in self._generators]
        found = func(*args, **kwargs)
        now = [generator.get_state() for generator in self._generators]
        drawn = any(not torch.equal(b, n) for b, n in zip(before, now, strict=True))
        if drawn and any(leaf.numel() > 1 for leaf in tree_leaves(found) if _is_tensor(leaf)):
            raise Unsupported(
                f"mesh.cp: {what}{self._place()} draws random numbers for some of the tokens, "
                "where one process would draw for all",
                fix="leave it out, or use nn.Dropout, which draws as one process does",
            )
        return found

    def _check_dropped(self, input: Tensor, p: float) -> Tensor:
        halves = self._half, self._between
        if input.dim() < 3 or not any(_keeps_places(input, 1, half) for half in halves):
            raise self._refuse("a dropout", "does not have its tokens along dimension 1")
        return input

    def _note(self, call: AttentionCall) -> AttentionCall:
        self.is_causal |= call.is_causal
        self.is_full |= not call.is_causal
        self.attends = True
        tokens = self._half.numel()
        lengths = call.query.shape[-2], call.key.shape[-2]
        if lengths != (tokens, tokens):
            what = f"an attention of {lengths[0]} queries over {lengths[1]} keys"
            raise self._refuse(what, f"does not go over the {tokens} tokens")
        if not _keeps_places(call.query, call.query.dim() - 2, self._half):
            raise self._refuse("an attention", "has its tokens in another order than the model's")
        return call


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _stay(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """In the place of attention: of each token itself, of all that it has, and of how queries and
    keys are turned by their places, which a product of the two would not show."""
    times = query.shape[-3] // key.shape[-3] if query.dim() > 3 else 1
    if times > 1:
        key, value = (t.repeat_interleave(times, -3) for t in (key, value))
    weights = torch.linspace(0.5, 1.5, query.shape[-1], device=query.device).to(query.dtype)
    return value + ((query - key * 0.5) * weights).sum(-1, keepdim=True)


def _twin(number: int, leaf: Any) -> Any:
    twins = vars(leaf).get(_TWINS) if isinstance(leaf, Tensor) else None
    return leaf if twins is None else twins[number]


def _find_target(what: str, args: Any, kwargs: Any) -> Tensor | None:
    """What an operation writes to."""
    out = kwargs.get("out")
    if isinstance(out, Tensor):
        return out
    writes = what == "__setitem__" or (what.endswith("_") and not what.startswith("__"))
    writes |= what.startswith("__i") and what.endswith("__") and what != "__invert__"
    first = args[0] if args else None
    return first if writes and isinstance(first, Tensor) else None


def _versions(leaves: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
    """Of tensors without twins, which every run would write to."""
    return [(leaf, leaf._version) for leaf in leaves if _TWINS not in vars(leaf)]


class _Restored:
    """What an operation has written to beside its result, for the next runs to find as it was."""

    def __init__(self, known: Sequence[tuple[Tensor, int]]) -> None:
        self._kept = [(leaf, leaf.clone()) for leaf, version in known if leaf._version != version]

    def put_back(self) -> None:
        """As the first run has left it."""
        for leaf, value in self._kept:
            leaf.copy_(value)


def _differs(one: Tensor, other: Tensor) -> Tensor:
    """bool, by element; NaN is as NaN."""
    differs = one != other
    if one.is_floating_point():
        differs &= ~(one.isnan() & other.isnan())
    return differs


def _keeps_places(tensor: Tensor, dim: int, half: Tensor) -> bool:
    """Whether what differs lies where tokens were changed, along ``dim``."""
    twins = vars(tensor).get(_TWINS)
    if tensor.dim() <= dim or tensor.shape[dim] != half.numel():
        return False
    if twins is None:
        return True
    picked = half.view([-1 if d == dim else 1 for d in range(tensor.dim())])
    misplaced = _differs(tensor, twins[_HALF]) & ~picked
    misplaced |= _differs(tensor, twins[_OTHER_HALF]) & picked
    return not bool(misplaced.any())


def _check_output(leaf: Tensor, half: Tensor) -> None:
    """Of what the model gives.

    Raises:
        Unsupported: it has no tokens along dimension 1, in the order of what was given; or they
            depend on their places.
    """
    if leaf.dim() < 2 or leaf.shape[1] != half.numel():
        raise Unsupported(
            f"mesh.cp: the model gives {list(leaf.shape)} for {half.numel()} tokens, and what "
            "has tokens along dimension 1 is all that can be put together",
            fix="give a number for each token, (batch, tokens, ...), and do the rest in task.loss; "
            "or set mesh.cp=1",
        )
    if not _keeps_places(leaf, 1, half):
        raise Unsupported(
            "mesh.cp: the model gives its tokens in another order than it was given them",
            fix="set mesh.cp=1",
        )
    twins = vars(leaf).get(_TWINS)
    if twins is None or half.numel() == 1 or not leaf.is_floating_point():
        return
    expected = leaf.roll(1, 1)
    apart = (twins[_ELSEWHERE] - expected).abs().max()
    if float(apart) > _DIFFER.get(leaf.dtype, 0.1) * float((leaf - expected).abs().max()):
        raise Unsupported(
            "mesh.cp: what the model gives for a token depends on its number among those of the "
            "process, as positions that the forward counts itself do",
            fix="let forward take positions (tokens,) or position_ids (1, tokens), and use these: "
            "they are those of the whole sequence",
        )
