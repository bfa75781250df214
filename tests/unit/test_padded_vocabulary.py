"""A vocabulary that is padded for the GPU: the model of the words alone, to rounding."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import TensorDataset

from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.checkpoint.cli.export import Export, export
from torsh_trainer.data.loading import Loading
from torsh_trainer.errors import ConfigError
from torsh_trainer.optim.optimizers import OptimizerSpec
from torsh_trainer.tasks.base import DataSource
from torsh_trainer.tasks.language_model import LanguageModel
from torsh_trainer.tasks.models import GPT
from torsh_trainer.training.trainer import Result, Trainer

WORDS = 257
make = partial(GPT, vocab_size=WORDS, context=8, layers=1, heads=2, width=8)


class Rows(TensorDataset):
    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index)[0]


class Windows(DataSource):
    fixed_length, context, vocab_size = True, 8, WORDS

    def __init__(self) -> None:
        drawn = torch.Generator().manual_seed(0)
        self.train = Rows(torch.randint(WORDS, (16, 9), generator=drawn))


def train(folder: Path, *, multiple: int, **knobs: Any) -> Result:
    # Not Adam, which makes a step of the rounding where a gradient is 0 (a key's bias).
    sgd = OptimizerSpec("SGD", lr=0.5, momentum=0.9)
    task = LanguageModel(
        partial(make, vocab_multiple=multiple),
        Windows(),
        sgd,
        chunked_loss=knobs.pop("way", "auto"),
    )
    options = CheckpointOptions(resume=knobs.pop("resume", "never"))
    return Trainer(
        task=task,
        loading=Loading(batch_size=4),
        checkpoint=options,
        max_steps=4,
        max_grad_norm=1.0,
        default_callbacks=False,
        run_dir=folder,
        **knobs,
    ).fit()


def test_initial_weights_and_logits_are_those_of_the_words() -> None:
    models = []
    for multiple in (1, 64):
        torch.manual_seed(0)
        models.append(make(vocab_multiple=multiple))
    one, padded = models
    assert padded.tokens.weight.shape == (320, 8)
    assert not padded.tokens.weight[WORDS:].any()
    tokens = torch.randint(WORDS, (2, 8))
    assert padded(tokens).shape == (2, 8, WORDS)
    torch.testing.assert_close(padded(tokens), one(tokens))


@pytest.mark.parametrize("way", [False, True], ids=["whole", "in chunks"])
def test_it_trains_alike_and_is_exported_without_padding(tmp_path: Path, way: bool) -> None:
    right = train(tmp_path / "one", multiple=1, way=way)
    found = train(tmp_path / "padded", multiple=64, way=way)
    assert found.content["train_loss"] == pytest.approx(right.content["train_loss"], rel=1e-6)
    assert found.model is not None
    assert right.model is not None
    state = found.model.state_dict()
    assert not state["tokens.weight"][WORDS:].any()
    file = tmp_path / "model.safetensors"
    export(Path(str(found.checkpoint)), Export("safetensors", file))
    exported = load_file(file)
    assert exported["tokens.weight"].shape == (WORDS, 8)
    for name, tensor in right.model.state_dict().items():
        torch.testing.assert_close(exported[name], tensor, rtol=1e-4, atol=1e-6, msg=name)
    with_state = tmp_path / "model.pt"
    export(Path(str(found.checkpoint)), Export("torch", with_state, optimizer=True))
    assert torch.load(with_state)["model"]["tokens.weight"].shape == (320, 8)


def test_a_checkpoint_goes_on_padded_as_it_was_and_in_no_other_way(tmp_path: Path) -> None:
    saved = str(train(tmp_path / "padded", multiple=64).checkpoint)
    with pytest.raises(ConfigError, match=r"tokens\.weight"):
        train(tmp_path / "one", multiple=1, resume=saved)
    train(tmp_path / "again", multiple=64, resume=saved)
