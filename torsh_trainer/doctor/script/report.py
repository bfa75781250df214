"""What is printed of mistakes in scripts."""

from __future__ import annotations

from torsh_trainer.doctor.output import write_field
from torsh_trainer.doctor.script.base import ScriptExamination
from torsh_trainer.utils.foreign import shorten


def write_mistakes(found: ScriptExamination) -> str:
    """Every mistake with its line, what happens, and the correction."""
    lines = []
    for one in found.mistakes:
        lines += [f"{one.file}:{one.line}: {one.name}", f"  says   {shorten(one.said, 90)}"]
        lines += write_field("why", one.why) + write_field("fix", one.fix) + [""]
    lines += [f"not read: {why}" for why in found.unread]
    read = ", ".join(f"{count} {kind}" for kind, count in found.pieces.items()) or "nothing"
    count, files = len(found.mistakes), len(found.files)
    said = f"{count} mistake{'s' * (count != 1)} in {files} file{'s' * (files != 1)}"
    lines.append(f"{said}; read: {read}")
    return "\n".join(lines)
