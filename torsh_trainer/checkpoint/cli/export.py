"""A checkpoint as plain files that other programs open: the verb ``checkpoint export``.

A file is written beside its place and renamed as the last act; nothing is replaced unless asked.
Needs memory for the weights (hf: for one shard), and for the optimizer's state where that goes too.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torsh_trainer.checkpoint.cli.contents import Contents, TensorEntry
from torsh_trainer.checkpoint.cli.exporting import Export as Export
from torsh_trainer.checkpoint.store.places import StoragePath
from torsh_trainer.errors import ConfigError
from torsh_trainer.utils.files import disk_error, sync_folder
from torsh_trainer.utils.lookup import list_first


def export(checkpoint: StoragePath, wanted: Export) -> tuple[list[Path], list[str]]:
    """Writes ``checkpoint`` as ``wanted``, after every byte of it was checked.

    Returns the files written, and sentences for the reader about what could not go along.

    Raises:
        ConfigError: the output exists, or the checkpoint lacks what is asked for.
        ResourceError: the checkpoint is damaged, the disk refused, or a library is missing.
    """
    _check_output(wanted)
    assert wanted.shard_bytes, "checked before anything is read"
    wanted.kind.check()
    contents = Contents.open(checkpoint, verified=True)
    chosen = _choose_weights(contents, wanted)
    try:
        notes = wanted.kind.notes(contents, wanted)
        write = _write_folder if wanted.kind.is_folder else _write_file
        written = write(contents, chosen, wanted)
    except OSError as error:
        raise disk_error(error, "write", wanted.output, setting="--output") from error
    return written, notes


def _choose_weights(contents: Contents, wanted: Export) -> dict[str, TensorEntry]:
    """Name in the file -> tensor of the checkpoint."""
    weights = dict(contents.model)
    if not weights:
        raise ConfigError(f"{contents.path} holds no model", fix="name another checkpoint")
    if wanted.ema:
        if not contents.is_averaged:
            raise ConfigError(
                f"--ema: {contents.path} holds no moving average",
                fix="leave --ema out; trainer.ema_decay=0.999 keeps one",
            )
        weights |= contents.averages_by_name()
    left_out = wanted.kind.leave_out(contents)
    weights = {name: entry for name, entry in weights.items() if name not in left_out}
    chosen = {
        wanted.name(name): entry for name, entry in weights.items() if name.startswith(wanted.strip)
    }
    if not chosen:
        raise ConfigError(
            f"--strip {wanted.strip}: no name of the model begins so",
            fix=f"its names are {list_first(list(weights))}",
        )
    return chosen


def _check_output(wanted: Export) -> None:
    output = wanted.output
    if wanted.kind.is_folder:
        if output.exists() and not output.is_dir():
            raise ConfigError(f"{output} is a file", fix="name a folder with --output")
        if output.is_dir() and any(output.iterdir()) and not wanted.force:
            raise ConfigError(
                f"{output} exists and is not empty",
                fix="name another folder, or replace the weights in it with --force",
            )
        return
    if output.is_dir():
        raise ConfigError(
            f"{output} is a folder",
            fix=f"name a file: --output {output / wanted.kind.file_name}",
        )
    if output.exists() and not wanted.force:
        raise ConfigError(f"{output} exists", fix="name another file, or replace it with --force")


def _write_file(
    contents: Contents, chosen: Mapping[str, TensorEntry], wanted: Export
) -> list[Path]:
    output = wanted.output
    output.parent.mkdir(parents=True, exist_ok=True)
    with _beside(output) as temporary:
        wanted.kind.write(contents, chosen, wanted, temporary)
        _sync(temporary)
        temporary.replace(output)
        sync_folder(output.parent)
    return [output]


def _write_folder(
    contents: Contents, chosen: Mapping[str, TensorEntry], wanted: Export
) -> list[Path]:
    """The folder appears whole; in one that is there, files change one by one, the index last."""
    output, kind = wanted.output, wanted.kind
    output.parent.mkdir(parents=True, exist_ok=True)
    with _beside(output) as temporary:
        temporary.mkdir()
        names = kind.write(contents, chosen, wanted, temporary)
        for name in names:
            _sync(temporary / name)
        sync_folder(temporary)
        if not output.exists():
            temporary.rename(output)
        else:
            for name in names:
                (temporary / name).replace(output / name)
            for old in output.iterdir():
                if kind.replaces(old.name) and old.name not in names:
                    old.unlink()
            sync_folder(output)
        sync_folder(output.parent)
    return [output / name for name in names]


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _beside(output: Path) -> Iterator[Path]:
    """A place beside ``output`` to write to, gone afterwards whatever happens."""
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        yield temporary
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
