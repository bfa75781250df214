"""All checks on one host, and what is told of them."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torsh_trainer import __version__
from torsh_trainer.doctor.base import Check, CheckResult
from torsh_trainer.doctor.machine import Machine, wait_for
from torsh_trainer.errors import ConfigError, nearest
from torsh_trainer.utils import registry

_LOOK_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class CheckReport:
    """What one check saw, why it matters, and what mends it."""

    name: str
    result: CheckResult
    why: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        told = {"name": self.name, "outcome": self.result.outcome, "saw": self.result.saw}
        return told | {"why": self.why, "fix": self.result.fix}

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> CheckReport:
        """What ``as_dict`` gave."""
        result = CheckResult(told["outcome"], told["saw"], told["fix"])
        return cls(told["name"], result, told["why"])


@dataclass(frozen=True)
class Examination:
    """What all checks saw on one host; ``took_s`` in seconds."""

    host: str
    reports: tuple[CheckReport, ...]
    took_s: float

    @property
    def findings(self) -> list[CheckReport]:
        """What is wrong, and checks that failed themselves."""
        return [one for one in self.reports if one.result.is_finding]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "host": self.host,
            "torsh_trainer": __version__,
            "seconds": round(self.took_s, 2),
            "findings": len(self.findings),
            "checks": [one.as_dict() for one in self.reports],
        }


def examine(machine: Machine, *, only: Sequence[str] = ()) -> Examination:
    """Runs the checks, one after the other; all of them, or those of the names ``only``.

    A check that fails itself is a finding: what it looks at is not known to be right.

    Raises:
        ConfigError: there is no check of such a name.
        ResourceError: a plugin's check cannot be loaded.
    """
    started = time.monotonic()
    reports = tuple(
        CheckReport(name, _look(check, machine, name), check.why)
        for name, check in load_checks(only).items()
    )
    return Examination(socket.gethostname(), reports, time.monotonic() - started)


def load_checks(only: Sequence[str] = ()) -> Mapping[str, Check]:
    """Name -> check, ours first.

    Raises:
        ConfigError: there is no check of such a name.
        ResourceError: a plugin's check cannot be loaded.
    """
    for name in only:
        if name not in registry.CHECKS:
            raise ConfigError(
                f"--only {name}: there is no such check",
                fix=nearest(name, registry.CHECKS.names()),
            )
    names = [name for name in registry.CHECKS.registrations() if not only or name in only]
    return {name: registry.CHECKS.load(name)() for name in names}


def _look(check: Check, machine: Machine, name: str) -> CheckResult:
    """What a check saw; one that fails, or hangs as a dead file system does, keeps no other."""

    def look() -> CheckResult:
        try:
            return check.look(machine)
        except Exception as error:  # noqa: BLE001 - a plugin's may raise anything
            said = " ".join(f"{type(error).__name__}: {error}".split())
            fix = f"report it; until then leave {name} out, with --only and the names of others"
            return CheckResult("finding", f"the check itself failed: {said}", fix)

    seen = wait_for(look, timeout_s=_LOOK_TIMEOUT_S)
    if seen is not None:
        return seen
    saw = f"no answer within {_LOOK_TIMEOUT_S:g} s: what it looks at hangs"
    return CheckResult("finding", saw, "dmesg | tail; df (a file system whose server is gone)")
