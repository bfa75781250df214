"""A GPT whose sequences are cut over processes equals a plain loop; what cannot be is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
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
    TOKENS,
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
from torsh_trainer.errors import ConfigError
from torsh_trainer.mesh import MeshOptions
from torsh_trainer.optim.optimizers import OptimizerSpec
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.context_parallel import door, exchanges, functions
from torsh_trainer.strategies.context_parallel.exchanges import EXCHANGES, AttentionCall
from torsh_trainer.strategies.context_parallel.shares import TokenShare
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.parallel import Parallel
from torsh_trainer.strategies.single import Single
from torsh_trainer.tasks.base import Task
from torsh_trainer.testing.ranks import RankFailure, shared_pool
from torsh_trainer.testing.whole_runs import run_in_turn, run_on_rank

CP = MeshOptions(cp=2)
GATHER, RING, HEADS = (Parallel(context_exchange=kind) for kind in ("gather", "ring", "alltoall"))
ON_TWO = GATHER, CP
MESHES: dict[str, tuple[int, Strategy, MeshOptions]] = {
    "gather": (2, GATHER, CP),
    "ring": (2, RING, CP),
    "alltoall": (2, HEADS, CP),
    "dp_shard=2": (4, GATHER, CP),
    "dp_replicate=2": (4, RING, MeshOptions(cp=2, dp_replicate=2, dp_shard=1)),
    "tp=2": (4, HEADS, MeshOptions(cp=2, tp=2)),
    "cp=4": (4, RING, MeshOptions(cp=4)),
}


# -- attention by itself ---------------------------------------------------------------------------


def make_tensors(heads: int, dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value and the gradient of what they give: (2, heads, 16, 8)."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, count, 16, 8) for count in (4, heads, heads, 4)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def mask_of(kind: str) -> Tensor | None:
    """(2, 1, 16, 16): some keys are not seen; ``causal`` is no mask of its own."""
    if kind != "masked":
        return None
    kept = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(5)) < 0.7
    return kept | torch.eye(16, dtype=torch.bool)


def attend_on_rank(
    comm: Communicator, name: str, kind: str, heads: int, dtype: torch.dtype
) -> list[Tensor]:
    """What attention gives to all tokens, and its gradients."""
    share = TokenShare(comm.rank, comm.size, balanced=kind == "causal")
    *own, gradient = (share.take_own(t, 2) for t in make_tensors(heads, dtype))
    own = [t.requires_grad_() for t in own]
    mask = mask_of(kind)
    rows = None if mask is None else share.take_own(mask, 2)
    call = AttentionCall(*own, rows, kind == "causal", None, gqa=heads < 4)
    output = EXCHANGES[name](call, comm, share)
    output.backward(gradient)  # type: ignore[no-untyped-call]
    parts = [output.detach(), *(t.grad for t in own)]
    return [share.join(comm.all_gather(part.contiguous()), 2) for part in parts]


def attend_alone(kind: str, heads: int, dtype: torch.dtype) -> list[Tensor]:
    """The same by torch on one process."""
    *own, gradient = make_tensors(heads, dtype)
    own = [t.requires_grad_() for t in own]
    output = F.scaled_dot_product_attention(
        *own, mask_of(kind), is_causal=kind == "causal", enable_gqa=heads < 4
    )
    output.backward(gradient)  # type: ignore[no-untyped-call]
    return [output.detach(), *(t.grad for t in own if t.grad is not None)]


@pytest.mark.matrix(9)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("kind", ["causal", "full", "masked"])
def test_attention_over_cut_tokens_is_that_of_torch(
    kind: str, heads: int, dtype: torch.dtype
) -> None:
    expected = attend_alone(kind, heads, dtype)
    for ranks in (2, 4):
        for name in EXCHANGES:
            if name == "ring" and kind == "masked":
                continue
            ours = shared_pool(ranks).run(attend_on_rank, name, kind, heads, dtype)[0]
            # Each head's numbers come from the same kernel over the same tokens.
            exact = name == "alltoall" and heads == 4
            for mine, plain_one in zip(ours, expected, strict=True):
                units = 0 if exact else 48
                bound = units * torch.finfo(dtype).eps / 2 * float(plain_one.abs().max())
                assert float((mine - plain_one).abs().max()) <= bound, f"{name} on {ranks}"


def test_heads_that_do_not_divide_are_refused_with_the_other_way() -> None:
    def attend(comm: Communicator) -> str:
        query = torch.zeros(1, 3, 4, 8)
        share = TokenShare(comm.rank, comm.size, balanced=False)
        try:
            EXCHANGES["alltoall"](
                AttentionCall(query, query, query, None, False, None, False), comm, share
            )
        except ConfigError as error:
            return str(error)
        return ""

    for said in shared_pool(2).run(attend):
        assert "mesh.cp=2 processes some of the heads, and 3 do not divide" in said
        assert "strategy.context_exchange=gather" in said


@pytest.mark.parametrize("balanced", [True, False])
def test_shares_are_put_together_as_they_were_cut(balanced: bool) -> None:
    whole = torch.arange(48).view(2, 24)
    shares = [TokenShare(rank, 3, balanced) for rank in range(3)]
    parts = [share.take_own(whole, 1) for share in shares]
    assert torch.equal(shares[0].join(parts, 1), whole)
    assert all(map(torch.equal, parts, shares[0].divide(whole, 1)))
    for share, part in zip(shares, parts, strict=True):
        assert torch.equal(whole[:, share.places(24, whole.device)], part)
    if balanced:  # pairs of tokens that a causal mask lets each process see
        seen = [int((share.places(24, whole.device) + 1).sum()) for share in shares]
        assert len(set(seen)) == 1


# -- whole runs ------------------------------------------------------------------------------------


@pytest.mark.matrix(2)
@pytest.mark.parametrize("kind", [SGD, CLIPPED, ADAMW], ids=["sgd", "clipped-chunked", "adamw"])
@pytest.mark.parametrize("place", MESHES.values(), ids=MESHES)
def test_a_run_equals_a_plain_loop(
    place: tuple[int, Strategy, MeshOptions], kind: Kind, tmp_path: Path
) -> None:
    ranks, strategy, mesh = place
    for outcome in shared_pool(ranks).run(run_on_rank, trainer(kind, strategy, mesh), tmp_path):
        check(outcome, kind)


PLACES: dict[str, tuple[int, Strategy, MeshOptions]] = {
    "single": (1, Single(), MeshOptions()),
    "fsdp": (4, FSDP(wrap_min_bytes=0), MeshOptions()),
    "tp=2": (2, Parallel(), MeshOptions(tp=2)),
    "cp=4": (4, Parallel(), MeshOptions(cp=4)),
}


@pytest.mark.matrix(2)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("goes_to", [True, False], ids=["to", "from"])
def test_a_run_goes_on_on_another_mesh(
    goes_to: bool, place: tuple[int, Strategy, MeshOptions], tmp_path: Path
) -> None:
    ranks, strategy, mesh = place
    there = (ranks, trainer(ADAMW, strategy, mesh))
    here = (4, trainer(ADAMW, GATHER, MeshOptions(cp=2)))
    first, second = (here, there) if goes_to else (there, here)
    for outcome in run_in_turn(first, second, tmp_path, until=2):
        check(outcome, ADAMW, first=3)


def test_a_run_that_goes_on_there_has_the_bits_of_one_that_never_stopped(tmp_path: Path) -> None:
    made = trainer(ADAMW, GATHER, CP)
    pool = shared_pool(2)
    whole = pool.run(run_on_rank, made, tmp_path / "whole")
    pool.run(run_on_rank, made, tmp_path / "cut", 2)
    for through, resumed in zip(whole, pool.run(run_on_rank, made, tmp_path / "cut"), strict=True):
        assert resumed.losses == {step: through.losses[step] for step in (3, 4)}
        for name, value in through.parameters.items():
            assert torch.equal(resumed.parameters[name], value), name


def test_a_dropout_draws_for_all_tokens_what_one_process_draws(tmp_path: Path) -> None:
    kind = replace(SGD, dropout=0.4)
    (one,) = shared_pool(1).run(run_on_rank, trainer(kind, Single()), tmp_path / "one")
    made = trainer(kind, GATHER, CP)
    for ours in shared_pool(4).run(run_on_rank, made, tmp_path / "mesh"):
        for step, loss in one.losses.items():
            assert abs(ours.losses[step] - loss) / loss <= kind.relative, f"step {step}"
    undropped = plain(SGD).losses
    assert abs(undropped[1] - one.losses[1]) / one.losses[1] > 1e-3, "nothing was dropped"


class Breaks(Words):
    """One process fails in its second step."""

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        if outputs.requires_grad and torch.distributed.get_rank() == 1:
            raise RuntimeError("a fault of rank 1")
        return super().loss(outputs, batch)


def test_a_process_that_fails_ends_the_run(tmp_path: Path) -> None:
    made = replace(trainer(SGD, GATHER, CP), task=Breaks(SGD.optimizer))
    pool = shared_pool(2)
    try:
        with pytest.raises(RankFailure, match="a fault of rank 1"):
            pool.run(run_on_rank, made, tmp_path)
    finally:
        pool.close()


# -- one step, and what would be wrong -------------------------------------------------------------


@pytest.mark.parametrize("strategy", [GATHER, RING, HEADS], ids=["gather", "ring", "alltoall"])
@pytest.mark.parametrize("tp", [1, 2])
def test_one_step_is_a_few_units_away_from_a_plain_one(tp: int, strategy: Strategy) -> None:
    mesh = MeshOptions(cp=2, tp=tp)
    assert moved_by(SGD.task, None, strategy, mesh, ranks=2 * tp) <= 32


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("kind", [SGD, CLIPPED], ids=["whole-logits", "chunked"])
def test_lengths_that_do_not_divide_are_filled_up(kind: Kind, exchange: str) -> None:
    if exchange == "alltoall":  # of four heads
        kind = replace(kind, heads=3)
    strategy = Parallel(context_exchange=exchange, pad=True)
    assert moved_by(kind.task, None, strategy, MeshOptions(cp=3), ranks=3) <= 32


def test_a_dropout_draws_nothing_for_what_is_filled_up() -> None:
    task = replace(SGD, dropout=0.4).task
    assert moved_by(task, None, Parallel(pad=True), MeshOptions(cp=3), ranks=3) <= 32


def _lose_the_exchange() -> None:
    def attend(call: AttentionCall, comm: Communicator, share: TokenShare) -> Tensor:
        return exchanges.SCALED_DOT_PRODUCT(*call[:3], is_causal=True)

    EXCHANGES["gather"] = attend  # type: ignore[index]


def _lose_a_sum_of_gradients() -> None:
    exchanges.gather_tokens = functions.join_tokens


def _average_a_sum() -> None:
    def backward(ctx: Any, gradient: Tensor) -> Any:
        part = ctx.share.take_own(gradient, ctx.dim) / ctx.share.size
        return part, None, None, None, None

    functions._Gather.backward = staticmethod(backward)


def _count_places_anew() -> None:
    door.ContextDoor._tell_places = lambda self, values, places: {  # type: ignore[method-assign]
        **values, "positions": torch.arange(len(places))
    }  # fmt: skip
    door.watch_tokens = lambda *args, **kwargs: door.ForwardFindings(True, False, True)


def _forget_the_order() -> None:
    right = TokenShare.join

    def join(self: TokenShare, parts: Any, dim: int) -> Tensor:
        return torch.cat(list(parts), dim) if dim == 1 else right(self, parts, dim)

    TokenShare.join = join  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "wrong",
    [
        _lose_the_exchange,
        _lose_a_sum_of_gradients,
        _average_a_sum,
        _count_places_anew,
        _forget_the_order,
    ],
)
def test_what_is_lost_or_averaged_or_misplaced_is_found_out(wrong: Callable[[], None]) -> None:
    assert moved_by(SGD.task, wrong, *ON_TWO) > 1e4


# -- what is refused, in one sentence before the first step ----------------------------------------


class Small(Words):
    """Words by a model of its own, of which ``after`` is called with (batch, tokens, 8)."""

    def __init__(
        self, after: Any = None, *, positions: bool = True, plan: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(OptimizerSpec("SGD", lr=0.5))
        self.after = after
        self.positions = positions
        self.plan = plan

    def build_model(self) -> nn.Module:
        torch.manual_seed(5)
        return (Placed if self.positions else Alone)(self.after() if self.after else None)

    def context_plan(self, mesh: Any) -> Mapping[str, Any]:
        return self.plan or {}


class Alone(nn.Module):
    """Looks up words, does what it is given, and attends; its places are counted from 0."""

    def __init__(self, after: Any) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 8), nn.Embedding(16, 8)
        self.after = after
        self.head = nn.Linear(8, WORDS - 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.give(tokens, torch.arange(tokens.shape[1]))

    def give(self, tokens: Tensor, places: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(places)
        if self.after is not None:
            x = self.after(x)
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        return self.head(x)


class Placed(Alone):
    """It is told its places."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:  # type: ignore[override]
        places = torch.arange(tokens.shape[1]) if positions is None else positions
        return self.give(tokens, places)


class Along(nn.Module):
    """A layer over tokens in the place of columns."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x.transpose(1, 2)).transpose(1, 2)


class Does(nn.Module):
    def __init__(self, what: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        return self.what(x)


def does(what: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Does(what)


def attend_by_hand(x: Tensor) -> Tensor:
    scores: Tensor = (x @ x.mT).softmax(-1)
    return scores @ x


def shift(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 1, 0))[:, :-1]


class Pools(Small):
    """A number for each sample."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        give = model.forward
        model.forward = lambda tokens, positions=None: give(tokens, positions)[:, 0]  # type: ignore[method-assign]
        return model


class Head(Small):
    """Calls a part of the model by itself."""

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        x = super().forward(model, batch)
        return x + model.head(torch.zeros(8))  # type: ignore[operator]


class Scaled(Words):
    """The loss is multiplied by a parameter, which no process cuts."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.scale = nn.Parameter(torch.tensor(1.5))
        return model

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return super().forward(model, batch) * model.scale


class Noted(Small):
    """The loss reads what the model has noted of its tokens."""

    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        self.noted: list[Tensor] = []
        model.words.register_forward_hook(lambda module, args, x: self.noted.append(x))
        return model

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return super().loss(outputs, batch) + self.noted[-1].square().mean()


class Longer(Words):
    """Two tokens too few."""

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0][:, :-3].clamp(max=WORDS - 2))


class Extra(Small):
    """Another argument."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        give = model.forward
        model.forward = lambda tokens, scale, positions=None: give(tokens, positions) * scale  # type: ignore[method-assign]
        return model

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0][:, :-1].clamp(max=WORDS - 2), torch.tensor([[[2.0]]]))


REFUSED: dict[str, tuple[Task, str]] = {
    "convolution": (
        Small(lambda: Along(nn.Conv1d(8, 8, 3, padding=1))),
        "mesh.cp: conv1d in 'after.layer' (Conv1d) puts tokens together",
    ),
    "linear": (
        Small(lambda: Along(nn.Linear(8, 8))),
        "linear in 'after.layer' (Linear) puts tokens together",
    ),
    "norm of batches": (Small(lambda: Along(nn.BatchNorm1d(8))), "batch_norm in 'after.layer'"),
    "mean": (Small(does(lambda x: x - x.mean(1, keepdim=True))), "mean in 'after' (Does) puts"),
    "sum so far": (Small(does(lambda x: x.cumsum(1))), "cumsum in 'after' (Does) puts tokens"),
    "attention by hand": (Small(does(attend_by_hand)), "in 'after' (Does) puts tokens together"),
    "shift": (Small(does(lambda x: x + shift(x))), "add in 'after' (Does) puts tokens together"),
    "another order": (
        Small(does(lambda x: x.flip(1))),
        "an attention in Placed has its tokens in another order",
    ),
    "recurrence": (Small(lambda: First(nn.GRU(8, 8, batch_first=True))), "gru in 'after"),
    "reading": (
        Small(does(lambda x: x * 2 if x[0, 1, 0] > 0 else x)),
        "__bool__ in 'after' (Does) reads a number of its tokens",
    ),
    "noise": (Small(does(lambda x: x + torch.randn_like(x))), "randn_like in 'after' (Does) draws"),
    "dropout of attention": (
        Small(does(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5))),
        "attention drops some of its weights (dropout 0.5)",
    ),
    "own mask": (
        Small(does(lambda x: F.scaled_dot_product_attention(x, x, x, torch.ones(4, 4).bool()))),
        "attention is given a mask of [4, 4], which knows the own 4 tokens of a process",
    ),
    "local positions": (
        Small(positions=False),
        "depends on its number among those of the process, as positions that the forward counts",
    ),
    "a number for each sample": (Pools(), "the model gives [2, 19] for 8 tokens, and what has"),
    "a part by itself": (Head(), "the task calls 'head' apart from the model's forward"),
    "a parameter by itself": (Scaled(SGD.optimizer), "the task reads the parameter 'scale' apart"),
    "a note of its tokens": (Noted(), "task.loss gives"),
    "length": (Longer(SGD.optimizer), "4 chunks of one size (2 processes with two chunks each), a"),
    "another argument": (Extra(), "the model is called with 'scale', a tensor of shape [1, 1, 1]"),
    "no argument": (
        Small(plan={"toke": 1}),
        "the context plan (of the task) names 'toke', and Placed.forward has no such argument",
    ),
    "no dimension": (
        Small(plan={"tokens": "one"}),
        "says 'one' of 'tokens', which is no dimension",
    ),
}


class First(nn.Module):
    """Of what a recurrent layer gives the first."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)[0]
        return output


def test_a_layer_over_all_tokens_does_not_run_on_some() -> None:
    def look_at_four() -> None:
        door.MOST_TOKENS = 4  # type: ignore[misc]

    task = Small(lambda: Along(nn.Linear(8, 8)))
    pool = shared_pool(2)
    try:
        told = pool.run(refusal, task, *ON_TWO, look_at_four)
    finally:
        pool.close()
    for said in told:
        assert "mesh.cp: Placed does not run on 4 of 8 tokens (mat1 and mat2 shapes" in said, said


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_one_sentence(name: str) -> None:
    task, words = REFUSED[name]
    first, second = shared_pool(2).run(refusal, task, *ON_TWO)
    assert words in first, first
    assert first.startswith(("Unsupported: ", "ConfigError: "))
    assert second.split(":")[:2] == first.split(":")[:2]


RIGHT: dict[str, Task] = {
    "nothing": Small(),
    "a norm of each token": Small(lambda: nn.LayerNorm(8)),
    "a layer of torch": Small(lambda: nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True)),
    "an argument that is whole": Extra(plan={"scale": None}),
    "in place": Small(does(lambda x: x.clone().mul_(2).add_(x))),
    "flat": Small(does(lambda x: x.flatten(0, 1).relu().view_as(x))),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_keeps_to_each_token_is_right(name: str) -> None:
    assert moved_by(RIGHT[name], None, *ON_TWO) <= 64


@pytest.mark.parametrize(
    ("strategy", "mesh", "words"),
    [
        (DDP(), CP, "strategy=ddp cannot honour mesh.cp=2"),
        (FSDP(), CP, "strategy=fsdp cannot honour mesh.cp=2"),
        (Parallel(cpu_offload=True), CP, "strategy.cpu_offload=true beside mesh.cp"),
    ],
)
def test_what_stands_beside_no_cut_sequences_is_refused(
    strategy: Strategy, mesh: MeshOptions, words: str
) -> None:
    for said in shared_pool(2).run(refusal, SGD.task, strategy, mesh):
        assert words in said, said


def test_stages_beside_cut_sequences_are_refused() -> None:
    mesh = MeshOptions(cp=2, pp=2)
    for said in shared_pool(4).run(refusal, SGD.task, Parallel(), mesh):
        assert "strategy=parallel cannot honour mesh.pp=2 beside mesh.cp" in said, said


def test_what_nothing_hides_is_not_filled_up() -> None:
    for said in shared_pool(3).run(refusal, Small(), Parallel(pad=True), MeshOptions(cp=3)):
        assert "the attention of Placed is not causal" in said, said


def test_an_exchange_that_nobody_knows_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"context_exchange=rings is unknown.*'ring'"):
        Parallel(context_exchange="rings")


def test_processes_hold_their_parts_over_shards_and_sequences() -> None:
    def count(comm: Communicator) -> list[int]:
        from torsh_trainer.mesh import Groups
        from torsh_trainer.strategies.base import BatchPlan, Job
        from torsh_trainer.strategies.dividing import divide

        strategy, mesh = divide(comm.world, Parallel(wrap_min_bytes=0), CP)
        groups = Groups(mesh, comm)
        task = SGD.task
        job = Job(task, task.build_model, BatchPlan(8, 4, 1, 2), groups=groups)
        engine: Any = strategy.prepare(job, groups.data)
        held = [p.to_local().numel() for p in engine.model.parameters()]
        engine.close()
        groups.close()
        return held

    whole = sum(p.numel() for p in SGD.task.build_model().parameters())
    held = [sum(one) for one in shared_pool(4).run(count)]
    assert sum(held) == whole
    assert max(held) <= 1.1 * whole / 4


def test_tokens_of_the_test_divide() -> None:
    assert (TOKENS.shape[1] - 1) % 8 == 0
