"""``import horovod`` finds modules of ours, in this process alone; an installed one is not read."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from torsh_trainer.dropin.names import PUBLIC, ROOT, explain_missing

NAME = "horovod"
SHIM = Path(__file__).with_name("shim")
"""A folder for ``sys.path``: processes that a script starts find the modules of ours by it."""


class AliasFinder(MetaPathFinder, Loader):
    """Gives a module of ours for every name under ``horovod``.

    The module is one object under both of its names, so that its classes exist once.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Ours for what is Horovod's, nothing else.

        Raises:
            ModuleNotFoundError: no module of ours stands for it.
        """
        if fullname != NAME and not fullname.startswith(f"{NAME}."):
            return None
        part = fullname.removeprefix(NAME).removeprefix(".")
        if part not in PUBLIC:
            module, _, name = part.rpartition(".")
            raise ModuleNotFoundError(explain_missing(module, name), name=fullname)
        is_package = any(other.startswith(f"{part}.") for other in PUBLIC) or not part
        return importlib.util.spec_from_loader(fullname, self, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module of ours."""
        module = importlib.import_module(spec.name.replace(NAME, ROOT, 1))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run already, under its own name, which it keeps."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Has ``import horovod`` find ours from now on; without effect where it does already."""
    if any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        return
    for name in [name for name in sys.modules if name == NAME or name.startswith(f"{NAME}.")]:
        del sys.modules[name]
    sys.meta_path.insert(0, AliasFinder())
