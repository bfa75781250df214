"""A plan as JSON (schema: report.schema.json beside this file) and as one HTML page."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from torsh_trainer import __version__
from torsh_trainer.translate.plan import VERDICTS, Plan, note_more
from torsh_trainer.translate.project import Project

SCHEMA = "torsh-trainer/translation/1"
"""The name and version of the JSON report."""


PROJECT_SCHEMA = "torsh-trainer/project/1"
"""The same for the report of a folder, whose ``jobs`` each hold a ``plan`` as that schema says."""


def as_json(plan: Plan) -> str:
    """The report as JSON text."""
    return _dump(_content_of(plan))


def project_as_json(project: Project) -> str:
    """The report of a folder as JSON text; of a job that could not be read, the ``error``."""
    return _dump(
        {
            "schema": PROJECT_SCHEMA,
            "folder": project.folder,
            "files": project.read,
            "exit_code": project.exit_code,
            "notes": list(project.notes),
            "jobs": [
                {
                    "source": job.source,
                    "is": job.kind,
                    "plan": None if job.plan is None else _content_of(job.plan),
                    "error": None if job.error is None else str(job.error),
                }
                for job in project.jobs
            ],
        }
    )


def _dump(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n"


def _content_of(plan: Plan) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "source": plan.source,
        "engine": plan.engine,
        "target": plan.target,
        "version": plan.version,
        "context": plan.context,
        "mode": plan.mode,
        "world_size": plan.world_size,
        "exit_code": plan.exit_code,
        "counts": plan.counts,
        "choices": dict(plan.choices),
        "values": dict(plan.values),
        "taken_for": plan.taken_for,
        "warnings": list(plan.warnings),
        "notes": list(plan.notes),
        "facts": [dataclasses.asdict(fact) for fact in plan.facts],
        "command": plan.command,
        "sweep": {key: list(values) for key, values in plan.sweep.items()},
        "files": list(plan.files),
        "findings": [dataclasses.asdict(finding) for finding in plan.findings],
        "dtypes": [dataclasses.asdict(row) for row in plan.dtypes],
        "memory": dataclasses.asdict(plan.memory) if plan.memory else None,
    }


def schema_text() -> str:
    """The published JSON Schema of ``as_json``."""
    return files(__package__).joinpath("report.schema.json").read_text("utf-8")


def as_html(plan: Plan) -> str:
    """The report as a page that needs no other file."""
    title = f"{plan.source}: from {plan.engine} to {plan.target}"
    return _page(title, [f"<h1>{escape(title)}</h1>", *_sections(plan)])


def project_as_html(project: Project) -> str:
    """The report of a folder as one page: a table of its jobs, and each job below it."""
    title = f"{project.folder}: {len(project.jobs)} jobs"
    rows, below = [], []
    for number, job in enumerate(project.jobs, 1):
        if job.plan is None:
            rows.append(_row((job.source, job.kind, "", str(job.error)), kind="refused"))
            continue
        counts = ", ".join(f"{count} {word}" for word, count in job.plan.counts.items() if count)
        facts = ", ".join(fact.name for fact in job.plan.facts)
        missing = f"missing: {facts}" if facts else ""
        link = f'<a href="#job-{number}">'
        row = _row((job.source, job.kind, counts, missing))
        rows.append(row.replace("<td>", f"<td>{link}", 1).replace("</td>", "</a></td>", 1))
        below += [f'<h1 id="job-{number}">{escape(job.source)}</h1>', *_sections(job.plan)]
    notes = [f"<p>{escape(note)}</p>" for note in project.notes]
    table = _table(("job", "is", "verdicts", "what next"), rows)
    return _page(title, [f"<h1>{escape(title)}</h1>", *notes, table, *below])


def _page(title: str, parts: Sequence[str]) -> str:
    style = files(__package__).joinpath("report.css").read_text("utf-8")
    head = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{style}</style></head><body>",
    ]
    foot = f"<footer>ToRSh Trainer {escape(__version__)}</footer></body></html>"
    return "\n".join([*head, *parts, foot]) + "\n"


def _sections(plan: Plan) -> list[str]:
    """What a page says of a plan below its title."""
    counts = "".join(
        f'<li class="{verdict}"><b>{plan.counts[verdict]}</b> {verdict}</li>'
        for verdict in VERDICTS
    )
    world = f", {plan.world_size} processes" if plan.world_size else ""
    context = f"context {plan.context}, mode {plan.mode}"
    return [
        f"<p>{escape(plan.taken_for or f'{plan.engine} {plan.version}, {context}{world}')}</p>",
        f'<ul class="counts">{counts}</ul>',
        *(f'<p class="warning">{escape(warning)}</p>' for warning in plan.warnings),
        *(f"<p>{escape(note)}</p>" for note in plan.notes),
        *([f"<pre>{escape(plan.command)}</pre>"] if plan.command and not plan.facts else []),
        _facts(plan),
        "<h2>Every key</h2>",
        _table(
            ("key", "value", "line", "verdict", "becomes", "why", "rule"),
            list(_finding_rows(plan)),
        ),
        _dtypes(plan),
        _memory(plan),
    ]


def _facts(plan: Plan) -> str:
    if not plan.facts:
        return ""
    rows = [_row((fact.name, fact.used, fact.look)) for fact in plan.facts]
    heads = ("fact", "where it is used", "what to look at")
    more = note_more(plan.facts)
    said = f"<p>{escape(more)}</p>" if more else ""
    return "<h2>Missing, and only you know it</h2>" + _table(heads, rows) + said


def _finding_rows(plan: Plan) -> Iterator[str]:
    for f in plan.findings:
        why = f.why if f.engine_takes else f"{f.why} (the newest engine does not take the key)"
        cells = (f.key, as_one_line(f.value), f.where, f.verdict, f.becomes, why, f.rule)
        yield _row(cells, kind=f.verdict)


def _row(cells: Sequence[str], kind: str = "") -> str:
    cells = [escape(cell) for cell in cells]
    inner = "".join(f"<td>{cell}</td>" for cell in (_breakable(cells[0]), *cells[1:]))
    return f'<tr class="{kind}">{inner}</tr>' if kind else f"<tr>{inner}</tr>"


def _breakable(text: str) -> str:
    """A dotted name, which a browser may break after a dot, and nowhere else."""
    return text.replace(".", ".<wbr>")


def _table(head: Sequence[str], rows: Sequence[str]) -> str:
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    return (
        f'<div class="wide"><table><thead><tr>{names}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _dtypes(plan: Plan) -> str:
    if not plan.dtypes:
        return ""
    rows = [_row((row.what, row.before, row.after)) for row in plan.dtypes]
    return "<h2>Dtypes</h2>" + _table(("what", "before", "after"), rows)


def _memory(plan: Plan) -> str:
    if plan.memory is None:
        return ""
    before, after = plan.memory.before, plan.memory.after
    return (
        f"<h2>Memory</h2><p>{before:.2f} before, {after:.2f} after: {escape(plan.memory.note)}</p>"
    )


def as_one_line(value: Any) -> str:
    """A value as JSON on one line, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 120 else text[:117] + "..."
