"""What plugins add to the rules of DeepSpeed and Horovod."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torsh_trainer.errors import ConfigError
from torsh_trainer.utils import registry

T = TypeVar("T")


def collect_additions(
    attribute: str, named: Callable[[Any], Iterable[tuple[str, T]]]
) -> dict[str, T]:
    """By name, what the modules of ``torsh_trainer.translation_rules`` hold under ``attribute``.

    Importing a module enters its rules. ``named`` takes what one module holds apart.

    Raises:
        ConfigError: two plugins add the same.
    """
    found: dict[str, tuple[str, T]] = {}
    for plugin, module in registry.TRANSLATION_RULES.load_all(strict=False).items():
        for name, one in named(getattr(module, attribute, ())):
            if name in found:
                raise ConfigError(
                    f"the translation rules {found[name][0]!r} and {plugin!r} both take {name}",
                    fix="uninstall one of the two plugins",
                )
            found[name] = (plugin, one)
    return {name: one for name, (_, one) in found.items()}
