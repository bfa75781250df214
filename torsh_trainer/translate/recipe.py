"""A plan as a recipe: YAML that `+recipe=` takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from torsh_trainer.translate.plan import Plan

_ORDER = (
    "task",
    "trainer",
    "data",
    "optimizer",
    "schedule",
    "strategy",
    "precision",
    "compression",
    "launcher",
    "logger",
)


def recipe_of(plan: Plan) -> str:
    """The text of the recipe file."""
    parts = ["\n".join(_head(plan))]
    if plan.choices:
        chosen = [
            f"  - override /{group}: {plan.choices[group]}" for group in _groups(plan.choices)
        ]
        parts.append("defaults:\n" + "\n".join(chosen))
    groups = nest(plan.values)
    parts += [_yaml({name: groups[name]}) for name in _groups(groups)]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _head(plan: Plan) -> Iterator[str]:
    yield "# @package _global_"
    engine = f"{plan.engine} {plan.version}, {plan.context}, {plan.mode}"
    if plan.taken_for:
        engine = _one_line(plan.taken_for)
    yield f"# Translated from {_one_line(plan.source)} ({engine})."
    if "task._target_" not in plan.values:
        yield "# It names no model and no data: add task=, model= and data=, here or when it runs."
    if not {"trainer.max_steps", "trainer.max_epochs"} & set(plan.values):
        yield "# Nor the length of the run: trainer.max_steps or trainer.max_epochs."
    for verdict in ("refused", "approximate"):
        findings = [finding for finding in plan.findings if finding.verdict == verdict]
        if findings:
            yield f"# {verdict.capitalize()}:"
        for finding in findings:
            yield f"#   {_one_line(finding.key)}: {_one_line(finding.why)}"


def _one_line(text: str) -> str:
    """Nothing from the source may end a comment."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _groups(names: Mapping[str, Any]) -> list[str]:
    return sorted(names, key=lambda name: (name not in _ORDER, _rank(name), name))


def _rank(name: str) -> int:
    return _ORDER.index(name) if name in _ORDER else 0


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as dicts in one another."""
    content: dict[str, Any] = {}
    for dotted, value in values.items():
        *parents, name = dotted.split(".")
        node = content
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return content


class _Dumper(yaml.SafeDumper):
    """Lists on one line, as the files under conf/ have them."""


def _float(dumper: yaml.SafeDumper, value: float) -> yaml.Node:
    text = repr(value)
    if "e" in text and "." not in text:  # YAML 1.1 takes 1e-05 for a text
        text = text.replace("e", ".0e")
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


def _list(dumper: yaml.SafeDumper, value: list[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)


_Dumper.add_representer(float, _float)
_Dumper.add_representer(list, _list)


def _yaml(content: Mapping[str, Any]) -> str:
    return yaml.dump(dict(content), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
