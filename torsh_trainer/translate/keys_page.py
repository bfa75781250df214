"""Writes what the rules say into docs/migrate, or checks it; run in the root of a repository.

``keys.md`` is theirs as a whole, and of the guide the report on the file that it takes across.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from torsh_trainer.translate import lenient_json
from torsh_trainer.translate.deepspeed import keys, versions
from torsh_trainer.translate.deepspeed.rules import RULES, DeepSpeedRule
from torsh_trainer.translate.deepspeed.source import Options
from torsh_trainer.translate.deepspeed.translator import RULE_MODULES, translate_document
from torsh_trainer.translate.deepspeed.versions import NEWEST
from torsh_trainer.translate.horovod.rules import RULES as HOROVOD_RULES
from torsh_trainer.translate.horovod.translator import RULE_MODULES as HOROVOD_RULE_MODULES
from torsh_trainer.translate.horovod.versions import NEWEST as HOROVOD_NEWEST
from torsh_trainer.translate.plan import Plan
from torsh_trainer.translate.reading import Document
from torsh_trainer.translate.report import as_one_line

PAGE = Path("docs") / "migrate" / "keys.md"
GUIDE = Path("docs") / "migrate" / "deepspeed.md"
_FILE = re.compile(r'^```json title="ds_config.json"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_REPORT = re.compile(r"(<!-- report: .*? -->\n).*?(<!-- end of report -->)", re.DOTALL)

HEAD = """\
# Keys

Every key that [`translate`](../translate.md) knows, and the rule that takes it. This page is
written by `make keys` from the rules themselves, and a test fails when it says anything else;
nobody edits it by hand.

What a rule says of *your* value, with the reason, stands in the report of your file:
`translate FILE --report report.html`. A key that stands nowhere here is an error with the nearest
name; so is one in the wrong block.
"""
DEEPSPEED = """\
## DeepSpeed

*takes* is what the value may be: `?` allows null, `int>0` a whole number above 0, words with a bar
between them one of them. *default* is DeepSpeed {newest}'s; where it is empty, the rule says what
happens without the key. *removed*: DeepSpeed {newest} refuses the key by its mere presence, and the
translation goes on from older versions.
"""
RULES_HEAD = """\
### Rules for DeepSpeed

The id of a rule stands in every finding. *versions* are those of DeepSpeed that it speaks of, where
not all.
"""
HOROVOD = """\
## Horovod

What a launch line, a file of settings, the environment and a script may say is Horovod {newest}'s
own; `horovodrun --help` lists it. Every one of them is taken by one of these rules.
"""


def page() -> str:
    """The whole page."""
    assert RULE_MODULES  # importing them has entered their rules
    assert HOROVOD_RULE_MODULES
    newest = versions.format_version(NEWEST)
    parts = [HEAD, DEEPSPEED.format(newest=newest)]
    for title, blocks in _group_by_title(keys.BLOCKS).items():
        parts += [f"### {title}\n", _table(_key_rows(blocks))]
    parts += [RULES_HEAD, _table(_rule_rows(RULES.values()))]
    parts += [HOROVOD.format(newest=HOROVOD_NEWEST), _table(_horovod_rows())]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def guide(text: str) -> str:
    """The guide ``text`` with the report on its file as it is today."""
    found = _FILE.search(text)
    assert found is not None, "the guide shows its file"
    document = Document(
        "ds_config.json", lenient_json.parse(found.group(1), name="ds_config.json"), "deepspeed", {}
    )
    plan = translate_document(document, Options(world_size=2))
    table = _table(_finding_rows(plan))
    return _REPORT.sub(lambda marks: f"{marks.group(1)}\n{table}\n{marks.group(2)}", text)


def _finding_rows(plan: Plan) -> Iterator[list[str]]:
    yield ["key", "value", "line", "verdict", "becomes", "why"]
    for f in plan.findings:
        line = str(f.line) if f.given else "default"
        becomes = f"`{f.becomes}`" if f.becomes else ""
        yield [f"`{f.key}`", f"`{as_one_line(f.value)}`", line, f.verdict, becomes, f.why]


def _group_by_title(blocks: Iterable[keys.KeyBlock]) -> dict[str, list[keys.KeyBlock]]:
    titled: dict[str, list[keys.KeyBlock]] = {}
    for block in blocks:
        title = f"`{block.prefix}`" if block.prefix else "Outermost level, and small blocks"
        titled.setdefault(title, []).append(block)
    return titled


def _key_rows(blocks: Sequence[keys.KeyBlock]) -> Iterator[list[str]]:
    yield ["key", "takes", "default", "rule", ""]
    for block in blocks:
        prefix = f"{block.prefix}." if block.prefix else ""
        for line in block.lines.strip().splitlines():
            name, kind, default, rule = line.split()
            yield [
                f"`{prefix}{name.removesuffix('!')}`",
                f"`{kind}`",
                "" if default == "-" else f"`{default}`",
                ", ".join(f"`{one}`" for one in rule.split("|")),
                "removed" if block.removed else "",
            ]


def _rule_rows(rules: Iterable[DeepSpeedRule]) -> Iterator[list[str]]:
    yield ["rule", "what it says", "versions"]
    for rule in sorted(rules, key=lambda rule: rule.id):
        since = f"since {versions.format_version(rule.since)}" if rule.since != (0,) else ""
        until = f"until {versions.format_version(rule.until)}" if rule.until != NEWEST else ""
        yield [f"`{rule.id}`", rule.doc, " ".join(filter(None, [since, until]))]


def _horovod_rows() -> Iterator[list[str]]:
    yield ["rule", "what it says"]
    for name in sorted(HOROVOD_RULES):
        yield [f"`{name}`", HOROVOD_RULES[name].doc]


def _escape(cell: str) -> str:
    """A bar in a cell: within backticks a reader would see the backslash of an escaped one."""
    coded = re.sub(r"`([^`|]*\|[^`]*)`", r"<code>\1</code>", cell)
    return coded.replace("|", "&#124;")


def _table(rows: Iterable[Sequence[str]]) -> str:
    head, *body = [[_escape(cell) for cell in row] for row in rows]
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    """Returns the exit code: 1 where ``--check`` finds a page out of date."""
    parser = argparse.ArgumentParser(prog="python -m torsh_trainer.translate.keys_page")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if a page is out of date"
    )
    check = parser.parse_args().check
    codes = [_write_or_compare(PAGE, page(), check=check)]
    if GUIDE.is_file():
        codes.append(_write_or_compare(GUIDE, guide(GUIDE.read_text("utf-8")), check=check))
    return max(codes)


def _write_or_compare(path: Path, text: str, *, check: bool) -> int:
    """Writes ``text``, or compares it with what is there."""
    before = path.read_text("utf-8") if path.is_file() else ""
    if text == before:
        return 0
    if not check:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        print(f"{path} written")
        return 0
    changes = list(difflib.unified_diff(before.splitlines(), text.splitlines(), lineterm="", n=0))
    print(f"{path} is not what the rules say; make keys writes it anew", file=sys.stderr)
    print("\n".join(changes[:40]), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
