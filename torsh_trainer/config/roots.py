"""Where configuration lies: folders of groups and of recipes, and what they offer.

Nothing here imports Hydra: the help page and the messages about a mistyped name need file names
only, and are there in milliseconds.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from torsh_trainer.errors import ConfigError
from torsh_trainer.utils import registry

RECIPE = "recipe"
"""The group of recipes: ``+recipe=NAME``."""

YAML = (".yaml", ".yml")

FREE = "vars"
"""The setting that takes any key."""


@dataclass(frozen=True)
class Root:
    """A folder of config groups and one of recipes (``NAME/recipe.yaml``); either may be absent.

    ``provider`` names it to the user: torsh_trainer, a plugin, or command-line.
    """

    provider: str
    conf: Path
    recipes: Path


@dataclass(frozen=True)
class Roots:
    """All roots of a command line: the user's, our ``own``, those of plugins.

    The first to have a file serves it.
    """

    own: Root
    user: Root | None = None
    plugins: tuple[Root, ...] = ()

    @property
    def all(self) -> tuple[Root, ...]:
        return (*(() if self.user is None else (self.user,)), self.own, *self.plugins)

    def groups(self) -> dict[str, list[str]]:
        """Group -> its options, sorted; ``recipe`` is left to ``recipes``."""
        found: dict[str, set[str]] = {}
        for root in self.all:
            for folder, names in _yaml_files(root.conf):
                if folder not in ("", RECIPE) and not folder.startswith(("recipes", "hydra")):
                    found.setdefault(folder, set()).update(names)
        return {group: sorted(found[group]) for group in sorted(found)}

    def recipes(self) -> dict[str, Path]:
        """Recipe name -> its file."""
        found: dict[str, Path] = {}
        for root in self.all:
            for path in sorted(root.recipes.glob("*/recipe.yaml")):
                found.setdefault(path.parent.name, path)
            for path in sorted((root.conf / RECIPE).glob("*.yaml")):
                found.setdefault(path.stem, path)
        return dict(sorted(found.items()))


def find_roots(config_dir: str | None = None) -> Roots:
    """The user's folder (``--config-dir``), our own, and those of installed plugins, in this order.

    Raises:
        ConfigError: ``config_dir`` is not a folder.
    """
    user = None
    if config_dir is not None:
        folder = Path(config_dir).absolute()
        if not folder.is_dir():
            raise ConfigError(
                f"--config-dir {config_dir} is not a folder",
                fix="it is the folder that holds your groups and a recipes/ folder",
            )
        user = Root("command-line", folder, folder / "recipes")
    plugins = (
        Root(name, folder / "conf", folder / "recipes")
        for name, folder in registry.plugin_folders().items()
    )
    return Roots(_own(), user, tuple(plugins))


def _own() -> Root:
    """Inside the package when it was installed as a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    home = package / "_data"
    if not home.is_dir():
        home = package.parent
    return Root("torsh_trainer", home / "conf", home / "recipes")


def _yaml_files(top: Path) -> list[tuple[str, list[str]]]:
    """(folder relative to ``top``, stems of its YAML files) for every folder that has some.

    A file whose name begins with an underscore is a part of others, and no option.
    """
    found = []
    for folder, _, files in os.walk(top, followlinks=True):
        names = [Path(name).stem for name in files if name.endswith(".yaml") and name[0] != "_"]
        if names:
            found.append((Path(folder).relative_to(top).as_posix().removeprefix("."), names))
    return found
