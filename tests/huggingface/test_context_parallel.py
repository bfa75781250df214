"""Models of transformers whose sequences are cut train as a loop of plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.huggingface.small_models import BERT, GPT2, LLAMA
from tests.huggingface.steps import Kind, check_step, refusal
from torsh_trainer.mesh import MeshOptions
from torsh_trainer.strategies.parallel import Parallel
from torsh_trainer.testing.ranks import shared_pool

WITHOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
LLAMA_KIND: Kind = ("llama", LLAMA, False)
KINDS: dict[str, Kind] = {
    "llama": LLAMA_KIND,
    "llama-chunked": ("llama", LLAMA, True),
    "gpt2": ("gpt2", {**GPT2, **WITHOUT}, False),
    "qwen3-tied": ("qwen3", {**LLAMA, "head_dim": 8, "tie_word_embeddings": True}, True),
}
TOKENS = torch.randint(1, 40, (4, 8), generator=torch.Generator().manual_seed(1))
WHOLE = {"input_ids": TOKENS, "labels": TOKENS}
# Texts of 8, 5, 3 and 7 tokens; those behind are filled up.
FILLED = torch.arange(8) >= torch.tensor([[8], [5], [3], [7]])
PADDED = {
    "input_ids": TOKENS.masked_fill(FILLED, 0),
    "labels": TOKENS.masked_fill(FILLED, -100),
    "attention_mask": (~FILLED).long(),
}
# Two texts in each row: positions begin anew, and none sees the other.
PACKED = {
    "tokens": TOKENS,
    "targets": TOKENS.roll(-1, 1),
    "position_ids": torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]).expand(4, 8),
}
BATCHES: dict[str, Any] = {"whole": WHOLE, "padded": PADDED, "packed": PACKED}
CP = MeshOptions(cp=2)
GATHER, RING, HEADS = (Parallel(context_exchange=kind) for kind in ("gather", "ring", "alltoall"))


@pytest.mark.parametrize("name", KINDS)
def test_a_step_is_a_few_units_from_a_plain_one(name: str) -> None:
    check_step(KINDS[name], WHOLE, CP, GATHER)


@pytest.mark.parametrize("batch", ["padded", "packed"])
@pytest.mark.parametrize("strategy", [GATHER, HEADS], ids=["gather", "alltoall"])
def test_texts_that_are_filled_up_or_packed_are_masked_as_on_one_process(
    strategy: Parallel, batch: str
) -> None:
    check_step(LLAMA_KIND, BATCHES[batch], CP, strategy)


SIX = {
    name: {key: tensor[:, :6] for key, tensor in batch.items()} for name, batch in BATCHES.items()
}


@pytest.mark.parametrize("name", SIX)
def test_a_batch_is_filled_up_to_a_length_that_divides(name: str) -> None:
    check_step(LLAMA_KIND, SIX[name], CP, Parallel(pad=True))


def test_an_encoder_sees_all_tokens_but_those_that_are_filled_in() -> None:
    for batch in (WHOLE, PADDED):
        check_step(("bert", BERT, False), batch, CP, GATHER)
    check_step(("bert", BERT, False), SIX["padded"], MeshOptions(cp=4), Parallel(pad=True), ranks=4)


def test_keys_of_fewer_heads_than_queries_travel_in_every_way() -> None:
    for strategy in (RING, HEADS):
        check_step(LLAMA_KIND, WHOLE, CP, strategy)


def test_layers_and_sequences_are_cut_together() -> None:
    check_step(LLAMA_KIND, PADDED, MeshOptions(cp=2, tp=2), GATHER, ranks=4)


@pytest.mark.parametrize(
    ("kind", "batch", "strategy", "words"),
    [
        (("gpt2", GPT2, False), WHOLE, GATHER, "attention drops some of its weights"),
        (LLAMA_KIND, PADDED, RING, "context_exchange=ring knows causal masks and none"),
        (("mistral", {**LLAMA, "sliding_window": 4}, False), WHOLE, GATHER, "sliding_window=4"),
        (LLAMA_KIND, SIX["whole"], GATHER, "4 chunks of one size"),
    ],
    ids=["dropout", "ring", "window", "length"],
)
def test_what_cannot_be_cut_is_one_sentence(
    kind: Kind, batch: Any, strategy: Parallel, words: str
) -> None:
    for said in shared_pool(2).run(refusal, kind, batch, CP, strategy):
        assert words in said, said
