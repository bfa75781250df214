"""Before gradients are shared: do all processes have the same model?"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import nn

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.failures import MismatchError
from torsh_trainer.comm.watchdog import ranks_words


def check_alike(model: nn.Module, comm: Communicator) -> None:
    """Returns when every member's ``model`` has tensors of the same names, shapes and dtypes.

    Otherwise a backend would wait for ever, or take one tensor's bytes for another's. Collective.

    Raises:
        MismatchError: names the first tensor that differs, and who has what, on every member.
    """
    if comm.size == 1:
        return
    mine = [
        f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    ]
    digest = hashlib.blake2b(repr(mine).encode(), digest_size=16).hexdigest()
    if len(set(comm.all_gather_object(digest))) == 1:
        return
    told = _first_difference(comm.all_gather_object(mine))
    raise MismatchError(
        f"the processes have different models: {told}",
        fix="build the same model on every process: what its shape depends on (classes, "
        "vocabulary, files) must not differ between them",
        rank=comm.rank,
        operation="model",
    )


def _first_difference(lists: Sequence[Sequence[str]]) -> str:
    """Who has what at the first place where not all have the same."""
    number = 0
    while len({tuple(words[: number + 1]) for words in lists}) == 1:
        number += 1
    by_words: dict[str, list[int]] = {}
    for rank, words in enumerate(lists):
        what = words[number] if number < len(words) else "no further tensor"
        by_words.setdefault(what, []).append(rank)
    return "; ".join(f"{ranks_words(ranks)}: {what}" for what, ranks in by_words.items())
