"""One step of a causal model of transformers on a mesh, and by a loop of plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torsh_trainer.comm.base import Communicator
from torsh_trainer.mesh import Groups, MeshOptions
from torsh_trainer.optim.optimizers import OptimizerSpec
from torsh_trainer.strategies.base import BatchPlan, Clip, Job, MicroBatch, MicroBatchPlace
from torsh_trainer.strategies.dividing import divide
from torsh_trainer.strategies.parallel import Parallel
from torsh_trainer.tasks.base import DataSource, Task
from torsh_trainer.tasks.huggingface.heads import CausalLM
from torsh_trainer.tasks.huggingface.models import HuggingFaceModel
from torsh_trainer.testing.compare import U32
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.state import whole_state

Kind = tuple[str, Mapping[str, Any], Any]
"""The model's type, what its configuration has, and ``task.chunked_loss``."""


class Seeded(CausalLM):
    def build_model(self) -> Any:
        torch.manual_seed(3)
        return super().build_model()


class MaskedWords(Task):
    """Words that an encoder is to say, of batches as ``CausalLM`` takes."""

    optimizer = OptimizerSpec("SGD", lr=0.5)
    data = DataSource()

    def __init__(self, knobs: Mapping[str, Any]) -> None:
        self.knobs = knobs

    def build_model(self) -> Any:
        from transformers import BertConfig, BertForMaskedLM

        torch.manual_seed(3)
        return BertForMaskedLM(BertConfig(**self.knobs))

    def forward(self, model: Any, batch: Any) -> Tensor:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits: Tensor = model(**inputs).logits
        return logits

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    def weight(self, batch: Any) -> float:
        return float((batch["labels"] != -100).sum())


def task_of(kind: Kind) -> Task:
    name, knobs, chunked = kind
    if name == "bert":
        return MaskedWords(knobs)
    made = partial(HuggingFaceModel, config=name, overrides=knobs)
    return Seeded(made, DataSource(), OptimizerSpec("SGD", lr=0.5), chunked_loss=chunked)


def train(
    comm: Communicator, kind: Kind, batch: Any, mesh: MeshOptions, strategy: Parallel
) -> tuple[float, float, dict[str, Tensor]]:
    """Loss and norm of one step, and the parameters after it."""
    task = task_of(kind)
    made, divided = divide(comm.world, strategy, mesh)
    groups = Groups(divided, comm)
    job = Job(task, task.build_model, BatchPlan(4, 4, 1, 1), groups=groups)
    engine = made.prepare(job, groups.data)
    weight = task.weight(batch)
    micro = MicroBatch(batch, weight, 1, MicroBatchPlace(0, 1))
    engine.zero_grad()
    report = engine.forward_backward([micro], weight, task)
    outcome = engine.step(Clip(norm=0.5), measure_norm=True)
    assert outcome.grad_norm is not None
    state = whole_state(engine.state_dict(), groups.data)["model"]
    engine.close()
    groups.close()
    return float(report.parts[0][0]), float(outcome.grad_norm), state


def refusal(comm: Communicator, *args: Any) -> str:
    """The words that a step is refused with."""
    try:
        train(comm, *args)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return f"{type(error).__name__}: {error}"
    return ""


def check_step(
    kind: Kind, batch: Any, mesh: MeshOptions, strategy: Parallel, *, ranks: int = 2
) -> None:
    """A step on ``mesh`` is at most 32 units in the last place from a plain one."""
    task = task_of(kind)
    model = task.build_model()
    (made,) = task.build_optimizers(model.named_parameters()).values()
    loss = task.loss(task.forward(model, batch), batch)
    loss.backward()  # type: ignore[no-untyped-call]
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    made.step()
    for ours, ours_norm, parameters in shared_pool(ranks).run(train, kind, batch, mesh, strategy):
        assert abs(ours - loss.item()) / loss.item() <= 8 * U32
        assert abs(ours_norm - norm) / norm <= 32 * U32
        for key, value in model.state_dict().items():
            if key.endswith("key.bias"):  # no softmax sees it: its gradient is nothing but rounding
                continue
            away = float((parameters[key] - value).abs().max() / value.abs().max())
            assert away <= 32 * U32, f"{key} by {away / U32:.1f} u"
