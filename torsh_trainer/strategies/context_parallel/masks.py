"""Attention masks of models of transformers, which make them for the tokens that they are given.

A model is given masks of ones where nothing is masked, so that it takes its causal attention as it
is, or whole rows of the mask that one process would make: own queries, all keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torsh_trainer.errors import Unsupported
from torsh_trainer.strategies.context_parallel.plan import TokenArguments
from torsh_trainer.strategies.context_parallel.shares import TokenShare

_MASK, _PLACES = "attention_mask", "position_ids"


def is_of_transformers(model: nn.Module) -> bool:
    """Whether ``model`` is one of transformers, or looks to its callers like one."""
    return hasattr(getattr(model, "config", None), "_attn_implementation")


def refuse_attention(model: nn.Module) -> None:
    """Makes sure that a model of transformers calls torch's attention, over all tokens before.

    Raises:
        Unsupported: another implementation, or windows.
    """
    if not is_of_transformers(model):
        return
    config: Any = model.config
    if config._attn_implementation != "sdpa":
        raise Unsupported(
            f"mesh.cp exchanges keys and values in F.scaled_dot_product_attention, and this "
            f"{type(model).__name__} computes attention by {config._attn_implementation!r}",
            fix="set ++model.attention=sdpa, or attn_implementation='sdpa' where the model is made",
        )
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if kinds:
        some = sorted(kinds - {"full_attention"})
        windowed = some[0] if some else None
    elif window is not None and getattr(config, "use_sliding_window", True):
        windowed = f"sliding_window={window}"
    else:
        windowed = None
    if windowed:
        raise Unsupported(
            f"mesh.cp: the attention of this {type(model).__name__} does not see all tokens before "
            f"({windowed}), and nothing cuts such masks yet",
            fix="set mesh.cp=1, or take a model with full attention",
        )


def mask_whole(given: TokenArguments, filled: int, *, is_causal: bool) -> Tensor | None:
    """Which pairs of tokens one process would not mask for another reason than being later, bool
    (batch or 1, 1, tokens or 1, tokens); None: all.

    ``filled`` are the tokens that sequences are filled up to, which none of theirs sees.
    """
    more = filled - given.tokens
    seen = _mask_given(given)
    if more == 0:
        return seen
    if seen is None:
        if is_causal:
            return None  # they are later than all others
        seen = torch.ones((1, 1, 1, given.tokens), dtype=torch.bool, device=given.device)
    if seen.shape[-2] > 1:  # a row each
        seen = torch.nn.functional.pad(seen, (0, 0, 0, more), value=True)
    return torch.nn.functional.pad(seen, (0, more), value=is_causal)


def _mask_given(given: TokenArguments) -> Tensor | None:
    mask, places = given.values.get(_MASK), given.values.get(_PLACES)
    if mask is not None:
        if mask.dim() != 2:
            raise Unsupported(
                f"mesh.cp: the model is given a mask of {list(mask.shape)}, and a mask of padding "
                "(batch, tokens) is all that is cut",
                fix="give attention_mask (batch, tokens), or set mesh.cp=1",
            )
        kept = mask.bool()
        return None if bool(kept.all()) else kept[:, None, None, :]
    if places is None:
        return None
    # As transformers does: a text begins wherever a position does not follow the one before it.
    text = (places.diff(dim=1) != 1).cumsum(1)
    if not bool(text.any()):
        return None
    text = torch.nn.functional.pad(text, (1, 0))
    return (text.unsqueeze(2) == text.unsqueeze(1)).unsqueeze(1)


def cut_mask(
    whole: Tensor | None,
    given: TokenArguments,
    share: TokenShare,
    filled: int,
    *,
    is_causal: bool,
) -> Tensor:
    """What such a model is given as ``attention_mask``: (batch, own tokens) of ones, or (batch, 1,
    own tokens, tokens) bool."""
    rows = share.places(filled, given.device)
    if whole is None:
        batch = next(iter(given.dims))
        return rows.new_ones((given.values[batch].shape[0], len(rows)))
    seen = whole
    if whole.shape[-2] > 1:
        seen = share.take_own(whole, whole.dim() - 2)
    if is_causal:
        seen = seen & (torch.arange(filled, device=given.device) <= rows.unsqueeze(1))
    return seen.expand(-1, -1, len(rows), -1)
