"""What a sample draws, on any number of processes, micro-batches and engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.data.feed import TrainLoader
from torsh_trainer.data.loading import Loading
from torsh_trainer.data.sampler import BatchPartition
from torsh_trainer.strategies import builtin
from torsh_trainer.strategies.base import BatchPlan, Clip, Job, Strategy
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.single import Single
from torsh_trainer.tasks.base import DataSource, Task
from torsh_trainer.testing.ranks import OPTIONS, shared_pool

SAMPLES, BATCH, SEED, STEPS = 27, 12, 7, 4  # the third step of an epoch has 3 samples


class Sequences(DataSource):
    """Sequences of 5 vectors of 8, and a number for each."""

    def __init__(self) -> None:
        drawn = torch.Generator().manual_seed(1)
        x = torch.randn(SAMPLES, 5, 8, generator=drawn)
        self.train = torch.utils.data.TensorDataset(x, x.mean((1, 2)).unsqueeze(1))


class DropPath(nn.Module):
    """Leaves out a whole sample's branch, as timm does."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * x.new_empty(x.shape[0], *[1] * (x.dim() - 1)).bernoulli_(0.5)


class Noise(nn.Module):
    """Draws by functions of torch: noise a sample, a mask of tokens, one vector for all samples."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        rows = rows * (torch.rand_like(rows) < 0.7) + 0.1 * torch.randn_like(rows)
        x = rows.view_as(x) * torch.bernoulli(torch.full(x.shape[:2], 0.8)).unsqueeze(-1)
        x = x + 0.1 * torch.distributions.Normal(x, torch.ones_like(x)).rsample()
        if torch.rand(()) < 0.5:
            x = x * 1.5
        return x + 0.1 * torch.randint(-2, 3, x.shape) + 0.1 * torch.randn(5, 8)


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.layer = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.layer(self.inner(x))))


class SelfAttention(nn.Module):
    def __init__(self, *, weights: bool) -> None:
        super().__init__()
        self.weights = weights
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=self.weights)[0]


class Functional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = F.scaled_dot_product_attention(x, x, x, dropout_p=0.3)
        x = F.alpha_dropout(F.feature_alpha_dropout(x, 0.2, training=True), 0.2, training=True)
        return F.dropout2d(F.dropout1d(x, 0.3).unsqueeze(-1), 0.2).squeeze(-1)


class Recomputed(nn.Module):
    """The user's own activation checkpointing, which no engine knows of."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.block = Block(nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad:  # a reentrant one looks at its inputs alone
            x = x.clone().requires_grad_()
        result: Tensor = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return result


KINDS = {
    "dropout": nn.Dropout,
    "drop path": DropPath,
    "noise": Noise,
    "functional": Functional,
    "attention": lambda: SelfAttention(weights=False),
    "attention with weights": lambda: SelfAttention(weights=True),
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True),
    "recomputed": lambda: Recomputed(reentrant=False),
    "recomputed in reentrant autograd": lambda: Recomputed(reentrant=True),
}


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(KINDS[kind]()), Block(KINDS[kind]()))
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(x).mean(1))


class Draws(Task):
    def __init__(self, kind: str = "dropout") -> None:
        self.kind = kind
        self.data = Sequences()

    def build_model(self) -> nn.Module:
        torch.manual_seed(3)
        return Model(self.kind)

    def build_optimizers(self, named_parameters: Any) -> Mapping[str, Any]:
        return {"main": torch.optim.SGD([p for _, p in named_parameters], lr=0.05)}

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch[1])


Found = tuple[list[float], dict[str, Tensor]]


def train(
    comm: Communicator,
    strategy: Strategy,
    task: Task,
    micro: int = 3,
    options: Mapping[str, Any] = MappingProxyType({}),
    begun: tuple[int, int, Mapping[str, Any]] | None = None,
    steps: int = STEPS,
    evaluates: bool = False,
) -> Found:
    """Losses of the steps and the model after them; ``begun``: samples, steps and model so far.

    ``evaluates``: the last loss is that of an evaluation over all samples.
    """
    size = comm.world.size
    cut = BatchPartition(BATCH, micro, size, comm.world.rank)
    plan = BatchPlan(BATCH, micro, BATCH // micro // size, size)
    job = Job(task, task.build_model, plan, **{"randomness": "by_sample", **options})
    engine = strategy.prepare(job, comm)
    consumed, step, model = begun or (0, 0, None)
    if model is not None:
        engine.model.load_state_dict(model)
    loading = Loading(batch_size=BATCH)
    feed = TrainLoader(task, loading, cut, comm, seed=SEED, consumed=consumed, step=step).steps()
    losses = []
    for _ in range(steps):
        work = next(feed)
        engine.zero_grad()
        report = engine.forward_backward(work.micro_batches, work.weight, task)
        engine.step(Clip())
        share = sum(float(loss) * weight for loss, weight in report.parts)
        losses.append(comm.reduce_values([share])[0] / work.weight)
    feed.close()
    if evaluates:
        batch = default_collate([task.data.train[i] for i in range(SAMPLES)])
        (total, count) = engine.evaluate([(batch, True)], task)["loss"]
        losses.append(float(total / count))
    whole = engine.state_dict()["model"]
    whole = {
        n: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for n, t in whole.items()
    }
    engine.close()
    return losses, whole


def assert_alike(found: Found, right: Found) -> None:
    torch.testing.assert_close(found[0], right[0], rtol=1e-5, atol=1e-6)
    assert found[1].keys() == right[1].keys()
    for name, tensor in right[1].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-4, atol=1e-6, msg=name)


ENGINES = [
    pytest.param(1, Single(), 3, id="accumulate 4"),
    pytest.param(1, Single(), 6, id="accumulate 2"),
    pytest.param(2, DDP(), 6, id="ddp x 2"),
    pytest.param(2, DDP(overlap=False), 3, id="ddp x 2, accumulate 2"),
    pytest.param(4, DDP(), 3, id="ddp x 4"),
    pytest.param(2, FSDP(), 6, id="fsdp x 2"),
    pytest.param(2, builtin.Gloo(), 6, id="gloo x 2"),
]


@pytest.mark.matrix(20)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "strategy", "micro"), ENGINES)
def test_every_engine_and_every_cut_trains_as_one_process_in_one_micro_batch(
    size, strategy, micro, kind
):
    (right,) = shared_pool(1).run(train, Single(), Draws(kind), BATCH)
    for found in shared_pool(size).run(train, strategy, Draws(kind), micro):
        assert_alike(found, right)


@pytest.mark.parametrize("kind", ["dropout", "attention", "noise"])
@pytest.mark.parametrize(("size", "strategy"), [(1, Single()), (2, DDP()), (2, FSDP())])
@pytest.mark.parametrize("again", [True, "selective"])
def test_a_forward_that_is_run_again_draws_the_same(size, strategy, kind, again):
    (right,) = shared_pool(1).run(train, Single(), Draws(kind), BATCH)
    options = {"activation_checkpointing": again}
    for found in shared_pool(size).run(train, strategy, Draws(kind), BATCH // size, options):
        assert_alike(found, right)


@pytest.mark.matrix(4)
@pytest.mark.parametrize(
    "again", [False, True, "selective"], ids=["kept", "run again", "products kept"]
)
@pytest.mark.parametrize(
    ("size", "strategy", "micro"), [(1, Single(), 3), (2, DDP(), 6), (2, FSDP(), 6)]
)
def test_what_torch_compiles_draws_as_eager(size, strategy, micro, again):
    (right,) = shared_pool(1).run(train, Single(), Draws(), BATCH)
    options = {"compile": {"backend": "aot_eager"}, "activation_checkpointing": again}
    for found in shared_pool(size).run(train, strategy, Draws(), micro, options):
        assert_alike(found, right)


@pytest.mark.exhaustive  # a compilation of a minute; what aot_eager traces above draws alike
def test_what_inductor_generates_draws_as_eager():
    (right,) = shared_pool(1).run(train, Single(), Draws("drop path"), BATCH, {}, None, 1)
    options = {"compile": {"dynamic": False}}
    for found in shared_pool(2).run(train, DDP(), Draws("drop path"), 6, options, None, 1):
        assert_alike(found, right)


@pytest.mark.parametrize(
    "knobs",
    [
        {"mode": "reduce-overhead"},
        {"options": {"triton.cudagraphs": True}},
        {"options": {"fallback_random": False}},
        {"backend": "cudagraphs"},
    ],
)
def test_compiled_code_that_repeats_numbers_or_makes_its_own_draws_by_micro_batch(knobs):
    plan = BatchPlan(BATCH, BATCH, 1, 1)
    task = Draws()
    job = Job(task, task.build_model, plan, compile=knobs, randomness="by_sample")
    assert Single().prepare(job, LocalCommunicator()).randomness == "by_micro_batch"


def test_a_run_that_goes_on_in_another_cut_draws_the_same():
    (right,) = shared_pool(1).run(train, Single(), Draws(), BATCH)
    first, model = shared_pool(1).run(train, Single(), Draws(), BATCH, {}, None, 3)[0]
    for losses, whole in shared_pool(2).run(train, DDP(), Draws(), 3, {}, (SAMPLES, 3, model), 1):
        assert_alike((first + losses, whole), right)


class Normalised(nn.Module):
    """BatchNorm, whose statistics are those of a micro-batch, and a dropout of half the units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(40, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Evaluates(Draws):
    def build_model(self) -> nn.Module:
        torch.manual_seed(3)
        return Normalised()


MPI = replace(OPTIONS, backend="mpi")


@pytest.mark.parametrize(
    ("size", "strategy", "comm"),
    [
        pytest.param(2, DDP(), OPTIONS, id="ddp x 2"),
        pytest.param(4, DDP(), OPTIONS, id="ddp x 4"),
        pytest.param(2, FSDP(), OPTIONS, id="fsdp x 2"),
        pytest.param(4, FSDP(), OPTIONS, id="fsdp x 4"),
        pytest.param(2, builtin.Gloo(), OPTIONS, id="gloo x 2"),
        pytest.param(2, builtin.MPI(), MPI, id="mpi x 2"),
        pytest.param(4, builtin.MPI(), MPI, id="mpi x 4"),
    ],
)
def test_normalised_batches_and_dropout_train_and_evaluate_as_accumulated_in_one_process(
    size, strategy, comm
):
    """Micro-batches of 3 everywhere: four of them in one process."""
    given = (Evaluates(), 3, {}, None, STEPS, True)
    (right,) = shared_pool(1).run(train, Single(), *given)
    for found in shared_pool(size, options=comm).run(train, strategy, *given):
        assert len(found[0]) == STEPS + 1
        assert_alike(found, right)


def test_by_micro_batch_another_cut_draws_other_numbers():
    options = {"randomness": "by_micro_batch"}
    (whole,) = shared_pool(1).run(train, Single(), Draws(), BATCH, options)
    (cut,) = shared_pool(1).run(train, Single(), Draws(), 3, options)
    (on_two,) = {tuple(f[0]) for f in shared_pool(2).run(train, DDP(), Draws(), 3, options)}
    assert abs(whole[0][0] - cut[0][0]) > 1e-3
    torch.testing.assert_close(list(on_two), cut[0], rtol=1e-5, atol=1e-6)
