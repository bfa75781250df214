"""What ``translate RECIPE --to ENGINE`` writes and prints."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from torsh_trainer.translate import report
from torsh_trainer.translate.command import ELSEWHERE, check_report
from torsh_trainer.translate.outward import accelerate, deepspeed, torchtitan
from torsh_trainer.translate.outward.native import Native
from torsh_trainer.translate.plan import Plan
from torsh_trainer.translate.table import table_of
from torsh_trainer.utils.files import write_text
from torsh_trainer.utils.foreign import readable

_WIDE = 200
"""Columns where no terminal says how many."""

TARGETS: Mapping[str, tuple[Callable[[Native], Plan], Callable[[Plan], str]]] = {
    "deepspeed": (deepspeed.to_deepspeed, deepspeed.text_of),
    "accelerate-fsdp": (accelerate.to_accelerate, accelerate.text_of),
    "torchtitan": (torchtitan.to_torchtitan, torchtitan.text_of),
}
"""Name -> the translation, and the text of the file."""


def write(native: Native, to: str, *, output: Path | None, report_file: Path | None) -> int:
    """Translates ``native``, prints the report, and writes both where asked; 0, 10 or 11.

    Raises:
        ConfigError: the recipe is nothing that the engine could train, or a name is wrong.
        ResourceError: a file cannot be written.
    """
    check_report(report_file)
    translate, text_of = TARGETS[to]
    plan = translate(native)
    if output is not None:
        write_text(output, text_of(plan), fix=ELSEWHERE)
    if report_file is not None:
        html = report_file.suffix != ".json"
        text = report.as_html(plan) if html else report.as_json(plan)
        write_text(report_file, text, fix=ELSEWHERE)
    width = shutil.get_terminal_size((_WIDE, 24)).columns
    sys.stdout.write(readable(table_of(plan, width=width)))
    if output is not None:
        print(f"\n{output}: written for {plan.target}")
    return plan.exit_code
