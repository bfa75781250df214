"""The reader: the syntax of Hjson as the package hjson has it, and the place of everything."""

from __future__ import annotations

import hjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate import lenient_json
from torsh_trainer.translate.nodes import leaves

LENIENT = {
    "comments": "{# one\n a: 1 // two\n /* three\n */ b: 2}",
    "bare keys and texts": "{a: some words, and more\n b: true\n}",
    "no braces": "a: 1\nb: {c: [1 2\n3]}\n",
    "trailing commas": '{"a": [1, 2,], "b": {"c": null,},}',
    "single quotes": "{'a': 'it\\'s', \"b\": \"a 'quote'\"}",
    "several lines": "{\n  a: '''\n    one\n    two\n    '''\n}",
    "escapes": '{"a": "\\u00e9\\n\\ud83d\\ude00\\/"}',
    "numbers": "{a: 5e8, b: -0.5, c: 1e-5, d: 0, e: 5e12, f: 1.0, g: 01\n h: -\n}",
    "words that begin like words": "{a: nullable\n b: truest\n c: false, d: 1 2\n}",
    "a placeholder keeps its comma": '{"a": CONFIG_SIZE,\n "b": 1}',
    "a byte order mark": '\ufeff{"a": 1}',
    "nothing": "",
    "a comment alone": "# nothing\n",
    "no comma between": '{"a": [1] "b": "x" c: 2}',
}


@pytest.mark.parametrize("what", LENIENT)
def test_it_reads_what_hjson_reads(what):
    text = LENIENT[what]
    assert lenient_json.parse(text, name="x").plain() == hjson.loads(text)


BROKEN = {
    "an open object": ('{"a": 1', "1:8", "ends within the object"),
    "an open list": ('{"a": [1, 2', "1:12", "ends within the list"),
    "no colon": ('{"a" 1}', "1:6", "a colon should follow"),
    "no value": ('{"a":\n}', "2:1", "a value should stand here"),
    "two commas": ("{a: [1,,2]}", "1:8", "a value should stand here"),
    "text afterwards": ('{"a": 1}\n}', "2:1", "more text after the end"),
    "an open text": ('{\n "a": "b\n}', "2:7", "has no end on its line"),
    "an unknown escape": ('{"a": "\\x"}', "1:8", "no escape sequence"),
    "an open comment": ("{a: 1 /* b", "1:7", "has no end"),
    "a list": ("[1]", "1:4", "holds no object"),
    "a key twice": ('{"a": 1,\n "b": {"c": 1, "c": 2}}', "2:16", "stands twice, first in line 2"),
    "a number beyond all": ("{a: 1e999}", "1:5", "beyond the range"),
    "a number of many digits": ("{a: " + "9" * 500 + "}", "1:5", "more than 400 digits"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_is_named_with_its_place(what):
    text, place, words = BROKEN[what]
    with pytest.raises(ConfigError) as caught:
        lenient_json.parse(text, name="ds.json")
    assert str(caught.value).startswith(f"ds.json:{place}: ")
    assert words in str(caught.value)
    assert caught.value.fix


def test_what_is_nested_too_deep_is_refused_not_recursed_into():
    for opening in ("[", "{a:"):
        with pytest.raises(ConfigError, match="nested deeper than 64 levels"):
            lenient_json.parse("{a:" + opening * 5000, name="x")


def test_every_key_knows_its_line_and_column():
    text = '// first\n{\n  "a": 1, b: {\n    "c": [1,\n 2]\n  }\n}'
    places = {
        ".".join(path): (str(entry.place), str(entry.node.place))
        for path, entry in leaves(lenient_json.parse(text, name="x"))
    }
    assert places == {"a": ("3:3", "3:8"), "b.c": ("4:5", "4:10")}


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab :#", max_size=3), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from("abcd"), JSON_VALUES))
@example({"a": ",\\"})
def test_it_agrees_with_hjson_on_what_hjson_writes(value):
    for text in (hjson.dumpsJSON(value), hjson.dumps(value)):
        try:
            right = hjson.loads(text)
        except hjson.HjsonDecodeError:  # it writes {"a": ",\\"} without the second backslash
            with pytest.raises(ConfigError):
                lenient_json.parse(text, name="x")
        else:
            assert lenient_json.parse(text, name="x").plain() == right


SOUP = st.lists(
    st.sampled_from([*"{}[],:'\"#\n \\/*-1e.x", "true", "null", "//", "/*", "*/", "'''", "\\u00"]),
    max_size=14,
).map("".join)


@settings(max_examples=400, deadline=None)
@given(SOUP)
def test_any_text_is_read_as_hjson_reads_it_or_refused_in_words(text):
    refusal, ours = None, None
    try:
        ours = lenient_json.parse("{" + text, name="x").plain()
    except ConfigError as error:
        refusal = error
    if refusal is None:
        assert ours == hjson.loads("{" + text)
        return
    assert refusal.facts["line"] >= 1
    if "stands twice" not in refusal.sentence:
        with pytest.raises((ValueError, IndexError)):  # hjson's own, at an open comment
            hjson.loads("{" + text)
