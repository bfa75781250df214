"""What our modules answer to a name that they do not have."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from torsh_trainer.dropin.names import StoodFor, engine_of
from torsh_trainer.errors import Unsupported


def refuse_unknown(module: str) -> Callable[[str], Any]:
    """A ``__getattr__`` for ``module``, by its own name: the sentence of what is not there."""
    engine = engine_of(".".join(module.split(".")[:3]))
    part = module.removeprefix(engine.root).removeprefix(".")

    def refuse(name: str) -> Any:
        if name.startswith("__"):  # asked by Python itself
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise AttributeError(engine.explain(part, name))

    return refuse


def make_missing_module(name: str, engine: StoodFor) -> ModuleType:
    """A module in the place of the engine's ``name``, for which there is none of ours.

    Scripts import more than they use. Every name is in it, and refuses when it is used.
    """
    module = ModuleType(name, f"Stands in the place of {name}: to use a name of it is refused.")
    part = name.removeprefix(engine.name).removeprefix(".")

    def get(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        missing = MissingName(attribute, (), {"words": engine.explain(part, attribute)})
        setattr(module, attribute, missing)
        return missing

    module.__getattr__ = get  # type: ignore[method-assign]
    return module


class MissingName(type):
    """A class that no object has: to call it, to read of it or to build upon it is refused."""

    words: str

    def __new__(cls, name: str, bases: tuple[type, ...], content: dict[str, Any]) -> Any:
        for base in bases:
            if isinstance(base, MissingName):
                base._refuse()
        return super().__new__(cls, name, bases, content)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        cls._refuse()

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        cls._refuse()

    def _refuse(cls) -> NoReturn:
        sentence, _, fix = cls.words.partition("; ")
        raise Unsupported(sentence, fix=fix)
