"""The clock of this host."""

from __future__ import annotations

import time

from torsh_trainer.doctor.base import Check, CheckResult, pass_check, report_finding
from torsh_trainer.doctor.machine import Machine

_EARLIEST = 1_750_000_000
"""June 2025, in seconds since 1970: before the releases of torch that we run on."""

_ADJUSTED = ("chronyd", "ntpd", "systemd-timesyn", "ptp4l", "phc2sys", "openntpd")


class Clock(Check):
    """The clock says a possible time; `--hosts` compares those of all hosts."""

    why = (
        "with a clock that is years behind, certificates are not yet valid: nothing can be "
        "downloaded, and files seem to come from the future"
    )

    def look(self, machine: Machine) -> CheckResult:
        now = time.time()
        saw = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
        if now < _EARLIEST:
            return report_finding(saw, fix="timedatectl set-ntp true, or chronyc makestep")
        names = {
            (machine.read(f"/proc/{one.parent.name}/comm") or "").strip()
            for one in machine.glob("proc/[0-9]*/comm")
        }
        kept = sorted(names & set(_ADJUSTED))
        return pass_check(f"{saw}, kept by {kept[0]}" if kept else f"{saw}, kept by nothing here")
