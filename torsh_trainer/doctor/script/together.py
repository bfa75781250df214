"""Mistakes that show where several pieces are held against one another."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from torsh_trainer.doctor.script.base import ScriptMistake, ScriptPiece
from torsh_trainer.doctor.script.compose import find_fixed_places

_FALLS_BACK = re.compile(r"\bnccl\b.*(fall(s)? ?back|fallback)|fallback.*\bnccl\b", re.IGNORECASE)
_REFUSES = re.compile(r"if\s*!?\s*(not\s+)?[\w.:]*is_nccl_available\(\)|feature_not_available")
_SCALE = re.compile(r"--scale[ =](\w[\w-]*)=(\d+)")

PiecesRule = Callable[[Sequence[ScriptPiece]], Iterator[ScriptMistake]]


def find_two_answers(pieces: Sequence[ScriptPiece]) -> Iterator[ScriptMistake]:
    """Without NCCL one place stops with an error, and another goes on with another backend."""
    falls, refuses = None, None
    for piece in pieces:
        if piece.kind not in ("page", "source"):
            continue
        for number, line in piece.lines():
            if falls is None and _FALLS_BACK.search(line):
                falls = (piece, number)
            if refuses is None and _REFUSES.search(line) and not _FALLS_BACK.search(line):
                refuses = (piece, number)
    if falls is None or refuses is None:
        return
    piece, number = falls
    yield piece.mistake(
        "missing_nccl_has_two_answers",
        number,
        why=f"{refuses[0].file}:{refuses[1]} stops with an error where NCCL is missing, and this "
        "goes on without a word: ranks that decide apart wait for one another in two backends",
        fix="decide once for all ranks, and say so: comm.on_missing=error, or =fallback",
    )


def find_scaled_services(pieces: Sequence[ScriptPiece]) -> Iterator[ScriptMistake]:
    """``docker compose up --scale``: copies of a service that has a fixed rank."""
    fixed = {
        service: (piece.file, line)
        for piece in pieces
        if piece.kind == "compose"
        for service, line in find_fixed_places(piece).items()
    }
    for piece in pieces:
        if piece.kind != "shell":
            continue
        for number, line in piece.lines():
            for service, count in _SCALE.findall(line):
                if int(count) > 1 and service in fixed and "#" not in line.split("--scale")[0]:
                    file, at = fixed[service]
                    yield piece.mistake(
                        "scaled_service_has_one_rank",
                        number,
                        why=f"{count} copies of {service} have the one rank that {file}:{at} "
                        "gives it: two processes take one place, and others are empty",
                        fix=f"write a service for each rank ({service}, {service}_2, ...), each "
                        "with its own NODE_RANK",
                    )


RULES: tuple[PiecesRule, ...] = (find_two_answers, find_scaled_services)
