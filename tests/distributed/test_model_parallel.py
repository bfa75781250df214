"""Layers and stages as modules of a plain script equal the uncut ones of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError
from torsh_trainer.mesh import MeshOptions
from torsh_trainer.model_parallel import (
    ColumnParallelLinear,
    ParallelAttention,
    RowParallelLinear,
    ThreeDParallelismConfig,
    VocabParallelEmbedding,
)
from torsh_trainer.pipeline import PipelineParallel
from torsh_trainer.testing.compare import U32
from torsh_trainer.testing.ranks import shared_pool


class Net(nn.Module):
    """An embedding, attention and a perceptron, of layers that ``make`` gives by name."""

    def __init__(self, embedding: Any, attention: Any, up: Any, down: Any, head: Any) -> None:
        super().__init__()
        self.embedding, self.attention = embedding, attention
        self.up, self.down, self.head = up, down, head

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if isinstance(self.attention, nn.MultiheadAttention):
            later = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
            x = x + self.attention(x, x, x, attn_mask=later, need_weights=False)[0]
        else:
            x = x + self.attention(x, is_causal=True)
        return self.head(x + self.down(self.up(x).relu()))


TOKENS = torch.randint(10, (3, 6), generator=torch.Generator().manual_seed(4))


def make_whole(dropout: float = 0.0) -> Net:
    torch.manual_seed(7)
    return Net(
        nn.Embedding(12, 8, padding_idx=9),
        nn.MultiheadAttention(8, 4, dropout, batch_first=True),
        nn.Linear(8, 16),
        nn.Linear(16, 8, bias=False),
        nn.Linear(8, 4),
    )


def make_cut(dropout: float = 0.0) -> Net:
    """Each layer by itself, as a script would; then with the values of the whole ones."""
    net = Net(
        VocabParallelEmbedding(12, 8, 9),
        ParallelAttention(8, 4, dropout),
        ColumnParallelLinear(8, 16, bias=True, gather_output=False),
        RowParallelLinear(16, 8, bias=False),
        ColumnParallelLinear(8, 4),
    )
    for name, layer in make_whole(dropout).named_children():
        getattr(net, name).load_whole(layer.state_dict())
    return net


def train_on_rank(comm: Communicator, dropout: float) -> tuple[Tensor, dict[str, Tensor]]:
    """What the cut net gives, and its parameters after a step, put together."""
    net = make_cut(dropout)
    torch.manual_seed(11)
    output = net(TOKENS)
    output.square().mean().backward()
    torch.optim.SGD(net.parameters(), lr=0.5).step()
    state = {
        f"{name}.{key}": value
        for name, layer in net.named_children()
        for key, value in layer.gather_whole().items()  # type: ignore[operator]
    }
    return output.detach(), state


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("ranks", [2, 4])
def test_layers_of_a_script_equal_those_of_torch(ranks: int, dropout: float) -> None:
    net = make_whole(dropout)
    torch.manual_seed(11)
    expected = net(TOKENS)
    expected.square().mean().backward()
    expected = expected.detach()
    torch.optim.SGD(net.parameters(), lr=0.5).step()
    for output, state in shared_pool(ranks).run(train_on_rank, dropout):
        assert float((output - expected).abs().max() / expected.abs().max()) <= 16 * U32
        assert set(state) == set(net.state_dict())
        for name, value in net.state_dict().items():
            away = float((state[name] - value).abs().max() / value.abs().max())
            assert away <= 32 * U32, f"{name} by {away / U32:.1f} u"


def test_a_layer_begins_with_what_the_first_process_draws() -> None:
    def make(comm: Communicator) -> list[dict[str, Tensor]]:
        torch.manual_seed(comm.rank)
        layers = [ColumnParallelLinear(4, 6), RowParallelLinear(4, 3), VocabParallelEmbedding(6, 2)]
        return [layer.gather_whole() for layer in layers]

    torch.manual_seed(0)
    plain = [nn.Linear(4, 6), nn.Linear(4, 3), nn.Embedding(6, 2)]
    for states in shared_pool(2).run(make):
        for state, layer in zip(states, plain, strict=True):
            assert all(torch.equal(state[key], v) for key, v in layer.state_dict().items())


LAYERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "columns": (lambda: ColumnParallelLinear(4, 5), "give 4 or 6 in the place of 5"),
    "rows": (
        lambda: RowParallelLinear(5, 4),
        "RowParallelLinear: dimension 1 of its weight, [4, 5]",
    ),
    "words": (lambda: VocabParallelEmbedding(7, 4), "give 6 or 8 in the place of 7"),
    "heads": (lambda: ParallelAttention(9, 3), "num_heads=3 does not divide over 2 processes"),
    "width": (lambda: ParallelAttention(9, 2), "embed_dim=9 does not divide into num_heads=2"),
    "stages": (lambda: PipelineParallel([nn.ReLU()], 2), "1 stages do not divide over 2 processes"),
    "devices": (
        lambda: PipelineParallel([nn.ReLU(), nn.ReLU()], 2, ["cpu"]),
        "device_placement names 1 devices for 2 stages",
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_what_does_not_divide_is_one_sentence(name: str) -> None:
    make, words = LAYERS[name]

    def try_layer(comm: Communicator) -> str:
        try:
            make()
        except ConfigError as error:
            return str(error)
        return ""

    for said in shared_pool(2).run(try_layer):
        assert words in said, said


def test_three_axes_are_said_to_the_trainer() -> None:
    config = ThreeDParallelismConfig(dp_size=2, tp_size=2, pp_size=2, num_microbatches=4)
    assert config.world_size == 8
    assert config.mesh_options() == MeshOptions(dp_replicate=1, dp_shard=2, tp=2, pp=2)
    assert "mesh.pp=2" in config.overrides()
    assert "trainer.accumulate=4" in config.overrides()
    with pytest.raises(ConfigError, match="= 8 is not the 6 processes of this job"):
        config.validate(6)
    with pytest.raises(ConfigError, match="more stages than there are layers"):
        ThreeDParallelismConfig(pp_size=4, num_layers=3)


# -- stages ----------------------------------------------------------------------------------------

INPUT = torch.randn(10, 6, generator=torch.Generator().manual_seed(8))
TARGET = torch.randn(10, 3, generator=torch.Generator().manual_seed(9))


def make_stages() -> list[list[nn.Module]]:
    """Four lists of layers, as the guides give them."""
    torch.manual_seed(2)
    return [
        [nn.Linear(6, 8), nn.ReLU()],
        [nn.Linear(8, 8), nn.Tanh()],
        [nn.LayerNorm(8), nn.Linear(8, 5)],
        [nn.Linear(5, 3)],
    ]


def run_plain(micro_batches: int) -> tuple[Tensor, float, dict[str, Tensor], Tensor]:
    """Outputs, mean loss, gradients by stage, and those of the input, of the same micro-batches."""
    stages = nn.ModuleDict({str(i): nn.Sequential(*s) for i, s in enumerate(make_stages())})
    whole = nn.Sequential(*stages.values())
    outputs, total = [], 0.0
    given = INPUT.clone().requires_grad_()
    for part, wanted in zip(
        given.tensor_split(micro_batches), TARGET.tensor_split(micro_batches), strict=True
    ):
        output = whole(part)
        loss = (output - wanted).square().mean() * (len(part) / len(INPUT))
        loss.backward()
        outputs.append(output.detach())
        total += loss.item()
    gradients = {n: p.grad for n, p in stages.named_parameters() if p.grad is not None}
    assert given.grad is not None
    return torch.cat(outputs), total, gradients, given.grad


def mean_square(output: Tensor, wanted: Tensor) -> Tensor:
    return (output - wanted).square().mean()


def run_on_rank(
    comm: Communicator, micro_batches: int, schedule: str | None
) -> tuple[Tensor, float, dict[str, Tensor], Tensor | None]:
    """The same by ``forward`` and a backward of the caller's, or by ``run_step`` of a schedule."""
    pipeline = PipelineParallel(make_stages(), micro_batches, schedule=schedule)
    with torch.no_grad():
        outputs = pipeline(INPUT)
    given = INPUT.clone().requires_grad_()
    if schedule is None:
        output = pipeline(given)
        assert torch.equal(output, outputs)
        loss = mean_square(output, TARGET)
        loss.backward()  # type: ignore[no-untyped-call]
    else:
        loss = pipeline.run_step(INPUT, TARGET, mean_square)
    own = {n: p.grad for n, p in pipeline.stages.named_parameters() if p.grad is not None}
    return outputs, float(loss), own, given.grad


@pytest.mark.parametrize(
    ("ranks", "schedule"),
    [(2, None), (4, None), (4, "gpipe"), (4, "1f1b"), (2, "interleaved_1f1b"), (2, "looped_bfs")],
)
def test_stages_of_a_script_equal_one_process(ranks: int, schedule: str | None) -> None:
    outputs, total, gradients, of_input = run_plain(4)
    found: dict[str, Tensor] = {}
    for ours, loss, own, given in shared_pool(ranks).run(run_on_rank, 4, schedule):
        assert torch.equal(ours, outputs)
        assert abs(loss - total) <= 8 * U32 * total
        found.update(own)
        if given is not None:
            away = float((given - of_input).abs().max())
            assert away <= 8 * U32 * float(of_input.abs().max())
    assert set(found) == set(gradients)
    for name, value in gradients.items():
        if schedule is not None:  # the same sums in the same order, but looped BFS's
            bound = 8.0 if schedule == "looped_bfs" else 0.0
        else:  # one mean over all samples in the place of a sum over micro-batches
            bound = 16.0
        away = float((found[name] - value).abs().max() / value.abs().max())
        assert away <= bound * U32, f"{name} by {away / U32:.1f} u"


def test_one_process_runs_all_stages_on_the_devices_that_it_is_given() -> None:
    outputs, total, gradients, _ = run_plain(4)
    pipeline = PipelineParallel(make_stages(), 4, ["cpu"] * 4)
    assert torch.equal(pipeline(INPUT), outputs)
    loss = pipeline.run_step(INPUT, TARGET, mean_square)
    assert abs(float(loss) - total) <= 8 * U32 * total
    for name, p in pipeline.stages.named_parameters():
        assert p.grad is not None
        assert torch.equal(p.grad, gradients[name])
    with pytest.raises(ConfigError, match="10 samples do not make 11 micro-batches"):
        PipelineParallel(make_stages(), 11)(INPUT)
