"""Forwards without gradients through the stages of a pipeline, batch after batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from torsh_trainer.strategies.evaluation import Evaluation
from torsh_trainer.strategies.pipeline.crossing import Left, Passage, Received
from torsh_trainer.strategies.pipeline.exchange import Edge
from torsh_trainer.strategies.pipeline.held import HeldStages
from torsh_trainer.strategies.pipeline.step import shapes_of
from torsh_trainer.strategies.pipeline.task import StageTask
from torsh_trainer.strategies.writes import DUE_FORWARDS
from torsh_trainer.tasks.base import Mean, Task, metrics_of, sum_of


class StagedEvaluation(Evaluation):
    """Of which this process computes the stages ``held``.

    The last stage has the numbers, and shares them with the others of its pipeline.
    """

    def __init__(self, held: HeldStages, **parts: Any) -> None:
        super().__init__(**parts)
        self._held = held
        self._forwards = dict.fromkeys(held.own, 0)

    def evaluate(
        self, batches: Iterable[tuple[Any, bool]], task: Task, *, averaged: bool
    ) -> dict[str, Mean]:
        parts: dict[str, list[Mean]] = {}
        staged = StageTask(task)
        with self.running(averaged=averaged):
            for batch, counts in batches:
                answer = self._run(batch, staged.evaluate)
                if counts and not isinstance(answer, Left):
                    for name, mean in metrics_of(answer).items():
                        parts.setdefault(name, []).append(mean)
            self._held.exchange.finish()
        sums = {name: sum_of(name, means) for name, means in parts.items()}
        told = {name: (float(mean.total), float(mean.weight)) for name, mean in sums.items()}
        held = self._held
        told = held.comm.broadcast_object(told, src=held.last_rank)
        return {name: Mean(*mean) for name, mean in told.items()}

    def predict(
        self, batches: Iterable[tuple[Any, bool]], task: Task, *, averaged: bool
    ) -> Iterator[Any]:
        held, staged = self._held, StageTask(task)
        with self.running(averaged=averaged):
            for batch, counts in batches:
                answer = self._run(batch, staged.predict)
                held.exchange.finish()
                if counts:
                    mine = tree_map(_to_host, answer) if held.is_last else None
                    yield held.comm.broadcast_object(mine, src=held.last_rank)

    def _run(self, batch: Any, method: Any) -> Any:
        """``method`` of ``batch`` on the stages of this process; what the last of them gives."""
        held, key, answer = self._held, ("evaluate", shapes_of(batch)), None
        for stage in held.own:
            received = None
            if stage:
                edge = Edge(held.rank_of(stage - 1), "forward", stage)
                incoming = held.exchange.receive(edge, key)
                received = Received(incoming.specs, incoming.wait())
            passage = Passage(stage, received, _nothing)
            self._forwards[stage] += 1
            watches = self._forwards[stage] in DUE_FORWARDS
            with (
                self._writes.watch_evaluation(),
                held.crossing.passing(passage, watches=watches),
            ):
                answer = method(self._module, batch)
                if not isinstance(answer, Left):
                    held.crossing.check_end(passage)
            if isinstance(answer, Left):
                edge = Edge(held.rank_of(stage + 1), "forward", stage + 1)
                held.exchange.send(edge, key, answer.specs, answer.tensors)
        return answer


def _to_host(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf


def _nothing() -> None:
    return None
