"""A command line taken apart: flags, and overrides."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
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
    "--hydra-help",
    "--dry-run",
)
_PATH, _NAME = ("--config-path", "-cp"), ("--config-name", "-cn")
_INFO = ("--info", "-i")
_OF_LAUNCHERS = ("--local_rank", "--local-rank")


@dataclass(frozen=True)
class CommandLine:
    """What the user asked of the door; ``overrides`` as typed.

    ``show``, ``info``, ``package`` and ``resolve`` print configuration instead of training;
    ``dry_run`` says what a repeated run would take from a checkpoint.
    """

    overrides: tuple[str, ...] = ()
    help: bool = False
    hydra_help: bool = False
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


def parse(argv: Sequence[str], *, verb: str = "") -> CommandLine:
    """Flags and overrides may stand in any order; ``verb`` is the word before them, for messages.

    Raises:
        ConfigError: an unknown flag, or a flag without its value; the nearest flag is offered.
    """
    _refuse_what_hydra_alone_has(argv, verb)
    namespace, unknown = _parser().parse_known_intermixed_args(_with_all_after_info(argv))
    flags = [word for word in unknown if word.startswith("-")]
    if flags:
        raise ConfigError(f"unknown flag {flags[0]}", fix=_offer(flags[0]))
    values = vars(namespace)
    overrides = (*values.pop("overrides"), *unknown)
    values.pop("run")  # what happens anyway
    for flag in ("--resolve", "--package"):
        if values[flag.lstrip("-")] and values["show"] is None:
            raise ConfigError(
                f"{flag} goes with --cfg",
                fix=f"write {_command([*verb.split(), '--cfg', 'job', *argv])}",
            )
    return CommandLine(overrides=tuple(overrides), **values)


def _refuse_what_hydra_alone_has(argv: Sequence[str], verb: str) -> None:
    """Says what to type for the flags by which Hydra is told where its one configuration lies."""
    given, rest, words = {}, [], list(argv)
    while words:
        flag, equals, value = words.pop(0).partition("=")
        if flag == "--experimental-rerun":
            raise ConfigError(f"{flag} is not offered here", fix="write rerun RUN_DIRECTORY")
        if flag not in _PATH + _NAME:
            rest.append(flag + equals + value)
            continue
        if not equals and not words:
            raise ConfigError(f"{flag} has no value", fix="write +recipe=FILE.yaml instead")
        given[_PATH if flag in _PATH else _NAME] = (flag, value if equals else words.pop(0))
    if not given:
        return
    flag, folder = given.get(_PATH, ("", ""))
    here = ["--config-dir", folder] if folder else []
    if _NAME in given:
        flag, name = given[_NAME]
        file = Path(folder, name).with_suffix(".yaml")
        here.append(f"+recipe={file.as_posix() if file.is_file() else Path(name).stem}")
    raise ConfigError(
        f"{flag} is Hydra's, and the root of the configuration is ours: a recipe stands in it",
        fix=f"write {_command([*verb.split(), *here, *rest])}",
    )


def _with_all_after_info(argv: Sequence[str]) -> list[str]:
    """``--info`` by itself shows all, also where an override comes next."""
    words: list[str] = []
    for word, after in zip(argv, [*argv[1:], ""], strict=False):
        alone = word in _INFO and ("=" in after or after.startswith(("-", "~")))
        words += [f"--info={INFO[0]}"] if alone else [word]
    return words


def _command(words: Sequence[str]) -> str:
    return shlex.join(["python", "-m", "torsh_trainer", *words])


def _offer(flag: str) -> str:
    if flag.partition("=")[0] in _OF_LAUNCHERS:
        return (
            "the launcher adds it, and says it in LOCAL_RANK as well: start with deepspeed "
            "--no_local_rank, or python -m torch.distributed.launch --use_env"
        )
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
    add("--hydra-help", action="store_true")
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
