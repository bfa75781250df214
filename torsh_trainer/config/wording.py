"""What Hydra and OmegaConf raise, in our words: one sentence and the next move."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from torsh_trainer.config.roots import RECIPE
from torsh_trainer.errors import ConfigError, ResourceError, TorshError, TrainingError, nearest
from torsh_trainer.utils import registry
from torsh_trainer.utils.files import disk_error
from torsh_trainer.utils.registry import GROUPS
from torsh_trainer.utils.user_code import place_of, words_of

Compose = Callable[[], DictConfig]
"""Composes the configuration with every group chosen and no knob overridden."""

COMPOSING = (HydraException, OmegaConfBaseException)
"""The kinds of exception that ``composing_error`` can word."""


def composing_error(error: Exception, compose: Compose) -> ConfigError:
    """The ConfigError for what went wrong while Hydra composed or swept.

    ``compose`` is asked only when a knob is unknown, for the names that exist.
    """
    chain = list(_chain(error))
    for link in chain:
        if isinstance(link, ConfigError):
            return link
    for link in chain:
        worded = _explain(link, compose)
        if worded is not None:
            return worded
    return ConfigError(
        f"the configuration cannot be composed: {_first_line(chain[-1])}",
        fix="debug=true shows where",
    )


def plain(config: DictConfig) -> dict[str, Any]:
    """``config`` with every ${...} resolved, as plain dicts and lists.

    Raises:
        ConfigError: a value is missing (???), or ${...} names nothing.
    """
    try:
        content = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise _value_error(error) from error
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def _explain(error: BaseException, compose: Compose) -> ConfigError | None:
    text = str(error)
    if isinstance(error, OverrideParseException):
        return ConfigError(
            f"{error.override!r} cannot be read as NAME=VALUE", fix="put the value in quotes"
        )
    if isinstance(error, MissingConfigException):
        return _missing_option(error)
    if isinstance(error, MissingMandatoryValue | InterpolationResolutionError):
        return _value_error(error)
    if found := re.search(r"Could not override '([^']+)'", text):
        return _not_overridden(found[1], text, compose)
    if found := re.search(r"Could not delete (?:from config\. )?'([^']+)'", text):
        return ConfigError(f"~{found[1]}: there is nothing of that name", fix="leave it out")
    if found := re.search(r"already at '([^']+)'", text):
        return ConfigError(
            f"+{found[1]} adds a knob that is there already", fix=f"write {found[1]}=VALUE"
        )
    if found := re.search(
        r"(?:Multiple values for|^)\s*([\w/@.]+)(?: appears more than once|\.)", text
    ):
        fix = "keep one of the choices"
        if found[1] == RECIPE:
            fix += "; a recipe that builds on another lists `- /recipe/NAME` in its defaults"
        return ConfigError(f"{found[1]} is chosen more than once", fix=fix)
    if found := re.search(r"Override '([^:]+) : ([^']+)' is defined before", text):
        return ConfigError(
            f"{_file_of(text)}: 'override {found[1]}' stands before entries that are no overrides",
            fix="put the overrides at the end of its defaults list",
        )
    if found := re.search(r"does not support sweep type : ([A-Z]+)", text):
        return ConfigError(
            f"{found[1].lower()}(...) needs a sweeper that samples",
            fix="add hydra/sweeper=optuna (pip install hydra-optuna-sweeper)",
        )
    if found := re.search(r"Error merging override (\S+)", text):
        return _not_merged(found[1], error, compose)
    if isinstance(error, ConfigCompositionException) and text:
        return ConfigError(
            f"the configuration cannot be composed: {_first_line(error)}",
            fix="debug=true shows where",
        )
    return None


def _missing_option(error: MissingConfigException) -> ConfigError:
    path = str(error.missing_cfg_file)
    group, _, name = path.rpartition("/")
    where = f"{_file_of(str(error))}: " if "In '" in str(error) else ""
    if where == "config: ":  # as Hydra sees it; what the user chose has been checked
        where = "a defaults list of the recipe: "
    if error.options:
        distribution = registry.DISTRIBUTIONS.get((group, name))
        fix = f"pip install {distribution}" if distribution else nearest(name, error.options)
        return ConfigError(f"{where}unknown {group} {name!r}", fix=fix)
    if group and group not in GROUPS:
        return ConfigError(f"{where}there is no group {group!r}", fix=nearest(group, GROUPS))
    return ConfigError(f"{where}there is no {path}.yaml", fix="--info searchpath lists the folders")


def _not_overridden(key: str, text: str, compose: Compose) -> ConfigError:
    where = f"{_file_of(text)}: " if "In '" in text else ""
    if key in GROUPS:
        return ConfigError(
            f"{key}={{...}} sets a knob that {key} does not have",
            fix=f"set its knobs one by one: {key}.NAME=VALUE",
        )
    if "." not in key:
        return ConfigError(f"{where}there is no group {key!r}", fix=nearest(key, GROUPS))
    return _unknown_knob(key, compose())


def _unknown_knob(key: str, config: Mapping[str, Any]) -> ConfigError:
    """The words for a dotted key that is not in ``config``."""
    parts = key.split(".")
    node: Any = config
    for depth, part in enumerate(parts):
        parent = ".".join(parts[:depth])
        if not OmegaConf.is_dict(node):
            if node is None and depth == 1:
                return ConfigError(
                    f"{key}: no {parent} is chosen", fix=f"choose one: {parent}=NAME, or a recipe"
                )
            return ConfigError(
                f"{key}: {parent} is a value and holds no knobs", fix=f"write {parent}=VALUE"
            )
        if part not in node:
            return _no_such_knob(key, parent, part, node)
        node = node[part]
    return ConfigError(
        f"{key} is not a knob of every option that is swept over",
        fix="sweep over options that share it, or give each its own sweep",
    )


def _no_such_knob(key: str, parent: str, part: str, node: DictConfig) -> ConfigError:
    names = [str(name) for name in node if not str(name).startswith("_")]
    target = node.get("_target_")
    what = f"unknown knob {key}"
    if part in GROUPS and not parent:
        fix = f"choose one: {part}=NAME, or a recipe; or set it where the task says its own"
        return ConfigError(f"{key}: no {part} is chosen", fix=fix)
    if part in GROUPS:
        return ConfigError(what, fix=f"{part} is a group of its own: {part}=NAME")
    offer = nearest(part, [f"{name}" for name in names])
    if offer.startswith("did you mean"):
        offer = re.sub(r"'([\w-]+)'", rf"{parent}.\1", offer) if parent else offer
    elif not names and target is None:  # such as storage_options: whatever a user gives it
        offer = f"{parent} is empty, and takes what you add: +{key}=VALUE"
    elif not names:
        offer = f"{parent} has no knobs"
    else:
        offer = f"{parent} has " + offer.removeprefix("choose one of ")
    if target is not None and not str(target).startswith("torsh_trainer."):
        offer += f" (to hand it to {target} all the same: +{key}=VALUE)"
    return ConfigError(what, fix=offer, name=key)


def _not_merged(override: str, error: BaseException, compose: Compose) -> ConfigError:
    key = override.partition("=")[0].lstrip("+~")
    if "." in key:
        config = compose()
        if OmegaConf.select(config, key, throw_on_missing=False) is None:
            return _unknown_knob(key, config)
    cause = error.__cause__ or error
    return ConfigError(f"{override} cannot be applied: {_first_line(cause)}", fix=f"look at {key}")


def _value_error(error: BaseException) -> ConfigError:
    key = str(getattr(error, "full_key", "") or "")
    if isinstance(error, MissingMandatoryValue):
        name = key or _find_quoted(str(error))
        return ConfigError(f"{name} has no value", fix=f"give {name}=VALUE", name=name)
    if isinstance(error, InterpolationKeyError):
        return ConfigError(
            f"{key}: ${{{_find_quoted(str(error))}}} names nothing in the configuration",
            fix=f"correct the name in the braces, or give {key} a value",
        )
    return ConfigError(f"{key}: {_first_line(error)}", fix=f"give {key} a value")


def _chain(error: BaseException) -> Sequence[BaseException]:
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in links:
        links.append(link)
        link = link.__cause__ or link.__context__
    return links


def _file_of(text: str) -> str:
    """The recipe or file whose defaults list is at fault, from Hydra's ``In 'recipe/x': ...``."""
    found = re.search(r"In '?([^':]+)'?:", text)
    path = found[1] if found else "the defaults list"
    _, slashes, rest = path.partition("//")
    return f"/{rest}" if slashes else path.replace("/", " ", 1)


def _find_quoted(text: str) -> str:
    found = re.search(r"'([^']+)'", text) or re.search(r":\s*(\S+)", text)
    return found[1] if found else text


def _first_line(error: BaseException) -> str:
    line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return " ".join(line.split())


def as_failure(error: Exception) -> TorshError:
    """``error`` itself when it speaks to the user; else in one sentence, with the user's line."""
    if isinstance(error, TorshError):
        return error
    if isinstance(error, COMPOSING):
        return composing_error(error, OmegaConf.create)
    if isinstance(error, OSError) and error.filename is not None and not place_of(error):
        return disk_error(error, "use", Path(os.fsdecode(error.filename)), setting="hydra.run.dir")
    kind = ResourceError if isinstance(error, OSError) else TrainingError
    return kind(words_of(error), fix="debug=true shows the whole traceback")
