"""Whatever a configuration holds: no traceback, no key without a verdict, the same answer twice."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate import report
from torsh_trainer.translate.deepspeed import keys, versions
from torsh_trainer.translate.deepspeed.source import CONTEXTS, Options
from torsh_trainer.translate.deepspeed.translator import translate
from torsh_trainer.translate.nodes import leaves, node_of
from torsh_trainer.translate.recipe import recipe_of
from torsh_trainer.translate.table import table_of

SAME = ("exact", "emulated")
PATHS = sorted(path for path in keys.schema() if path[-1] != "*")
ODD_NUMBERS = (0, 1, 2, 8, -1, 0.5, 1e-5, 5e8, 1e300, 2**70, float("nan"))
ODD_TEXTS = ("", "auto", "cpu", "3", "bf16", "Adam", "WarmupLR", "x,", "log", "linear")
ODD_REST = (None, True, False, [], [1], [0.9, 0.99], {}, {"a": 1})
ODD = st.sampled_from(ODD_NUMBERS) | st.sampled_from(ODD_TEXTS) | st.sampled_from(ODD_REST)
SENSIBLE: dict[keys.Path, list[Any]] = {
    ("train_batch_size",): [64, 128],
    ("train_micro_batch_size_per_gpu",): [1, 4, 8],
    ("gradient_accumulation_steps",): [1, 2],
    ("optimizer", "type"): ["Adam", "AdamW", "SGD", "Lamb", "OneBitAdam", "Adagrad"],
    ("scheduler", "type"): ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "StepLR"],
    ("zero_optimization", "stage"): [0, 1, 2, 3],
}


def put(config: dict[str, Any], path: keys.Path, value: Any) -> None:
    for key in path[:-1]:
        inner = config.setdefault(key, {})
        if not isinstance(inner, dict):
            return
        config = inner
    config[path[-1]] = value


@st.composite
def configurations(draw: st.DrawFn, *, odd: bool) -> dict[str, Any]:
    config: dict[str, Any] = {}
    put(config, ("train_micro_batch_size_per_gpu",), 4)
    for path in draw(st.lists(st.sampled_from(PATHS), max_size=14)):
        if path in SENSIBLE:
            put(config, path, draw(st.sampled_from(SENSIBLE[path])))
        elif odd:
            put(config, path, draw(ODD))
        else:
            default = keys.schema()[path].default
            flipped = not default if isinstance(default, bool) else default
            put(config, path, draw(st.sampled_from([default, flipped])))
    if odd and draw(st.booleans()):
        name = draw(st.text("abcdefgz_", min_size=1, max_size=6))
        put(config, (*draw(st.sampled_from(PATHS))[:-1], name), draw(ODD))
    return config


OPTIONS = st.builds(
    Options,
    world_size=st.sampled_from([None, 1, 4, 8]),
    version=st.sampled_from([(0, 14, 0), (0, 19, 2), (0, 19, 6), versions.NEWEST]),
    context=st.sampled_from(CONTEXTS),
    lenient=st.booleans(),
)


def keys_in(config: dict[str, Any]) -> set[str]:
    return {".".join(path) for path, _ in leaves(node_of(config))}


def outputs(config: dict[str, Any], options: Options) -> tuple[str, ...]:
    plan = translate(config, options)
    assert {f.key for f in plan.findings if f.given} == keys_in(config)
    assert not [f for f in plan.findings if f.rule == "ledger"]
    assert plan.exit_code in (0, 10, 11)
    unproved = {f.rule for f in plan.findings if f.verdict in SAME and not f.proved_by}
    assert not unproved
    text = report.as_json(plan)
    json.loads(text)
    return text, report.as_html(plan), table_of(plan, width=120), recipe_of(plan)


def answer(config: dict[str, Any], options: Options) -> tuple[str, ...]:
    """All outputs, or the words and the next move of a refusal."""
    try:
        return outputs(config, options)
    except ConfigError as error:
        return error.sentence, error.fix


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(configurations(odd=True), OPTIONS)
def test_whatever_stands_there_is_translated_whole_or_refused_in_words(config, options):
    first, second = (answer(config, options) for _ in range(2))
    assert first == second
    assert all(first)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(configurations(odd=False))
def test_the_order_of_keys_changes_nothing_but_their_lines(config):
    turned = dict(reversed(config.items()))
    try:
        first = translate(config)
    except ConfigError:
        with pytest.raises(ConfigError):
            translate(turned)
        return
    second = translate(turned)
    assert (first.choices, first.values) == (second.choices, second.values)
    assert sorted(map(repr, first.findings)) == sorted(map(repr, second.findings))
