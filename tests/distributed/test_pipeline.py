"""A model in stages trains as on one process; checkpoints go to any mesh and back.

One process runs the same micro-batches under ``single``, which other tests hold to plain PyTorch,
and ``test_one_step_is_that_of_plain_pytorch`` here. Bounds are in units in the last place of the
largest element of a tensor (2^-24 of it).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from torsh_trainer.comm.base import Communicator
from torsh_trainer.data.loading import Loading
from torsh_trainer.mesh import Groups, MeshOptions
from torsh_trainer.optim.optimizers import OptimizerSpec
from torsh_trainer.strategies.base import (
    BatchPlan,
    Clip,
    Job,
    MicroBatch,
    MicroBatchPlace,
    Strategy,
)
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.dividing import divide
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.parallel import Parallel
from torsh_trainer.strategies.pipeline import engine as engine_module
from torsh_trainer.strategies.pipeline import held as held_module
from torsh_trainer.strategies.single import Single
from torsh_trainer.tasks.base import DataSource, Task
from torsh_trainer.tasks.models import GPT
from torsh_trainer.testing.compare import U32
from torsh_trainer.testing.ranks import RankFailure, shared_pool
from torsh_trainer.testing.state import whole_state
from torsh_trainer.testing.whole_runs import RunOutcome, run_in_turn, run_on_rank
from torsh_trainer.training.trainer import Trainer

WORDS, LENGTH, STEPS, BATCH, MICRO = 20, 6, 4, 8, 4
TOKENS = torch.randint(WORDS, (21, LENGTH + 1), generator=torch.Generator().manual_seed(3))

PP, ALL_DATA = MeshOptions(pp=2), MeshOptions()
MESHES: dict[str, tuple[int, Strategy, MeshOptions]] = {
    "1f1b": (2, Parallel(), PP),
    "gpipe": (2, Parallel(schedule="gpipe"), PP),
    "interleaved": (2, Parallel(schedule="interleaved_1f1b", stages_per_rank=2), PP),
    "looped": (2, Parallel(schedule="looped_bfs", stages_per_rank=2), PP),
    "dp_shard=2": (4, Parallel(), PP),
    "dp_replicate=2": (4, Parallel(), MeshOptions(pp=2, dp_replicate=2, dp_shard=1)),
    "pp=4": (4, Parallel(), MeshOptions(pp=4)),
}


class Source(DataSource):
    """Two global batches of eight and a tail of five."""

    train = TensorDataset(TOKENS)
    eval = TensorDataset(TOKENS[:7])
    predict = TensorDataset(TOKENS[:7])


class Untied(nn.Module):
    """Residuals outside of its blocks, a head of its own, a parameter without dimensions, which no
    process cuts, and a norm of batches at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.tokens = nn.Embedding(WORDS, 12)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.GELU()) for _ in range(4)
        )
        self.norm = nn.BatchNorm1d(12)
        self.head = nn.Linear(12, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) * self.scale
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x.flatten(0, 1)).view_as(x))


class Words(Task):
    """Next words; ``weighs`` counts words, of which samples have other numbers."""

    data = Source()

    def __init__(self, kind: Kind) -> None:
        self.optimizer = kind.optimizer
        self.kind = kind
        self.sample_weight = None if kind.weighs else 1.0

    def build_model(self) -> nn.Module:
        torch.manual_seed(5)
        if self.kind.model == "untied":
            return Untied()
        dropout = self.kind.dropout
        return GPT(vocab_size=WORDS, context=8, layers=4, heads=4, width=12, dropout=dropout)

    def forward(self, model: nn.Module, batch: Any) -> Any:
        inputs = batch[0][:, :-1]
        return model(inputs, batch[0][:, 1:]) if self.kind.chunked else model(inputs)

    def predict(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0][:, :-1])

    def targets(self, batch: Any) -> Tensor:
        targets = batch[0][:, 1:]
        return targets.masked_fill(targets % 3 == 0, -100) if self.kind.weighs else targets

    def weight(self, batch: Any) -> float:
        return float((self.targets(batch) != -100).sum())

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        targets = self.targets(batch)
        if outputs.dim() == 0:
            return outputs / targets.numel()
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Kind:
    """What is trained; and how far a run may be from one process, relative, and in units of the
    largest element of a parameter. 0 is bit for bit."""

    optimizer: OptimizerSpec = OptimizerSpec("SGD", lr=0.5)
    model: str = "gpt"
    clip: float | None = None
    chunked: bool = False
    weighs: bool = False
    dropout: float = 0.0
    recomputes: bool = False
    relative: float = 64 * U32
    parameters: float = 128 * U32


ADAM = OptimizerSpec("AdamW", lr=0.01, weight_decay=0.1)
KINDS = {
    "untied": Kind(model="untied", relative=0.0, parameters=0.0),
    "untied-adamw": Kind(ADAM, "untied", relative=0.0, parameters=0.0),
    "gpt-dropout": Kind(dropout=0.3, recomputes=True),
    "gpt-clipped": Kind(OptimizerSpec("SGD", lr=0.5, momentum=0.9), clip=0.5, chunked=True),
    "gpt-weighs": Kind(weighs=True),
    # Adam divides by a gradient's own size: see docs/parallel.md, and testing/compare.py.
    "gpt-adamw": Kind(ADAM, clip=0.5, relative=2e-4, parameters=2e-2),
}


def trainer(kind: Kind, strategy: Strategy, mesh: MeshOptions = ALL_DATA) -> Trainer:
    return Trainer(
        task=Words(kind),
        strategy=strategy,
        mesh=mesh,
        loading=Loading(
            batch_size=BATCH, micro_batch_size=BATCH // MICRO, shuffle=False, eval_batch_size=2
        ),
        max_steps=STEPS,
        max_grad_norm=kind.clip,
        activation_checkpointing=kind.recomputes,
        log_every=1,
        eval_every=2,
        eval_every_epochs=None,
        device="cpu",
        log_level="error",
    )


_FOUND: dict[str, RunOutcome] = {}


def on_one_process(kind: Kind) -> RunOutcome:
    """The run of ``kind`` under ``single``: one for all meshes, whatever the bounds."""
    name = repr(replace(kind, relative=0.0, parameters=0.0))
    if name not in _FOUND:
        with tempfile.TemporaryDirectory() as folder:
            run = shared_pool(1).run(run_on_rank, trainer(kind, Single()), Path(folder))
        (_FOUND[name],) = run
    return _FOUND[name]


def check(outcome: RunOutcome, kind: Kind, *, first: int = 1) -> None:
    """Every quantity that began at step ``first`` is that of one process."""
    outcome.assert_close(
        on_one_process(kind),
        relative=kind.relative,
        parameters=kind.parameters,
        norms=8 * U32,  # a sum over stages
        first=first,
    )


def beside_data(kind: Kind) -> Kind:
    """``kind`` where gradients are summed over processes, in another order."""
    most = 2e-2 if kind.optimizer is ADAM else 128 * U32
    least = 2e-4 if kind.optimizer is ADAM else 64 * U32
    return replace(kind, relative=max(kind.relative, least), parameters=max(kind.parameters, most))


@pytest.mark.matrix(6)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_equals_one_of_one_process(kind: str, mesh: str, tmp_path: Path) -> None:
    ranks, strategy, options = MESHES[mesh]
    asked = beside_data(KINDS[kind]) if mesh.startswith("dp") else KINDS[kind]
    for outcome in shared_pool(ranks).run(run_on_rank, trainer(asked, strategy, options), tmp_path):
        check(outcome, asked)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "looped_bfs"])
@pytest.mark.parametrize("kind", ["gpt-dropout", "gpt-adamw"])
def test_several_stages_a_process_beside_shards_equal_one_process(
    kind: str, schedule: str, tmp_path: Path
) -> None:
    asked = beside_data(KINDS[kind])
    strategy = Parallel(schedule=schedule, stages_per_rank=2, wrap_min_bytes=0)
    for outcome in shared_pool(4).run(run_on_rank, trainer(asked, strategy, PP), tmp_path):
        check(outcome, asked)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("kind", ["gpt-clipped", "gpt-weighs", "gpt-adamw"])
def test_stages_of_layers_that_are_cut_equal_one_process(kind: str, tmp_path: Path) -> None:
    asked = beside_data(KINDS[kind])
    made = trainer(asked, Parallel(), MeshOptions(pp=2, tp=2))
    for outcome in shared_pool(4).run(run_on_rank, made, tmp_path):
        check(outcome, asked)


# -- checkpoints ----------------------------------------------------------------------------------

PLACES: dict[str, tuple[int, Strategy, MeshOptions]] = {
    "single": (1, Single(), ALL_DATA),
    "ddp": (2, DDP(), ALL_DATA),
    "fsdp": (4, FSDP(wrap_min_bytes=0), ALL_DATA),
    "pp=4": (4, Parallel(), MeshOptions(pp=4)),
}


class TwoRates(OptimizerSpec):
    """Blocks have half the rate, in a group that the last stage alone has a part of."""

    def build_all(self, named_parameters: Any) -> Any:
        named = list(named_parameters)
        blocks = [p for name, p in named if name.startswith("blocks.3")]
        others = [p for name, p in named if not name.startswith("blocks.3")]
        groups = [{"params": others}, {"params": blocks, "lr": self.lr / 2}]
        return {"main": torch.optim.AdamW(groups, lr=self.lr)}


TWO_RATES = Kind(TwoRates("AdamW", lr=0.01), relative=2e-4, parameters=2e-2)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("goes_to", [True, False], ids=["to", "from"])
def test_a_run_goes_on_on_another_mesh(
    goes_to: bool, place: tuple[int, Strategy, MeshOptions], tmp_path: Path
) -> None:
    ranks, strategy, mesh = place
    kind = TWO_RATES
    there = (ranks, trainer(kind, strategy, mesh))
    here = (2, trainer(kind, Parallel(), PP))
    first, second = (here, there) if goes_to else (there, here)
    for outcome in run_in_turn(first, second, tmp_path, until=2):
        check(outcome, kind, first=3)


def test_a_run_that_goes_on_has_the_bits_of_one_that_never_stopped(tmp_path: Path) -> None:
    made = trainer(replace(KINDS["gpt-adamw"], dropout=0.3), Parallel(), PP)
    pool, run = shared_pool(2), partial(run_on_rank, mode="async")
    whole = pool.run(run, made, tmp_path / "whole")
    pool.run(run, made, tmp_path / "cut", 2)
    for through, resumed in zip(whole, pool.run(run, made, tmp_path / "cut"), strict=True):
        assert resumed.losses == {step: through.losses[step] for step in (3, 4)}
        for name, value in through.parameters.items():
            assert torch.equal(resumed.parameters[name], value), name


# -- one step of an engine ------------------------------------------------------------------------


def step(
    comm: Communicator,
    task: Task,
    strategy: Strategy,
    mesh: MeshOptions,
    wrong: Callable[[], None] | None = None,
    more: Mapping[str, Any] | None = None,
    accumulate: int = 4,
) -> tuple[float, dict[str, Tensor]]:
    """The mean loss of a step of micro-batches of two, and the parameters after it."""
    if wrong is not None:
        wrong()
    strategy, made = divide(comm.world, strategy, mesh)
    groups = Groups(made, comm)
    batch = BatchPlan(2 * accumulate * made.dp, 2, accumulate, made.dp)
    job = Job(task=task, build_model=task.build_model, batch=batch, groups=groups, **(more or {}))
    engine = strategy.prepare(job, groups.data)
    engine.zero_grad()
    report = engine.forward_backward(micro_batches(accumulate), 2.0 * accumulate, task)
    engine.step(Clip())
    parameters = whole_state(engine.state_dict(), groups.data, groups.pipeline)["model"]
    engine.close()
    groups.close()
    loss = sum(float(one) * weight for one, weight in report.parts) / (2.0 * accumulate)
    return loss, parameters


def micro_batches(accumulate: int) -> list[MicroBatch]:
    return [
        MicroBatch((TOKENS[2 * i : 2 * i + 2],), 2.0, i, MicroBatchPlace(i, accumulate))
        for i in range(accumulate)
    ]


def refusal(comm: Communicator, *args: Any, **kwargs: Any) -> str:
    """The words that a step is refused with."""
    try:
        step(comm, *args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return f"{type(error).__name__}: {error}"
    return ""


def words_of(task: Task, strategy: Strategy, more: Mapping[str, Any], accumulate: int = 4) -> str:
    first, second = shared_pool(2).run(refusal, task, strategy, PP, None, more, accumulate)
    assert first == second
    return first


def moved_by(kind: Kind, wrong: Callable[[], None] | None) -> float:
    """How far a step ends from the plain one, in units of the largest element."""
    task = Words(kind)
    model = task.build_model()
    (made,) = task.build_optimizers(model.named_parameters()).values()
    for micro in micro_batches(4):
        torch.manual_seed(int(micro.rng_key or 0))
        loss = task.loss(task.forward(model, micro.batch), micro.batch)
        loss.backward(torch.tensor(0.25))  # type: ignore[no-untyped-call]
    made.step()
    pool = shared_pool(2)
    try:
        answers = pool.run(step, task, Parallel(), PP, wrong)
    finally:
        if wrong is not None:
            pool.close()  # its processes have the wrong function
    return max(
        float((parameters[name] - value).abs().max() / value.abs().max()) / U32
        for _, parameters in answers
        for name, value in model.state_dict().items()
        if value.is_floating_point()
    )


@pytest.mark.parametrize(("kind", "bound"), [(Kind(model="untied"), 0.0), (Kind(dropout=0.3), 8.0)])
def test_one_step_is_that_of_plain_pytorch(kind: Kind, bound: float) -> None:
    assert moved_by(kind, None) <= bound


def _lose_a_micro_batch() -> None:
    right = engine_module.PipelineEngine.run_backward

    def wrong(self: Any, micro: MicroBatch, done: Any, gradients: Any) -> None:
        right(self, micro._replace(weight=micro.weight * (micro.rng_key != 1)), done, gradients)

    engine_module.PipelineEngine.run_backward = wrong  # type: ignore[method-assign]


def _average_a_loss() -> None:
    right = engine_module.PipelineEngine.run_backward

    def wrong(self: Any, micro: MicroBatch, done: Any, gradients: Any) -> None:
        right(self, micro._replace(weight=micro.weight / 2), done, gradients)

    engine_module.PipelineEngine.run_backward = wrong  # type: ignore[method-assign]


def _lose_a_tie() -> None:
    engine_module.PipelineEngine._sum_tied = lambda self: None  # type: ignore[method-assign]


@pytest.mark.parametrize("wrong", [_lose_a_micro_batch, _average_a_loss])
def test_what_is_lost_or_averaged_is_found_out(wrong: Callable[[], None]) -> None:
    assert moved_by(Kind(), wrong) > 1e4


def test_a_tie_that_is_lost_is_found_out() -> None:
    with pytest.raises(RankFailure, match=r"'tokens.weight' is held by several stages \(mesh.pp\)"):
        moved_by(Kind(), _lose_a_tie)


def _swap_stages() -> None:
    right = held_module.find_stages

    def wrong(*args: Any, **kwargs: Any) -> Any:
        plan = right(*args, **kwargs)
        places = {name: frozenset(1 - stage for stage in s) for name, s in plan.places.items()}
        return replace(plan, places=places)

    held_module.find_stages = wrong


def test_stages_that_are_swapped_are_found_out() -> None:
    pool = shared_pool(2)
    try:
        told = pool.run(refusal, Words(Kind(model="untied")), Parallel(), PP, _swap_stages)
    finally:
        pool.close()
    assert all("the forward calls 'tokens' in stage 0" in words for words in told), told


def elements(comm: Communicator) -> int:
    """How many elements of parameters this process holds."""
    task = Words(Kind(model="untied"))
    strategy, mesh = divide(comm.world, Parallel(), PP)
    groups = Groups(mesh, comm)
    job = Job(task, task.build_model, BatchPlan(8, 2, 4 // mesh.dp, mesh.dp), groups=groups)
    engine: Any = strategy.prepare(job, groups.data)
    held = sum(p.to_local().numel() for p in engine.model.parameters() if p.dim())
    with engine.whole_shapes():
        whole = sum(p.numel() for p in engine.model.parameters())
    assert whole == sum(p.numel() for p in task.build_model().parameters())
    engine.close()
    groups.close()
    return held


def test_a_process_holds_its_part_of_both_meshes() -> None:
    total = sum(p.numel() for p in Untied().parameters() if p.dim())
    held = shared_pool(4).run(elements)
    assert sum(held) == total
    assert max(held) <= 1.25 * total / 4  # four blocks, and an embedding or a head beside them


# -- what is refused, in one sentence on every process before the first step ----------------------


class Changes(Words):
    """Gives another shape where the batch does not say so, or no loss."""

    def __init__(self, kind: Kind, how: str) -> None:
        super().__init__(kind)
        self.how = how

    def build_model(self) -> nn.Module:
        if self.how == "sparse":
            return nn.Sequential(nn.Embedding(WORDS, 4, sparse=True), nn.Linear(4, WORDS))
        return super().build_model()

    def forward(self, model: nn.Module, batch: Any) -> Any:
        if self.how == "twice":
            model(batch[0][:, :-1])
        return super().forward(model, batch)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        loss = super().loss(outputs, batch)
        return loss.detach() if self.how == "detached" else loss


UNTIED = Kind(model="untied")
REFUSED: dict[str, tuple[Task, Strategy, dict[str, Any], str]] = {
    "stages": (
        Words(UNTIED),
        Parallel(schedule="interleaved_1f1b", stages_per_rank=3),
        {},
        "mesh.pp=2 x strategy.stages_per_rank=3 makes 6 stages, and the model (Untied) has 4 b",
    ),
    "rounds": (
        Words(UNTIED),
        Parallel(schedule="interleaved_1f1b", stages_per_rank=2),
        {"accumulate": 5},
        "does not divide a step of 5 micro-batches into rounds; set trainer.accumulate=4 or 6",
    ),
    "sparse": (Changes(UNTIED, "sparse"), Parallel(), {}, "mesh.pp cannot take a sparse gradient"),
    "detached": (
        Changes(UNTIED, "detached"),
        Parallel(),
        {},
        "returned a value without a gradient",
    ),
    "manual": (
        Words(UNTIED),
        Parallel(),
        {"more": {"manual": True}},
        "a task that steps its optimizers itself beside mesh.pp",
    ),
    "compile": (
        Words(UNTIED),
        Parallel(),
        {"more": {"compile": {}}},
        "trainer.compile=true beside",
    ),
    "offload": (Words(UNTIED), Parallel(cpu_offload=True), {}, "strategy.cpu_offload=true beside"),
    "ddp": (Words(UNTIED), DDP(), {}, "strategy=ddp cannot honour mesh.pp=2: it takes every"),
    "fsdp": (Words(UNTIED), FSDP(), {}, "use strategy=parallel"),
    "within": (
        Words(UNTIED),
        Parallel(split=("blocks.3.1",)),
        {},
        "a stage begins at 'blocks.3.1', within 'blocks.3', which strategy.wrap_modules",
    ),
}


def test_running_averages_at_several_times_are_refused() -> None:
    strategy = Parallel(schedule="interleaved_1f1b", stages_per_rank=2)
    for words in shared_pool(4).run(refusal, Words(UNTIED), strategy, PP):
        assert "running averages (BatchNorm) over several data-parallel processes" in words


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_one_sentence(name: str) -> None:
    task, strategy, more, words = REFUSED[name]
    said = words_of(task, strategy, **{"more": {}, **more})
    assert words in said, said
    assert said.startswith(("Unsupported: ", "ConfigError: "))
