"""``import horovod`` or ``deepspeed`` finds modules of ours, in this process alone.

An installed one is not read.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from torsh_trainer.dropin.missing import make_missing_module
from torsh_trainer.dropin.names import ENGINES

SHIM = Path(__file__).with_name("shim")
"""A folder for ``sys.path``: processes that a script starts find the modules of ours by it."""


class AliasFinder(MetaPathFinder, Loader):
    """Gives a module of ours for every name under ``horovod`` and ``deepspeed``.

    The module is one object under both of its names, so that its classes exist once.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Ours for what is such an engine's, nothing else.

        Raises:
            ModuleNotFoundError: no module of ours stands for it, and the engine is not ``late``.
        """
        root, _, part = fullname.partition(".")
        engine = ENGINES.get(root)
        if engine is None:
            return None
        if part not in engine.public:
            if engine.late:
                return importlib.util.spec_from_loader(fullname, self, is_package=True)
            module, _, name = part.rpartition(".")
            raise ModuleNotFoundError(engine.explain(module, name), name=fullname)
        is_package = any(other.startswith(f"{part}.") for other in engine.public) or not part
        return importlib.util.spec_from_loader(fullname, self, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module of ours, or one in which every name refuses."""
        root, _, part = spec.name.partition(".")
        if part not in ENGINES[root].public:
            spec.loader_state = spec
            return make_missing_module(spec.name, ENGINES[root])
        module = importlib.import_module(spec.name.replace(root, ENGINES[root].root, 1))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run already, under its own name, which it keeps."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Has ``import horovod`` and ``import deepspeed`` find ours from now on.

    Without effect where they do already.
    """
    if any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        return
    for name in [name for name in sys.modules if name.partition(".")[0] in ENGINES]:
        del sys.modules[name]
    sys.meta_path.insert(0, AliasFinder())
