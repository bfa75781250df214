"""``trainer.pretrained``: a file of weights, or what a run has saved."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from torsh_trainer.checkpoint.store.finding import first_sound, offers
from torsh_trainer.checkpoint.store.integrity import MANIFEST, verify
from torsh_trainer.checkpoint.store.retention import candidates
from torsh_trainer.errors import ConfigError, TorshError
from torsh_trainer.tasks.weight_files import StoredTensor
from torsh_trainer.tasks.weights import Report, load_pretrained, load_stored

if TYPE_CHECKING:  # it imports torch.distributed.checkpoint, which takes its time
    from torsh_trainer.checkpoint.cli.contents import Contents, TensorEntry


def start_from(model: nn.Module, path: str, *, strict: bool) -> Report:
    """Copies weights into ``model``: those of a file, or of a checkpoint of ours.

    ``path`` is whatever ``load_pretrained`` takes, a checkpoint, a run directory or a folder of
    checkpoints (its newest). Of a checkpoint with a moving average that is taken, which is what
    evaluations of that run saw; only buffers, and what was not averaged, are the model's own then.

    Raises:
        ConfigError: nothing is there, or it does not fit.
        ResourceError: it cannot be read, or is damaged.
    """
    if not _has_checkpoints(Path(path)):
        return load_pretrained(model, path, strict=strict)
    from torsh_trainer.checkpoint.cli.contents import Contents  # late: see above

    try:
        found = first_sound(offers(path, Path(path)), verify)
        assert found is not None, path
        contents = Contents.open(found, verified=False)
    except TorshError as error:
        fix = "name another checkpoint, or a file of weights"
        raise type(error)(f"trainer.pretrained={path}: {error.sentence}", fix=fix) from error
    entries = contents.model
    if not entries:
        raise ConfigError(f"trainer.pretrained={found} holds no model", fix="name another")
    what = str(found)
    if contents.is_averaged:
        entries = {**entries, **contents.averages_by_name()}
        what = f"{found} (its moving average)"
    stored = {
        name: StoredTensor(entry.shape, _Reader(contents, entry), entry.dtype)
        for name, entry in entries.items()
    }
    return load_stored(model, stored, named=what, strict=strict, extra=contents.extra_state)


def _has_checkpoints(path: Path) -> bool:
    if not path.is_dir():
        return False
    return (path / MANIFEST).exists() or bool(candidates(path) or candidates(path / "checkpoints"))


@dataclasses.dataclass(frozen=True)
class _Reader:
    contents: Contents
    entry: TensorEntry

    def __call__(self) -> Tensor:
        ((_, tensor),) = self.contents.read([self.entry])
        return tensor
