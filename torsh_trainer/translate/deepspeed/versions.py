"""Versions of DeepSpeed that rules speak of."""

from __future__ import annotations

import re

from torsh_trainer.errors import ConfigError

Version = tuple[int, ...]

NEWEST: Version = (0, 19, 8)
"""The newest release that the rules were held against."""

CLIPS_BY_DEFAULT: Version = (0, 19, 3)
"""From here on ``gradient_clipping`` is 1.0 where it is missing (#8068); 0.19.2 does not clip."""

REMOVALS: Version = (0, 19, 8)
"""The release that refuses keys of features it has removed, even switched off."""


def parse(text: str) -> Version:
    """``0.19.8`` as (0, 19, 8); ``newest`` is the newest known.

    Raises:
        ConfigError: it is no version, or newer than any that the rules know.
    """
    if text == "newest":
        return NEWEST
    if not re.fullmatch(r"\d+(\.\d+){1,2}", text):
        raise ConfigError(
            f"--source-version {text} is no version of DeepSpeed",
            fix=f"write it as in --source-version {format_version(NEWEST)}",
        )
    version = tuple(int(part) for part in text.split("."))
    if version > NEWEST:
        raise ConfigError(
            f"DeepSpeed {text} is newer than the rules of this release",
            fix=f"translate as --source-version {format_version(NEWEST)}, "
            "and check what changed since",
        )
    return version


def format_version(version: Version) -> str:
    """As it is written: 0.19.8."""
    return ".".join(map(str, version))
