"""The ready models: sizes, causality, and what engines need of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torsh_trainer.errors import ConfigError
from torsh_trainer.tasks.base import parameter_count
from torsh_trainer.tasks.models import GPT, MLP, Block, SmallCNN


def gpt_parameters(*, vocab_size: int, context: int, layers: int, width: int) -> int:
    """Embeddings, 12 width^2 weights and 13 width biases and norms a block, the last norm."""
    block = 12 * width**2 + 13 * width
    return (vocab_size + context) * width + layers * block + 2 * width


def test_gpt2_124m_has_the_parameters_of_gpt2() -> None:
    sizes = {"vocab_size": 50257, "context": 1024, "layers": 12, "width": 768}
    with torch.device("meta"):
        model = GPT(heads=12, **sizes)
    assert parameter_count(model)[0] == gpt_parameters(**sizes) == 124_439_808


def test_no_logit_of_a_gpt_depends_on_a_later_token() -> None:
    torch.manual_seed(0)
    model = GPT(vocab_size=17, context=12, layers=2, heads=2, width=16).eval()
    tokens = torch.randint(17, (2, 12))
    before = model(tokens)
    for place in range(1, 12):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % 17
        after = model(changed)
        assert torch.equal(before[:, :place], after[:, :place])
        assert not torch.equal(before[:, place], after[:, place])


def test_a_gpt_looks_at_every_earlier_token() -> None:
    torch.manual_seed(0)
    model = GPT(vocab_size=17, context=8, layers=1, heads=2, width=16).eval()
    embedded = model.tokens(torch.randint(17, (1, 8))).detach().requires_grad_()
    model.blocks[0](embedded)[0, -1].sum().backward()
    assert embedded.grad is not None
    assert (embedded.grad.abs().sum(-1) > 0).all()


def test_the_output_layer_of_a_gpt_is_its_embedding() -> None:
    model = GPT(vocab_size=11, context=4, layers=1, heads=1, width=8)
    assert [name for name, p in model.named_parameters() if p.shape == (11, 8)] == ["tokens.weight"]
    features = torch.randn(2, 3, 8)
    assert torch.equal(model.tokens(features), features @ model.tokens.weight.T)


def test_a_gpt_starts_as_gpt2_does() -> None:
    torch.manual_seed(0)
    layers = 8
    model = GPT(vocab_size=500, context=64, layers=layers, heads=4, width=128)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            narrow = name.endswith(("attention_out.weight", "mlp_out.weight"))
            expected = 0.02 / (2 * layers) ** 0.5 if narrow else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
    tokens = torch.randint(500, (4, 65))
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(torch.tensor(500.0).log().item(), rel=0.02)


def test_the_flops_of_a_gpt_are_those_of_the_palm_paper() -> None:
    model = GPT(vocab_size=100, context=32, layers=3, heads=2, width=16)
    multiplied = gpt_parameters(vocab_size=100, context=32, layers=3, width=16) - 32 * 16
    assert model.flops_per_token(24) == 6 * multiplied + 12 * 3 * 16 * 24


def test_the_flops_of_a_gpt_agree_with_those_that_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    width, tokens, layers = 64, 32, 2
    model = GPT(vocab_size=128, context=tokens, layers=layers, heads=2, width=width)
    with (
        FlopCounterMode(display=False) as counter,
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        model(torch.randint(128, (1, tokens))).sum().backward()
    # Norms and biases, which N counts and torch does not, are a few of a thousand.
    assert model.flops_per_token(tokens) * tokens == pytest.approx(
        counter.get_total_flops(), rel=0.03
    )


def test_blocks_stand_in_a_module_list_for_sharding_and_checkpointing() -> None:
    model = GPT(layers=3, heads=1, width=8)
    assert isinstance(model.blocks, nn.ModuleList)
    assert [type(block) for block in model.blocks] == [Block] * 3


@pytest.mark.parametrize(
    ("model", "example"),
    [
        (GPT(vocab_size=16, context=8, layers=2, heads=2, width=8), torch.randint(16, (2, 8))),
        (SmallCNN(image_size=8, channels=(4, 8), hidden=8), torch.rand(2, 1, 8, 8)),
        (MLP(in_features=6, out_features=2, hidden=(4,)), torch.rand(2, 6)),
    ],
    ids=["gpt", "small_cnn", "mlp"],
)
def test_a_model_compiles_into_one_graph(model: nn.Module, example: torch.Tensor) -> None:
    model.eval()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(example), model(example))


@pytest.mark.parametrize("size", [8, 28])
def test_a_small_cnn_takes_the_images_it_was_made_for(size: int) -> None:
    model = SmallCNN(in_channels=3, image_size=size, num_classes=7, channels=(4, 8, 16), hidden=5)
    assert model(torch.rand(2, 3, size, size)).shape == (2, 7)


def test_an_mlp_flattens_what_it_is_given() -> None:
    assert MLP(in_features=64, out_features=3, hidden=[])(torch.rand(5, 1, 8, 8)).shape == (5, 3)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: GPT(width=10, heads=4), "does not divide into model.heads=4"),
        (lambda: GPT(layers=0), "model.layers=0"),
        (lambda: SmallCNN(image_size=4, channels=(1, 1, 1)), "cannot be halved 3 times"),
        (lambda: SmallCNN(channels=()), "model.channels=0"),
        (lambda: MLP(hidden=(8, 0)), "model.hidden=0"),
        (lambda: MLP(dropout=1.5), "model.dropout=1.5"),
    ],
)
def test_a_model_that_cannot_be_built_says_which_knob_is_wrong(build: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build()  # type: ignore[operator]
