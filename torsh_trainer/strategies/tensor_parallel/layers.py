"""Forwards of modules that are cut over processes, on plain tensors.

A cut parameter is a DTensor over ``tp``, of which a forward takes the local part: DTensors all the
way through a model cost twice as much as one process needs for the whole of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError, Unsupported
from torsh_trainer.strategies.context_parallel.functions import (
    gather_tokens,
    join_tokens,
    scatter_sum,
    split_tokens,
)
from torsh_trainer.strategies.context_parallel.shares import TokenShare
from torsh_trainer.strategies.tensor_parallel.functions import (
    copy_to_parts,
    gather_parts,
    own_part,
    split_to_parts,
    sum_of_parts,
)
from torsh_trainer.strategies.tensor_parallel.losses import sum_of_losses_of_parts
from torsh_trainer.strategies.tensor_parallel.plan import ParallelPlan, Style
from torsh_trainer.tasks.huggingface.hidden import sums_losses_of
from torsh_trainer.tasks.models import TokenEmbedding

CUT = "_torsh_cut_by"
"""The attribute of a tensor that is a part of a layer's output: the layer's name."""


_Forward = Callable[..., Any]
_Maker = Callable[[Any, str, Style, Communicator], _Forward]


class Cut(NamedTuple):
    """Along which dimension a parameter is cut, each of ``parts`` equal pieces by itself."""

    dim: int
    parts: int = 1


def cuts_of(module: nn.Module, style: Style) -> dict[str, Cut]:
    """How the parameters of ``module`` are cut; the others stay whole."""
    if style.kind == "rowwise":
        return {"weight": Cut(0 if isinstance(module, nn.Embedding) else 1)}
    if not style.cuts:
        return {}
    if isinstance(module, nn.Embedding):
        return {"weight": Cut(1)}
    parts = style.parts or 1
    cuts = {"weight": Cut(0, parts)}
    if module.bias is not None and parts == 1:
        cuts["bias"] = Cut(0)
    return cuts


def find_cuts(
    model: nn.Module, plan: ParallelPlan, is_computed: Callable[[str], bool] = lambda name: True
) -> dict[nn.Parameter, Cut]:
    """How the parameters of ``model`` are cut; those that are not named stay whole.

    Modules that are not computed here (``is_computed`` of their names) have no say in it.

    Raises:
        Unsupported: modules that share a parameter do not agree about it, or hold it in a way that
            nothing can cut.
    """
    users: dict[nn.Parameter, dict[str, Cut | None]] = {}
    for name, module in model.named_modules():
        if not is_computed(name):
            continue
        cuts: dict[str, Cut] = {}
        if name in plan.styles:
            cuts = cuts_of(module, plan.styles[name])
        for key, parameter in module._parameters.items():
            if parameter is not None:
                users.setdefault(parameter, {})[f"{name}.{key}".strip(".")] = cuts.get(key)
    found = {}
    for parameter, ways in users.items():
        if len(set(ways.values())) > 1:
            (one, first), (other, second) = list(ways.items())[:2]
            raise Unsupported(
                f"mesh.tp: {one!r} and {other!r} are one parameter, and the plan cuts them "
                f"differently ({_describe(first)}, {_describe(second)})",
                fix="give both a style that cuts it alike (an embedding that is rowwise with a "
                "head that is colwise_gather), or neither",
            )
        way = next(iter(ways.values()))
        if way is not None:
            found[parameter] = way
    return found


def _describe(cut: Cut | None) -> str:
    return "not at all" if cut is None else f"along dimension {cut.dim}"


def replace_forwards(model: nn.Module, plan: ParallelPlan, comm: Communicator) -> None:
    """Has every module of ``plan`` compute on its part, once its parameters are cut."""
    for name, style in plan.styles.items():
        module: Any = model.get_submodule(name)
        make = _maker(module, style)
        if make is not None:
            module.forward = make(module, name, style, comm)


def make_forward(
    module: nn.Module, name: str, style: Style, comm: Communicator, *, like: nn.Module
) -> _Forward:
    """What computes with the part that ``module`` has of a layer as ``like``.

    ``module`` has the sizes of the whole layer, and the parameters of its part.
    """
    make = _maker(like, style)
    assert make is not None, "a style that cuts"
    return make(module, name, style, comm)


def refuse_kinds(model: nn.Module, plan: ParallelPlan) -> None:
    """Makes sure that all modules of ``plan`` are of kinds that can be cut.

    Raises:
        Unsupported: names the first that is not, and why.
    """
    for name, style in plan.styles.items():
        module = model.get_submodule(name)
        why = _why_not(module, style)
        if why:
            raise Unsupported(
                f"the plan says {style.kind} of {name!r} ({type(module).__name__}), {why}",
                fix=f"leave {name!r} out of the plan, which keeps it whole",
            )


def _why_not(module: Any, style: Style) -> str:
    if style.kind == "replicate":
        return ""
    if sums_losses_of(module) and module.bias is None:
        needs = "whose logits the loss needs: colwise_gather"
        return "" if style.kind == "colwise_gather" else needs
    if "forward" in vars(module):
        return "whose forward something else has replaced (activation checkpointing of the layer)"
    if hasattr(module, "parametrizations"):
        return "whose weight is computed from other parameters"
    if style.kind == "replicate_split" and not style.splits_tokens:
        return "which strategy.sequence_parallel=true alone knows"
    if style.kind.startswith("replicate"):
        return "" if module._parameters else "which has no parameters of its own"
    if isinstance(module, TokenEmbedding):
        return "" if style.kind == "rowwise" else "which is cut by words: rowwise"
    plain = (nn.Linear, nn.Embedding)
    if not isinstance(module, plain):
        return "and only nn.Linear and nn.Embedding are cut so far"
    if type(module).forward not in (nn.Linear.forward, nn.Embedding.forward):
        return "which has a forward of its own"
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            return "which looks at all words (max_norm, scale_grad_by_freq or sparse)"
        if style.kind == "colwise":
            return "whose columns nothing would put together: colwise_gather"
        if style.parts not in (None, 1):
            return "which is not several projections in one"
    elif style.kind == "rowwise" and style.parts not in (None, 1):
        return "whose inputs are no projections"
    return ""


def _maker(module: nn.Module, style: Style) -> _Maker | None:
    if style.kind == "replicate":
        return _join_before if style.splits_tokens else None
    if style.kind.startswith("replicate"):
        return _replicate_sum
    if isinstance(module, TokenEmbedding):
        return _token_embedding
    if sums_losses_of(module):
        return _head
    if isinstance(module, nn.Embedding):
        return _words if style.kind == "rowwise" else _columns
    return _rowwise if style.kind == "rowwise" else _colwise


def _share_of(comm: Communicator) -> TokenShare:
    return TokenShare(comm.rank, comm.size, balanced=False)


def _enter(input: Tensor, style: Style, comm: Communicator) -> Tensor:
    """What each process computes its part of, from what is the same on all or has own tokens."""
    if style.splits_tokens:
        return gather_tokens(input, comm, _share_of(comm), 1)
    return copy_to_parts(input, comm)


def _leave(part: Tensor, style: Style, comm: Communicator) -> Tensor:
    """The sum of what all have computed, or of its own tokens.

    Raises:
        ConfigError: there are no tokens along dimension 1, or they do not divide.
    """
    if not style.splits_tokens:
        return sum_of_parts(part, comm)
    if part.dim() != 3 or part.shape[1] % comm.size:
        raise ConfigError(
            f"strategy.sequence_parallel=true cuts tokens, dimension 1 of (batch, tokens, width), "
            f"over mesh.tp={comm.size} processes, and a layer gives {list(part.shape)}",
            fix=f"give sequences of a multiple of {comm.size} tokens, or set "
            "strategy.sequence_parallel=false",
        )
    return scatter_sum(part, comm, _share_of(comm), 1)


def local(parameter: Any) -> Tensor:
    """This process's part, with the gradient's way back."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _colwise(module: Any, name: str, style: Style, comm: Communicator) -> _Forward:
    parts = style.parts or 1

    def forward(input: Tensor) -> Tensor:
        bias = module.bias
        if bias is not None and parts > 1:
            bias = own_part(copy_to_parts(bias, comm), comm, 0, parts)
        elif bias is not None:
            bias = local(bias)
        output = F.linear(_enter(input, style, comm), local(module.weight), bias)
        if style.kind == "colwise_gather":
            return _gather(output, comm, parts)
        setattr(output, CUT, (name, parts, output.shape))
        return output

    return forward


def _head(module: Any, name: str, style: Style, comm: Communicator) -> _Forward:
    """Of a language model of transformers that sums losses."""
    give_logits = _colwise(module, name, style, comm)

    def forward(input: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return give_logits(input)
        weight, words = local(module.weight), module.out_features
        if style.splits_tokens:
            input = join_tokens(input, comm, _share_of(comm), 1)
        return sum_of_losses_of_parts(input, weight, targets, comm, words=words)

    return forward


def _gather(output: Tensor, comm: Communicator, parts: int) -> Tensor:
    whole = _whole(gather_parts(output, comm))
    if parts == 1:
        return whole
    # By rank, and within one by part: to be by part, and within one by rank.
    pieces = whole.unflatten(-1, (comm.size, parts, -1))
    return pieces.transpose(-3, -2).flatten(-3)


def _rowwise(module: Any, name: str, style: Style, comm: Communicator) -> _Forward:
    def forward(input: Tensor) -> Tensor:
        weight = local(module.weight)
        if input.shape[-1] == module.in_features:
            if style.splits_tokens:
                raise Unsupported(
                    f"strategy.sequence_parallel=true: {name!r} is rowwise, and what it is given "
                    "is not cut by a colwise layer before it",
                    fix=f"leave {name!r} out of the plan, or cut the layer before it colwise",
                )
            input = split_to_parts(input, comm)
        total = _whole(_leave(F.linear(input, weight), style, comm))
        if module.bias is None:
            return total
        bias = copy_to_parts(module.bias, comm) if style.splits_tokens else module.bias
        return total + bias.to(total.dtype)

    return forward


def _whole(tensor: Tensor) -> Tensor:
    """``tensor``, of which a watch of the functions that made it may think as of a part."""
    if hasattr(tensor, CUT):
        delattr(tensor, CUT)
    return tensor


def _columns(module: Any, name: str, style: Style, comm: Communicator) -> _Forward:
    def forward(input: Tensor) -> Tensor:
        found = F.embedding(input, local(module.weight), module.padding_idx)
        whole = gather_parts(found, comm)
        return split_tokens(whole, comm, _share_of(comm), 1) if style.splits_tokens else whole

    return forward


def _words(module: Any, name: str, style: Style, comm: Communicator) -> _Forward:
    def forward(input: Tensor) -> Tensor:
        weight = local(module.weight)
        first = comm.rank * weight.shape[0]
        _check_words(input, module.num_embeddings)
        padding = None if module.padding_idx is None else module.padding_idx - first
        if padding is not None and not 0 <= padding < weight.shape[0]:
            padding = None
        place = input - first
        elsewhere = (place < 0) | (place >= weight.shape[0])
        found = F.embedding(place.masked_fill(elsewhere, 0), weight, padding)
        return _leave(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), style, comm)

    return forward


def _check_words(numbers: Tensor, words: int) -> None:
    """As torch's own look-up: a number of no word is an error, not a row of zeros."""
    known = ((numbers >= 0) & (numbers < words)).all()
    if not numbers.is_cpu:
        torch._assert_async(known)
    elif not known:
        raise IndexError("index out of range in self")


def _token_embedding(module: Any, name: str, style: Style, comm: Communicator) -> _Forward:
    look_up = _words(module, name, style, comm)

    def forward(input: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is not None:
            weight = local(module.weight)
            if style.splits_tokens:
                input = join_tokens(input, comm, _share_of(comm), 1)
            return sum_of_losses_of_parts(input, weight, targets, comm, words=module.words)
        if not input.is_floating_point():
            return look_up(input)
        logits = F.linear(_enter(input, style, comm), local(module.weight))
        logits = gather_parts(logits, comm)
        return logits if module.words == logits.shape[-1] else logits[..., : module.words]

    return forward


def _join_before(module: Any, name: str, style: Style, comm: Communicator) -> _Forward:
    """Of what is whole and sees all tokens, as a head that is not cut."""
    plain = module.forward

    def forward(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        return plain(join_tokens(input, comm, _share_of(comm), 1), *args, **kwargs)

    return forward


def _replicate_sum(module: Any, name: str, style: Style, comm: Communicator) -> _Forward:
    plain = type(module).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        own = dict(module._parameters)
        try:
            for key, parameter in own.items():
                if parameter is not None:
                    del module._parameters[key]
                    module.__dict__[key] = copy_to_parts(parameter, comm)
            given = plain(module, *args, **kwargs)
            if style.kind == "replicate_split":  # of (tokens, width) or (batch, tokens, width)
                given = _share_of(comm).take_own(given, given.dim() - 2)
            return given
        finally:
            for key in own:
                module.__dict__.pop(key, None)
            module._parameters.clear()
            module._parameters.update(own)

    return forward
