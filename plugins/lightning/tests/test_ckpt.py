"""``.ckpt`` files: Lightning's go on in our loop, ours in Lightning's, on one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import CASES, Case
from lightning.pytorch.callbacks import ModelCheckpoint
from loops import under_lightning, under_our_loop
from modules.classification import Classifier
from modules.variations import Saves
from recorder import described, differences

from torsh_trainer.errors import ConfigError

NAMES = ("classification", "gan", "autoencoder", "fine-tuning", "hooks: OwnBackward")


def saving(case: Case, **how: object) -> Case:
    """The case with a checkpoint at the end of every epoch, and as told."""
    made: Callable[[], list] = lambda: [  # noqa: E731
        *case.callbacks(),
        ModelCheckpoint("kept", save_last=True, save_top_k=-1, **how),
    ]
    return replace(case, callbacks=made, stages=("fit",))


def until(case: Case, epochs: int) -> Case:
    return replace(case, flags={**case.flags, "max_epochs": epochs})


@pytest.mark.matrix(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of_lightning_goes_on_here_and_one_of_ours_there(name, tmp_path):
    case, files = saving(CASES[name]), {}
    for loop in (under_lightning, under_our_loop):
        folder = tmp_path / loop.__name__
        loop(until(case, 3), folder)
        (files[loop],) = (folder / "kept").glob("epoch=0-*.ckpt")
    theirs, ours = (torch.load(file, weights_only=True) for file in files.values())
    assert described(theirs) == described(ours)
    expected = under_lightning(until(case, 3), tmp_path / "more", resume=files[under_lightning])
    for loop, file in ((under_our_loop, under_lightning), (under_lightning, under_our_loop)):
        folder = tmp_path / f"{loop.__name__} from {file.__name__}"
        found = loop(until(case, 3), folder, resume=files[file])
        assert not differences(expected, found), folder.name


def test_a_checkpoint_from_the_middle_of_an_epoch_goes_on_as_in_lightning(tmp_path):
    case = saving(CASES["hooks: DrawsAtRandom"], every_n_train_steps=4)
    under_lightning(until(case, 1), tmp_path)
    (file,) = (tmp_path / "kept").glob("*step=4.ckpt")
    expected = under_lightning(until(case, 2), tmp_path / "a", resume=file)
    assert not differences(expected, under_our_loop(until(case, 2), tmp_path / "b", resume=file))


def test_a_module_loads_from_a_checkpoint_of_ours(tmp_path):
    case = saving(replace(CASES["classification"], module=lambda: Classifier(width=5)))
    recording = under_our_loop(until(case, 1), tmp_path, watched="nothing")
    module = Classifier.load_from_checkpoint(tmp_path / "kept" / "last.ckpt")
    assert module.hparams.width == 5
    for name, value in module.state_dict().items():
        assert torch.equal(recording.parameters[name], value)


class Runs:
    """Pickled, it would write a file when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return (Path.touch, (self.file,))


def test_a_checkpoint_that_carries_code_is_read_only_where_the_user_says_so(tmp_path):
    case = saving(replace(CASES["hooks: OwnBackward"], module=Saves))
    under_lightning(until(case, 1), tmp_path, watched="nothing")
    good, bad, ran = (tmp_path / "kept" / "last.ckpt"), tmp_path / "bad.ckpt", tmp_path / "ran"
    content = torch.load(good, weights_only=True)
    torch.save({**content, "more": Runs(ran)}, bad)
    with pytest.raises(ConfigError, match="run code"):
        under_our_loop(until(case, 2), tmp_path, resume=bad)
    assert not ran.exists()
    under_our_loop(until(case, 2), tmp_path, resume=bad, trusted=True)
    assert ran.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no checkpoint of Lightning"),
        (b"no archive at all", "no checkpoint of Lightning"),
        ({"epoch": 1}, "no state_dict"),
        ([1, 2], "no state_dict"),
        (None, "no checkpoint file"),
    ],
)
def test_what_is_no_checkpoint_is_refused_by_name(content, words, tmp_path):
    file = tmp_path / "some.ckpt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        torch.save(content, file)
    with pytest.raises(ConfigError, match=words) as refused:
        under_our_loop(CASES["hooks: OwnBackward"], tmp_path, resume=file)
    assert str(file) in str(refused.value)
    assert refused.value.fix
