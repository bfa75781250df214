"""Models of transformers are cut by their own plan, and train as a loop of plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.huggingface.small_models import LLAMA
from torsh_trainer.comm.base import Communicator
from torsh_trainer.mesh import Groups, MeshOptions
from torsh_trainer.optim.optimizers import OptimizerSpec
from torsh_trainer.strategies.base import BatchPlan, Clip, Job, MicroBatch, MicroBatchPlace
from torsh_trainer.strategies.dividing import divide
from torsh_trainer.strategies.parallel import Parallel
from torsh_trainer.tasks.base import DataSource
from torsh_trainer.tasks.huggingface.heads import CausalLM
from torsh_trainer.tasks.huggingface.models import HuggingFaceModel
from torsh_trainer.testing.compare import U32
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.state import whole_state

KINDS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "llama": ("llama", LLAMA, False),
    "llama-chunked": ("llama", LLAMA, True),
    "qwen3-tied": ("qwen3", {**LLAMA, "head_dim": 8, "tie_word_embeddings": True}, True),
}
TOKENS = torch.randint(1, 40, (4, 9), generator=torch.Generator().manual_seed(1))


class Seeded(CausalLM):
    def build_model(self) -> Any:
        torch.manual_seed(3)
        return super().build_model()


def task_of(name: str, knobs: Mapping[str, Any], chunked: Any) -> Seeded:
    made = partial(HuggingFaceModel, config=name, overrides=knobs)
    return Seeded(made, DataSource(), OptimizerSpec("SGD", lr=0.5), chunked_loss=chunked)


def train(comm: Communicator, kind: Any) -> tuple[float, float, dict[str, Tensor]]:
    """Loss and norm of one step, and the parameters after it."""
    task = task_of(*kind)
    strategy, mesh = divide(comm.world, Parallel(), MeshOptions(tp=2))
    groups = Groups(mesh, comm)
    job = Job(task, task.build_model, BatchPlan(4, 4, 1, 1), groups=groups)
    engine = strategy.prepare(job, groups.data)
    micro = MicroBatch({"input_ids": TOKENS, "labels": TOKENS}, 32.0, 1, MicroBatchPlace(0, 1))
    engine.zero_grad()
    report = engine.forward_backward([micro], 32.0, task)
    outcome = engine.step(Clip(norm=0.5), measure_norm=True)
    assert outcome.grad_norm is not None
    state = whole_state(engine.state_dict(), groups.data)["model"]
    engine.close()
    groups.close()
    return float(report.parts[0][0]), float(outcome.grad_norm), state


@pytest.mark.parametrize("name", KINDS)
def test_a_step_by_the_models_own_plan_is_a_few_units_from_a_plain_one(name: str) -> None:
    task = task_of(*KINDS[name])
    model = task.build_model()
    (made,) = task.build_optimizers(model.named_parameters()).values()
    batch = {"input_ids": TOKENS, "labels": TOKENS}
    loss = task.loss(task.forward(model, batch), batch)
    loss.backward()  # type: ignore[no-untyped-call]
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    made.step()
    for ours, ours_norm, parameters in shared_pool(2).run(train, KINDS[name]):
        assert abs(ours - loss.item()) / loss.item() <= 8 * U32
        assert abs(ours_norm - norm) / norm <= 32 * U32
        for key, value in model.state_dict().items():
            away = float((parameters[key] - value).abs().max() / value.abs().max())
            assert away <= 32 * U32, f"{key} by {away / U32:.1f} u"


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"num_key_value_heads": 1}, "mesh.tp=2 does not divide the 1 heads of 'model.layers.0.s"),
        ({"vocab_size": 41}, "mesh.tp=2 does not divide the 41 "),
        ({"attention_dropout": 0.1}, "draws random numbers on a part of the output of 'model.la"),
    ],
)
def test_what_cannot_be_cut_is_one_sentence(knobs: dict[str, Any], words: str) -> None:
    def try_engine(comm: Communicator) -> str:
        try:
            train(comm, ("llama", {**LLAMA, **knobs}, False))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return f"{type(error).__name__}: {error}"
        return ""

    for said in shared_pool(2).run(try_engine):
        assert words in said, said


def test_a_model_without_a_plan_is_told_to_write_one() -> None:
    def try_engine(comm: Communicator) -> str:
        gpt2 = {"vocab_size": 40, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32}
        try:
            train(comm, ("gpt2", gpt2, False))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return str(error)
        return ""

    for said in shared_pool(2).run(try_engine):
        assert "mesh.tp=2 needs a plan" in said, said
        assert "GPT2LMHeadModel" in said, said
