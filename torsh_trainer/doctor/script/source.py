"""Mistakes in source code and settings that a launch hangs on."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torsh_trainer.doctor.script.base import PieceRule, ScriptMistake, ScriptPiece

_CALL = re.compile(r"init_process_group\s*\(")
_LOCAL = re.compile(
    r"\b(?:Rank\s*\(|rank\s*=)[^,\n]*(?:env::var|environ|getenv)[^,\n]*[\"']LOCAL_RANK[\"']"
)
_PROMETHEUS = re.compile(r"prometheus[_-]port[\"']?\s*[:=]\s*9090\b", re.IGNORECASE)


def find_local_rank_as_rank(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """LOCAL_RANK given to the process group as the rank of all."""
    inside = 0
    for number, line in piece.lines():
        inside = 12 if _CALL.search(line) else inside - 1
        if _LOCAL.search(line) and inside >= 0:
            yield piece.mistake(
                "local_rank_as_rank",
                number,
                why="LOCAL_RANK counts the processes of one host: with two hosts two processes are "
                "rank 0, and the world is never complete",
                fix="read RANK; LOCAL_RANK chooses the GPU alone",
            )


def find_prometheus_port(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """Every process serves its metrics at the port of Prometheus itself."""
    for number, line in piece.lines():
        if _PROMETHEUS.search(line):
            yield piece.mistake(
                "prometheus_port",
                number,
                why="9090 is the port of the Prometheus server itself, and the processes of one "
                "host cannot all have it: the second fails with Address already in use",
                fix="another port for each process: 9400 + LOCAL_RANK; or rank 0 alone serves",
            )


RULES: tuple[PieceRule, ...] = (find_local_rank_as_rank, find_prometheus_port)
