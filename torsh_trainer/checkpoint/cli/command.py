"""``python -m torsh_trainer checkpoint list|show|verify|diff|export|import``.

What needs torch is imported by the word that needs it: the rest answers in milliseconds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from torsh_trainer.checkpoint.cli import inspection
from torsh_trainer.checkpoint.cli.inspection import Look
from torsh_trainer.checkpoint.cli.printing import (
    count_words,
    number,
    print_json,
    say,
    size,
    table,
    when,
)
from torsh_trainer.checkpoint.store.places import StoragePath, parse_storage_path
from torsh_trainer.checkpoint.store.retention import is_name
from torsh_trainer.errors import ConfigError, TorshError, nearest
from torsh_trainer.utils import registry
from torsh_trainer.utils.arguments import VerbParser
from torsh_trainer.utils.files import disk_error
from torsh_trainer.utils.foreign import escape_controls
from torsh_trainer.utils.registry import PluginKind

DTYPES = ("bf16", "fp16", "fp32")

_PROGRAM = "python -m torsh_trainer checkpoint"
_WHERE = "a checkpoint (.../step-00000100), or a run directory: its newest; a URL too"


def main(argv: Sequence[str]) -> int:
    """Does what ``argv`` asks; returns the exit code.

    Raises:
        ConfigError: there is no such checkpoint, or the command line makes no sense.
        ResourceError: a checkpoint is damaged, a file cannot be read or written, a library is
            missing.
    """
    words = {
        "list": _list,
        "show": _show,
        "verify": _verify,
        "diff": _diff,
        "export": _export,
        "import": _import,
    }
    argv = [word for word in argv if word.lower() != "debug=true"]  # the door has read it
    if argv and not argv[0].startswith("-") and argv[0] not in words:
        raise ConfigError(f"checkpoint {argv[0]}: no such word", fix=nearest(argv[0], words))
    options = _parser().parse_args(argv)
    try:
        return words[options.word](options)
    except OSError as error:
        if error.filename is None:
            raise
        raise disk_error(error, "read", Path(os.fsdecode(error.filename))) from error


def _list(options: argparse.Namespace) -> int:
    places = _places(options)
    folders, unread = _gather_checkpoints(places)
    if options.json:
        looks = [one for looks in folders.values() for one in looks]
        looks += [Look(path, None, error.sentence) for path, error in unread.items()]
        print_json([_as_json(one) for one in looks])
        return _tell_unread(unread)
    for i, (folder, looks) in enumerate(folders.items()):
        # Of checkpoints that were named one by one, nobody looked at their neighbours.
        chosen = all(one.path in places for one in looks)
        latest = None if chosen else inspection.newest(looks)
        rows = [_row(one, newest=one is latest) for one in looks]
        head = ["step", "saved", "processes", "strategy", "size", "metrics", "state"]
        say(*([""] if i else []), folder, *table([head, *rows], right=(0, 2, 4)))
    return _tell_unread(unread)


def _row(one: Look, *, newest: bool) -> list[str]:
    manifest = one.manifest
    state = one.problem or ("complete, newest" if newest else "complete")
    name = one.path.name
    step = name.removeprefix("step-").lstrip("0") or "0"
    if manifest is None:
        return [step, "-", "-", "-", "-", "-", state]
    metrics = ", ".join(f"{name} {number(value)}" for name, value in manifest.metrics.items())
    return [
        step if is_name(name) else str(manifest.step),
        when(manifest.saved_at),
        str(manifest.world_size),
        str(manifest.facts.get("strategy", "-")),
        size(one.size_bytes),
        metrics or "-",
        state,
    ]


def _as_json(one: Look) -> dict[str, object]:
    manifest = one.manifest
    return {
        "path": str(one.path),
        "step": manifest.step if manifest else None,
        "saved_at": manifest.saved_at if manifest else None,
        "world_size": manifest.world_size if manifest else None,
        "strategy": manifest.facts.get("strategy") if manifest else None,
        "metrics": dict(manifest.metrics) if manifest else {},
        "size_bytes": one.size_bytes,
        "complete": not one.problem,
        "problem": one.problem or None,
    }


def _show(options: argparse.Namespace) -> int:
    found = _choose_checkpoint(options.path, options)
    from torsh_trainer.checkpoint.cli import showing
    from torsh_trainer.checkpoint.cli.contents import Contents

    contents = Contents.open(found, verified=False)
    entries = showing.select_entries(contents, options.only)
    if options.json:
        print_json(showing.as_values(contents, entries))
        return 0
    width = shutil.get_terminal_size((100, 24)).columns
    every = options.all or options.only is not None
    lines = showing.as_text(contents, entries, every=every, pieces=options.pieces, width=width)
    say(*lines)
    return 0


def _verify(options: argparse.Namespace) -> int:
    folders, unread = _gather_checkpoints(_places(options))
    verdicts = [inspection.examine(one.path) for looks in folders.values() for one in looks]
    for verdict in verdicts:
        if verdict.damages:
            say(f"{'newer  ' if verdict.newer else 'damaged'}  {verdict.path}")
        else:
            files = count_words(verdict.files, "file")
            say(f"whole    {verdict.path} ({files}, {size(verdict.size_bytes)})")
        for damage in verdict.damages:
            say(f"         {damage}")
        if verdict.strangers:
            say(f"         not part of it: {', '.join(verdict.strangers)}")
    damaged = 1 if any(verdict.damages for verdict in verdicts) else 0
    return max(damaged, _tell_unread(unread))


def _gather_checkpoints(
    places: Sequence[StoragePath],
) -> tuple[dict[StoragePath, list[Look]], dict[StoragePath, TorshError]]:
    """The checkpoints in ``places``, and what could not be looked at.

    Raises:
        TorshError: there is nothing else to show.
    """
    unread: dict[StoragePath, TorshError] = {}
    folders = inspection.gather(places, unread=unread)
    if not folders:
        raise next(iter(unread.values()))
    return folders, unread


def _tell_unread(unread: Mapping[StoragePath, TorshError]) -> int:
    """Says what was left out; the exit code for it."""
    _tell(f"left out: {error}" for error in unread.values())
    return max((error.exit_code for error in unread.values()), default=0)


def _diff(options: argparse.Namespace) -> int:
    if options.top < 1:
        raise ConfigError(f"--top {options.top} is below 1", fix="give 1 or more")
    paths = [_choose_checkpoint(path, options) for path in (options.a, options.b)]
    from torsh_trainer.checkpoint.cli import comparing
    from torsh_trainer.checkpoint.cli.contents import Contents

    one, other = (Contents.open(path, verified=True) for path in paths)
    found = comparing.compare(one, other, pattern=options.only)
    if options.json:
        print_json(comparing.as_values(found))
    else:
        width = shutil.get_terminal_size((100, 24)).columns
        lines = comparing.as_text(found, top=options.top, by=options.by, width=width)
        say(*lines)
    return 1 if options.exit_code and not found.same else 0


def _export(options: argparse.Namespace) -> int:
    registry.EXPORT_FORMATS.find(options.format)
    found = _choose_checkpoint(options.path, options)
    from torsh_trainer.checkpoint.cli import export

    wanted = export.Export(
        format=options.format,
        output=options.output,
        ema=options.ema,
        optimizer=options.optimizer,
        dtype=options.dtype,
        prefix=options.prefix,
        strip=options.strip,
        max_shard_size=options.max_shard_size,
        config=options.config,
        force=options.force,
    )
    written, notes = export.export(found, wanted)
    _tell(notes)
    print(*map(escape_controls, map(str, written)), sep="\n")
    return 0


def _import(options: argparse.Namespace) -> int:
    from torsh_trainer.checkpoint.cli import importing

    wanted = importing.Import(
        file=options.file,
        output=parse_storage_path(options.output, _storage(options)),
        strip=options.strip,
        parameters=options.parameters,
        optimizers=tuple(filter(None, options.optimizers.split(","))),
        step=options.step,
        samples=options.samples,
        format=options.format,
    )
    written, notes = importing.import_file(wanted)
    _tell(notes)
    print(escape_controls(str(written)))
    return 0


def _tell(notes: Iterable[str]) -> None:
    for note in notes:
        say(note, file=sys.stderr)


def _places(options: argparse.Namespace) -> list[StoragePath]:
    return [parse_storage_path(path, _storage(options)) for path in options.paths]


def _choose_checkpoint(path: str, options: argparse.Namespace) -> StoragePath:
    found, passed_over = inspection.choose(parse_storage_path(path, _storage(options)))
    _tell(f"passed over {one.path}: {one.problem}" for one in passed_over)
    return found


def _storage(options: argparse.Namespace) -> dict[str, Any]:
    """``KEY=VALUE`` as ``checkpoint.storage_options`` has them; values are YAML."""
    given = {}
    for text in options.storage:
        key, equals, value = text.partition("=")
        try:
            given[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            equals = ""
        if not (key and equals):
            raise ConfigError(
                f"--storage {text} is no setting",
                fix="write --storage endpoint_url=http://host:9000",
            )
    return given


def _local(text: str) -> Path:
    if "://" in text:
        raise ConfigError(
            f"{text} is a URL, and plain files are read and written on this machine",
            fix="name a path; copying is the storage's own business",
        )
    return Path(text).expanduser()


def _parser() -> VerbParser:
    parser = VerbParser(
        prog=_PROGRAM,
        description="Looks at checkpoints, compares them, and takes them to other formats and back."
        " No code in a file is ever run.",
        epilog="Exit code: 0 done, 1 damaged, or the disk or a library is missing, 2 your input.",
    )
    words = parser.add_subparsers(dest="word", metavar="WORD", required=True)
    for word, told, add in (
        ("list", "which there are, and whether they are complete", _add_list),
        ("show", "what one holds: tensors, settings, position", _add_show),
        ("verify", "read every byte and name what is damaged", _add_verify),
        ("diff", "how two differ: tensors, settings, position", _add_diff),
        ("export", "write files that other programs open", _add_export),
        ("import", "make a checkpoint of another program's file", _add_import),
    ):
        one = words.add_parser(word, help=told)
        add(one)
        one.add_argument(
            "--storage",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="for a URL: a setting of its file system, as in checkpoint.storage_options",
        )
    return parser


def _add_list(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Lists checkpoints by step. Looks at sizes alone: verify reads the files themselves."
    )
    _add_paths(parser)
    parser.add_argument("--json", action="store_true", help="for scripts")


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.description = "Shows what a checkpoint holds. Tensors are not read."
    parser.add_argument("path", metavar="CKPT", help=_WHERE)
    parser.add_argument(
        "--only", metavar="PATTERN", help="tensors whose name matches, such as 'head.*'"
    )
    parser.add_argument(
        "--all", action="store_true", help="a line for each tensor, however many there are"
    )
    parser.add_argument(
        "--pieces", action="store_true", help="which file holds which piece of each tensor"
    )
    parser.add_argument("--json", action="store_true", help="everything, for scripts")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compares size and CRC-32 of every file with what was written. "
        "Exits with 0 when all is whole, with 1 otherwise."
    )
    _add_paths(parser)


def _add_diff(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compares two checkpoints. A relative difference is |a - b| / max(|a|, |b|)."
    )
    parser.add_argument("a", metavar="A", help=_WHERE)
    parser.add_argument("b", metavar="B", help="the other")
    parser.add_argument("--only", metavar="PATTERN", help="tensors whose name matches")
    parser.add_argument(
        "--top", type=int, default=20, metavar="N", help="so many tensors (default: 20)"
    )
    parser.add_argument(
        "--by",
        choices=("absolute", "relative"),
        default="absolute",
        help="what puts a tensor first (default: absolute)",
    )
    parser.add_argument("--json", action="store_true", help="everything, for scripts")
    parser.add_argument(
        "--exit-code", action="store_true", help="exit with 1 when anything differs"
    )


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes a checkpoint as plain files that other programs open. "
        "Names are those of the model, numbers those that were saved."
    )
    add = parser.add_argument
    add("path", metavar="CKPT", help=_WHERE)
    add("--format", required=True, metavar="FORMAT", help=_join_names(registry.EXPORT_FORMATS))
    add("--output", "-o", type=_local, required=True, metavar="PATH", help="a file; hf: a folder")
    add("--ema", action="store_true", help="the moving average in place of the parameters")
    add("--optimizer", action="store_true", help="torch: the optimizer's state too, by name")
    add("--dtype", choices=DTYPES, help="convert the weights (default: as saved)")
    add("--prefix", default="", help="put this before every name, such as model.")
    add("--strip", default="", metavar="PREFIX", help="only names that begin so, without it")
    add("--max-shard-size", metavar="SIZE", help="hf: such as 500MB (default: 5GB)")
    add("--config", type=_local, metavar="FILE", help="hf: the model's config.json")
    add("--force", action="store_true", help="replace what is there")


def _add_import(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Makes a checkpoint of a .safetensors file, a file of torch.save (as a script on Horovod "
        "writes it), a Lightning .ckpt, a Hugging Face folder, or what DeepSpeed saved (every "
        "ZeRO stage, and the universal format). With the state of an optimizer in it, a run goes "
        "on from it."
    )
    add = parser.add_argument
    add("file", type=_local, metavar="FILE", help="a file, or a folder of shards")
    add(
        "--output",
        "-o",
        required=True,
        metavar="DIR",
        help="a folder of checkpoints: the new one is DIR/step-XXXXXXXX",
    )
    add(
        "--from",
        dest="format",
        default="auto",
        metavar="FORMAT",
        help=f"auto, {_join_names(registry.IMPORT_FORMATS)} (default: auto)",
    )
    add("--strip", default="", metavar="PREFIX", help="only names that begin so, without it")
    add(
        "--parameters",
        type=_local,
        metavar="FILE",
        help="names of the parameters in the optimizer's order, one a line",
    )
    add(
        "--optimizers",
        default="",
        metavar="NAME,...",
        help="names of the optimizers (default: main, others)",
    )
    add("--step", type=int, metavar="N", help="updates made so far (default: what the file says)")
    add(
        "--samples",
        type=int,
        metavar="N",
        help="samples consumed so far (default: what the file says, or 0)",
    )


def _join_names(kind: PluginKind) -> str:
    return ", ".join(kind.registrations())


def _add_paths(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="DIR",
        help="a checkpoint, a run directory, or a folder with some below it; a URL too",
    )
