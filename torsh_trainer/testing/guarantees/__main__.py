"""Writes docs/guarantees.md, or checks it; run in the root of a repository."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from torsh_trainer.testing.guarantees.page import page_of
from torsh_trainer.testing.guarantees.reading import read

PAGE = Path("docs") / "guarantees.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 where ``--check`` finds the page out of date."""
    parser = argparse.ArgumentParser(prog="python -m torsh_trainer.testing.guarantees")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if the page is out of date"
    )
    check = parser.parse_args(argv).check
    page = page_of(read(Path.cwd()))
    before = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
    if page == before:
        return 0
    if not check:
        PAGE.write_text(page, encoding="utf-8")
        print(f"{PAGE} written")
        return 0
    changes = list(difflib.unified_diff(before.splitlines(), page.splitlines(), lineterm="", n=0))
    print(f"{PAGE} is not what the tests say; make guarantees writes it anew", file=sys.stderr)
    print("\n".join(changes[:40]), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
