"""A recorded construction gives the bits of a plain one, and holds no more memory than it may."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers import AutoConfig, AutoModelForCausalLM

from torsh_trainer.deferred import memory, recording
from torsh_trainer.deferred.recording import DeferredInit, read_later
from torsh_trainer.deferred.seen import OVERWRITES
from torsh_trainer.tasks.models import GPT


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an operation does not use has its memory taken, however small."""
    monkeypatch.setattr(recording, "RESIDENT_BYTES", 0)
    for module in (memory, recording):
        monkeypatch.setattr(module, "LEAST_BYTES", 1)


class Made(nn.Module):
    """What a function of this module's makes of it."""

    def __init__(self, make: Callable[[Any], object]) -> None:
        super().__init__()
        make(self)


def record(build: Callable[[], nn.Module]) -> tuple[nn.Module, DeferredInit]:
    torch.manual_seed(5)
    with DeferredInit() as init:
        model = build()
        init.leave(model)
    return model, init


def has_memory(parameter: nn.Parameter) -> bool:
    return parameter.untyped_storage().nbytes() > 0


def check(build: Callable[[], nn.Module]) -> list[str]:
    """Holds a recorded construction against a plain one; the parameters that are left whole."""
    torch.manual_seed(5)
    plain = build()
    drawn = torch.get_rng_state()
    model, init = record(build)
    assert torch.equal(torch.get_rng_state(), drawn)
    expected = dict(plain.named_parameters(remove_duplicate=False))
    found = dict(model.named_parameters(remove_duplicate=False))
    assert list(found) == list(expected)
    for name, parameter in found.items():
        values, like = init.values(parameter), expected[name].detach()
        assert (values.dtype, values.stride()) == (like.dtype, like.stride()), name
        assert torch.equal(values, like), name
        into = torch.full((like.numel(),), 7, dtype=like.dtype)
        init.write(parameter, into)
        assert torch.equal(into, like.reshape(-1)), name
        assert parameter.requires_grad == expected[name].requires_grad
    buffers = dict(model.named_buffers())
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffers[name], buffer), name
    assert torch.equal(torch.get_rng_state(), drawn)
    return [name for name, parameter in model.named_parameters() if has_memory(parameter)]


def initialise(model: Any) -> None:
    model.linear = nn.Linear(30, 20)
    nn.init.orthogonal_(model.linear.weight)
    model.narrow = nn.Linear(20, 30)
    nn.init.trunc_normal_(model.narrow.weight, std=0.02)
    model.convolution = nn.Conv1d(9, 9, 3)
    nn.init.dirac_(model.convolution.weight)
    model.sparse = nn.Linear(20, 20)
    nn.init.sparse_(model.sparse.weight, 0.1)
    model.image = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.half = nn.Linear(30, 30).half()
    model.frozen = nn.Linear(30, 30).requires_grad_(False)
    model.last = nn.Linear(2, 2)


def compute_from_others(model: Any) -> None:
    model.one, model.other = nn.Linear(30, 20), nn.Linear(20, 30)
    product = model.one.weight.detach() @ model.other.weight.detach()
    model.product = nn.Parameter(product + model.other.weight.std() * torch.randn(20, 20))
    with torch.no_grad():
        model.one.weight[:, :7].mul_(3.0)
        model.other.weight.t()[:5] += model.other.weight.mean()
        model.one.bias.copy_(model.product[0])
    model.last = nn.Linear(2, 2)


def look_at_values(model: Any) -> None:
    model.weight = nn.Parameter(torch.randn(40, 40))
    model.other = nn.Parameter(torch.randn(40))
    model.greatest = nn.Parameter(torch.full((7,), model.weight.abs().max().item()))
    model.sum = nn.Parameter(torch.full((7,), sum(model.other.tolist())))
    if bool(model.weight[0, 0] > 0):
        model.branch = nn.Parameter(torch.randn(3))
    model.last = nn.Linear(2, 2)


def tie_and_copy(model: Any) -> None:
    model.embedding = nn.Embedding(50, 20, padding_idx=3)
    model.head = nn.Linear(20, 50)
    model.head.weight = model.embedding.weight
    model.copy = copy.deepcopy(model.head)
    model.layers = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2
    )
    for parameter in model.layers.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    halves = torch.randn(200)
    model.one, model.other = nn.Parameter(halves[:100]), nn.Parameter(halves[100:])
    model.last = nn.Linear(2, 2)


def register_buffers(model: Any) -> None:
    model.norm = nn.BatchNorm1d(30)
    places = torch.arange(100.0)[:, None] * torch.exp(
        torch.arange(0, 64, 2) * (-math.log(1e4) / 64)
    )
    model.register_buffer("places", torch.zeros(100, 64))
    model.places[:, 0::2], model.places[:, 1::2] = torch.sin(places), torch.cos(places)
    model.register_buffer("mask", torch.ones(90, 90).tril())
    model.register_buffer("order", torch.randperm(77))
    model.register_buffer("copied", copy.deepcopy(model.places))
    model.last = nn.Linear(2, 2)


def parametrise(model: Any) -> None:
    model.normed = parametrizations.weight_norm(nn.Linear(20, 20))
    model.spectral = parametrizations.spectral_norm(nn.Linear(20, 20))
    model.recurrent = nn.LSTM(30, 20, 2)
    model.last = nn.Linear(2, 2)


def draw_by_generators(model: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    model.one = nn.Parameter(torch.empty(30, 30).normal_(generator=generator))
    torch.manual_seed(9)
    model.two = nn.Parameter(torch.rand(30, 30, generator=generator))
    model.three = nn.Parameter(F_dropout(torch.ones(30, 30)))
    model.last = nn.Linear(2, 2)


def F_dropout(tensor: Tensor) -> Tensor:
    return nn.functional.dropout(tensor, 0.3, training=True)


def write_in_parts(model: Any) -> None:
    model.experts = nn.Parameter(torch.empty(4, 30, 10))
    model.twice = nn.Parameter(torch.empty(30, 10))
    with torch.no_grad():
        for expert in model.experts:
            nn.init.xavier_uniform_(expert)
        model.twice[:20].normal_()
        model.twice[10:].fill_(2.0)
    model.last = nn.Linear(2, 2)


@pytest.mark.matrix(4)
@pytest.mark.parametrize(
    "make",
    [
        initialise,
        compute_from_others,
        look_at_values,
        tie_and_copy,
        register_buffers,
        parametrise,
        draw_by_generators,
        write_in_parts,
    ],
    ids=lambda make: make.__name__,
)
def test_parameters_come_out_bit_for_bit_as_built_plainly_and_none_is_left_whole(
    make: Callable[[Any], object],
) -> None:
    assert {name.split(".")[0] for name in check(lambda: Made(make))} <= {"last"}


def test_a_gpt_comes_out_bit_for_bit_with_padded_rows() -> None:
    whole = check(lambda: GPT(vocab_size=97, layers=2, width=32, vocab_multiple=64))
    assert whole == ["tokens.weight"]  # what was padded last is still in use


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2", "mixtral", "gpt_neox", "mamba"])
def test_models_of_transformers_come_out_bit_for_bit(kind: str) -> None:
    names = {"num_local_experts": 4} if kind == "mixtral" else {}
    config = AutoConfig.for_model(kind, **SMALL, **names)
    whole = check(lambda: AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    assert whole in ([], ["lm_head.weight"])


def from_numpy(model: Any) -> None:
    model.weight = nn.Parameter(torch.from_numpy(numpy.random.RandomState(0).randn(600, 600)))


def seen_by_numpy(model: Any) -> None:
    model.weight = nn.Parameter(torch.randn(600, 600))
    model.other = nn.Parameter(torch.randn(3))
    model.weight.detach().numpy()[0] = 0.0


def asked_for_its_place(model: Any) -> None:
    model.weight = nn.Parameter(torch.randn(600, 600))
    model.other = nn.Parameter(torch.randn(3))
    model.place = model.weight.data_ptr()


def with_an_alias(model: Any) -> None:
    model.weight = nn.Parameter(torch.randn(600, 600))
    model.alias = model.weight.detach().t()
    model.other = nn.Parameter(torch.randn(3))


def with_holes(model: Any) -> None:
    model.weight = nn.Parameter(torch.empty(600, 600))
    with torch.no_grad():
        model.weight[:, ::2] = 1.0
        model.weight[:, 1::2] = 2.0


@pytest.mark.matrix(3)
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (from_numpy, "outside of torch's operations"),
        (seen_by_numpy, "used without torch's operations"),
        (asked_for_its_place, "used without torch's operations"),
        (with_an_alias, "another tensor lies in their memory"),
        (with_holes, "not all of their values are set"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_cannot_be_computed_again_is_left_whole_and_the_summary_says_why(
    make: Callable[[Any], object], why: str
) -> None:
    assert "weight" in check(lambda: Made(make))
    model, init = record(lambda: Made(make))
    size = f"{sum(p.nbytes for p in model.parameters() if has_memory(p)) / 2**20:,.1f} MiB"
    assert f"{size} of them whole in the host memory" in init.summary
    assert (
        f"such as weight: {'' if why.startswith(('another', 'not')) else 'their '}" in init.summary
    )
    assert why in init.summary


def test_a_folder_that_transformers_opens_is_left_whole_and_right(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", **SMALL)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    whole = check(lambda: AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    assert "model.embed_tokens.weight" in whole


def test_tensors_beside_the_model_have_their_memory_afterwards() -> None:
    kept = []

    def make(model: Any) -> None:
        kept.extend([torch.randn(50), torch.randn(60)])
        model.weight = nn.Parameter(torch.randn(40))
        model.last = nn.Linear(2, 2)

    torch.manual_seed(5)
    expected = [torch.randn(50), torch.randn(60)]
    record(lambda: Made(make))
    for found, like in zip(kept, expected, strict=True):
        assert torch.equal(found, like)


def test_a_constructor_may_save_and_pickle() -> None:
    file = io.BytesIO()

    def make(model: Any) -> None:
        model.one, model.other = nn.Linear(40, 40), nn.Linear(40, 40)
        torch.save(model.state_dict(), file)
        model.last = nn.Linear(2, 2)

    model, init = record(lambda: Made(make))
    file.seek(0)
    saved = torch.load(file)
    for name, parameter in model.named_parameters():
        if name in saved:
            assert torch.equal(init.values(parameter), saved[name]), name


def test_a_constructor_that_fails_leaves_every_tensor_its_memory() -> None:
    kept = []

    def make(model: Any) -> None:
        kept.append(nn.Linear(40, 40))
        model.last = nn.Linear(2, 2)
        raise KeyError("no")

    torch.manual_seed(5)
    expected = nn.Linear(40, 40)
    with pytest.raises(KeyError):
        record(lambda: Made(make))
    assert torch.equal(kept[0].weight, expected.weight)


def test_an_initialisation_that_comes_out_differently_is_found() -> None:
    with DeferredInit() as init:
        model = nn.Sequential(nn.Linear(40, 40), nn.Linear(2, 2))
        init.leave(model)
    for one in init._memories:
        for operation in one.content.operations if one.content is not None else ():
            if operation.state is not None:
                operation.state = torch.Generator().manual_seed(1).get_state()
    with pytest.raises(AssertionError, match="came out differently"):
        init.values(model[0].weight)


def test_what_is_read_later_is_read_when_it_is_needed_and_at_once_elsewhere() -> None:
    values, reads = torch.randn(30, 30), []

    def read() -> Tensor:
        reads.append(1)
        return values

    assert torch.equal(read_later(read, (30, 30), torch.float32), values)
    reads.clear()
    with DeferredInit() as init:
        model = nn.Linear(30, 30, dtype=torch.float64)
        with torch.no_grad():
            model.weight.copy_(read_later(read, (30, 30), torch.float32))
        init.leave(model)
        assert not reads
    assert torch.equal(init.values(model.weight), values.double())
    assert reads == [1]


def operators() -> Iterator[Any]:
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            for overload in packet.overloads():
                yield getattr(packet, overload)


def test_every_operator_that_takes_a_generator_is_known_to_draw() -> None:
    names = [one.name() for one in operators()]
    assert len(names) > 2000
    drawing = [
        one
        for one in operators()
        if any("Generator" in str(argument.type) for argument in one._schema.arguments)
    ]
    assert len(drawing) > 30
    for one in drawing:
        assert torch.Tag.nondeterministic_seeded in one.tags, one.name()


@pytest.mark.parametrize("function", sorted(OVERWRITES, key=lambda one: one.name()))
def test_an_operator_that_overwrites_writes_everything_and_reads_nothing(function: Any) -> None:
    arguments = {
        "bernoulli_": (0.5,),
        "fill_": (torch.tensor(2.0) if function._overloadname == "Tensor" else 2.0,),
        "copy_": (torch.randn(999),),
        "geometric_": (0.5,),
        "random_": {"from": (3, 99), "to": (99,)}.get(function._overloadname, ()),
    }.get(function._schema.name.removeprefix("aten::"), ())
    found = []
    for before in (math.nan, 3.0):
        torch.manual_seed(1)
        found.append(function(torch.full((999,), before), *arguments))
    assert torch.equal(*found)
