"""A plugin of pytest: writes down which tests were chosen and how each ended, as it goes.

``pytest -p benchmarks.gpu.record --record FILE``: what was not reached in time is known by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--record", type=Path, help="a file, which gets a line of JSON for each event")


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(Record(config.getoption("--record")))


class Record:
    """Writes to ``file``."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_collection_finish(self, session: Any) -> None:
        self._write(chosen=[item.nodeid for item in session.items])

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":  # set up and torn down well is not
            words = report.longrepr[2] if report.skipped and report.longrepr else ""
            self._write(test=report.nodeid, outcome=report.outcome, words=str(words))

    def _write(self, **facts: Any) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")


def read(file: Path) -> dict[str, Any]:
    """``{"passed", "failed": [names], "skipped": {reason: [names]}, "not_run": [names]}``."""
    chosen: list[str] = []
    ended: dict[str, tuple[str, str]] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        facts = json.loads(line)
        if "chosen" in facts:
            chosen = facts["chosen"]
        elif ended.get(facts["test"], ("",))[0] != "failed":
            ended[facts["test"]] = facts["outcome"], facts["words"].removeprefix("Skipped: ")
    skipped: dict[str, list[str]] = {}
    for name, (outcome, words) in ended.items():
        if outcome == "skipped":
            skipped.setdefault(words, []).append(name)
    return {
        "passed": [name for name, (outcome, _) in ended.items() if outcome == "passed"],
        "failed": [name for name, (outcome, _) in ended.items() if outcome == "failed"],
        "skipped": skipped,
        "not_run": [name for name in chosen if name not in ended],
    }
