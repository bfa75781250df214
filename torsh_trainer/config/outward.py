"""``translate RECIPE --to ENGINE``: a recipe composed, with the places of what it sets."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torsh_trainer.config import command_line
from torsh_trainer.config.overrides import bare_key
from torsh_trainer.config.roots import RECIPE, Roots, find_roots
from torsh_trainer.config.verifying import compose_line
from torsh_trainer.errors import ConfigError
from torsh_trainer.translate import yaml_places
from torsh_trainer.translate.deepspeed import versions
from torsh_trainer.translate.nodes import Node, Place, leaves
from torsh_trainer.translate.outward.command import TARGETS
from torsh_trainer.translate.outward.native import GROUPS, Native

FLAG = "--to"
_CHOICE = "override /"


@dataclass(frozen=True)
class OutwardRequest:
    """A recipe, where it is to go, and where the file and the report are to lie."""

    native: Native
    to: str
    output: Path | None
    report: Path | None


def parse_request(argv: Sequence[str]) -> OutwardRequest:
    """What ``translate RECIPE --to ENGINE [overrides]`` asks for.

    Raises:
        ConfigError: an option or override that means nothing, or a recipe that does not compose.
    """
    known, rest = _parser().parse_known_args(list(argv))
    overrides = list(rest)
    if known.world_size is not None:
        overrides.append(f"launcher.num_processes={known.world_size}")
    if known.config_dir is not None:
        overrides += ["--config-dir", known.config_dir]
    line = command_line.parse([f"+{RECIPE}={known.recipe}", *overrides])
    if line.multirun or not line.trains or line.dry_run:
        raise ConfigError("translate writes a file", fix="leave -m, --cfg and --info out")
    config = compose_line(line)
    file = _file(known.recipe, find_roots(line.config_dir))
    found = list(_set_by(yaml_places.parse(file.read_text("utf-8"), name=str(file))))
    given = {key: node.place for key, node in found}
    options = {key: str(node.value) for key, node in found if key in GROUPS}
    for text in line.overrides:
        given[bare_key(text)] = Place()
        options.pop(bare_key(text), None)
    del given[RECIPE]
    version = versions.parse(known.source_version)
    native = Native(known.recipe, config, given, options, version)
    return OutwardRequest(native, known.to, known.output, known.report)


def _file(recipe: str, roots: Roots) -> Path:
    """The file of a recipe that has been composed, so that it exists."""
    path = Path(recipe).expanduser()
    if path.is_file():
        return path
    return path / "recipe.yaml" if path.is_dir() else roots.recipes()[recipe]


def _set_by(root: Node) -> Iterator[tuple[str, Node]]:
    """The knobs that a recipe sets, and the groups of which it chooses the option."""
    defaults = root.value.get("defaults")
    for item in defaults.node.value if defaults is not None and defaults.node.is_list else ():
        for key, entry in item.value.items() if item.is_mapping else ():
            if key.startswith(_CHOICE):
                yield key.removeprefix(_CHOICE), Node(entry.node.value, entry.place)
    knobs = {k: e for k, e in root.value.items() if k not in ("defaults", "hydra")}
    for path, entry in leaves(Node(knobs)):
        yield ".".join(path), Node(entry.node.value, entry.place)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torsh_trainer translate",
        allow_abbrev=False,
        description="Writes a native recipe as a file that another engine reads, with a verdict "
        "for every knob. Overrides follow as on any command line. Exits with 0 when nothing "
        "differs, 10 when something is approximate, 11 when something is refused, 2 when the "
        "recipe is invalid.",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe's name or file")
    parser.add_argument(FLAG, required=True, choices=list(TARGETS), help="the engine")
    parser.add_argument("--output", "-o", type=Path, metavar="FILE", help="write the file there")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="write the report: .json or .html"
    )
    parser.add_argument(
        "--config-dir", "-cd", metavar="DIR", help="the folder of your groups and recipes"
    )
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="processes: launcher.num_processes=N"
    )
    parser.add_argument(
        "--source-version",
        default="newest",
        metavar="VERSION",
        help=f"of DeepSpeed, for which it writes; default: "
        f"{versions.format_version(versions.NEWEST)}",
    )
    return parser
