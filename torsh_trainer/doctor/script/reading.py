"""From files to pieces of known kinds, and from pieces to mistakes."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torsh_trainer.doctor.script import compose, dockerfile, kubernetes, shell, source, together
from torsh_trainer.doctor.script.base import (
    PieceKind,
    PieceRule,
    ScriptExamination,
    ScriptMistake,
    ScriptPiece,
)
from torsh_trainer.doctor.script.shell_reading import why_unread
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.translate import yaml_places
from torsh_trainer.utils.files import check_plain

_LARGEST = 2_000_000
_PAGES = (".md", ".markdown", ".txt", ".rst")
_SHELLS = (".sh", ".bash", ".slurm", ".sbatch", ".pbs", ".job", ".lsf", ".zsh", ".ksh")
_SOURCES = (".py", ".rs", ".toml")
_FENCE = re.compile(r"^\s*(```+|~~~+)\s*([\w+-]*)")
_SHELL_WORDS = re.compile(
    r"^\s*(#!.*sh\b|#SBATCH|#PBS|#BSUB|export \w+=|torchrun|srun|sbatch|mpirun|python3? |sudo |"
    r"docker|kubectl|accelerate launch|deepspeed |\w+=\$\()",
    re.MULTILINE,
)
_DIRECTIVE = re.compile(r"^\s*#(SBATCH|PBS|BSUB)\b")

RULES: Mapping[PieceKind, Sequence[PieceRule]] = {
    "shell": shell.RULES,
    "dockerfile": dockerfile.RULES,
    "compose": compose.RULES,
    "kubernetes": kubernetes.RULES,
    "yaml": source.RULES,
    "source": source.RULES,
    "page": (),
}


def read_files(paths: Sequence[Path]) -> ScriptExamination:
    """The mistakes of all files, each alone and held against one another.

    Raises:
        ConfigError: a file is nothing that is known here, or cannot be parsed.
        ResourceError: a file cannot be read, or what reads the syntax of a shell is missing.
    """
    unread: list[str] = []
    pieces = [piece for path in paths for piece in _cut(path, unread)]
    found: list[ScriptMistake] = []
    for piece in pieces:
        if piece.kind == "shell" and (why := why_unread(piece)):
            unread.append(f"{piece.file}:{piece.first}: {why}")
        if piece.kind == "kubernetes" and (why := kubernetes.why_not_judged(piece)):
            unread.append(f"{piece.file}:{piece.first}: {why}")
        for rule in RULES[piece.kind]:
            found += rule(piece)
    for check in together.RULES:
        found += check(pieces)
    order = {str(path): at for at, path in enumerate(paths)}
    found = sorted(dict.fromkeys(found), key=lambda one: (order[one.file], one.line, one.name))
    kinds = Counter[str](piece.kind for piece in pieces if piece.kind != "page")
    return ScriptExamination(tuple(map(str, paths)), kinds, tuple(unread), tuple(found))


def _cut(path: Path, unread: list[str]) -> list[ScriptPiece]:
    name, text = str(path), _read(path)
    if path.suffix in _PAGES:
        return [ScriptPiece("page", name, text, is_whole=False), *_cut_page(name, text, unread)]
    if path.suffix in (".yaml", ".yml"):
        return _cut_yaml(name, text, unread, is_whole=True)
    if re.match(r"(docker|container)file|.*\.dockerfile$", path.name, re.IGNORECASE):
        return [ScriptPiece("dockerfile", name, text)]
    if path.suffix in _SOURCES:
        return [ScriptPiece("source", name, text)]
    if path.suffix in _SHELLS or text.startswith("#!") or _SHELL_WORDS.search(text):
        return [ScriptPiece("shell", name, text)]
    raise ConfigError(
        f"{name} is no shell script, Dockerfile, YAML or page that is known here",
        fix="end its name with .sh, .yaml or .md, or call it Dockerfile",
    )


def _read(path: Path) -> str:
    if path.is_dir():
        raise ConfigError(f"{path} is a folder", fix=f"name its files: {path}/*.sh")
    check_plain(path)
    try:
        if path.stat().st_size > _LARGEST:
            raise ConfigError(f"{path} is too large for a script", fix="name the script itself")
        content = path.read_bytes()
    except OSError as error:
        raise ResourceError(
            f"cannot read {path}: {error.strerror}", fix="name a file that exists"
        ) from error
    if b"\0" in content:
        raise ConfigError(f"{path} is no text", fix="name the script itself")
    return content.decode("utf-8", errors="replace")


# -- pages -----------------------------------------------------------------------------------------


def _cut_page(name: str, text: str, unread: list[str]) -> Iterator[ScriptPiece]:
    """The blocks of a page between fences; lines of a scheduler's alone go before the next block.

    A guide shows them apart, and means one script.
    """
    waiting: tuple[str, ScriptPiece] | None = None
    for section, first, tag, block in _find_blocks(text):
        padded = "\n" * (first - 1) + block
        kind = _kind_of(tag, block)
        if kind == "yaml":
            yield from _cut_yaml(name, padded, unread, is_whole=False)
            continue
        if kind is None:
            continue
        piece = ScriptPiece(kind, name, padded, is_whole=False)
        if kind == "shell":
            if waiting is not None and waiting[0] == section:
                piece = replace(piece, text=_overlay(waiting[1].text, padded))
            waiting = (section, piece) if _is_directives(block) else None
            if waiting is not None:
                continue
        yield piece


def _find_blocks(text: str) -> Iterator[tuple[str, int, str, str]]:
    """(the heading above, first line, tag, text) of every block."""
    section, fence, tag, first, held = "", "", "", 0, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        mark = _FENCE.match(line)
        if fence:
            if mark and mark[1].startswith(fence) and not mark[2]:
                yield section, first, tag, "\n".join(held) + "\n"
                fence = ""
            else:
                held.append(line)
        elif mark:
            fence, tag, first, held = mark[1], mark[2].lower(), number + 1, []
        elif line.startswith("#"):
            section = line


def _kind_of(tag: str, block: str) -> PieceKind | None:
    """By the tag; a block whose words are a shell's is one, whatever its tag says."""
    if tag in ("dockerfile", "docker"):
        return "dockerfile"
    if tag in ("yaml", "yml"):
        return "yaml"
    if tag == "rust":
        return "source"
    if tag in ("python", "py"):
        return "source" if _is_python(block) else "shell"
    if tag in ("bash", "sh", "shell", "zsh", "slurm", "console"):
        return "shell"
    return "shell" if not tag and _SHELL_WORDS.search(block) else None


def _is_python(block: str) -> bool:
    try:
        ast.parse(block)
    except (SyntaxError, ValueError):
        return not _SHELL_WORDS.search(block)
    return True


def _is_directives(block: str) -> bool:
    lines = [line for line in block.splitlines() if line.strip()]
    return (
        bool(lines)
        and all(line.lstrip().startswith("#") for line in lines)
        and any(_DIRECTIVE.match(line) for line in lines)
    )


def _overlay(before: str, after: str) -> str:
    """Two texts as one, each on the lines that it has."""
    lines = after.splitlines()
    for number, line in enumerate(before.splitlines()):
        if line.strip():
            lines[number] = line
    return "\n".join(lines) + "\n"


# -- YAML ------------------------------------------------------------------------------------------


def _cut_yaml(name: str, text: str, unread: list[str], *, is_whole: bool) -> list[ScriptPiece]:
    """The documents of a YAML file, by what they describe."""
    pieces = []
    for padded in _split_documents(text):
        if not padded.strip() or all(
            line.lstrip().startswith("#") for line in padded.splitlines() if line.strip()
        ):
            continue
        try:
            root = yaml_places.parse(padded, name=name)
        except ConfigError as error:
            if is_whole:
                raise
            unread.append(error.sentence)  # a fragment of a page
            continue
        keys = set(root.value)
        kind: PieceKind = "yaml"
        if "services" in keys:
            kind = "compose"
        elif {"apiVersion", "kind"} <= keys:
            kind = "kubernetes"
        pieces.append(ScriptPiece(kind, name, padded, is_whole, root))
    return pieces


def _split_documents(text: str) -> Iterator[str]:
    held, start = list[str](), 0
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("---"):
            yield "\n" * start + "\n".join(held) + "\n"
            held, start = [], number + 1
        else:
            held.append(line)
    yield "\n" * start + "\n".join(held) + "\n"
