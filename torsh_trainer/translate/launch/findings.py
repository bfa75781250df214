"""What a job of a launch file comes to: findings, options of groups, and knobs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torsh_trainer.translate.launch.flags import StatedFlag
from torsh_trainer.translate.outcomes import Outcome
from torsh_trainer.translate.plan import Finding
from torsh_trainer.utils.masking import MASK, is_secret, mask_text

ASKED = "asked below: only you know it"


@dataclass
class JobFindings:
    """What a job comes to: findings in their order, options of groups, and knobs."""

    findings: list[Finding] = field(default_factory=list)
    sets: list[Mapping[str, Any]] = field(default_factory=list)
    choices: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def take(self, said: StatedFlag, outcome: Outcome, rule: str, *, given: bool = True) -> None:
        self.choices.update(outcome.choices)
        self.values.update(outcome.values)
        self.sets.append({**outcome.choices, **outcome.values})
        self.findings.append(
            Finding(
                key=said.key,
                value=_report_value(said),
                line=said.place.line if given else 0,
                column=said.place.column if given else 0,
                verdict=outcome.verdict,
                becomes=outcome.said,
                why=outcome.why,
                rule=rule,
                given=given,
                file=said.file,
            )
        )

    def settle(self) -> None:
        """Says of what another line or file overrides that it does not count."""
        final = {**self.choices, **self.values}
        for at, sets in enumerate(self.sets):
            lost = [key for key, value in sets.items() if final.get(key, value) != value]
            if lost:
                says = ", ".join(f"{key}={final[key]}" for key in lost)
                self.findings[at] = replace(
                    self.findings[at],
                    verdict="dead",
                    becomes="",
                    why=f"{says} counts before it, from another of these lines",
                )

    def refuse(self, knob: str, why: str) -> None:
        """Says of every row that sets ``knob`` why nothing can come of it."""
        for at, finding in enumerate(self.findings):
            if knob in re.split("[ =]", finding.becomes):
                self.findings[at] = replace(finding, verdict="refused", becomes="", why=why)
                self.sets[at] = {}

    def ask(self, names: set[str]) -> None:
        """Says of a file that is not where the line says that it is asked for."""
        for at in range(len(self.sets)):
            finding = self.findings[at]
            if finding.key.lstrip("-").replace("-", "_") in names:
                self.findings[at] = replace(finding, verdict="refused", why=ASKED, becomes="")


def _report_value(said: StatedFlag) -> Any:
    """The value for the report, without secrets."""
    if is_secret(said.name):
        return MASK
    return mask_text(said.text) if said.values or not said.file else said.text
