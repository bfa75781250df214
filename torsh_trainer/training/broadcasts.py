"""Losses that compare every sample with every other one, because two shapes only nearly fit."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

from torsh_trainer.errors import ConfigError

_WARNING = "Using a target size"


@contextlib.contextmanager
def refuse_broadcasts() -> Iterator[None]:
    """Within the block, what torch's losses only warn of is an error.

    Outputs (n, 1) against targets (n,) become (n, n): the mean over those is no mean over samples,
    and another one for every way to cut a batch.

    Raises:
        ConfigError: outputs and targets of a loss differ in shape.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=_WARNING, category=UserWarning)
        try:
            yield
        except UserWarning as warning:
            if not str(warning).startswith(_WARNING):
                raise
            sentence = " ".join(str(warning).split()).split(". ")[0]
            raise ConfigError(
                f"a loss would broadcast its arguments: {sentence[0].lower()}{sentence[1:]}",
                fix="give outputs and targets one shape, as in outputs.squeeze(-1), or expand the "
                "targets",
            ) from warning
