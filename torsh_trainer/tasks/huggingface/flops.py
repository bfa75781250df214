"""Floating-point operations of a causal language model of transformers, from its configuration."""

from __future__ import annotations

from typing import Any

from torch import nn

_ATTENDS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Kinds of layers whose attention the formula counts."""


def flops_per_token(model: nn.Module, tokens: float) -> float | None:
    """Operations of forward and backward for one token of a sequence of ``tokens``.

    6 N + 12 L d T (Chowdhery et al. 2022, PaLM, appendix B): N are the parameters that multiply,
    so without embeddings that are only looked up; L layers whose heads are d wide together. The
    whole attention matrix is counted, and nothing that is computed again. From the configuration
    and not by torch's FlopCounterMode: that needs a forward before the first step, which a model
    that is cut over processes cannot give to one of them, and a model on the meta device refuses.

    None where the formula does not hold: experts, of which a token sees a few; layers that are no
    attention; an encoder; another modality's parts.
    """
    config: Any = getattr(model, "config", None)
    if config is None or config.get_text_config() is not config:
        return None
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    sizes: list[Any] = [getattr(config, name, None) for name in names]
    kinds = set(getattr(config, "layer_types", None) or ())
    if (
        not all(isinstance(size, int) and size > 0 for size in sizes)
        or getattr(config, "is_encoder_decoder", False)
        or kinds - _ATTENDS
        or any("expert" in name or "router" in name for name, _ in model.named_parameters())
    ):
        return None
    layers, heads, width = sizes
    head: int = getattr(config, "head_dim", None) or width // heads
    return 6.0 * _count_multiplied(model) + 12.0 * layers * heads * head * tokens


def _count_multiplied(model: nn.Module) -> int:
    """Parameters of matrix products: all but embeddings that no output layer shares."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    kept = None if output is None else output.weight
    looked_up = {
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.weight is not kept
    }
    return sum(p.numel() for p in model.parameters() if p not in looked_up)
