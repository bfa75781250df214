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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
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
from torsh_trainer.strategies.context_parallel.shares import TokenShare, fill_up
from torsh_trainer.strategies.context_parallel.watching import (
    MOST_SAMPLES,
    MOST_TOKENS,
    ForwardFindings,
    watch_tokens,
)
from torsh_trainer.strategies.tensor_parallel.functions import sum_of_parts
from torsh_trainer.strategies.units import forget_order
from torsh_trainer.strategies.writes import DUE_FORWARDS
from torsh_trainer.tasks.chunked_loss import IGNORED

_ALL = TokenShare(0, 1, balanced=False)
_SAME_LOSS = 1e-5
"""By what part of it a loss may differ between processes that compute it from the same outputs."""
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

    def check_loss(self, loss: Any) -> None:
        """Of a loss that is looked at, before its backward."""


class ContextDoor(WholeTokens):
    """The cut around ``model``, by ``plan``, over the processes of ``groups.context``.

    ``exchange`` is the way of attention (``EXCHANGES``). ``pads`` fills sequences up to a length
    that divides. The model's forward is replaced on the instance.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ContextPlan,
        groups: Groups,
        exchange: str,
        *,
        pads: bool,
        splits_layers: bool,
    ) -> None:
        self.model = model
        self.plan = plan
        self.comm = comm = groups.context
        self._tensor, self._everybody = groups.tensor, groups.whole
        self._exchange = EXCHANGES[exchange]
        self._pads = pads
        self._layers = (
            TokenShare(groups.tensor.rank, groups.tensor.size, balanced=False)
            if splits_layers
            else _ALL
        )
        self._forward = model.forward
        self._signature = inspect.signature(self._forward)
        self._takes = frozenset(parameters_of(model))
        self._name = type(model).__name__
        self._is_of_transformers = masks.is_of_transformers(model)
        self._forwards = {True: 0, False: 0}
        self._seen: ForwardFindings | None = None
        self._is_within = False
        self._last: Attending | None = None
        self.summary = ""
        if comm.size > 1:
            self.summary = _summarise(plan, exchange, comm.size, parameters_of(model))

        @functools.wraps(self._forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._call(*args, **kwargs)

        model.forward = forward

    # -- a call -----------------------------------------------------------------------------------

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_within:  # the model calls itself
            return self._forward(*args, **kwargs)
        given = read_arguments(self._name, self._signature, self.plan, args, kwargs)
        given.values.update(self._settings(given))
        training = self.model.training
        self._forwards[training] += 1
        if self._seen is None or self._forwards[training] in DUE_FORWARDS:
            self._watch(given)
        assert self._seen is not None
        balanced = self._seen.is_causal and self.comm.size > 1
        share = TokenShare(self.comm.rank, self.comm.size, balanced)
        filled = self._find_length(given.tokens, share)
        values = self._cut(given, share, filled)
        self._last = Attending(
            self._exchange, self.comm, share, filled, drawn=given.tokens, layers=self._layers
        )
        with self._inside(), self._last:
            output = self._forward(**values)
        sums = given.values.get(TARGETS) is not None and isinstance(output, Tensor)
        joined = tree_map(functools.partial(self._join, share, filled, sums), output)
        if filled == given.tokens:
            return joined
        return tree_map(functools.partial(_cut_off, given.tokens), joined)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        self._is_within = True
        try:
            yield
        finally:
            self._is_within = False

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

    def _find_length(self, tokens: int, share: TokenShare) -> int:
        """How many tokens a sequence of so many is filled up to.

        Raises:
            ConfigError: it does not divide, and is not to be filled up.
            Unsupported: what it is filled up with would be seen.
        """
        assert self._seen is not None
        if tokens % share.chunks == 0:
            return tokens
        if not self._pads:
            raise _does_not_divide(tokens, share.chunks, self.comm.size)
        if self._seen.is_full and not self._is_of_transformers:
            raise Unsupported(
                "strategy.pad=true fills sequences up behind their end, where a causal mask hides "
                f"it, and the attention of {self._name} is not causal",
                fix=f"give sequences of a multiple of {share.chunks} tokens",
            )
        return tokens + -tokens % share.chunks

    def _cut(self, given: TokenArguments, share: TokenShare, filled: int) -> dict[str, Any]:
        assert self._seen is not None
        values, causal = dict(given.values), self._seen.is_causal
        for name, dim in given.dims.items():
            fill = IGNORED if name == TARGETS else 0
            values[name] = share.take_own(fill_up(values[name], dim, filled, fill=fill), dim)
        if self._is_of_transformers:
            seen = masks.mask_whole(given, filled, is_causal=causal)
            if seen is not None and causal and self._seen.is_full:
                raise Unsupported(
                    f"mesh.cp: some attention of {self._name} is causal and some is not, and a "
                    "batch has padding",
                    fix="set mesh.cp=1, or give batches without padding",
                )
            mask = masks.cut_mask(seen, given, share, filled, is_causal=causal)
            values["attention_mask"] = mask
        places = share.places(filled, given.device).clamp(max=given.tokens - 1)
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
        """Runs the model once more, on the first tokens of a few samples, the same everywhere."""
        few = min(MOST_TOKENS, given.tokens)
        few = max(1, few // self._layers.size) * self._layers.size
        values = {name: v for name, v in given.values.items() if name != TARGETS}
        dims = {name: dim for name, dim in given.dims.items() if name != TARGETS}
        alone = all(name in given.dims for name, v in given.values.items() if _has_tensors(v))
        for name, dim in dims.items():
            values[name] = values[name].narrow(dim, 0, few)
            if dim and alone:
                values[name] = values[name][:MOST_SAMPLES]
        if self._is_of_transformers:
            values.pop("attention_mask", None)
            dims.pop("attention_mask", None)
            name = next(iter(dims))
            values["attention_mask"] = values[name].new_ones(
                (values[name].shape[0], few), dtype=torch.int64
            )
        values = self._tell_places(values, torch.arange(few, device=given.device))
        for name in PLACES:
            if isinstance(values.get(name), Tensor):
                dims[name] = self.plan.dims[name] or 0
        names = {module: name for name, module in self.model.named_modules()}
        seen, error = ForwardFindings(False, False, False), None
        try:
            with self._inside():
                seen = watch_tokens(
                    self.model,
                    self._forward,
                    values,
                    dims,
                    names=lambda module: names.get(module, ""),
                    device=given.device,
                    comm=self._tensor,
                    layers=self._layers,
                )
        except Unsupported as refused:
            error = refused
        except (RuntimeError, ValueError, IndexError) as failed:
            if few == given.tokens:
                raise
            error = Unsupported(
                f"mesh.cp: {self._name} does not run on {few} of {given.tokens} tokens "
                f"({str(failed).splitlines()[0]}), as one with a layer over all of them does not",
                fix="set mesh.cp=1",
            )
        finally:
            forget_order(self.model)
        if error is not None and self.comm.size == 1:
            error = _say_of_layers(error)
        for told in self._everybody.all_gather_object(error):
            if told is not None:
                raise told
        if self._seen is None:
            self._seen = seen
            if self.comm.size > 1:
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

    def check_loss(self, loss: Any) -> None:
        """Collective over the processes with the same samples.

        Raises:
            Unsupported: they have other losses, of the same outputs.
        """
        mine = float(loss.detach()) if isinstance(loss, Tensor) and loss.numel() == 1 else 0.0
        told = self.comm.all_gather_object(mine)
        if any(abs(one - told[0]) > _SAME_LOSS * abs(told[0]) for one in told):
            raise Unsupported(
                f"mesh.cp: task.loss gives {mine:.6g} on a process, and {told[0]:.6g} on another "
                "with the same samples: it reads something that the model has computed of some of "
                "the tokens and does not give",
                fix="have the model give it for each token, or set mesh.cp=1",
            )

    @contextlib.contextmanager
    def watch_calls(self) -> Iterator[None]:
        """Around a forward and a loss.

        Raises:
            Unsupported: the task calls a module with parameters apart from the model's forward, or
                reads one that is whole on every process.
        """
        names = {m: name for name, m in self.model.named_modules() if m is not self.model}

        def check(module: nn.Module, _: Any) -> None:
            if not self._is_within and module in names and _has_parameters(module):
                raise Unsupported(
                    f"mesh.cp: the task calls {names[module]!r} apart from the model's forward, on "
                    "all tokens on each process, so that its gradient would count several times",
                    fix="call it within the model's forward, or set mesh.cp=1",
                )

        whole = {
            id(p): name for name, p in self.model.named_parameters() if not hasattr(p, "placements")
        }
        handle = nn.modules.module.register_module_forward_pre_hook(check)
        try:
            with _ReadsApart(whole, lambda: self._is_within):
                yield
        finally:
            handle.remove()


class _ReadsApart(TorchFunctionMode):
    """Refuses what is computed from ``whole`` parameters, by ``id``, unless ``is_within`` the
    model's forward: every process would add their whole gradient."""

    def __init__(self, whole: Mapping[int, str], is_within: Callable[[], bool]) -> None:
        super().__init__()
        self._whole = whole
        self._is_within = is_within

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not self._is_within() and getattr(func, "__name__", "") not in ("__get__", "__set__"):
            for leaf in args:
                if id(leaf) in self._whole:
                    raise Unsupported(
                        f"mesh.cp: the task reads the parameter {self._whole[id(leaf)]!r} apart "
                        "from the model's forward, so that its gradient would count several times",
                        fix="use it within the model's forward, or set mesh.cp=1",
                    )
        return func(*args, **(kwargs or {}))


def _say_of_layers(error: Unsupported) -> Unsupported:
    """``error``, where tokens are cut between pairs of layers alone."""
    words = error.sentence.replace("mesh.cp", "strategy.sequence_parallel")
    return Unsupported(
        words, fix=error.fix.replace("mesh.cp=1", "strategy.sequence_parallel=false")
    )


def _cut_off(tokens: int, leaf: Any) -> Any:
    has_them = isinstance(leaf, Tensor) and leaf.dim() > 1
    return leaf.narrow(1, 0, tokens) if has_them else leaf


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
        fix=f"the nearest length that does is {near} (data.context); or set strategy.pad=true, "
        "which fills up what a causal mask hides",
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
