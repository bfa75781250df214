"""Where a model is cut into stages, and forwards of its stages one after the other in one process.

The expected values are those of the same model, called whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torsh_trainer.errors import ConfigError, Unsupported
from torsh_trainer.strategies.pipeline.crossing import Crossing, Left, Passage, Received
from torsh_trainer.strategies.pipeline.exchange import TensorSpec
from torsh_trainer.strategies.pipeline.orders import (
    bubble,
    check_micro_batches,
    check_schedule,
    order_of,
)
from torsh_trainer.strategies.pipeline.stages import StagePlan, cut_evenly, find_stages
from torsh_trainer.strategies.pipeline.task import StageTask
from torsh_trainer.tasks.models import GPT
from torsh_trainer.testing.tiny import TinyModelOptions, TinyTask

CPU = torch.device("cpu")


def plan_of(model: nn.Module, count: int, **asked: Any) -> StagePlan:
    return find_stages(
        model, count, **{"split": (), "both_ends": (), **asked}, asked=f"mesh.pp={count}"
    )


def make_stages(model: nn.Module, count: int, **asked: Any) -> list[tuple[nn.Module, Crossing]]:
    """A copy of ``model`` for each stage, with what that holds of it."""
    plan = plan_of(model, count, **asked)
    made = []
    for stage in range(count):
        own = copy.deepcopy(model)
        crossing = Crossing(own, plan, [stage], compute=torch.float32, device=CPU)
        crossing.remove_others()
        crossing.hook()
        made.append((own, crossing))
    return made


def run_stages(
    stages: list[tuple[nn.Module, Crossing]], forward: Callable[[nn.Module], Any], loss: Any
) -> Tensor:
    """The loss of the last stage; gradients are in the parameters of all of them."""
    outputs: list[Any] = []
    received: list[Received | None] = [None]
    for stage, (model, crossing) in enumerate(stages):
        passage = Passage(stage, received[-1], lambda: None)
        with crossing.passing(passage, watches=True):
            try:
                outputs.append(loss(forward(model)))
                crossing.check_end(passage)
            except Left as left:
                outputs.append(left)
                sent = [t.detach().clone() for t in left.tensors]
                received.append(Received(left.specs, sent))
    outputs[-1].backward()
    for stage in reversed(range(len(stages) - 1)):
        gradients = [g for g in received[stage + 1].gradients if g is not None]
        torch.autograd.backward([t for t in outputs[stage].tensors if t.requires_grad], gradients)
    return outputs[-1].detach()


def check_stages(
    model: nn.Module,
    count: int,
    forward: Callable[[nn.Module], Any],
    loss: Callable[[Any], Tensor] = lambda outputs: outputs.square().mean(),
    **asked: Any,
) -> None:
    """Bit for bit the loss and the gradients of the whole model; each parameter is held once."""
    model.zero_grad()
    stages = make_stages(model, count, **asked)
    expected = loss(forward(model))
    expected.backward()
    assert torch.equal(run_stages(stages, forward, loss), expected.detach())
    found: dict[str, Tensor] = {}
    for own, _ in stages:
        for name, p in own.named_parameters():
            held = found.get(name)
            assert p.grad is not None, name
            found[name] = p.grad if held is None else held + p.grad
    for name, p in model.named_parameters():
        assert p.grad is not None
        bound = 0.0 if sum(name in dict(m.named_parameters()) for m, _ in stages) == 1 else 1e-6
        torch.testing.assert_close(found[name], p.grad, rtol=bound, atol=bound)


TOKENS = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("count", [2, 3])
def test_a_gpt_in_stages_is_the_gpt(count: int) -> None:
    torch.manual_seed(0)
    model = GPT(vocab_size=11, context=8, layers=3, heads=2, width=8)
    check_stages(model, count, lambda m: m(TOKENS))


@pytest.mark.parametrize(
    "options",
    [TinyModelOptions(), TinyModelOptions(tied=True), TinyModelOptions(attention=True)],
    ids=["plain", "tied", "attention"],
)
def test_a_residual_outside_of_the_blocks_goes_on_with_them(options: TinyModelOptions) -> None:
    check_stages(TinyTask(options).build_model(), 2, lambda m: m(TOKENS))


def test_layers_of_other_widths_in_a_row_are_cut_between_any_two() -> None:
    model = nn.Sequential(
        nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 9), nn.Linear(9, 2)
    )
    x = torch.randn(4, 5)
    check_stages(model, 3, lambda m: m(x))
    check_stages(model, 2, lambda m: m(x), split=("1",))


class Pairs(nn.Module):
    """Blocks that take and give two tensors, and one that comes from a parameter as a keyword."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, state: Tensor, *, bias: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(x) + bias, state + self.other(x)

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(4, 4)
        self.bias = nn.Parameter(torch.randn(4))
        self.blocks = nn.ModuleList(Pairs.Block() for _ in range(4))
        self.end = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias * 2.0
        x, state = self.start(x), x
        for block in self.blocks:
            x, state = block(x, state, bias=bias)
        return self.end(x + state)


@pytest.mark.parametrize("count", [2, 4])
def test_blocks_may_take_and_give_several_tensors(count: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, requires_grad=True)  # so that the state has a gradient from the start
    check_stages(Pairs(), count, lambda m: m(x))


class InPlace(nn.Module):
    """Adds to what it holds in place."""

    class Block(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * 2.0)  # which keeps no x

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(InPlace.Block(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for block in self.blocks:
            x += block(x)
        return x


def test_a_forward_may_write_to_what_it_has_received() -> None:
    x = torch.randn(3, 4)
    check_stages(InPlace(), 2, lambda m: m(x))


def test_hooks_on_the_model_run_to_their_end() -> None:
    told: list[str] = []
    stages = make_stages(Odd(""), 2)
    for number, (model, _) in enumerate(stages):
        model.register_forward_hook(lambda *_, n=number: told.append(f"after {n}"))
        model.register_forward_hook(
            lambda *_, n=number: told.append(f"always {n}"), always_call=True
        )
    run_stages(stages, lambda m: m(torch.ones(2, 4)), lambda outputs: outputs.mean())
    assert told == ["after 0", "always 0", "after 1", "always 1"]


def test_a_forward_that_is_called_without_its_module_leaves_too() -> None:
    x = torch.ones(2, 4)
    check_stages(Odd(""), 2, lambda m: m.forward(x))


class Looks(nn.Linear):
    """Looks at what it computes, which has no shape without values."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * 2.0 if float(x.detach().sum()) > 0.0 else x


def test_a_block_that_looks_at_values_is_taken_to_give_what_it_takes() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    check_stages(nn.Sequential(*(Looks(4, 4) for _ in range(4))), 2, lambda m: m(x))


def test_one_that_does_not_is_refused_where_the_next_stage_begins() -> None:
    model = nn.Sequential(Looks(4, 6), Looks(6, 5), Looks(5, 5))
    stages = make_stages(model, 2, split=("2",))
    with pytest.raises(Unsupported, match=r"gives .* and '2', at which stage 1 begins, takes"):
        run_stages(stages, lambda m: m(torch.ones(3, 4)), lambda outputs: outputs.mean())


# -- what is refused ------------------------------------------------------------------------------


class Odd(nn.Module):
    """Two blocks, and a forward that ``kind`` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.start = nn.Linear(4, 4)
        if kind == "late":
            self.end = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        if kind == "early":
            self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        if self.kind == "early":
            x = self.first(x)
        x = self.start(x)
        before = x * 2.0
        for block in self.blocks if self.kind != "skips" else self.blocks[:1]:
            x = block(x.tanh()) + x if self.kind == "norm" else block(x)
        if self.kind == "late":
            x = self.end(x)
        return x + before if self.kind == "skip" else x


ODD = {
    "skip": "uses (add) what 'start' of an earlier stage has computed",
    "norm": "uses (add) what",
    "late": "calls 'end' in stage 1, and by its place in the model it belongs to stage 0",
    "early": "the forward calls 'first' in stage 0, and by its place in the model it belongs to",
    "skips": "a forward has ended without a call of 'blocks.1', at which stage 1 begins",
}


@pytest.mark.parametrize("kind", ODD)
def test_a_forward_that_cannot_be_cut_there_is_refused(kind: str) -> None:
    stages = make_stages(Odd(kind), 2)
    with pytest.raises(Unsupported) as error:
        run_stages(stages, lambda m: m(torch.ones(2, 4)), lambda outputs: outputs.mean())
    assert ODD[kind] in str(error.value)


def test_a_model_that_is_called_twice_for_a_batch_is_refused() -> None:
    stages = make_stages(Odd(""), 2)
    with pytest.raises(Unsupported, match="the model is called twice for one batch"):
        run_stages(stages, lambda m: m(m(torch.ones(2, 4))), lambda outputs: outputs.mean())


class Counts(nn.Module):
    """Counts its forwards at their end, in a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        self.count += 1
        return x


def test_a_buffer_that_another_stage_changes_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"stage 1 changes the buffer 'Counts\.count'"):
        run_stages(make_stages(Counts(), 2), lambda m: m(torch.ones(2, 4)), lambda out: out.mean())


def test_what_is_not_computed_has_no_values() -> None:
    """Where nobody follows it, a use of it gives no number at all."""
    (_, _), (model, crossing) = make_stages(Odd("skip"), 2)
    given = Received([TensorSpec(0, (2, 4), torch.float32, trains=True)], [torch.ones(2, 4)])
    passage = Passage(1, given, lambda: None)
    with crossing.passing(passage, watches=False):
        assert bool(model(torch.ones(2, 4)).isnan().all())


@pytest.mark.parametrize(
    ("count", "asked", "words"),
    [
        (3, {}, "mesh.pp=3 makes 3 stages, and the model (Odd) has 2 blocks"),
        (2, {"split": ("blocks.7",)}, "strategy.split names 'blocks.7', and the model has no such"),
        (3, {"split": ("blocks.1", "blocks.0")}, "not the order in which the model has them"),
        (3, {"split": ("blocks.1",)}, "strategy.split names 1 modules, and mesh.pp=3 makes 3"),
        (2, {"both_ends": ("word",)}, "strategy.both_ends names 'word', and the model has no such"),
    ],
)
def test_a_cut_that_is_none_is_one_sentence(count: int, asked: Any, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan_of(Odd(""), count, **asked)
    assert words in str(error.value)


def test_a_model_without_blocks_needs_names() -> None:
    with pytest.raises(ConfigError, match=r"has no nn\.ModuleList or nn\.Sequential"):
        plan_of(nn.Bilinear(2, 2, 2), 2)


# -- sizes and orders -----------------------------------------------------------------------------


def test_stages_are_even_by_parameters() -> None:
    assert cut_evenly([1] * 8, 4) == [2, 4, 6]
    assert cut_evenly([5, 1, 1, 1, 1, 5], 3) == [1, 5]
    model = GPT(vocab_size=4096, context=8, layers=4, heads=2, width=8)
    # The embedding outweighs all blocks, and belongs to the first stage.
    assert plan_of(model, 2).begins == ("blocks.1",)


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 6, 12])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("name", "stages"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("looped_bfs", 2)]
)
def test_every_order_computes_all_once_and_never_waits_in_a_ring(
    name: str, stages: int, ranks: int, micro_batches: int
) -> None:
    """Run by processes whose sends wait for their receives, the strictest that there is."""
    if name == "interleaved_1f1b" and micro_batches % max(1, micro_batches // ranks):
        with pytest.raises(ConfigError, match="micro-batches into rounds"):
            check_micro_batches(name, ranks=ranks, micro_batches=micro_batches)
        return
    check_micro_batches(name, ranks=ranks, micro_batches=micro_batches)
    orders = [
        list(
            order_of(
                name, ranks=ranks, stages_per_rank=stages, micro_batches=micro_batches, rank=rank
            )
        )
        for rank in range(ranks)
    ]
    computed = [
        (a.kind, a.stage, a.micro_batch)
        for order in orders
        for a in order
        if a.kind in ("forward", "backward")
    ]
    everything = {
        (kind, stage, i)
        for kind in ("forward", "backward")
        for stage in range(ranks * stages)
        for i in range(micro_batches)
    }
    assert len(computed) == len(everything)
    assert set(computed) == everything
    beside = {"send_forward": ("receive_forward", 1), "send_backward": ("receive_backward", -1)}
    while any(orders):
        moved = False
        for order in orders:
            if order and order[0].kind in ("forward", "backward"):
                order.pop(0)
                moved = True
            elif order and order[0].kind in beside:
                kind, step = beside[order[0].kind]
                wanted = (kind, order[0].stage + step, order[0].micro_batch)
                other = orders[wanted[1] % ranks]
                if other and tuple(other[0]) == wanted:
                    order.pop(0)
                    other.pop(0)
                    moved = True
        assert moved, "all wait"


def test_1f1b_holds_no_more_forwards_than_stages() -> None:
    order = order_of("1f1b", ranks=4, stages_per_rank=1, micro_batches=16, rank=0)
    held, most = 0, 0
    for action in order:
        held += {"forward": 1, "backward": -1}.get(action.kind, 0)
        most = max(most, held)
    assert most == 4


def test_the_bubble_is_that_of_the_formula() -> None:
    assert bubble(ranks=4, stages_per_rank=1, micro_batches=9) == pytest.approx(3 / 12)
    assert bubble(ranks=4, stages_per_rank=3, micro_batches=9) == pytest.approx(3 / 30)


@pytest.mark.parametrize(
    ("name", "stages", "words"),
    [
        ("zbv_zero_bubble", 2, "strategy.schedule=zbv_zero_bubble is not there yet"),
        ("1f2b", 1, "strategy.schedule=1f2b is unknown; did you mean '1f1b'?"),
        ("1f1b", 2, "strategy.schedule=1f1b with strategy.stages_per_rank=2: it takes 1"),
        ("interleaved_1f1b", 1, "it takes 2 or more"),
        ("1f1b", 0, "strategy.stages_per_rank=0 is below 1"),
    ],
)
def test_a_schedule_that_is_none_is_one_sentence(name: str, stages: int, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_schedule(name, stages)
    assert words in str(error.value)


def test_a_task_in_a_stage_gives_what_goes_on_instead_of_raising() -> None:
    class Leaves(TinyTask):
        def forward(self, model: nn.Module, batch: Any) -> Any:
            raise Left((), ())

    task = StageTask(Leaves())
    left = task.forward(nn.Identity(), None)
    assert isinstance(left, Left)
    assert left.__traceback__ is None
    assert task.loss(left, None) is left
