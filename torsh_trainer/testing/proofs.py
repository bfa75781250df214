"""Which test proves which rule of the translation: read from the tests' own marks.

``python -m torsh_trainer.testing.proofs [--check]`` writes the table that reports take
``proved_by`` from, or says whether it is up to date; run it in the root of a repository. A test
names its rules with ``@pytest.mark.proves("zero.stage", ...)``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torsh_trainer.testing.guarantees.reading import imported

TABLE = Path("torsh_trainer") / "translate" / "deepspeed" / "proofs.json"
PLACES = ("tests/translate", "tests/unit", "plugins/deepspeed/tests")
MARK = "proves"


def table_of(root: Path) -> str:
    """The table as JSON text: rule -> ids of tests.

    Raises:
        ResourceError: a test imports what is not installed.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for place in PLACES:
        for file in sorted((root / place).glob("test_*.py")):
            if f"mark.{MARK}(" in file.read_text("utf-8"):
                where = file.relative_to(root).as_posix()
                for test, rules in _marked(imported(file, where)):
                    for rule in rules:
                        found[rule].append(f"{where}::{test}")
    return json.dumps({rule: sorted(found[rule]) for rule in sorted(found)}, indent=1) + "\n"


def _marked(module: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, value in vars(module).items():
        if name.startswith("test_"):
            yield name, _rules(value)
        elif isinstance(value, type) and name.startswith("Test"):
            for inner, method in vars(value).items():
                if inner.startswith("test_"):
                    yield f"{name}::{inner}", _rules(method)


def _rules(test: Any) -> tuple[str, ...]:
    marks = getattr(test, "pytestmark", ())
    return tuple(rule for mark in marks if mark.name == MARK for rule in mark.args)


def main() -> int:
    """Returns the exit code: 1 where ``--check`` finds the table out of date."""
    parser = argparse.ArgumentParser(prog="python -m torsh_trainer.testing.proofs")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if the table is out of date"
    )
    check = parser.parse_args().check
    text = table_of(Path.cwd())
    if TABLE.is_file() and TABLE.read_text("utf-8") == text:
        return 0
    if not check:
        TABLE.write_text(text, encoding="utf-8")
        print(f"{TABLE} written")
        return 0
    print(
        f"{TABLE} is not what the tests say; python -m torsh_trainer.testing.proofs writes it anew",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
