"""A check of the doctor: ``python -m torsh_trainer doctor --only scratch``."""

from __future__ import annotations

from pathlib import Path

from torsh_trainer.doctor.base import Check, CheckResult, pass_check, report_finding, skip_check
from torsh_trainer.doctor.machine import Machine


class Scratch(Check):
    """The site's scratch disk, which SITE_SCRATCH names, is mounted."""

    why = "jobs of this site keep their data there, and fill the home disk where it is missing"

    def look(self, machine: Machine) -> CheckResult:
        folder = machine.env.get("SITE_SCRATCH", "")
        if not folder:
            return skip_check("SITE_SCRATCH is not set")
        if not Path(folder).is_dir():
            return report_finding(f"{folder} is not there", fix=f"mount {folder}")
        return pass_check(folder)
