"""What is printed of mistakes in scripts."""

from __future__ import annotations

import textwrap

from torsh_trainer.doctor.script.base import ScriptReading
from torsh_trainer.utils.foreign import shorten

_WIDTH = 100


def write_mistakes(found: ScriptReading) -> str:
    """Every mistake with its line, what happens, and the correction."""
    lines = []
    for one in found.mistakes:
        lines += [f"{one.file}:{one.line}: {one.name}", f"  says   {shorten(one.said, 90)}"]
        lines += _field("why", one.why) + _field("fix", one.fix) + [""]
    lines += [f"not read: {why}" for why in found.unread]
    read = ", ".join(f"{count} {kind}" for kind, count in found.pieces.items()) or "nothing"
    count, files = len(found.mistakes), len(found.files)
    said = f"{count} mistake{'s' * (count != 1)} in {files} file{'s' * (files != 1)}"
    lines.append(f"{said}; read: {read}")
    return "\n".join(lines)


def _field(name: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=f"  {name:<7}",
        subsequent_indent=" " * 9,
        break_long_words=False,
        break_on_hyphens=False,
    )
