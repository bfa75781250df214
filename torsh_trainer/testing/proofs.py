"""Which test proves which rule of the translation: read from the tests' own marks.

``python -m torsh_trainer.testing.proofs [--check]`` writes the tables that reports take
``proved_by`` from, or says whether they are up to date; run it in the root of a repository. A test
names its rules with ``@pytest.mark.proves("zero.stage", ...)``, and those of another engine than
DeepSpeed with ``engine="horovod"``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torsh_trainer.testing.guarantees.reading import import_test
from torsh_trainer.translate.proofs import ENGINES

PLACES = ("tests/translate", "tests/unit", "plugins/deepspeed/tests", "plugins/horovod/tests")
MARK = "proves"


def table_of(engine: str) -> Path:
    """Where the table of an engine lies, from the root of the repository."""
    return Path("torsh_trainer") / "translate" / engine / "proofs.json"


def tables(root: Path) -> dict[str, str]:
    """Engine -> its table as JSON text: rule -> ids of tests.

    Raises:
        ResourceError: a test imports what is not installed.
    """
    found: dict[str, dict[str, list[str]]] = {name: defaultdict(list) for name in ENGINES}
    for place in PLACES:
        for file in sorted((root / place).glob("test_*.py")):
            if f"mark.{MARK}" in file.read_text("utf-8"):
                where = file.relative_to(root).as_posix()
                for test, engine, rule in _find_marks(import_test(file, where)):
                    found[engine][rule].append(f"{where}::{test}")
    return {
        engine: json.dumps({rule: sorted(rules[rule]) for rule in sorted(rules)}, indent=1) + "\n"
        for engine, rules in found.items()
    }


def _find_marks(module: Any) -> Iterator[tuple[str, str, str]]:
    """(test, engine, rule) of every mark in a module."""
    for name, value in vars(module).items():
        if name.startswith("test_"):
            yield from ((name, *proved) for proved in _rules(value))
        elif isinstance(value, type) and name.startswith("Test"):
            for inner, method in vars(value).items():
                if inner.startswith("test_"):
                    yield from ((f"{name}::{inner}", *proved) for proved in _rules(method))


def _rules(test: Any) -> Iterator[tuple[str, str]]:
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == MARK:
            yield from ((mark.kwargs.get("engine", ENGINES[0]), rule) for rule in mark.args)


def main() -> int:
    """Returns the exit code: 1 where ``--check`` finds a table out of date."""
    parser = argparse.ArgumentParser(prog="python -m torsh_trainer.testing.proofs")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if a table is out of date"
    )
    check = parser.parse_args().check
    old = {
        table_of(engine): text
        for engine, text in tables(Path.cwd()).items()
        if not table_of(engine).is_file() or table_of(engine).read_text("utf-8") != text
    }
    for table, text in old.items():
        if check:
            what = "is not what the tests say; python -m torsh_trainer.testing.proofs writes it"
            print(f"{table} {what} anew", file=sys.stderr)
        else:
            table.write_text(text, encoding="utf-8")
            print(f"{table} written")
    return 1 if check and old else 0


if __name__ == "__main__":
    sys.exit(main())
