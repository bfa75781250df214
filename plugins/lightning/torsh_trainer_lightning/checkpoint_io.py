"""``.ckpt`` files: read safely first, and said in a sentence where one cannot be read."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from torsh_trainer.errors import ConfigError, ResourceError

_CODE = re.compile(r"(?:GLOBAL|[Cc]lass) ([\w.]+)")
"""Where torch names, in a long message, what a file asks for."""
ALLOWED = "pass weights_only=False (fit, validate, test and predict take it)"


class MissingCheckpoint(ResourceError, FileNotFoundError):
    """There is no such file; scripts that go on without one catch what Lightning raises."""


class SafeCheckpointIO(TorchCheckpointIO):
    """Lightning's files as Lightning writes them; what is read runs no code unless it is allowed.

    ``allowed`` is the next move that an error names for a file that carries code. ``of_any`` takes
    whatever torch has saved, as Fabric does.
    """

    def __init__(self, *, allowed: str = ALLOWED, of_any: bool = False) -> None:
        self._allowed = allowed
        self._of_any = of_any

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, loc: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """The content of a ``.ckpt``.

        Raises:
            ConfigError: it is no checkpoint of Lightning's, or it carries code and
                ``weights_only`` is not False.
            MissingCheckpoint: it is not there.
        """
        safely = True if weights_only is None else weights_only
        try:
            content = super().load_checkpoint(path, map_location, weights_only=safely)
        except (FileNotFoundError, IsADirectoryError) as error:
            raise MissingCheckpoint(
                f"there is no checkpoint file {path}", fix="give the path of a .ckpt file"
            ) from error
        except pickle.UnpicklingError as error:
            brought = _CODE.search(str(error))
            if brought is None:
                raise _no_checkpoint(path) from error
            raise ConfigError(
                f"{path} holds more than numbers and names, and to load it would run code in it: "
                f"{brought[1]}",
                fix=f"if you trust whoever wrote it, {self._allowed}",
            ) from error
        except (RuntimeError, EOFError, ValueError, KeyError, AttributeError) as error:
            raise _no_checkpoint(path) from error
        return dict(content) if self._of_any else check_content(content, path)


def check_content(content: Any, path: str | Path) -> dict[str, Any]:
    """``content`` itself, where it is a checkpoint of Lightning's.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(content, Mapping) or not isinstance(content.get("state_dict"), Mapping):
        raise _no_checkpoint(path)
    return dict(content)


def _no_checkpoint(path: str | Path) -> ConfigError:
    return ConfigError(
        f"{path} is no checkpoint of Lightning's",
        fix="give a .ckpt file that ModelCheckpoint or trainer.save_checkpoint has written",
    )
