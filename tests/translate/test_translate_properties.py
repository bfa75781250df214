"""Whatever a configuration holds: no traceback, no key without a verdict, the same answer twice."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torsh_trainer.errors import ConfigError, TorshError
from torsh_trainer.translate import report
from torsh_trainer.translate.deepspeed import keys, versions
from torsh_trainer.translate.deepspeed.source import CONTEXTS, MODES, Options
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
    mode=st.sampled_from(MODES),
    lenient=st.booleans(),
    sizes_from_loader=st.booleans(),
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


@st.composite
def texts(draw: st.DrawFn) -> tuple[dict[str, Any], str, dict[str, int]]:
    """A configuration, a file that holds it as people write, and the line of each key."""
    config = json.loads(json.dumps(draw(configurations(odd=False))))
    lines, places = ["{"], {}

    def write(node: dict[str, Any], above: str, indent: str) -> None:
        for name, value in node.items():
            if draw(st.booleans()):
                lines.append(f"{indent}{draw(st.sampled_from(['#', '//']))} {name}: a remark")
            places[f"{above}{name}"] = len(lines) + 1
            key = name if draw(st.booleans()) else json.dumps(name)
            if isinstance(value, dict) and value:
                lines.append(f"{indent}{key}: {{")
                write(value, f"{above}{name}.", f"{indent}  ")
                lines.append(f"{indent}}},")
            else:
                lines.append(f"{indent}{key}: {json.dumps(value)}{draw(st.sampled_from(',,'))}")

    write(config, "", "  ")
    return config, "\n".join([*lines, "}"]), places


@settings(
    max_examples=100, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(texts(), OPTIONS)
def test_a_file_is_taken_as_its_content_and_every_verdict_has_its_line(tmp_path, written, options):
    config, text, places = written
    file = tmp_path / "ds.json"
    file.write_text(text)
    encoded = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    try:
        plan = translate(config, options)
    except ConfigError:
        for source in (file, encoded):
            with pytest.raises(ConfigError):
                translate(source, options)
        return
    for source in (file, encoded):
        found = translate(source, options)
        assert (found.choices, found.values) == (plan.choices, plan.values)
    given_lines = {f.key: f.line for f in translate(file, options).findings if f.given}
    assert given_lines == {key: line for key, line in places.items() if key in given_lines}
    assert given_lines.keys() == keys_in(config)


@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(configurations(odd=True), OPTIONS, st.sampled_from(["no", "bf16", "fp16", "odd"]))
def test_a_block_in_a_file_of_accelerate_is_translated_whole_or_refused_in_words(
    tmp_path, config, options, precision
):
    around = {"deepspeed_config": config, "mixed_precision": precision, "num_processes": 4}
    file = tmp_path / "accelerate.yaml"
    file.write_text(yaml.safe_dump(around))

    def found() -> Any:
        try:
            plan = translate(file, options)
        except ConfigError as error:
            return error.sentence, error.fix
        assert not [f for f in plan.findings if f.rule == "ledger"]
        return report.as_json(plan)

    first = found()
    assert first == found()
    assert all(first)


NOISE = st.text(st.sampled_from('{}[]:,"#/ \n\\a1.-eE\x00é'), max_size=60) | st.binary(max_size=40)


@settings(
    max_examples=150, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(NOISE, st.sampled_from(["ds.json", "ds.yaml"]))
def test_what_is_no_configuration_is_an_error_in_words(tmp_path, noise, name):
    file = tmp_path / name
    file.write_bytes(noise.encode() if isinstance(noise, str) else noise)
    said = None
    try:
        translate(file, Options(lenient=True, sizes_from_loader=True))
    except TorshError as error:
        said = error
    assert said is None or (said.sentence and said.fix)
