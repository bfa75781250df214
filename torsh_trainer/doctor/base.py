"""The contract of a check of the doctor: what it looks at, why it matters, and what it found."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar, Literal

from torsh_trainer.doctor.machine import Machine


@dataclass(frozen=True)
class CheckResult:
    """What a check saw on a host.

    ``outcome`` is ``fine``, ``finding``, or ``skipped`` where there is nothing to look at (no GPU
    here), with the reason as ``saw``. ``fix`` is the command that mends a finding, empty elsewhere.
    """

    outcome: Literal["fine", "finding", "skipped"]
    saw: str
    fix: str = ""

    @property
    def is_finding(self) -> bool:
        """Something is wrong."""
        return self.outcome == "finding"


class Check(abc.ABC):
    """One thing of a host that stops or slows a job.

    The first line of the class's docstring says what it looks at. ``why`` says in a sentence what
    happens to a job where it is wrong.
    """

    why: ClassVar[str]

    @abc.abstractmethod
    def look(self, machine: Machine) -> CheckResult:
        """What it sees on ``machine``: in seconds, without changing anything that stays.

        A file that it writes is removed again. What cannot be read is skipped with its reason,
        never taken for fine.
        """


def pass_check(saw: str) -> CheckResult:
    """Nothing is wrong."""
    return CheckResult("fine", saw)


def report_finding(saw: str, *, fix: str) -> CheckResult:
    """Something is wrong; ``fix`` is the command that mends it, or the next move."""
    return CheckResult("finding", saw, fix)


def skip_check(reason: str) -> CheckResult:
    """There is nothing to look at."""
    return CheckResult("skipped", reason)
