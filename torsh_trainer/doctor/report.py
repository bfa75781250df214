"""What the doctor prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torsh_trainer.doctor.base import Check
from torsh_trainer.doctor.examination import CheckReport, Examination
from torsh_trainer.doctor.output import write_field


def write_examination(found: Examination, *, show_all: bool) -> str:
    """The findings of one host, each with why and fix; with ``show_all`` what was fine, too."""
    lines = [f"{found.host}: {len(found.reports)} checks in {found.took_s:.1f} s"]
    for one in found.findings:
        lines += ["", *write_finding(one)]
    rest = [one for one in found.reports if not one.result.is_finding]
    if show_all:
        lines += ["", *_write_rest(rest)]
    fine = sum(one.result.outcome == "fine" for one in rest)
    findings, more = len(found.findings), "" if show_all else " (--all shows them)"
    told = f"{findings} finding{'s' * (findings != 1)}; fine: {fine}, nothing to look at here"
    lines += ["", f"{told}: {len(rest) - fine}{more}"]
    return "\n".join(lines)


def write_hosts(told: Mapping[str, Any], *, show_all: bool) -> str:
    """What was found on each host, between them, and in their network."""
    lines = []
    for examination in told["hosts"]:
        rows = [CheckReport.from_dict(row) for row in examination["checks"]]
        found = Examination(examination["host"], tuple(rows), examination["seconds"])
        lines += [write_examination(found, show_all=show_all), ""]
    lines += [f"not reached: {error}\n" for error in told["unreached"].values()]
    count = len(told["between"])
    lines.append(f"between the hosts: {count} finding{'s' * (count != 1)}")
    for row in told["between"]:
        lines += ["", *write_finding(CheckReport.from_dict(row))]
    whole = told["network"]["all"]
    if whole is not None and not whole["stage"]:
        speed, small = whole["bandwidth"] / 1e6, whole["small_s"] * 1000
        said = f"{speed:.0f} MB/s on the bus, {small:.1f} ms for 16 bytes"
        promised = told["network"]["promised"]
        beside = f"; the slowest link promises {promised / 1e6:.0f} MB/s" if promised else ""
        lines += ["", f"all-reduce over {len(whole['hosts'])} hosts: {said}{beside}"]
    pairs = [pair for pair in told["network"]["pairs"] if not pair["stage"]]
    if pairs:
        slowest = min(pairs, key=lambda pair: pair["bandwidth"])
        speed = slowest["bandwidth"] / 1e6
        lines.append(f"pair by pair: {speed:.0f} MB/s or more ({' - '.join(slowest['hosts'])})")
    return "\n".join(lines)


def write_finding(one: CheckReport) -> list[str]:
    """One finding: its name, and what it saw, why it matters, what mends it."""
    return [
        f"  {one.name}",
        *write_field("saw", one.result.saw, indent=4, column=5),
        *write_field("why", one.why, indent=4, column=5),
        *write_field("fix", one.result.fix, indent=4, column=5),
    ]


def write_list(checks: Iterable[tuple[str, Check]]) -> str:
    """Every check with what it looks at."""
    rows = [(name, summarize(check)) for name, check in checks]
    column = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:<{column}}{what}" for name, what in rows)


def summarize(check: Check) -> str:
    """The first line of a check's docstring: what it looks at."""
    return (type(check).__doc__ or "").strip().splitlines()[0]


def _write_rest(rest: Sequence[CheckReport]) -> list[str]:
    column = max((len(one.name) for one in rest), default=0) + 2
    return [
        f"  {one.name:<{column}}{'-  ' if one.result.outcome == 'skipped' else ''}{one.result.saw}"
        for one in rest
    ]
