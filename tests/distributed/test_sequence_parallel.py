"""Tokens that are cut between pairs of cut layers: a GPT equals a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from tests.distributed.small_gpt import (
    ADAMW,
    CLIPPED,
    SGD,
    Kind,
    Words,
    check,
    moved_by,
    refusal,
    trainer,
)
from torsh_trainer.mesh import MeshOptions
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.context_parallel import door
from torsh_trainer.strategies.parallel import Parallel
from torsh_trainer.strategies.single import Single
from torsh_trainer.strategies.tensor_parallel import layers
from torsh_trainer.strategies.tensor_parallel.agreeing import WholeAlike
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.whole_runs import run_on_rank

SPLIT = Parallel(sequence_parallel=True)
ON_TWO = SPLIT, MeshOptions(tp=2)
MESHES: dict[str, tuple[int, MeshOptions]] = {
    "tp=2": (2, MeshOptions(tp=2)),
    "tp=4": (4, MeshOptions(tp=4)),
    "dp_shard=2,tp=2": (4, MeshOptions(tp=2)),
    "cp=2,tp=2": (4, MeshOptions(cp=2, tp=2)),
}


@pytest.mark.matrix(1)
@pytest.mark.parametrize("kind", [SGD, CLIPPED, ADAMW], ids=["sgd", "clipped-chunked", "adamw"])
@pytest.mark.parametrize("place", MESHES.values(), ids=MESHES)
def test_a_run_equals_a_plain_loop(
    place: tuple[int, MeshOptions], kind: Kind, tmp_path: Path
) -> None:
    ranks, mesh = place
    for outcome in shared_pool(ranks).run(run_on_rank, trainer(kind, SPLIT, mesh), tmp_path):
        check(outcome, kind)


@pytest.mark.exhaustive
def test_a_run_goes_on_without_it_and_the_other_way(tmp_path: Path) -> None:
    there, here = trainer(ADAMW, Single()), trainer(ADAMW, *ON_TWO)
    for number, (first, second) in enumerate([((1, there), (2, here)), ((2, here), (1, there))]):
        folder = tmp_path / str(number)
        shared_pool(first[0]).run(run_on_rank, first[1], folder, 2)
        for outcome in shared_pool(second[0]).run(run_on_rank, second[1], folder):
            check(outcome, ADAMW, first=3)


@pytest.mark.parametrize("mesh", [MeshOptions(tp=2), MeshOptions(cp=2, tp=2)], ids=["tp", "cp-tp"])
def test_a_dropout_between_layers_draws_what_one_process_draws(mesh: MeshOptions) -> None:
    class Dropping(Words):
        """Drops within the residuals, but not in attention."""

        def build_model(self) -> nn.Module:
            model: Any = super().build_model()
            for block in model.blocks:
                block.residual_dropout.p = 0.3
            return model

    task = Dropping(SGD.optimizer, dropout=0.4)
    assert moved_by(task, None, SPLIT, mesh, ranks=mesh.cp * 2) <= 64


def _blind() -> None:
    """Nobody looks at what would find it out, too."""
    WholeAlike.check = lambda self, parameters: None  # type: ignore[assignment,method-assign]
    door.watch_tokens = lambda *args, **kwargs: door.ForwardFindings(True, False, True)


def _lose_gradients_of_norms() -> None:
    _blind()
    layers.copy_to_parts = lambda tensor, comm: tensor  # type: ignore[assignment]


def _lose_a_sum_over_tokens() -> None:
    _blind()
    layers.gather_tokens = layers.join_tokens


def _keep_own_products() -> None:
    _blind()
    layers.scatter_sum = layers.split_tokens


@pytest.mark.parametrize(
    "wrong", [_lose_gradients_of_norms, _lose_a_sum_over_tokens, _keep_own_products]
)
def test_what_is_lost_is_found_out(wrong: Callable[[], None]) -> None:
    assert moved_by(SGD.task, None, *ON_TWO) <= 32
    assert moved_by(SGD.task, wrong, *ON_TWO) > 1e4


def test_norms_whose_gradients_nobody_sums_are_found_to_drift_apart() -> None:
    def lose() -> None:
        layers.copy_to_parts = lambda tensor, comm: tensor  # type: ignore[assignment]

    pool = shared_pool(2)
    try:
        told = pool.run(refusal, SGD.task, *ON_TWO, lose)
    finally:
        pool.close()
    for said in told:
        assert "and no longer the same" in said, said


class Mixes(Words):
    """A convolution over tokens between the layers."""

    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        model.mix = nn.Conv1d(12, 12, 3, padding=1)
        norm = model.norm
        model.norm = nn.Identity()
        model.norm.forward = lambda x: norm(x + model.mix(x.transpose(1, 2)).transpose(1, 2))
        return model


class Shorter(Words):
    """Seven tokens."""

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        output: Tensor = model(batch[0][:, :-2].clamp(max=18))
        return output


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Mixes(SGD.optimizer), "strategy.sequence_parallel: conv1d in 'mix' (Conv1d) puts tokens"),
        (Shorter(SGD.optimizer), "over mesh.tp=2 processes, and a layer gives [4, 7, 12]"),
    ],
)
def test_what_cannot_be_cut_is_one_sentence(task: Words, words: str) -> None:
    for said in shared_pool(2).run(refusal, task, *ON_TWO):
        assert words in said, said


@pytest.mark.parametrize(
    ("strategy", "mesh", "ranks", "words"),
    [
        (SPLIT, MeshOptions(), 2, "and mesh.tp is 1; set mesh.tp=2 or more"),
        (SPLIT, MeshOptions(tp=2, pp=2), 4, "cannot honour mesh.pp=2 beside mesh.tp"),
    ],
)
def test_what_stands_beside_it_not_is_refused(
    strategy: Strategy, mesh: MeshOptions, ranks: int, words: str
) -> None:
    for said in shared_pool(ranks).run(refusal, SGD.task, strategy, mesh):
        assert words in said, said
