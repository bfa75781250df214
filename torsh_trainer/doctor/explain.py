"""``doctor explain LOG``: the symptoms that are known in a log, with their lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from torsh_trainer.doctor.output import write_field
from torsh_trainer.doctor.symptoms import SYMPTOMS, Symptom
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.utils.files import check_plain
from torsh_trainer.utils.foreign import shorten

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_ERROR = re.compile(
    r"^(?:\S*\s)?\s*([A-Z]\w*(?:Error|Exception|Interrupt)\b.*)|\b(error|fatal): ", re.I
)
_LONGEST = 400


@dataclass
class Explanation:
    """A symptom in a log: where it stands first, and how often."""

    log: str
    symptom: Symptom
    line: int
    text: str
    count: int = 1

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        known = self.symptom
        return {
            "log": self.log,
            "line": self.line,
            "count": self.count,
            "text": self.text,
            "name": known.name,
            "follows": known.follows,
            "cause": known.cause,
            "fix": known.fix,
            "source": known.source,
        }


@dataclass(frozen=True)
class LogReading:
    """What logs hold: explanations, causes before what follows from them; else the first error."""

    logs: Sequence[str]
    lines: int
    explanations: Sequence[Explanation]
    first_error: tuple[str, int, str] | None = None


@dataclass
class _Search:
    found: dict[str, Explanation] = field(default_factory=dict)
    first_error: tuple[str, int, str] | None = None
    lines: int = 0

    def read(self, log: str, lines: Iterable[str]) -> None:
        for number, line in enumerate(lines, 1):
            self.lines += 1
            text = shorten(_COLOURS.sub("", line).strip(), _LONGEST)
            lower = text.lower()
            for symptom in SYMPTOMS:
                if symptom.is_said_in(text, lower):
                    known = self.found.get(symptom.name)
                    if known is None:
                        self.found[symptom.name] = Explanation(log, symptom, number, text)
                    else:
                        known.count += 1
            if self.first_error is None and _is_error(text, lower):
                self.first_error = (log, number, text)


def _find_logs(name: str) -> list[str]:
    """The logs of a run directory, or of another folder; a file is its own."""
    folder = Path(name)
    if not folder.is_dir():
        return [name]
    for pattern in ("logs/*.log", "*.log", "*.out"):
        if found := sorted(map(str, folder.glob(pattern))):
            return found
    raise ConfigError(f"{name} holds no logs", fix=f"name them: {name}/FILE")


def _is_error(text: str, lower: str) -> bool:
    if not any(word in lower for word in ("error", "exception", "interrupt", "fatal", "traceback")):
        return False
    return text.startswith("Traceback") or _ERROR.search(text) is not None


def explain_logs(names: Sequence[str], given: TextIO) -> LogReading:
    """What is known of the logs; ``-`` is ``given``.

    Raises:
        ConfigError: a log is no text.
        ResourceError: it cannot be read.
    """
    search = _Search()
    for name in [log for given_name in names for log in _find_logs(given_name)]:
        if name == "-":
            search.read("the input", given)
            continue
        path = Path(name)
        check_plain(path)
        try:
            with path.open("rb") as file:
                if b"\0" in file.read(4096):
                    raise ConfigError(
                        f"{name} is no text", fix="unpack it: zcat LOG | ... explain -"
                    )
            with path.open(encoding="utf-8", errors="replace") as log:
                search.read(name, log)
        except OSError as error:
            raise ResourceError(
                f"cannot read {name}: {error.strerror}", fix="name a log that exists, or -"
            ) from error
    order = {symptom.name: at for at, symptom in enumerate(SYMPTOMS)}
    found = sorted(
        search.found.values(), key=lambda one: (one.symptom.follows, order[one.symptom.name])
    )
    return LogReading(names, search.lines, found, search.first_error)


def write_explanation(found: LogReading) -> str:
    """What is told of the logs."""
    lines = []
    for one in found.explanations:
        often = f" (and {one.count - 1} times more)" if one.count > 1 else ""
        lines += [
            f"{one.log}:{one.line}: {one.symptom.name}{often}",
            *write_field("says", one.text),
            *write_field("cause", f"{one.symptom.cause} ({one.symptom.source})"),
            *write_field("fix", one.symptom.fix),
            "",
        ]
    causes = [one for one in found.explanations if not one.symptom.follows]
    if causes:
        return "\n".join(lines).rstrip()
    said = f"{found.lines} lines hold none of the {len(SYMPTOMS)} symptoms that are known here"
    if found.explanations:
        said = "these follow a failure elsewhere: the cause is in the log of another process"
    lines.append(said)
    if found.first_error is not None:
        log, number, text = found.first_error
        lines.append(f"the first error is {log}:{number}: {text}")
    return "\n".join(lines)
