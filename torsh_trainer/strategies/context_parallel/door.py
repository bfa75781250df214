"""A model whose forward runs on some of the tokens, and is called with all of them.

Tokens are cut where the model is called, and put together where it returns: the task, its loss and
its metrics see whole sequences, and are as they are on one process. Every process computes the
loss of whole sequences from what all have given, and its gradient by its own tokens.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from torsh_trainer.errors import ConfigError, Unsupported
from torsh_trainer.mesh import Groups
from torsh_trainer.strategies.context_parallel import masks
from torsh_trainer.strategies.context_parallel.attending import Attending
from torsh_trainer.strategies.context_parallel.exchanges import EXCHANGES
from torsh_trainer.strategies.context_parallel.functions import join_tokens
from torsh_trainer.strategies.context_parallel.plan import (
    PLACES,
    TARGETS,
    ContextPlan,
    TokenArguments,
    parameters_of,
    read_arguments,
)
from torsh_trainer.strategies.context_parallel.shares import TokenShare
from torsh_trainer.strategies.context_parallel.watching import (
    MOST_SAMPLES,
    MOST_TOKENS,
    ForwardFindings,
    watch_tokens,
)
from torsh_trainer.strategies.tensor_parallel.functions import sum_of_parts
from torsh_trainer.strategies.units import forget_order
from torsh_trainer.strategies.writes import DUE_FORWARDS

log = logging.getLogger(__name__)


class WholeTokens:
    """The null object: every process has all tokens."""

    summary = ""

    def in_backward(self) -> contextlib.AbstractContextManager[Any]:
        """Around a backward, which may run parts of the forward again."""
        return contextlib.nullcontext()

    def watch_calls(self) -> contextlib.AbstractContextManager[Any]:
        """Around a forward and a loss that are looked at."""
        return contextlib.nullcontext()


class ContextDoor(WholeTokens):
    """The cut around ``model``, by ``plan``, over the processes of ``groups.context``.

    ``exchange`` is the way of attention (``EXCHANGES``). The model's forward is replaced on the
    instance.
    """

    def __init__(self, model: nn.Module, plan: ContextPlan, groups: Groups, exchange: str) -> None:
        self.model = model
        self.plan = plan
        self.comm = comm = groups.context
        self._tensor, self._everybody = groups.tensor, groups.whole
        self._exchange = EXCHANGES[exchange]
        self._forward = model.forward
        self._signature = inspect.signature(self._forward)
        self._takes = frozenset(parameters_of(model))
        self._name = type(model).__name__
        self._is_of_transformers = masks.is_of_transformers(model)
        self._forwards = {True: 0, False: 0}
        self._seen: ForwardFindings | None = None
        self._within: Attending | None = None
        self._last: Attending | None = None
        self.summary = _summarise(plan, exchange, comm.size, parameters_of(model))

        @functools.wraps(self._forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._call(*args, **kwargs)

        model.forward = forward

    # -- a call -----------------------------------------------------------------------------------

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if self._within is not None:  # the model calls itself
            return self._forward(*args, **kwargs)
        given = read_arguments(self._name, self._signature, self.plan, args, kwargs)
        given.values.update(self._settings(given))
        self._check_length(given.tokens)
        training = self.model.training
        self._forwards[training] += 1
        if self._seen is None or self._forwards[training] in DUE_FORWARDS:
            self._watch(given)
        assert self._seen is not None
        share = TokenShare(self.comm.rank, self.comm.size, self._is_balanced)
        if given.tokens % share.chunks:
            raise _does_not_divide(given.tokens, share.chunks, self.comm.size)
        values = self._cut(given, share)
        self._within = self._last = Attending(self._exchange, self.comm, share, given.tokens)
        try:
            with self._within:
                output = self._forward(**values)
        finally:
            self._within = None
        sums = given.values.get(TARGETS) is not None
        return tree_map(functools.partial(self._join, share, given.tokens, sums), output)

    @property
    def _is_balanced(self) -> bool:
        return self._seen is None or self._seen.is_causal

    def _settings(self, given: TokenArguments) -> dict[str, Any]:
        """What a model is called with beside: where its tokens stand is filled in by the cut."""
        if given.values.get("labels") is not None:
            raise Unsupported(
                f"mesh.cp: {self._name} is called with labels, of which it makes a loss itself, "
                "and would shift those of some of the tokens",
                fix="call it without labels, and compute the loss in task.loss from its logits",
            )
        if self._is_of_transformers and "use_cache" in self._takes:
            return {"use_cache": False}  # it is for generating
        return {}

    def _check_length(self, tokens: int) -> None:
        if tokens % self.comm.size:
            chunks = TokenShare(0, self.comm.size, self._is_balanced).chunks
            raise _does_not_divide(tokens, chunks, self.comm.size)

    def _cut(self, given: TokenArguments, share: TokenShare) -> dict[str, Any]:
        values = dict(given.values)
        for name, dim in given.dims.items():
            values[name] = share.take_own(values[name], dim)
        places = share.places(given.tokens, given.device)
        if self._is_of_transformers:
            whole = masks.mask_whole(given)
            causal = self._seen is not None and self._seen.is_causal
            values["attention_mask"] = masks.cut_mask(whole, given, share, is_causal=causal)
        return self._tell_places(values, places)

    def _tell_places(self, values: dict[str, Any], places: Tensor) -> dict[str, Any]:
        for name in PLACES:
            if name in self._takes and values.get(name) is None:
                values[name] = places if name == "positions" else places.unsqueeze(0)
        return values

    def _join(self, share: TokenShare, tokens: int, sums: bool, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if sums and leaf.dim() == 0:
            return sum_of_parts(leaf, self.comm)
        if leaf.dim() < 2 or leaf.shape[1] * share.size != tokens:
            raise Unsupported(
                f"mesh.cp: the model gives {list(leaf.shape)} for {tokens // share.size} of "
                f"{tokens} tokens, and what has tokens along dimension 1 is all that can be put "
                "together",
                fix="give a number for each token, (batch, tokens, ...), and do the rest in "
                "task.loss; or set mesh.cp=1",
            )
        return join_tokens(leaf, self.comm, share, 1)

    # -- what is looked for -----------------------------------------------------------------------

    def _watch(self, given: TokenArguments) -> None:
        """Runs the model once more, on a few tokens of a few samples."""
        share = TokenShare(self.comm.rank, self.comm.size, False)
        few = min(MOST_TOKENS, given.tokens // self.comm.size)
        values = {name: v for name, v in given.values.items() if name != TARGETS}
        dims = {name: dim for name, dim in given.dims.items() if name != TARGETS}
        alone = all(name in given.dims for name, v in given.values.items() if _has_tensors(v))
        for name, dim in dims.items():
            values[name] = share.take_own(values[name], dim).narrow(dim, 0, few)
            if dim and alone:
                values[name] = values[name][:MOST_SAMPLES]
        if self._is_of_transformers:
            values.pop("attention_mask", None)
            dims.pop("attention_mask", None)
            name = next(iter(dims))
            values["attention_mask"] = values[name].new_ones(
                (values[name].shape[0], few), dtype=torch.int64
            )
        places = share.places(given.tokens, given.device)[:few]
        values = self._tell_places(values, places)
        for name in PLACES:
            if isinstance(values.get(name), Tensor):
                dims[name] = self.plan.dims[name] or 0
        names = {module: name for name, module in self.model.named_modules()}
        self._within = Attending(self._exchange, self.comm, share, given.tokens)
        seen, error = ForwardFindings(False, False), None
        try:
            seen = watch_tokens(
                self.model,
                self._forward,
                values,
                dims,
                names=lambda module: names.get(module, ""),
                device=given.device,
                comm=self._tensor,
            )
        except Unsupported as refused:  # by its numbers, which other processes have not
            error = refused
        finally:
            self._within = None
            forget_order(self.model)
        for told in self._everybody.all_gather_object(error):
            if told is not None:
                raise told
        if self._seen is None:
            self._seen = seen
            self._tell(given.tokens)

    def _tell(self, tokens: int) -> None:
        assert self._seen is not None
        if not self._seen.attends:
            log.warning(
                "mesh.cp: the model calls no F.scaled_dot_product_attention: its tokens know "
                "nothing of each other"
            )
        share = TokenShare(0, self.comm.size, self._seen.is_causal)
        kind = "balanced for a causal mask" if self._seen.is_causal else "as they follow"
        log.info(
            "mesh.cp: %d tokens a sequence, cut into %d chunks, %s",
            tokens, share.chunks, kind,
        )  # fmt: skip

    def in_backward(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._last is None else self._last

    @contextlib.contextmanager
    def watch_calls(self) -> Iterator[None]:
        """Around a forward and a loss.

        Raises:
            Unsupported: the task calls a module with parameters apart from the model's forward.
        """
        names = {m: name for name, m in self.model.named_modules() if m is not self.model}

        def check(module: nn.Module, _: Any) -> None:
            if self._within is None and module in names and _has_parameters(module):
                raise Unsupported(
                    f"mesh.cp: the task calls {names[module]!r} apart from the model's forward, on "
                    "all tokens on each process, so that its gradient would count several times",
                    fix="call it within the model's forward, or set mesh.cp=1",
                )

        handle = nn.modules.module.register_module_forward_pre_hook(check)
        try:
            yield
        finally:
            handle.remove()


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def _does_not_divide(tokens: int, chunks: int, cp: int) -> ConfigError:
    below = tokens // chunks * chunks
    near = " or ".join(str(n) for n in (below, below + chunks) if n)
    each = f" ({cp} processes with two chunks each)" if chunks > cp else ""
    return ConfigError(
        f"mesh.cp={cp} cuts a sequence into {chunks} chunks of one size{each}, and {tokens} tokens "
        "do not divide",
        fix=f"the nearest length that does is {near} (data.context), or pad batches to it",
        tokens=tokens,
    )


def _summarise(plan: ContextPlan, exchange: str, cp: int, takes: Sequence[str]) -> str:
    """In one line: what is cut, and how keys and values travel."""
    named = [name for name in takes if plan.dims.get(name) is not None]
    what = f" ({', '.join(named)})" if named else ""
    how = {
        "gather": "all keys and values are gathered in each attention",
        "ring": "keys and values go round in each attention",
        "alltoall": "each process has some heads of all tokens in each attention",
    }[exchange]
    return f"sequences{what} cut over {cp} processes ({plan.source}); {exchange}: {how}"
