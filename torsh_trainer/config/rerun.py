"""``rerun RUN [overrides]``: a run again, from what its directory says it was made of."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hydra import compose

from torsh_trainer.config.app import CONFIG, open_app
from torsh_trainer.config.command_line import CommandLine
from torsh_trainer.config.job import import_paths
from torsh_trainer.config.overrides import bare_key
from torsh_trainer.config.roots import RECIPE, YAML, find_roots
from torsh_trainer.config.wording import plain
from torsh_trainer.errors import ConfigError
from torsh_trainer.utils.files import disk_error, parse_yaml
from torsh_trainer.utils.masking import MASK, mask_override

USAGE = "write rerun RUN_DIRECTORY [OVERRIDE ...]"
_RESUME = "checkpoint.resume"
HELP = """\
python -m torsh_trainer rerun RUN_DIRECTORY [OVERRIDE ...]

Repeats a run with the recipe and the overrides that it was started with, in a new directory.
Overrides given here win over the earlier ones; ~KEY forgets an earlier override of KEY.

It begins at step 0 again. To go on from where the run is, add checkpoint.resume=RUN_DIRECTORY.

--dry-run trains nothing and writes nothing: it says what such a continuation would restore, what
not, and what will be inexact and why; with overrides, what they change. Exit code 0, or 2 where
the checkpoint would be refused."""


def command_line(line: CommandLine) -> CommandLine:
    """The command line that repeats a run; the first of ``line.overrides`` is its directory.

    Recipe and overrides are those of that run, and later ones win; ``~KEY`` forgets an earlier
    override of KEY. The new run gets a directory of its own.

    Raises:
        ConfigError: the directory is no run's, or a file that the run was made from is gone.
    """
    if not line.overrides:
        raise ConfigError("rerun repeats a run, and none is named", fix=USAGE)
    run, *later = line.overrides
    earlier = _overrides(Path(run))
    overrides = merge_overrides(earlier, later)
    for text in overrides:
        _check_known(text, Path(run))
        _check_file(text, Path(run))
    config_dir = line.config_dir or _config_dir(Path(run))
    return CommandLine(**{**vars(line), "overrides": tuple(overrides), "config_dir": config_dir})


@contextlib.contextmanager
def explain_unknown_knob(line: CommandLine) -> Iterator[None]:
    """Around the repeated run: an unknown knob that the earlier run set is said to be one."""
    try:
        yield
    except ConfigError as error:
        name = error.facts.get("name")
        if name is None or name not in map(bare_key, _overrides(Path(line.overrides[0]))):
            raise
        raise ConfigError(
            f"{error.sentence}, which the earlier run set",
            fix=f"add ~{name} to forget it",
            name=name,
        ) from error


class PreviewFunction(Protocol):
    """What a resolved configuration would take from a checkpoint (assemble.preview)."""

    def __call__(
        self,
        config: dict[str, Any],
        *,
        run_dir: Path,
        env: Mapping[str, str],
        import_paths: Sequence[str],
    ) -> tuple[str, bool]: ...


def dry_run(line: CommandLine, *, preview: PreviewFunction, env: Mapping[str, str]) -> int:
    """Says what the repeated run would take from a checkpoint of the first; returns the exit code.

    That is the newest one of the run, unless an override of ``line`` names another.

    Raises:
        TorshError: what went wrong, in words.
    """
    if line.multirun or not line.trains:
        raise ConfigError("--dry-run looks at one run", fix="leave -m, --cfg and --info out")
    again = command_line(line)
    run, *later = line.overrides
    named = _RESUME in map(bare_key, later)
    with open_app(again, find_roots(again.config_dir)) as app:
        config = plain(compose(CONFIG, app.overrides))
    begins = _begins(config)
    if not named:
        config["checkpoint"]["resume"] = "auto"  # of the directory of the first run
    text, refused = preview(
        config, run_dir=Path(run), env=env, import_paths=import_paths(again.config_dir)
    )
    if not named:
        what = shlex.join(["rerun", run, *map(mask_override, later)])
        print(f"{what} {begins}, in a new directory.")
        print(f"{what} {_RESUME}={shlex.quote(run)} goes on from its newest checkpoint:\n")
    print(text)
    return ConfigError.exit_code if refused else 0


def _begins(config: Mapping[str, Any]) -> str:
    resume = config["checkpoint"]["resume"]
    return "begins at step 0" if resume in ("auto", "never") else f"goes on from {resume} again"


def merge_overrides(earlier: Sequence[str], later: Sequence[str]) -> list[str]:
    """Both lists of overrides, without the earlier ones that a later one replaces."""
    replaced = {bare_key(text) for text in later}
    kept = [text for text in earlier if bare_key(text) not in replaced]
    forgotten = {bare_key(text) for text in earlier}
    return kept + [
        text for text in later if not (text.startswith("~") and bare_key(text) in forgotten)
    ]


def _read_saved(run: Path, name: str) -> Any:
    path = run / ".hydra" / name
    try:
        if not run.is_dir():
            raise ConfigError(f"{run} is no directory", fix=USAGE)
        if path.is_file():
            return parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise disk_error(error, "read", path) from error
    except ValueError as error:  # a UnicodeDecodeError among them
        raise _damage_error(path) from error
    raise ConfigError(
        f"{run} is no run of this command line: it has no .hydra/{name}",
        fix="give the directory that a run printed, such as runs/digits/2031-01-31_18-30-05",
    )


def _check_known(text: str, run: Path) -> None:
    """A secret was not kept, so that it has to be given again."""
    if MASK in text:
        key = text.partition("=")[0]
        raise ConfigError(
            f"{run} was started with a secret in {bare_key(text)}, which was not written down",
            fix=f"give {key}=VALUE again; {key}='${{oc.env:NAME}}' is written as it stands",
        )


def _overrides(run: Path) -> list[str]:
    """What the earlier run was started with."""
    found = _read_saved(run, "overrides.yaml")
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise _damage_error(run / ".hydra" / "overrides.yaml")
    return found


def _damage_error(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is not as Hydra wrote it",
        fix="put it right, or write the command line anew: provenance.json has it",
    )


def _check_file(text: str, run: Path) -> None:
    """A file that the run was made from should still be there."""
    key, _, value = text.partition("=")
    path = Path(value.strip("'\""))
    if path.suffix in YAML and path.is_absolute() and not path.is_file() and "." not in key:
        raise ConfigError(
            f"{run} was made from {path}, which is gone",
            fix=f"give {'+' + RECIPE if bare_key(text) == RECIPE else key}=ANOTHER_FILE.yaml; "
            f"{run}/config.yaml holds what it came to",
        )


def _config_dir(run: Path) -> str | None:
    """The --config-dir of a run, from the places that Hydra read."""
    try:
        sources = [
            {name: str(source[name]) for name in ("provider", "schema", "path")}
            for source in _read_saved(run, "hydra.yaml")["hydra"]["runtime"]["config_sources"]
        ]
    except (LookupError, TypeError) as error:
        raise _damage_error(run / ".hydra" / "hydra.yaml") from error
    for source in sources:
        if source["provider"] == "command-line" and source["schema"] == "torsh-conf":
            if not Path(source["path"]).is_dir():
                raise ConfigError(
                    f"the run was made with --config-dir {source['path']}, which is gone",
                    fix="give --config-dir with the folder's new place",
                )
            return source["path"]
    return None
