"""Models of transformers are cut into stages as they are, and train as a loop of plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.huggingface.small_models import GPT2, LLAMA
from tests.unit.test_pipeline_stages import check_stages, make_stages, run_stages
from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import Unsupported
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

KINDS: dict[str, tuple[str, dict[str, Any], Any, float]] = {
    "llama": ("llama", LLAMA, False, 0.0),
    "llama-chunked": ("llama", {**LLAMA, "attention_dropout": 0.2}, True, 0.0),
    "qwen3-tied": ("qwen3", {**LLAMA, "head_dim": 8, "tie_word_embeddings": True}, True, 8.0),
    "gpt2": ("gpt2", GPT2, False, 8.0),
}
"""Of which the tied ones sum the gradients of both ends in another order."""
TOKENS = torch.randint(1, 40, (8, 9), generator=torch.Generator().manual_seed(1))


class Seeded(CausalLM):
    def build_model(self) -> Any:
        torch.manual_seed(3)
        return super().build_model()


def task_of(name: str, knobs: Mapping[str, Any], chunked: Any, _: float) -> Seeded:
    made = partial(HuggingFaceModel, config=name, overrides=knobs)
    return Seeded(made, DataSource(), OptimizerSpec("SGD", lr=0.5), chunked_loss=chunked)


def micro_batches() -> list[MicroBatch]:
    """The last ones have padding."""
    made = []
    for i in range(4):
        tokens = TOKENS[2 * i : 2 * i + 2]
        mask = (torch.arange(9) < 9 - i).long().expand(2, 9)
        batch = {
            "input_ids": tokens,
            "labels": tokens.masked_fill(mask == 0, -100),
            "attention_mask": mask,
        }
        made.append(MicroBatch(batch, 2.0 * (8 - i), i, MicroBatchPlace(i, 4)))
    return made


def train(comm: Communicator, kind: Any) -> tuple[float, float, dict[str, Tensor], Tensor]:
    """Loss and norm of one step, the parameters after it, and logits."""
    task = task_of(*kind)
    strategy, mesh = divide(comm.world, Parallel(), MeshOptions(pp=2))
    groups = Groups(mesh, comm)
    job = Job(task, task.build_model, BatchPlan(8, 2, 4, 1), groups=groups)
    engine = strategy.prepare(job, groups.data)
    engine.zero_grad()
    micro = micro_batches()
    total = sum(one.weight for one in micro)
    report = engine.forward_backward(micro, total, task)
    outcome = engine.step(Clip(), measure_norm=True)
    assert outcome.grad_norm is not None
    state = whole_state(engine.state_dict(), groups.data, groups.pipeline)["model"]
    (found,) = engine.predict([(micro[3].batch, True)], task)
    engine.close()
    groups.close()
    loss = sum(float(one) * weight for one, weight in report.parts) / total
    return loss, float(outcome.grad_norm), state, found


@pytest.mark.parametrize("name", KINDS)
def test_a_step_in_stages_is_that_of_a_plain_loop(name: str) -> None:
    task, bound = task_of(*KINDS[name]), KINDS[name][-1]
    model = task.build_model()
    (made,) = task.build_optimizers(model.named_parameters()).values()
    micro, mean = micro_batches(), 0.0
    total = sum(one.weight for one in micro)
    for one in micro:
        torch.manual_seed(int(one.rng_key or 0))
        loss = task.loss(task.forward(model, one.batch), one.batch)
        loss.backward(torch.tensor(one.weight / total))  # type: ignore[no-untyped-call]
        mean += loss.item() * one.weight / total
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    made.step()
    model.eval()
    with torch.no_grad():
        logits = task.predict(model, micro[3].batch)
    for ours, ours_norm, parameters, found in shared_pool(2).run(train, KINDS[name]):
        assert abs(ours - mean) / mean <= 1e-12
        assert abs(ours_norm - norm) / norm <= 8 * U32
        assert set(parameters) == set(model.state_dict())
        for key, value in model.state_dict().items():
            away = float((parameters[key] - value).abs().max() / value.abs().max())
            assert away <= bound * U32, f"{key} by {away / U32:.1f} u"
        torch.testing.assert_close(found, logits, rtol=0, atol=1e-5 if bound else 0.0)


SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
IMAGES = {"image_size": 16, "patch_size": 4, **SMALL}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", SMALL),
    "roberta": ("RobertaForMaskedLM", {**SMALL, "max_position_embeddings": 32}),
    "gpt_neox": ("GPTNeoXForCausalLM", SMALL),
    "gemma2": ("Gemma2ForCausalLM", {**GROUPED, "head_dim": 8}),
    "mixtral": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "vit": ("ViTForImageClassification", IMAGES),
}


def build(name: str, kind: str, knobs: Mapping[str, Any]) -> Any:
    import transformers

    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(name, **knobs)
    model = getattr(transformers, kind)(config)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OTHERS)
def test_stages_of_other_models_are_the_model(name: str) -> None:
    given = torch.ones(2, 3, 16, 16) if name == "vit" else TOKENS
    check_stages(
        build(name, *OTHERS[name]),
        2,
        lambda model: model(given).logits,
        lambda logits: logits.float().square().mean(),
    )


@pytest.mark.exhaustive
def test_a_decoder_whose_layers_all_read_an_encoder_is_refused() -> None:
    sizes = {"vocab_size": 40, "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    stages = make_stages(build("t5", "T5ForConditionalGeneration", {**sizes, "d_kv": 8}), 2)
    with pytest.raises(Unsupported, match="of an earlier stage has computed"):
        run_stages(
            stages,
            lambda model: model(input_ids=TOKENS, decoder_input_ids=TOKENS).logits,
            lambda logits: logits.mean(),
        )
