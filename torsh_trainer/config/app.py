"""The Hydra application, opened for one command line; and what it answers without training."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from torsh_trainer.config import sources
from torsh_trainer.config.command_line import CommandLine
from torsh_trainer.config.overrides import Overrides, bare_key, parse_override
from torsh_trainer.config.renamed import RENAMED, Table
from torsh_trainer.config.roots import RECIPE, Roots
from torsh_trainer.config.wording import COMPOSING, composing_error
from torsh_trainer.errors import ConfigError, nearest
from torsh_trainer.utils.masking import MASK, mask_text
from torsh_trainer.utils.registry import GROUPS, SETTINGS

if TYPE_CHECKING:  # Hydra hands one out, and names its class nowhere public
    from hydra._internal.hydra import Hydra

CONFIG = "config"
"""The root of the configuration: conf/config.yaml."""


@dataclass(frozen=True)
class App:
    """Hydra, and the overrides that it is to be given."""

    hydra: Hydra
    overrides: list[str]

    def groups_alone(self) -> DictConfig:
        """The configuration with every group chosen and no knob set: the names that there are."""
        kept = []
        for text in self.overrides:
            override = parse_override(text)
            if "." in bare_key(text) or bare_key(text) in SETTINGS:
                continue
            if override.is_sweep_override():
                first = next(override.sweep_string_iterator())
                text = f"{override.get_key_element()}={first}"
            kept.append(text)
        return self.hydra.compose_config(CONFIG, kept, RunMode.RUN)


@contextlib.contextmanager
def open_app(line: CommandLine, roots: Roots, *, renamed: Table = RENAMED) -> Iterator[App]:
    """Hydra reading ``roots``, with the overrides of ``line`` checked.

    Its global state is put back afterwards.

    Raises:
        ConfigError: an override that means nothing, or whatever Hydra refuses in the block.
    """
    sources.register(roots, renamed=renamed)
    own = str(roots.own.conf)
    with initialize_config_dir(version_base="1.3", config_dir=own, job_name="torsh_trainer"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        overrides = Overrides(roots, hydra.config_loader, Path.cwd(), line, renamed)
        app = App(hydra, overrides.prepare())
        try:
            yield app
        except COMPOSING as error:
            raise composing_error(error, app.groups_alone) from error


def show(line: CommandLine, roots: Roots) -> int:
    """Prints configuration, or what else ``line`` asks for instead of training; the exit code.

    Raises:
        ConfigError: the configuration cannot be composed.
    """
    with open_app(line, roots) as app:
        if line.shell_completion:
            app.hydra.shell_completion(CONFIG, app.overrides)
        elif line.info is not None:
            with _mask_stdout():
                app.hydra.show_info(line.info, CONFIG, app.overrides)
        else:
            _show_configuration(app, line)
    return 0


def _show_configuration(app: App, line: CommandLine) -> None:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), _mask_stdout():
            app.hydra.show_cfg(CONFIG, app.overrides, str(line.show), line.package, line.resolve)
    except SystemExit as error:  # what Hydra does about a package that is not there
        raise ConfigError(
            f"--package {line.package}: the configuration holds nothing there",
            fix=nearest(str(line.package), GROUPS),
        ) from error
    print(said.getvalue(), end="", file=sys.stderr)


@contextlib.contextmanager
def _mask_stdout() -> Iterator[None]:
    """What is printed within the block goes out without secrets, and is YAML as before."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        yield
    print(mask_text(shown.getvalue()).replace(f": {MASK}", f": '{MASK}'"), end="")


def _run_name(choices: Mapping[str, Any]) -> str:
    """What a run is called in ``runs/``: its recipe, or ``run``."""
    recipe = choices.get(RECIPE)
    if not recipe:
        return "run"
    path = Path(str(recipe))
    return path.parent.name if path.name == "recipe.yaml" else path.stem


OmegaConf.register_new_resolver("torsh.run_name", _run_name, replace=True)
