"""A GPT whose layers are cut over processes equals a plain loop; checkpoints go to any mesh.

The plain loop is written out below: it knows no processes. Bounds are in units in the last place of
the largest element of a tensor (2^-24 of it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.small_gpt import (
    ADAMW,
    CLIPPED,
    SGD,
    WORDS,
    Kind,
    Words,
    check,
    moved_by,
    plain,
    refusal,
    trainer,
)
from torsh_trainer.comm.base import Communicator
from torsh_trainer.mesh import Groups, MeshOptions
from torsh_trainer.optim.optimizers import OptimizerSpec
from torsh_trainer.strategies.base import (
    BatchPlan,
    Job,
    Strategy,
)
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.dividing import divide
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.parallel import Parallel
from torsh_trainer.strategies.single import Single
from torsh_trainer.strategies.tensor_parallel import layers
from torsh_trainer.strategies.tensor_parallel.agreeing import WholeAlike
from torsh_trainer.tasks.base import Task
from torsh_trainer.tasks.models import GPT, MLP
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.whole_runs import run_in_turn, run_on_rank

MESHES: dict[str, tuple[int, MeshOptions]] = {
    "tp=2": (2, MeshOptions(tp=2)),
    "dp_shard=2,tp=2": (4, MeshOptions(tp=2)),
    "dp_replicate=2,tp=2": (4, MeshOptions(dp_replicate=2, dp_shard=1, tp=2)),
    "tp=4": (4, MeshOptions(tp=4)),
}

ON_TWO = Parallel(), MeshOptions(tp=2)
run_saving_async = partial(run_on_rank, mode="async")


@pytest.mark.matrix(2)
@pytest.mark.parametrize("kind", [SGD, CLIPPED, ADAMW], ids=["sgd", "clipped-chunked", "adamw"])
@pytest.mark.parametrize("place", MESHES.values(), ids=MESHES)
def test_a_run_equals_a_plain_loop(
    place: tuple[int, MeshOptions], kind: Kind, tmp_path: Path
) -> None:
    ranks, mesh = place
    for outcome in shared_pool(ranks).run(
        run_saving_async, trainer(kind, Parallel(), mesh), tmp_path
    ):
        check(outcome, kind)


PLACES: dict[str, tuple[int, Strategy, MeshOptions]] = {
    "single": (1, Single(), MeshOptions()),
    "ddp": (2, DDP(), MeshOptions()),
    "fsdp": (4, FSDP(wrap_min_bytes=0), MeshOptions()),
    "tp=4": (4, Parallel(), MeshOptions(tp=4)),
}


@pytest.mark.matrix(2)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("goes_to", [True, False], ids=["to", "from"])
def test_a_run_goes_on_on_another_mesh(
    goes_to: bool, place: tuple[int, Strategy, MeshOptions], tmp_path: Path
) -> None:
    ranks, strategy, mesh = place
    there = (ranks, trainer(ADAMW, strategy, mesh))
    here = (4, trainer(ADAMW, Parallel(), MeshOptions(tp=2)))
    first, second = (here, there) if goes_to else (there, here)
    for outcome in run_in_turn(first, second, tmp_path, until=2, run=run_saving_async):
        check(outcome, ADAMW, first=3)


def test_a_run_that_goes_on_there_has_the_bits_of_one_that_never_stopped(tmp_path: Path) -> None:
    made = trainer(ADAMW, Parallel(), MeshOptions(tp=2))
    pool = shared_pool(2)
    whole = pool.run(run_saving_async, made, tmp_path / "whole")
    pool.run(run_saving_async, made, tmp_path / "cut", 2)
    for through, resumed in zip(
        whole, pool.run(run_saving_async, made, tmp_path / "cut"), strict=True
    ):
        assert resumed.losses == {step: through.losses[step] for step in (3, 4)}
        for name, value in through.parameters.items():
            assert torch.equal(resumed.parameters[name], value), name


def test_a_dropout_outside_of_cut_layers_draws_by_sample_what_one_process_draws(
    tmp_path: Path,
) -> None:
    kind = replace(SGD, dropout=0.4)
    (one,) = shared_pool(1).run(run_saving_async, trainer(kind, Single()), tmp_path / "one")
    made = trainer(kind, Parallel(), MeshOptions(tp=2))
    for ours in shared_pool(4).run(run_saving_async, made, tmp_path / "mesh"):
        for step, loss in one.losses.items():
            assert abs(ours.losses[step] - loss) / loss <= kind.relative, f"step {step}"
    undropped = plain(SGD).losses
    assert abs(undropped[1] - one.losses[1]) / one.losses[1] > 1e-3, "nothing was dropped"


def elements(comm: Communicator) -> tuple[int, int]:
    """How many elements of cut parameters this process holds, and of whole ones."""
    task = SGD.task
    strategy, mesh = divide(comm.world, Parallel(wrap_min_bytes=0), MeshOptions(tp=2))
    groups = Groups(mesh, comm)
    batch = BatchPlan(4 * mesh.dp, 4, 1, mesh.dp)
    job = Job(task=task, build_model=task.build_model, batch=batch, groups=groups)
    engine: Any = strategy.prepare(job, groups.data)
    held = {name: p.to_local().numel() for name, p in engine.model.named_parameters()}
    cut = sum(count for name, count in held.items() if name in engine._layers.names)
    engine.close()
    groups.close()
    return cut, sum(held.values()) - cut


def test_a_process_holds_its_part_of_both_meshes() -> None:
    model = SGD.task.build_model()
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    whole = ("norm", "positions", "attention_out.bias", "mlp_out.bias", "qkv.bias")
    rest = sum(size for name, size in sizes.items() if any(word in name for word in whole))
    cut, uncut = zip(*shared_pool(4).run(elements), strict=True)
    assert sum(cut) == sum(sizes.values()) - rest
    assert max(cut) <= 1.05 * sum(cut) / 4
    assert sum(uncut) == 2 * rest, "what is whole on two processes is cut over the other two"


def words_of(task: Task, strategy: Strategy, **more: Any) -> str:
    (first, second) = shared_pool(2).run(refusal, task, strategy, MeshOptions(tp=2), None, more)
    assert first == second
    return first


def _blind() -> None:
    """Nobody looks whether whole parameters are still the same, which would find it out, too."""
    WholeAlike.check = lambda self, parameters: None  # type: ignore[assignment,method-assign]


def _lose_a_sum() -> None:
    _blind()
    layers.sum_of_parts = lambda tensor, comm: tensor  # type: ignore[assignment]


def _average_a_sum() -> None:
    _blind()
    right = layers.sum_of_parts
    layers.sum_of_parts = lambda tensor, comm: right(tensor, comm) / comm.size  # type: ignore[assignment]


def _lose_a_sum_of_gradients() -> None:
    _blind()
    layers.copy_to_parts = lambda tensor, comm: tensor  # type: ignore[assignment]


def test_one_step_is_a_few_units_away_from_a_plain_one() -> None:
    assert moved_by(SGD.task, None, *ON_TWO) <= 32


@pytest.mark.parametrize("wrong", [_lose_a_sum, _average_a_sum, _lose_a_sum_of_gradients])
def test_a_sum_that_is_lost_or_averaged_is_found_out(wrong: Callable[[], None]) -> None:
    assert moved_by(SGD.task, wrong, *ON_TWO) > 1e4


FUSED = {
    "tokens": "rowwise",
    "blocks.*.attention_out": "rowwise",
    "blocks.*.mlp_in": "colwise",
    "blocks.*.mlp_out": "rowwise",
}


def test_a_fused_projection_that_is_cut_as_one_has_the_wrong_heads() -> None:
    plan = {**FUSED, "blocks.*.qkv": {"style": "colwise", "parts": 1}}
    assert moved_by(SGD.task, None, Parallel(plan=plan), MeshOptions(tp=2)) > 1e4
    words = words_of(SGD.task, Parallel(plan={**FUSED, "blocks.*.qkv": "colwise"}))
    assert "'blocks.0.qkv' (12 inputs, 36 outputs) colwise, and it looks like several" in words
    assert "write {style: colwise, parts: 3}" in words


# -- what is refused, in one sentence before the first step ----------------------------------------


class Small(Words):
    """With a model of its own."""

    def __init__(self, make: Callable[[], nn.Module], plan: Mapping[str, Any] | None = None):
        super().__init__(OptimizerSpec("SGD", lr=0.5))
        self.make, self.plan = make, plan

    def build_model(self) -> nn.Module:
        torch.manual_seed(5)
        return self.make()

    def parallel_plan(self, mesh: Any) -> Mapping[str, Any]:
        return self.plan or {}

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return model(F.one_hot(batch[0][:, 0], WORDS).float())

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return outputs.square().mean()


class Between(nn.Module):
    """Two layers, and something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor] | nn.Module, hidden: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WORDS, hidden), nn.Linear(hidden, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))


def gpt(**sizes: int) -> Task:
    return Small(lambda: GPT(**{"vocab_size": 8, "width": 8, "heads": 2, "layers": 1, **sizes}))


PAIR = {"up": "colwise", "down": "rowwise"}


def pair(between: Callable[[Tensor], Tensor], **styles: Any) -> Task:
    return Small(lambda: Between(between), {**PAIR, **styles})


REFUSED: dict[str, tuple[Task, dict[str, Any], str]] = {
    "heads": (gpt(heads=1), {}, "mesh.tp=2 does not divide the 1 heads of 'blocks.0.qkv'; the nea"),
    "words": (gpt(vocab_size=7), {}, "does not divide the 7 words of 'tokens'; the nearest that"),
    "hidden": (
        Small(lambda: Between(torch.relu, hidden=5), PAIR),
        {},
        "mesh.tp=2 does not divide the 5 outputs of 'up'; the nearest that it divides are 4 or 6",
    ),
    "no plan": (Small(lambda: Between(torch.relu)), {}, "mesh.tp=2 needs a plan of which layers"),
    "no module": (
        Small(lambda: Between(torch.relu), {"upp": "colwise"}),
        {},
        "the plan (of the task) names 'upp', and the model has no such module; did you mean 'up'?",
    ),
    "no style": (pair(torch.relu, up="columns"), {}, "'columns' of 'up', which is no style"),
    "cuts nothing": (
        Small(lambda: Between(torch.relu), {"up": "replicate"}),
        {},
        "cuts nothing, and mesh.tp=2",
    ),
    "no layer": (
        Small(lambda: Between(nn.Sequential(nn.ReLU())), {"between": "colwise"}),
        {},
        "colwise of 'between' (Sequential), and only nn.Linear and nn.Embedding are cut so far",
    ),
    "nothing puts it together": (
        Small(lambda: Between(torch.relu), {"down": "colwise", "up": "replicate"}),
        {},
        "does not divide the 3 outputs of 'down'",
    ),
    "dropout": (
        pair(nn.Dropout(0.5)),
        {},
        "dropout draws random numbers on a part of the output of 'up'",
    ),
    "softmax": (pair(lambda x: x.softmax(-1)), {}, "softmax goes along the columns of 'up'"),
    "halves": (
        Small(
            lambda: nn.Sequential(nn.Linear(WORDS, 8), nn.GLU(), nn.Linear(4, 2)),
            {"0": "colwise", "2": "rowwise"},
        ),
        {},
        "glu goes along the columns of '0'",
    ),
    "a gradient in part": (
        Small(lambda: Between(nn.PReLU()), PAIR),
        {},
        "a parameter that is whole is used (prelu) on a part of the output of 'up'",
    ),
    "an output in part": (
        Small(lambda: nn.Sequential(nn.Linear(WORDS, 8), nn.Linear(8, 4)), {"1": "colwise"}),
        {},
        "what the model gives is a part of the output of '1'",
    ),
    "another optimizer": (
        Words(OptimizerSpec("Muon", lr=0.1, others=OptimizerSpec("SGD", lr=0.1))),
        {},
        "mesh.tp cannot cut layers under optimizer Muon",
    ),
    "a fused kernel": (
        Words(OptimizerSpec("Adagrad", lr=0.1, fused=True)),
        {},
        "fused",
    ),
    "compile": (SGD.task, {"compile": {}}, "cannot honour trainer.compile=true beside mesh.tp"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_one_sentence(name: str) -> None:
    task, more, words = REFUSED[name]
    said = words_of(task, Parallel(), **more)
    assert words in said, said
    assert said.startswith(("Unsupported: ", "ConfigError: "))


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (FSDP(cpu_offload=True), "strategy.cpu_offload=true beside mesh.tp"),
        (FSDP(gather_in_compute_dtype=True), "strategy.gather_in_compute_dtype=true beside"),
        (DDP(), "strategy=ddp cannot honour mesh.tp=2"),
        (Single(), "strategy=single cannot honour mesh.tp=2"),
    ],
)
def test_what_stands_beside_no_cut_layers_is_refused(strategy: Strategy, words: str) -> None:
    assert words in words_of(SGD.task, strategy)


def _move_one() -> None:
    right = layers._rowwise

    def make_drifting(module: Any, name: str, style: Any, comm: Communicator) -> Any:
        inner = right(module, name, style, comm)
        return lambda x: inner(x) * (1.0 + comm.rank * 1e-6)

    layers._rowwise = make_drifting


def test_whole_parameters_that_drift_apart_are_found_out() -> None:
    pool = shared_pool(2)
    try:
        told = pool.run(refusal, SGD.task, Parallel(), MeshOptions(tp=2), _move_one)
    finally:
        pool.close()
    for words in told:
        assert "TrainingError: the parameter 'positions.weight' is whole on the processes" in words


def test_a_layer_in_between_that_sums_gradients_is_right() -> None:
    task = pair(torch.relu)
    task.make = lambda: Between(nn.PReLU())  # type: ignore[attr-defined]
    task.plan = {**PAIR, "between": "replicate_sum"}  # type: ignore[attr-defined]
    assert moved_by(task, None, *ON_TWO) <= 32


def test_a_dropout_before_gathered_columns_draws_what_one_process_draws() -> None:
    task = Small(lambda: MLP(in_features=WORDS, hidden=(8, 4), out_features=3, dropout=0.5))
    assert moved_by(task, None, *ON_TWO) <= 32
