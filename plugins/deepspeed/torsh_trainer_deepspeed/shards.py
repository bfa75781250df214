"""Where DeepSpeed keeps the parts of a parameter, and its state by name as a checkpoint has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_trainer.checkpoint.shards import FlatShard
from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import Unsupported
from torsh_trainer.strategies.state import load_model, materialise_slots
from torsh_trainer.tasks.weights import take_values
from torsh_trainer_deepspeed.files import Files
from torsh_trainer_deepspeed.own_state import gives_copies, put_whole, whole_parameters


class Piece(NamedTuple):
    """This rank's part of a parameter: ``numel`` elements from ``offset`` of it, flattened.

    They lie at ``start`` of ``flat``, a partition of the fp32 master weights, which is also what
    the optimizer knows its state by. A rank that holds nothing of it has a piece of no elements.
    """

    flat: Tensor
    start: int
    offset: int
    numel: int
    shape: tuple[int, ...]

    def within(self, whole: Tensor) -> Tensor:
        """The part of ``whole``, which is laid out as ``flat``, that belongs to the parameter."""
        return whole.detach().narrow(0, self.start, self.numel)

    def shard(self, name: str, whole: Tensor) -> FlatShard:
        """The same, as a checkpoint takes it."""
        return FlatShard(name, self.shape, self.offset, self.within(whole))


def find_replicated_pieces(zero: Any, rank: int) -> dict[int, Piece]:
    """Pieces by ``id(parameter)`` under stages 1 and 2: groups are flattened and cut evenly.

    DeepSpeed's own map of this (``_hp_mapping``) forgets that round_robin_gradients has put the
    parameters of a group in another order.
    """
    pieces = {}
    for index, group in enumerate(zero.optimizer.param_groups):
        (flat,) = group["params"]
        begin = rank * flat.numel()
        for parameter, at in _lay_out(zero, index):
            first = min(max(at, begin), begin + flat.numel())
            last = min(max(at + parameter.numel(), begin), begin + flat.numel())
            offset = min(max(begin - at, 0), parameter.numel())
            pieces[id(parameter)] = Piece(
                flat, first - begin, offset, last - first, tuple(parameter.shape)
            )
    return pieces


def _lay_out(zero: Any, index: int) -> Iterable[tuple[nn.Parameter, int]]:
    """The parameters of a group, and where each begins in the flattened whole."""
    if hasattr(zero, "bf16_groups"):
        parameters = zero.bf16_groups[index]
        sizes = [parameter.numel() for parameter in parameters]
        return zip(parameters, accumulate(sizes[:-1], initial=0), strict=True)
    parameters = zero.round_robin_bit16_groups[index]
    return zip(parameters, zero.round_robin_bit16_offsets[index], strict=True)


def find_partitioned_pieces(zero: Any, rank: int) -> dict[int, Piece]:
    """Pieces by ``id(parameter)`` under stage 3: every parameter is cut evenly, and padded."""
    pieces = {}
    for group in zero.fp16_groups:
        for parameter in group:
            index, start, _ = zero.grad_position[zero.get_param_id(parameter)]
            offset, numel = find_own_part(parameter, rank)
            flat = zero.fp32_partitioned_groups_flat[index]
            pieces[id(parameter)] = Piece(flat, start, offset, numel, tuple(parameter.ds_shape))
    return pieces


def find_own_part(parameter: Any, rank: int) -> tuple[int, int]:
    """(offset, number of elements) that stage 3 keeps of ``parameter`` here, padding apart."""
    size = parameter.partition_numel()
    offset = min(rank * size, parameter.ds_numel)
    return offset, min(size, parameter.ds_numel - offset)


class Shards:
    """The state of a sharded engine by parameter name.

    ``pieces`` are the trainable parameters' by id, ``flats`` the partitions of each group of
    ``inner``, ``files`` where some of them lie, ``fixed`` what a checkpoint has of the frozen
    parameters. ``push`` makes the parameters that forward uses out of the master weights.

    A model whose ``state_dict`` gives copies of its parameters is saved whole, as that gives it,
    and loaded by its own ``load_state_dict``.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        inner: Optimizer,
        pieces: Mapping[int, Piece],
        flats: Sequence[list[Tensor]],
        files: Files,
        fixed: Callable[[str, Any], Tensor | FlatShard],
        push: Callable[[], None],
    ) -> None:
        self._model = model
        self._comm = comm
        self._inner = inner
        self._pieces = pieces
        self._flats = flats
        self._files = files
        self._fixed = fixed
        self._push = push
        self._by_name = {
            name: pieces[id(p)] for name, p in model.named_parameters() if id(p) in pieces
        }

    def model(self) -> dict[str, Any]:
        """Master weights, frozen parameters and buffers; what is tied has all its names.

        Collective where the model gives copies.
        """
        given = self._model.state_dict(keep_vars=True)
        if gives_copies(self._model, given):
            with whole_parameters(self._model, self._own_parts(), self._comm):
                return dict(self._model.state_dict())
        parts = {id(p): part for p, part in self._own_parts()}
        state: dict[str, Any] = {}
        for name, value in given.items():
            part = parts.get(id(value), value)
            state[name] = part._replace(name=name) if isinstance(part, FlatShard) else part
        return state

    def _own_parts(self) -> list[tuple[nn.Parameter, Tensor | FlatShard]]:
        """Every parameter, and what this rank holds of its values as a checkpoint has them."""
        wholes = {id(flat): self._files.whole(flat, of=flat) for flat, _ in self._partitions()}
        found: list[tuple[nn.Parameter, Tensor | FlatShard]] = []
        for name, p in self._model.named_parameters():
            if id(p) in self._pieces:
                piece = self._pieces[id(p)]
                found.append((p, piece.shard(name, wholes[id(piece.flat)])))
            else:
                found.append((p, self._fixed(name, p)))
        return found

    def optimizer(self) -> dict[str, dict[str, Any]]:
        """``{parameter name: {slot: FlatShard, or a number's tensor}}``, in torch's words."""
        state: dict[str, dict[str, Any]] = {name: {} for name in self._by_name}
        for flat, names in self._partitions():
            shape = self._files.whole(flat, of=flat).shape
            for key, value in self._inner.state.get(flat, {}).items():
                whole = self._files.whole(value, of=flat)
                for name in names:
                    slot = _slot(name, self._by_name[name], key, whole, shape)
                    state[name][self._slot_word(key)] = slot
        return {name: slots for name, slots in state.items() if slots}

    def _slot_word(self, slot: str) -> str:
        return _WORDS.get(type(self._inner).__name__, {}).get(slot, slot)

    def materialise(self) -> None:
        """Creates the slots that a checkpoint is read into."""
        flats = [flat for group in self._flats for flat in group]
        self._create([flat for flat in flats if not self._files.hold(flat)])
        for flat in flats:  # which are never in memory all at once
            if self._files.hold(flat) and not self._inner.state.get(flat):
                with self._files.swap_in(flat):
                    self._create([flat])

    def _create(self, chosen: list[Tensor]) -> None:
        groups, state = self._inner.param_groups, self._inner.state
        if any(state.get(flat) for flat in chosen):
            return
        kept = [group["params"] for group in groups]
        ids = {id(flat) for flat in chosen}
        # Between its steps, stage 3 leaves the groups empty.
        for group, flats in zip(groups, self._flats, strict=True):
            group["params"] = [flat for flat in flats if id(flat) in ids]
        self._inner.state = type(state)(dict)
        try:
            materialise_slots(self._inner)
            state.update(self._inner.state)
        finally:
            self._inner.state = state
            for group, parameters in zip(groups, kept, strict=True):
                group["params"] = parameters

    @torch.no_grad()
    def load(self, model: Mapping[str, Any], slots: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes what ``model`` and ``optimizer`` gave.

        Raises:
            Unsupported: parameters that lie in one partition have states that it cannot hold.
        """
        self._load_model(model)
        if slots:
            self.materialise()
        for flat, names in self._partitions():
            self._load_partition(flat, names, slots)
        self._files.flush()
        self._push()

    def _load_model(self, source: Mapping[str, Any]) -> None:
        given = self._model.state_dict(keep_vars=True)
        if gives_copies(self._model, given):
            parts = self._own_parts()
            with whole_parameters(self._model, parts, self._comm):
                load_model(self._model, source)
                values = [p.detach() for p, _ in parts]
            for (_, part), value in zip(parts, values, strict=True):
                put_whole(part, value)
            return
        own = {id(value) for value in (*self._model.parameters(), *self._model.buffers())}
        for name, target in self.model().items():
            if id(given[name]) in own:
                _copy(target, source[name])
        rest = {name: source[name] for name, value in given.items() if id(value) not in own}
        if rest:  # extra state: only the module knows where it goes
            take_values(self._model, rest, strict=False)

    def _partitions(self) -> Iterable[tuple[Tensor, list[str]]]:
        found: dict[int, tuple[Tensor, list[str]]] = {}
        for name, piece in self._by_name.items():
            found.setdefault(id(piece.flat), (piece.flat, []))[1].append(name)
        return found.values()

    def _load_partition(
        self, flat: Tensor, names: list[str], slots: Mapping[str, Mapping[str, Any]]
    ) -> None:
        there = [name for name in names if slots.get(name)]
        if not there:
            self._inner.state.pop(flat, None)
            self._files.forget(flat)
            return
        if len(there) < len(names):
            odd = next(name for name in names if name not in there)
            raise _unequal(there[0], odd, "one has optimizer state and the other none")
        state = self._inner.state[flat]
        for key, value in list(state.items()):
            saved = [slots[name][self._slot_word(key)] for name in names]
            if all(isinstance(one, FlatShard) for one in saved):
                whole = self._files.whole(value, of=flat)
                for name, one in zip(names, saved, strict=True):
                    _copy(self._by_name[name].shard(name, whole), one)
                continue
            numbers = [None if one is None else float(one) for one in saved]
            for name, number in zip(names, numbers, strict=True):
                if number != numbers[0]:
                    raise _unequal(names[0], name, f"{key} is {numbers[0]:g} and {number:g}")
            if numbers[0] is not None:
                state[key] = _as_before(value, numbers[0])


_WORDS = {"DeepSpeedCPUAdagrad": {"exp_avg_sq": "sum"}}
"""Optimizers of DeepSpeed's that call a slot otherwise than torch's of that kind."""


def _slot(name: str, piece: Piece, key: str, value: Any, shape: torch.Size) -> Any:
    if isinstance(value, Tensor) and value.shape == shape:
        return piece.shard(name, value)
    if key == "step" or (isinstance(value, Tensor) and value.numel() == 1):
        # torch's own form of it, whichever optimizer counts.
        return torch.tensor(float(value))
    return value


def _as_before(value: Any, number: float) -> Any:
    """``number`` as the optimizer holds it: DeepSpeedCPUAdam counts its steps with an int."""
    if isinstance(value, Tensor):
        return torch.full_like(value, number)
    return type(value)(number)


def _copy(target: Any, source: Any) -> None:
    if isinstance(target, FlatShard):
        target.tensor.copy_(source.tensor.view_as(target.tensor))
    elif source is not target:
        target.copy_(source)


def _unequal(one: str, other: str, how: str) -> Unsupported:
    return Unsupported(
        f"the parameters {one!r} and {other!r} lie in one partition of DeepSpeed, and {how}",
        fix="go on with strategy=ddp or strategy=fsdp, which keep state by parameter",
        strategy="deepspeed",
    )
