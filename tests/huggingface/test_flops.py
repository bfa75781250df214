"""Operations of a model of transformers, beside those that torch counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from torsh_trainer.tasks.base import DataSource
from torsh_trainer.tasks.huggingface.heads import CausalLM

WIDE: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 200, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32},
    "llama": {
        "vocab_size": 200,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "head_dim": 32,
    },
}
MIXTRAL = {**WIDE["llama"], "num_local_experts": 4}


def make(kind: str, values: dict[str, Any]) -> Any:
    config = transformers.AutoConfig.for_model(kind, **values)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def task_of(model: Any) -> CausalLM:
    data = DataSource()
    data.mean_length = 32.0  # type: ignore[attr-defined]
    return CausalLM(lambda: model, data)


@pytest.mark.parametrize("kind", WIDE)
def test_operations_are_those_that_torch_counts(kind: str) -> None:
    model = make(kind, WIDE[kind])
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, 32).long(), use_cache=False).logits.sum().backward()
    # Norms and biases, which N counts and torch does not, are a few of a thousand.
    assert task_of(model).flops_per_sample(model) == pytest.approx(
        counter.get_total_flops(), rel=0.02
    )


def test_where_the_formula_does_not_hold_nothing_is_told() -> None:
    experts = make("mixtral", MIXTRAL)
    assert task_of(experts).flops_per_sample(experts) is None
    state_space = make("mamba", {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1})
    assert task_of(state_space).flops_per_sample(state_space) is None
