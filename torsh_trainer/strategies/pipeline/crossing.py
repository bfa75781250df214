"""One forward of the user's, of which a process computes its stage.

Every stage calls ``task.forward``. What stands before the stage is not computed: in its place come
tensors of the right shapes without values (``NaN``). Where the stage begins, what was received
takes the place of what the forward holds there, object by object; where the next one begins, an
exception leaves the forward with what that one needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves, tree_map

from torsh_trainer.errors import TorshError, Unsupported
from torsh_trainer.strategies.pipeline.exchange import TensorSpec
from torsh_trainer.strategies.pipeline.following import OUTSIDE, FollowOutside
from torsh_trainer.strategies.pipeline.stages import StagePlan


class Left(BaseException):
    """The forward has come to where the next stage begins: what goes there.

    No error, so that nobody who catches those in a forward catches it.
    """

    def __init__(self, specs: Sequence[TensorSpec], tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.specs = specs
        self.tensors = tensors


class Received:
    """A message from the stage before: ``tensors``, and their gradients after the backward."""

    def __init__(self, specs: Sequence[TensorSpec], tensors: Sequence[Tensor]) -> None:
        self.specs = specs
        self.tensors = list(tensors)
        self.gradients: list[Tensor | None] = [None for _ in tensors]

    def as_inputs(self) -> list[Tensor]:
        """The tensors, as what some operation gave: a forward may write to them."""
        anchor = torch.ones((), device=self.tensors[0].device, requires_grad=True)
        return [
            _Input.apply(anchor, tensor, self.gradients, number) if spec.trains else tensor
            for number, (spec, tensor) in enumerate(zip(self.specs, self.tensors, strict=True))
        ]


class _Input(torch.autograd.Function):
    """A tensor that has come from elsewhere, whose gradient goes there."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, tensor: Tensor, gradients: list[Tensor | None], number: int
    ) -> Tensor:
        ctx.gradients, ctx.number = gradients, number
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        ctx.gradients[ctx.number] = gradient
        return None, None, None, None


class Passage:
    """One forward of a stage, of which ``received`` is what came; None for the first stage.

    ``draws`` is told where the forward before has come to in its draws.
    """

    def __init__(self, stage: int, received: Received | None, go_on: Callable[[], None]) -> None:
        self.stage = stage
        self.received = received
        self.has_begun = received is None
        self.goes: Sequence[TensorSpec] = ()  # to the next stage, once this one has ended
        self.is_called = False  # by a call of the model, which has hooks
        self.at_begin: Callable[[], None] = lambda: None
        self._go_on = go_on

    def begin(self, name: str, arguments: Any) -> None:
        """The call of the module at which the stage begins, with ``arguments``.

        Raises:
            Unsupported: what was received cannot take their place.
        """
        assert self.received is not None
        leaves = tree_leaves(arguments)
        for spec, given in zip(self.received.specs, self.received.as_inputs(), strict=True):
            held = leaves[spec.place] if spec.place < len(leaves) else None
            if not isinstance(held, Tensor):
                raise Unsupported(
                    f"mesh.pp: {name!r}, at which stage {self.stage} begins, is called with other "
                    "arguments here than in the stage before",
                    fix="let the forward call it the same way on every process",
                )
            if tuple(held.shape) != spec.shape:
                raise Unsupported(
                    f"mesh.pp: stage {self.stage - 1} gives {list(spec.shape)}, and {name!r}, at "
                    f"which stage {self.stage} begins, takes {list(held.shape)}",
                    fix="let the shapes of a forward follow from those of its batch",
                )
            _put_in_place(held, given, name)
        self.has_begun = True
        self._go_on()
        self.at_begin()


def _put_in_place(held: Tensor, given: Tensor, name: str) -> None:
    """Makes the object ``held``, wherever the forward has it, the tensor ``given``."""
    try:
        torch.utils.swap_tensors(held, given)
    except RuntimeError as error:
        raise Unsupported(
            f"mesh.pp: what {name!r} is called with cannot be replaced by what the stage before "
            f"has computed ({error})",
            fix="name another module in strategy.split",
        ) from error


class Crossing:
    """The stages ``own`` of ``model``, under ``plan``; the modules of others are not computed.

    ``compute`` is the dtype of parameters in a forward, ``device`` where it runs.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: StagePlan,
        own: Sequence[int],
        *,
        compute: torch.dtype,
        device: torch.device,
    ) -> None:
        self._model = model
        self._plan = plan
        self._own = frozenset(own)
        self._compute = compute
        self._device = device
        self._shapes: dict[Any, Any] = {}
        self._removed: list[tuple[nn.Module, str, Tensor, bool]] = []
        self.passage: Passage | None = None
        for name, module in plan.list_units(model):
            if not self._own <= plan.places[name]:
                module.forward = self._replace(name, module, module.forward)
            if not self._own & plan.places[name]:
                for one in module.modules():  # hooks of the user's would see no values
                    one._forward_hooks.clear()
                    one._forward_pre_hooks.clear()

    # -- what is held -----------------------------------------------------------------------------

    def remove_others(self) -> None:
        """Takes the parameters and buffers of other stages out of the model.

        What a forward reads of them nevertheless has the shape, and no values.
        """
        stages = self._plan.stages_of_parameters(self._model)
        for name, module in self._model.named_modules():
            for key, parameter in list(module._parameters.items()):
                if parameter is not None and not stages[parameter] & self._own:
                    self._remove(module, key, parameter, module._parameters)
            if not self._plan.places[name] & self._own:
                for key, buffer in list(module._buffers.items()):
                    if buffer is not None:
                        self._remove(module, key, buffer, module._buffers)

    def _remove(self, module: nn.Module, key: str, tensor: Tensor, held: dict[str, Any]) -> None:
        is_parameter = held is module._parameters
        del held[key]
        stand_in = tensor.detach()  # a buffer may be what a mask is made of
        if is_parameter:
            stand_in = self._without_values(tensor.shape, tensor.dtype).expand(tensor.shape)
            setattr(stand_in, OUTSIDE, f"{type(module).__name__}.{key}")
        vars(module)[key] = stand_in
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if is_parameter:
            meta = nn.Parameter(meta, tensor.requires_grad)
        self._removed.append((module, key, meta, is_parameter))

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Within, the model has all parameters, those of other stages without values."""
        kept = []
        for module, key, meta, is_parameter in self._removed:
            kept.append((module, key, vars(module).pop(key), is_parameter))
            _dict_of(module, is_parameter)[key] = meta
        try:
            yield
        finally:
            for module, key, stand_in, is_parameter in kept:
                del _dict_of(module, is_parameter)[key]
                vars(module)[key] = stand_in

    def _without_values(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        empty = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
        return torch.full((), empty, dtype=dtype, device=self._device)

    # -- forwards ---------------------------------------------------------------------------------

    def hook(self) -> None:
        """Once the model is otherwise ready: its forwards begin and leave where stages do."""
        for stage, name in enumerate(self._plan.begins, 1):
            if {stage, stage - 1} & self._own:
                self._model.get_submodule(name).register_forward_pre_hook(
                    self._meet(stage, name), with_kwargs=True, prepend=True
                )
        self._model.forward = self._catch(self._model.forward)
        # In the place of what a call of the module is: behind all hooks, those that come later and
        # those that are always called included, which know of no exception but errors.
        self._model._compiled_call_impl = self._call

    @contextlib.contextmanager
    def passing(self, passage: Passage, *, watches: bool) -> Iterator[None]:
        """Around one forward of a stage; ``watches`` follows what has no values.

        Raises:
            Unsupported: the forward does something that stages cannot.
        """
        self.passage = passage
        follow = FollowOutside(passage) if watches else contextlib.nullcontext()
        before = self._versions() if watches else {}
        if watches:
            passage.at_begin = lambda: before.update(self._versions())
        try:
            with follow:
                yield
        finally:
            self.passage = None
        if passage.has_begun and before != (now := self._versions() if watches else {}):
            name = next(name for name in before if before[name] != now[name])
            raise Unsupported(
                f"mesh.pp: stage {passage.stage} changes the buffer {name!r}, which by its place "
                "in the model belongs to another stage, and would be saved as it is there",
                fix="register its module in __init__ where the forward uses it, or set mesh.pp=1",
            )

    def _versions(self) -> dict[str, tuple[int, int]]:
        """Which tensors the buffers of other stages are, and how often they were written to."""
        return {
            f"{type(module).__name__}.{key}": (id(vars(module)[key]), vars(module)[key]._version)
            for module, key, _, is_parameter in self._removed
            if not is_parameter
        }

    def check_end(self, passage: Passage) -> None:
        """After a forward that did not leave.

        Raises:
            Unsupported: it was to leave, or has not begun its stage.
        """
        begins = self._plan.begins
        missed = passage.stage if passage.stage < len(begins) else passage.stage - 1
        if passage.stage < len(begins) or not passage.has_begun:
            raise Unsupported(
                f"mesh.pp: a forward has ended without a call of {begins[missed]!r}, at which "
                f"stage {missed + 1} begins",
                fix="have task.forward, evaluate and predict call the whole model, or set "
                "mesh.pp=1",
            )

    def _meet(self, stage: int, name: str) -> Callable[..., None]:
        def meet(module: nn.Module, args: Any, kwargs: Any) -> None:
            passage = self.passage
            if passage is None:
                return
            if passage.stage == stage and not passage.has_begun:
                passage.begin(name, (args, kwargs))
            elif passage.stage == stage - 1 and passage.has_begun:
                raise Left(*_what_goes(name, (args, kwargs)))

        return meet

    def _catch(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The model gives what goes to the next stage, so that hooks on it see its end."""

        def catching(*args: Any, **kwargs: Any) -> Any:
            passage = self.passage
            if passage is not None and passage.stage > 0 and passage.has_begun:
                raise Unsupported(
                    "mesh.pp: the model is called twice for one batch, and a stage has received "
                    "what the one before gave for one call",
                    fix="call it once in task.forward, evaluate and predict, or set mesh.pp=1",
                )
            try:
                return forward(*args, **kwargs)
            except Left as left:
                assert passage is not None
                if not passage.is_called:
                    raise  # by its forward alone, around which there are no hooks
                passage.goes = left.specs
                return tuple(left.tensors)

        return catching

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        passage = self.passage
        if passage is None:
            return self._model._call_impl(*args, **kwargs)
        passage.is_called = True
        output = self._model._call_impl(*args, **kwargs)
        passage.is_called = False
        if passage.goes:
            # FSDP2 gives what a model gives in another dtype, where it computes in a lower one.
            pairs = zip(passage.goes, output, strict=True)
            raise Left(passage.goes, [tensor.to(spec.dtype) for spec, tensor in pairs])
        return output

    def _replace(
        self, name: str, module: nn.Module, forward: Callable[..., Any]
    ) -> Callable[..., Any]:
        def run_own(*args: Any, **kwargs: Any) -> Any:
            passage = self.passage
            if passage is None:
                return forward(*args, **kwargs)
            places = self._plan.places[name]
            if passage.has_begun and passage.stage in places:
                return forward(*args, **kwargs)
            if passage.has_begun or min(places) >= passage.stage:
                raise self._explain_place(name, passage)
            return self._give_outside(name, module, forward, args, kwargs)

        return run_own

    def _explain_place(self, name: str, passage: Passage) -> TorshError:
        begins, stage = self._plan.begins, passage.stage
        place = min(self._plan.places[name])
        when = f"in stage {stage}" if passage.has_begun else f"before {begins[stage - 1]!r}"
        return Unsupported(
            f"mesh.pp: the forward calls {name!r} {when}, and by its place in the model it belongs "
            f"to stage {place}",
            fix=f"name it in strategy.both_ends=[{name}] if the first and the last stage use it; "
            "else register it in __init__ where the forward uses it, or set mesh.pp=1",
        )

    # -- what is not computed ---------------------------------------------------------------------

    @torch.no_grad()
    def _give_outside(
        self, name: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        leaves = tree_leaves((args, kwargs))
        key = (name, module.training, *(_key_of(leaf) for leaf in leaves))
        if key not in self._shapes:
            try:
                self._shapes[key] = self._find_shapes(name, module, forward, args, kwargs)
            except Unsupported:
                # Most blocks give what they take; where a stage begins, shapes are compared.
                taken = [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]
                if not taken:
                    raise
                self._shapes[key] = torch.empty_like(taken[0], device="meta")

        def make(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            made = self._without_values(leaf.shape, leaf.dtype).expand(leaf.shape).clone()
            setattr(made, OUTSIDE, name)
            return made

        return tree_map(make, self._shapes[key])

    def _find_shapes(
        self, name: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """What ``module`` gives, as tensors on the device ``meta``."""
        below = list(module.modules())
        before = [dict(vars(one)) for one in below]
        held = [(dict(one._parameters), dict(one._buffers)) for one in below]

        def to_meta(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            dtype = self._compute if leaf.is_floating_point() else leaf.dtype
            return torch.empty(leaf.shape, dtype=dtype, device="meta")

        try:
            with torch._C.DisableTorchFunction(), self._as_meta(below, to_meta):
                return forward(*tree_map(to_meta, args), **tree_map(to_meta, kwargs))
        except Exception as error:
            raise Unsupported(
                f"mesh.pp: the shape of what {name!r} gives cannot be found without computing it "
                f"({error})",
                fix="name other modules in strategy.split, or set mesh.pp=1",
            ) from error
        finally:
            for one, attributes, (parameters, buffers) in zip(below, before, held, strict=True):
                vars(one).clear()
                vars(one).update(attributes)
                _refill(one._parameters, parameters)
                _refill(one._buffers, buffers)

    @contextlib.contextmanager
    def _as_meta(
        self, below: Sequence[nn.Module], to_meta: Callable[[Tensor], Tensor]
    ) -> Iterator[None]:
        """Within, ``below`` have all their parameters and buffers on the device ``meta``."""
        removed = {(id(m), key): (t, is_parameter) for m, key, t, is_parameter in self._removed}
        for one in below:
            for is_parameter in (True, False):
                held = _dict_of(one, is_parameter)
                for key, tensor in held.items():
                    if tensor is not None:
                        held[key] = _as_kind(to_meta(tensor), is_parameter)
            for key in [key for key in vars(one) if (id(one), key) in removed]:
                del vars(one)[key]
                tensor, is_parameter = removed[id(one), key]
                _dict_of(one, is_parameter)[key] = _as_kind(to_meta(tensor), is_parameter)
        yield


def _dict_of(module: nn.Module, is_parameter: bool) -> dict[str, Any]:
    return module._parameters if is_parameter else module._buffers


def _as_kind(tensor: Tensor, is_parameter: bool) -> Any:
    return nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor


def _refill(held: dict[str, Any], content: Mapping[str, Any]) -> None:
    held.clear()
    held.update(content)


def _key_of(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    return leaf if isinstance(leaf, int | float | str | bool | None) else type(leaf)


def _what_goes(name: str, arguments: Any) -> tuple[list[TensorSpec], list[Tensor]]:
    """Of the arguments of the module at which the next stage begins, the first tensor, and all that
    have a gradient: the rest every stage has.

    Raises:
        Unsupported: there is none.
    """
    specs: list[TensorSpec] = []
    tensors: list[Tensor] = []
    for place, leaf in enumerate(tree_leaves(arguments)):
        if not isinstance(leaf, Tensor) or any(leaf is one for one in tensors):
            continue
        if leaf.requires_grad or (not tensors and leaf.is_floating_point()):
            specs.append(TensorSpec(place, tuple(leaf.shape), leaf.dtype, leaf.requires_grad))
            tensors.append(leaf)
    if not tensors:
        raise Unsupported(
            f"mesh.pp: {name!r}, at which the next stage begins, is called without a tensor of "
            "floating-point numbers",
            fix="name a module in strategy.split that takes what the one before has computed",
        )
    return specs, tensors
