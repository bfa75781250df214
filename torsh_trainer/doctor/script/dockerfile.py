"""Mistakes in Dockerfiles."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torsh_trainer.doctor.script.base import PieceRule, ScriptMistake, ScriptPiece

_BARE = re.compile(r"^(nvidia/cuda|ubuntu|debian)\b")
_TOOLS = ("curl", "wget", "git")
_PLACES = re.compile(r"\b(RANK|LOCAL_RANK|NODE_RANK|WORLD_SIZE|MASTER_ADDR)[= ]")


def instructions(piece: ScriptPiece) -> Iterator[tuple[int, str, str]]:
    """(line, instruction, its words) in order."""
    for number, line in piece.join_lines():
        name, _, rest = line.partition(" ")
        yield number, name.upper(), rest.strip()


def find_absent_tools(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """A tool that runs before it is installed, in an image that comes without it."""
    bare, installed = "", set[str]()
    for line, name, rest in instructions(piece):
        if name == "FROM":
            bare, installed = (rest if _BARE.match(rest) else ""), set()
        if name != "RUN" or not bare:
            continue
        for part in re.split(r"&&|;|\|\||\|", rest):
            words = part.split()
            if re.search(r"\b(apt-get|apt|apk|yum|dnf)\b.*\b(install|add)\b", part):
                installed |= set(words)
            elif words and words[0] in _TOOLS and words[0] not in installed:
                yield piece.mistake(
                    "tool_before_it_is_installed",
                    line,
                    why=f"{bare.split()[0]} has no {words[0]}: the build ends with "
                    f"'{words[0]}: not found'",
                    fix=f"RUN apt-get update && apt-get install -y {words[0]} ca-certificates, "
                    "before this line",
                )
                installed.add(words[0])


def find_cuda_tag(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """A tag of nvidia/cuda that was never published, or that moves."""
    for line, name, rest in instructions(piece):
        if name != "FROM" or not rest:
            continue
        image = rest.split()[0]
        short = re.match(r"nvidia/cuda:(\d+\.\d+)-", image)
        if short:
            yield piece.mistake(
                "cuda_tag_without_patch",
                line,
                why="tags of nvidia/cuda have three numbers: the pull ends with 'manifest unknown'",
                fix=f"FROM {image.replace(short[1], short[1] + '.0', 1)}",
            )
        elif image.endswith(":latest") or (
            ":" not in image
            and "@" not in image
            and "$" not in image
            and image not in ("scratch", *_stages(piece))
        ):
            yield piece.mistake(
                "image_is_not_pinned",
                line,
                why="the tag moves: hosts that pull on different days run different software",
                fix=f"FROM {image.removesuffix(':latest')}:VERSION",
            )


def find_rank_in_image(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """A place in the world that is built into the image: every container has it."""
    for line, name, rest in instructions(piece):
        if name == "ENV" and (found := _PLACES.search(rest + " ")):
            yield piece.mistake(
                "rank_in_image",
                line,
                why=f"every container of the image has this {found[1]}, whatever its place",
                fix=f"leave it out; docker run -e {found[1]}=..., a value for each container",
            )


def find_lists_kept_apart(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """``apt-get install`` in a layer without ``apt-get update``."""
    for line, name, rest in instructions(piece):
        if name == "RUN" and re.search(r"apt(-get)? install", rest) and "update" not in rest:
            yield piece.mistake(
                "install_without_update",
                line,
                why="the list of packages is another layer's, perhaps months old: 404 Not Found",
                fix="RUN apt-get update && apt-get install -y ... in one line",
            )


def _stages(piece: ScriptPiece) -> set[str]:
    return {
        words[-1]
        for _, name, rest in instructions(piece)
        if name == "FROM" and len(words := rest.split()) >= 3 and words[-2].upper() == "AS"
    }


RULES: tuple[PieceRule, ...] = (
    find_absent_tools,
    find_cuda_tag,
    find_rank_in_image,
    find_lists_kept_apart,
)
