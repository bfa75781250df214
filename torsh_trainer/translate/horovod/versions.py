"""The version of Horovod that rules speak of: its last."""

from __future__ import annotations

from torsh_trainer.errors import ConfigError

NEWEST = "0.28.1"


def parse(text: str) -> str:
    """``newest`` or the one version that is known.

    Raises:
        ConfigError: it is another one.
    """
    if text in ("newest", NEWEST):
        return NEWEST
    raise ConfigError(
        f"--source-version {text}: the rules for Horovod speak of {NEWEST}, its last release",
        fix="leave it out, and read Horovod's changelog for what changed up to that release",
    )
