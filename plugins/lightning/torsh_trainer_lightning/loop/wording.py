"""What Lightning has to say about a configuration, in the words of an error of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType

from lightning.fabric.utilities.exceptions import MisconfigurationException

from torsh_trainer.errors import ConfigError


@contextlib.contextmanager
def reword_errors() -> Iterator[None]:
    """Makes one sentence of what Lightning itself refuses within; errors of user code pass.

    Raises:
        ConfigError: Lightning has refused something.
    """
    try:
        yield
    except (
        MisconfigurationException,
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        own = isinstance(error, MisconfigurationException)
        if not own and not _is_lightnings(error.__traceback__):
            raise
        sentence = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"Lightning refuses it: {sentence}", fix="debug=true shows where"
        ) from error


def _is_lightnings(traceback: TracebackType | None) -> bool:
    """Whether it was raised by Lightning's own code, and not by what that has called."""
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    name = "" if traceback is None else traceback.tb_frame.f_globals.get("__name__", "")
    return name.startswith("lightning.") and ".demos." not in name
