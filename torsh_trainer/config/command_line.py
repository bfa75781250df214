"""A command line taken apart: flags, and overrides."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from torsh_trainer.errors import ConfigError, nearest

INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
FLAGS = (
    "--help",
    "--version",
    "--multirun",
    "--run",
    "--config-dir",
    "--cfg",
    "--package",
    "--resolve",
    "--info",
    "--shell-completion",
    "--dry-run",
)
REFUSED = {"--config-path", "-cp", "--config-name", "-cn", "--experimental-rerun"}


@dataclass(frozen=True)
class CommandLine:
    """What the user asked of the door; ``overrides`` as typed.

    ``show``, ``info``, ``package`` and ``resolve`` print configuration instead of training;
    ``dry_run`` says what a repeated run would take from a checkpoint.
    """

    overrides: tuple[str, ...] = ()
    help: bool = False
    version: bool = False
    multirun: bool = False
    config_dir: str | None = None
    show: str | None = None
    info: str | None = None
    package: str | None = None
    resolve: bool = False
    shell_completion: bool = False
    dry_run: bool = False

    @property
    def trains(self) -> bool:
        return not (self.show or self.info or self.shell_completion)

    def with_overrides(self, overrides: Sequence[str]) -> CommandLine:
        """The same command line with other overrides."""
        return replace(self, overrides=tuple(overrides))


def parse(argv: Sequence[str]) -> CommandLine:
    """Flags and overrides may stand in any order.

    Raises:
        ConfigError: an unknown flag, or a flag without its value; the nearest flag is offered.
    """
    for word in argv:
        if word.partition("=")[0] in REFUSED:
            raise ConfigError(
                f"{word} is not offered here",
                fix="give --config-dir DIR, +recipe=FILE.yaml, or rerun RUN",
            )
    namespace, unknown = _parser().parse_known_intermixed_args(list(argv))
    flags = [word for word in unknown if word.startswith("-")]
    if flags:
        raise ConfigError(f"unknown flag {flags[0]}", fix=_offer(flags[0]))
    values = vars(namespace)
    overrides = (*values.pop("overrides"), *unknown)
    values.pop("run")  # what happens anyway
    if values["resolve"] and values["show"] is None:
        raise ConfigError(
            "--resolve goes with --cfg", fix="write --cfg job --resolve, or leave --resolve out"
        )
    return CommandLine(overrides=tuple(overrides), **values)


def _offer(flag: str) -> str:
    if "=" in flag or "." in flag:
        return f"an override has no dashes: write {flag.lstrip('-')}"
    offer = nearest(flag, FLAGS)
    if offer.startswith("did you mean"):
        return offer
    return "--help lists the flags; a knob is no flag: write trainer.max_steps=200"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, fix="--help lists the flags")


def _parser() -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    add = parser.add_argument
    add("overrides", nargs="*")
    add("-h", "--help", action="store_true")
    add("--version", action="store_true")
    add("-m", "--multirun", action="store_true")
    add("-r", "--run", action="store_true")
    add("-cd", "--config-dir", metavar="DIR")
    add("-c", "--cfg", dest="show", choices=["job", "hydra", "all"])
    add("-p", "--package")
    add("--resolve", action="store_true")
    add("-i", "--info", nargs="?", const="all", choices=INFO)
    add("-sc", "--shell-completion", action="store_true")
    add("--dry-run", action="store_true")
    return parser
