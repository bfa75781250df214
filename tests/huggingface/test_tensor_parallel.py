"""Models of transformers are cut by their own plan, and train as a loop of plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.huggingface.small_models import GPT2, LLAMA
from tests.huggingface.steps import Kind, check_step, refusal
from torsh_trainer.mesh import MeshOptions
from torsh_trainer.strategies.parallel import Parallel
from torsh_trainer.testing.ranks import shared_pool

KINDS: dict[str, Kind] = {
    "llama": ("llama", LLAMA, False),
    "llama-chunked": ("llama", LLAMA, True),
    "qwen3-tied": ("qwen3", {**LLAMA, "head_dim": 8, "tie_word_embeddings": True}, True),
}
TOKENS = torch.randint(1, 40, (4, 9), generator=torch.Generator().manual_seed(1))

BATCH = {"input_ids": TOKENS, "labels": TOKENS}
ON_TWO = (BATCH, MeshOptions(tp=2), Parallel())


@pytest.mark.parametrize("name", KINDS)
def test_a_step_by_the_models_own_plan_is_a_few_units_from_a_plain_one(name: str) -> None:
    check_step(KINDS[name], *ON_TWO)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"num_key_value_heads": 1}, "mesh.tp=2 does not divide the 1 heads of 'model.layers.0.s"),
        ({"vocab_size": 41}, "mesh.tp=2 does not divide the 41 "),
        ({"attention_dropout": 0.1}, "draws random numbers on a part of the output of 'model.la"),
    ],
)
def test_what_cannot_be_cut_is_one_sentence(knobs: dict[str, Any], words: str) -> None:
    for said in shared_pool(2).run(refusal, ("llama", {**LLAMA, **knobs}, False), *ON_TWO):
        assert words in said, said


def test_a_model_without_a_plan_is_told_to_write_one() -> None:
    for said in shared_pool(2).run(refusal, ("gpt2", GPT2, False), *ON_TWO):
        assert "mesh.tp=2 needs a plan" in said, said
        assert "GPT2LMHeadModel" in said, said
