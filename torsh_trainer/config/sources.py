"""Where Hydra reads configuration from: our folders, recipes, and YAML files named by their path.

Registered with Hydra through its own plugin door, so that composing, sweeping and every Hydra
launcher see the same files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, cast

import yaml
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from torsh_trainer.config.own_nodes import complete_node
from torsh_trainer.config.renamed import RENAMED, Table, rename_in
from torsh_trainer.config.roots import RECIPE, YAML, Root, Roots
from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.yaml_places import check_size


class YamlSource(ConfigSource):
    """What the sources below share: from a config path (``group/option``) to a YAML file."""

    renamed: ClassVar[Table] = RENAMED

    def locate(self, config_path: str) -> Path | None:
        """The file behind ``config_path``, or None when this source does not serve it."""
        raise NotImplementedError

    def load_config(self, config_path: str) -> ConfigResult:
        path = self.locate(config_path)
        if path is None:
            raise ConfigLoadError(f"Config not found : {config_path}")
        text = _read(path)
        header = ConfigSource._get_header_dict(text)
        if header["package"] is None and config_path.startswith(RECIPE + "/"):
            header["package"] = "_global_"  # a recipe sets knobs of every group
        package = header["package"] or _group(config_path)
        content = _parse(text, path)
        package = package.removeprefix("_global_")
        rename_in(content, self.renamed, package=package, path=path)
        content = complete_node(content, package=package, path=path)
        return ConfigResult(
            config=OmegaConf.create(content),
            path=str(path),
            provider=self.provider,
            header=header,
        )

    def is_config(self, config_path: str) -> bool:
        return self.locate(config_path) is not None

    def available(self) -> bool:
        return True


class FolderSource(YamlSource):
    """A folder of groups: ``strategy/ddp`` is ``strategy/ddp.yaml`` in it."""

    @staticmethod
    def scheme() -> str:
        return "torsh-conf"

    def locate(self, config_path: str) -> Path | None:
        if "/" not in config_path or "//" in config_path:
            return None  # the root of the configuration is ours alone
        path = Path(self.path, f"{config_path.removesuffix('.yaml')}.yaml")
        return path if path.is_file() else None

    def is_group(self, config_path: str) -> bool:
        return Path(self.path, config_path).is_dir()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        folder = Path(self.path, config_path)
        groups = [path.name for path in folder.iterdir() if path.is_dir()]
        configs = [path.stem for path in folder.glob("*.yaml")]
        return _filter_names(groups, configs, results_filter)


class RecipeSource(YamlSource):
    """A folder of recipes: ``recipe/digits`` is ``digits/recipe.yaml`` in it."""

    @staticmethod
    def scheme() -> str:
        return "torsh-recipes"

    def locate(self, config_path: str) -> Path | None:
        group, _, name = config_path.removesuffix(".yaml").partition("/")
        path = Path(self.path, name, "recipe.yaml")
        return path if group == RECIPE and name and path.is_file() else None

    def is_group(self, config_path: str) -> bool:
        return config_path in ("", RECIPE)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if config_path == "":
            return _filter_names([RECIPE], [], results_filter)
        names = [path.parent.name for path in Path(self.path).glob("*/recipe.yaml")]
        return _filter_names([], names, results_filter)


class PathSource(YamlSource):
    """Files by absolute path: ``strategy//home/me/ddp.yaml`` is that file, in group strategy."""

    @staticmethod
    def scheme() -> str:
        return "torsh-path"

    def locate(self, config_path: str) -> Path | None:
        _, slashes, rest = config_path.partition("//")
        path = Path("/", rest)
        return path if slashes and path.suffix in YAML and path.is_file() else None

    def is_group(self, config_path: str) -> bool:
        return config_path == RECIPE

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []


class OurSearchPath(SearchPathPlugin):
    """Adds the roots of this command line to Hydra's search path, where our own conf/ is."""

    roots: ClassVar[Roots | None] = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if self.roots is None:
            return
        if self.roots.user is not None:
            ours = SearchPathQuery(provider="main")
            for place in _places(self.roots.user):
                search_path.prepend(self.roots.user.provider, place, anchor=ours)
        own = self.roots.own
        search_path.append(own.provider, f"{RecipeSource.scheme()}://{own.recipes}")
        for plugin in self.roots.plugins:
            for place in _places(plugin):
                search_path.append(plugin.provider, place)
        search_path.append("paths", f"{PathSource.scheme()}://")


def _places(root: Root) -> list[str]:
    folders = ((FolderSource, root.conf), (RecipeSource, root.recipes))
    return [f"{kind.scheme()}://{folder}" for kind, folder in folders if folder.is_dir()]


def register(roots: Roots, *, renamed: Table = RENAMED) -> None:
    """Makes Hydra, in this process, read ``roots``; a later call replaces an earlier one."""
    plugins = Plugins.instance()
    for kind in (FolderSource, RecipeSource, PathSource, OurSearchPath):
        if kind not in plugins.discover(kind):
            plugins.register(kind)
    OurSearchPath.roots = roots
    YamlSource.renamed = renamed


def _filter_names(groups: list[str], configs: list[str], wanted: ObjectType | None) -> list[str]:
    names = [] if wanted is ObjectType.CONFIG else groups
    return sorted({*names, *([] if wanted is ObjectType.GROUP else configs)})


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}", fix="it should be a text file in UTF-8"
        ) from error


def _group(config_path: str) -> str:
    """``strategy.sub`` for ``strategy/sub/option``, and ``strategy`` for a file given by path."""
    group, slashes, _ = config_path.partition("//")
    return (group if slashes else config_path.rpartition("/")[0]).replace("/", ".")


def _parse(text: str, path: Path) -> dict[str, Any]:
    """The YAML in ``text``, read as Hydra reads it.

    Raises:
        ConfigError: it is not YAML, not a mapping, or too large by its aliases; names the file and
            the line.
    """
    try:
        if "&" in text and "*" in text:  # anchors and aliases, perhaps
            for node in yaml.compose_all(text, yaml.SafeLoader):
                check_size(node, str(path))
        content = OmegaConf.to_container(OmegaConf.create(text))
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deep", fix="correct its brackets") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError(
            f"{where}: this is not YAML: {error.problem}",
            fix="look at the indentation, the colons and the quotes of that line",
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{path} is not YAML: {error}", fix="it should be a text file of `name: value` lines"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} holds no mapping of names to values", fix="write one `name: value` a line"
        )
    return cast(dict[str, Any], content)
