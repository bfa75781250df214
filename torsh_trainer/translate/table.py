"""A plan as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from torsh_trainer.translate.plan import Plan, note_more
from torsh_trainer.translate.project import CONFIGURATION, LAUNCH, SCRIPT, Project, ProjectJob
from torsh_trainer.translate.report import as_one_line

_HEAD = ("key", "value", "line", "verdict", "becomes", "why")
_FACT_HEAD = ("fact", "where it is used", "what to look at")
_JOB_HEAD = ("job", "is", "with", "verdicts", "what next")
_WIDEST = (44, 24, 24, 16, 40)
"""Of all columns but the last, which takes what is left."""

_WIDEST_OF_JOBS = (48, 13, 32, 36)
_LEAST_LAST = 24


def table_of(plan: Plan, *, width: int) -> str:
    """The report in lines of at most ``width`` columns, where the keys leave room for that."""
    return "\n".join(_lines(plan, width)) + "\n"


def _lines(plan: Plan, width: int) -> Iterator[str]:
    world = f", {plan.world_size} processes" if plan.world_size else ""
    if plan.world_size == 1:
        world = ", 1 process"
    context = f"context {plan.context}, mode {plan.mode}"
    way = f"{plan.engine} {plan.version}, {context}"
    if plan.target != "native":
        way = f"for {plan.target}"
    if plan.taken_for:
        way = plan.taken_for
    yield f"{plan.source}: {way}{world}"
    for warning in plan.warnings:
        yield f"warning: {warning}"
    for note in plan.notes:
        yield f"note: {note}"
    yield ""
    rows = [
        (
            finding.key,
            as_one_line(finding.value),
            finding.where,
            finding.verdict,
            finding.becomes,
            finding.why + ("" if finding.engine_takes else " [not taken by the newest engine]"),
        )
        for finding in plan.findings
    ]
    if rows:
        yield from _columns([_HEAD, *rows], width)
    if plan.dtypes:
        yield ""
        heads = ("dtype of", "before", "after")
        yield from _columns([heads, *((d.what, d.before, d.after) for d in plan.dtypes)], width)
    if plan.memory is not None:
        yield ""
        yield f"memory: {plan.memory.before:.2f} before, {plan.memory.after:.2f} after"
        yield f"        {plan.memory.note}"
    if rows or not plan.facts:
        yield ""
        yield ", ".join(f"{count} {verdict}" for verdict, count in plan.counts.items() if count)
    if plan.facts:
        yield ""
        yield "missing, and only you know it:"
        facts = [(fact.name, fact.used, fact.look) for fact in plan.facts]
        yield from _columns([_FACT_HEAD, *facts], width)
        if more := note_more(plan.facts):
            yield from ("", more)


_MOST_FILES = 4
"""Of a job, that its row names."""


def table_of_project(project: Project, *, width: int) -> str:
    """A line for each job of a project, in lines of at most ``width`` columns."""
    return "\n".join(_project_lines(project, width)) + "\n"


def _project_lines(project: Project, width: int) -> Iterator[str]:
    counts = [(kind, project.count(kind)) for kind in (LAUNCH, SCRIPT, CONFIGURATION)]
    said = ", ".join(f"{count} from {kind}s" for kind, count in counts if count)
    jobs = "1 job" if len(project.jobs) == 1 else f"{len(project.jobs)} jobs"
    yield f"{project.folder}: a project, read and not executed: {jobs}, {said}"
    for note in project.notes:
        yield f"note: {note}"
    yield ""
    rows = [_job_row(job, project) for job in project.jobs]
    yield from _columns([_JOB_HEAD, *rows], width, _WIDEST_OF_JOBS)
    asked = [
        (fact.name, f"{project.shorten(plan.source)}: {fact.used}", fact.look)
        for plan in project.plans
        for fact in plan.facts
    ]
    if asked:
        yield ""
        yield "missing, and only you know it:"
        yield from _columns([_FACT_HEAD, *asked], width)


def _job_row(job: ProjectJob, project: Project) -> tuple[str, ...]:
    source = project.shorten(job.source)
    if job.plan is None:
        return (source, job.kind, "", "", str(job.error))
    plan = job.plan
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in plan.counts.items() if count)
    files = ", ".join(map(project.shorten, plan.files[:_MOST_FILES]))
    if len(plan.files) > _MOST_FILES:
        files += f" and {len(plan.files) - _MOST_FILES} more"
    return (source, job.kind, files, verdicts, _what_next(plan))


def _what_next(plan: Plan) -> str:
    if plan.facts:
        return "say what is missing: " + ", ".join(fact.name for fact in plan.facts)
    refused = [finding.key for finding in plan.findings if finding.verdict == "refused"]
    if refused:
        return "without a translation: " + ", ".join(dict.fromkeys(refused))
    approximate = [finding.key for finding in plan.findings if finding.verdict == "approximate"]
    if approximate:
        return "not the same numbers: " + ", ".join(dict.fromkeys(approximate))
    return "moves as it is"


def _columns(
    rows: Sequence[Sequence[str]], width: int, widest: Sequence[int] = _WIDEST
) -> Iterator[str]:
    count = len(rows[0])
    widths = [
        min(max(len(row[i]) for row in rows), widest[i] if i < len(widest) else width)
        for i in range(count - 1)
    ]
    last = max(_LEAST_LAST, width - sum(widths) - 2 * (count - 1))
    for row in rows:
        cells = [
            textwrap.wrap(cell, size, break_on_hyphens=False) or [""]
            for cell, size in zip(row, [*widths, last], strict=True)
        ]
        for i in range(max(map(len, cells))):
            line = [
                (cell[i] if i < len(cell) else "").ljust(size)
                for cell, size in zip(cells, [*widths, last], strict=True)
            ]
            yield "  ".join(line).rstrip()
