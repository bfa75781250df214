"""Shell text as a shell would read it, without running any of it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.translate.shell import grammar
from torsh_trainer.translate.shell.arithmetic import compute
from torsh_trainer.translate.shell.script import commands, read_script
from torsh_trainer.translate.shell.words import GPUS, plain


def words(text: str, **known: str) -> list[list[str]]:
    """The words of every command of ``text``."""
    found = commands(text, name="run.sh", known=known)
    return [[word.text for word in command.words] for command in found if command.words]


def last(text: str, **known: str) -> list[str]:
    return words(text, **known)[-1]


AS_BASH = {
    "assignment": "A=1; B=$A$A; echo-x $B ${B}3",
    "quotes": 'A=\'x  y\'; f-x "$A" $A \'$A\' "a\\"b" a\\ b',
    "continuation": "f-x a \\\n   b \\\n c",
    "words that go on": 'A=1; f-x --m=\\\n$A/x,\\\n"b c"\\\nd \\\n e',
    "no arguments": "if [ $# -gt 0 ]; then A=1; elif (( $# < 1 )); then A=2; fi; f-x $A",
    "arguments handed on": 'g() { f-x "${1:-all}" "${2-x}"; }; g "$@"; g a "$@"',
    "blanks in a string": 'A="a ${B:-x} \\\n   ${C:-y} \\\n z"; f-x $A "$A"',
    "defaults": "f-x ${A:-4} ${A-5} ${B:=6} $B ${B:+7} ${A:+8}",
    "default in quotes": 'PY=${PY:-"python3"}; f-x $PY',
    "nested default": 'A=1; f-x "${B:-$A/${C:-2}}"',
    "arrays": 'A=(1 "2 3"); A+=(4); f-x "${A[@]}" ${A[1]} ${#A[@]} ${A[-1]}',
    "keyed arrays": 'declare -A M=([a]=1 [b]=2); M[c]=3; K=b; f-x ${M[$K]} ${M["c"]}',
    "arithmetic": "A=7; B=$((A * 2 / 3)); f-x $B $((A % 4)) $((B > 3 && A < 9)) $((-A / 2))",
    "strings": "A=dir/model.tar.gz; f-x ${A%.gz} ${A%%.*} ${A##*/} ${A#*/} ${A/model/x} ${#A}",
    "more strings": "A=AbC; f-x ${A,,} ${A^^} ${A:1:1} ${A:1}",
    "indirect": "A=B; B=3; f-x ${!A}",
    "append": 'A="a"; A+=" b"; f-x $A',
    "braces": "f-x {1..3} a{b,c}d",
    "if": 'A=2; if [ "$A" -gt 1 ] && [[ $A == 2* ]]; then f-x yes; else f-x no; fi',
    "elif": "A=b; if [ $A = a ]; then f-x 1; elif [ $A = b ]; then f-x 2; else f-x 3; fi",
    "unset is empty": 'if [ -z "$NOBODY" ]; then A=1; else A=2; fi; f-x $A',
    "test": "if test 1 = 2; then f-x a; fi; f-x b",
    "and or": "[ 1 = 1 ] && A=x || A=y; f-x $A; [ 1 = 2 ] && A=z; f-x $A",
    "case": 'A=b; case "$A" in a|c) f-x 1;; b) f-x 2;; *) f-x 3;; esac',
    "for": "for i in 1 2 'a b'; do f-x $i; done",
    "counted for": "for ((i = 0; i < 6; i += 2)); do f-x $i; done",
    "function": 'g() { local n=$1; f-x "$n" "$@" $#; }; g 1 "2 3"',
    "return": "g() { f-x 1; return; f-x 2; }; g; f-x 3",
    "exit": "f-x 1; exit 0; f-x 2",
    "break": "for i in 1 2 3; do f-x $i; break; done; f-x end",
    "continue": "for i in 1 2; do [ $i = 1 ] && continue; f-x $i; done; f-x end",
    "eval": "A='f-x 1; f-x \"2 3\"'; eval $A",
    "bash -c": 'A=1; export A; bash -c "f-x $A b"',
    "subshell": "A=1; (A=2; f-x $A); f-x $A",
    "set and shift": "set -- a b c; shift; f-x $1 $#",
    "pure substitutions": "f-x $(basename a/b.sh .sh) `dirname a/b` $(echo 1 2) $(expr 3 + 4)",
    "pipes and redirections": "f-x a > /dev/null b 2>&1; f-x c",
    "heredoc leaves the rest": "cat <<EOF >/dev/null\nf-x 1\nEOF\nf-x 2",
    "let": "let A=3+4; f-x $A",
    "unset": "A=1; B=2; C=(1 2); unset A C; f-x $A ${A:-3} ${A-4} $B; A=5; f-x $A",
    "env": "env A=1 f-x 2",
}


@pytest.mark.parametrize("case", AS_BASH)
def test_words_are_those_that_bash_makes(case, tmp_path):
    text = AS_BASH[case]
    shim = tmp_path / "f-x"
    shim.write_text('#!/bin/sh\nprintf "%s\\0" "$0" "$@" >> "$OUT"\nprintf "\\1" >> "$OUT"\n')
    shim.chmod(0o755)
    (tmp_path / "echo-x").symlink_to(shim)
    out = tmp_path / "out"
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "OUT": str(out)}
    subprocess.run(["bash", "-c", text], env=environment, cwd=tmp_path, check=False)
    said = [call.split("\0")[1:-1] for call in out.read_text().split("\1")[:-1]]
    mine = [found[1:] for found in words(text) if found[0] in ("f-x", "echo-x")]
    assert mine == said


def test_what_only_a_shell_could_tell_is_a_hole_with_a_name():
    [command] = [
        c for c in commands("f $A ${B} $(date) x$1 $((N*2))", name="f", known={}) if c.words
    ]
    assert [word.open for word in command.words] == ["", "A", "B", "$(date)", "1", "N"]
    assert last("f $A $((N*2))", A="3", N="4") == ["f", "3", "8"]


@pytest.mark.parametrize(
    "text",
    [
        "$(nvidia-smi -L | wc -l)",
        "$(nvidia-smi --list-gpus | wc -l)",
        '$(python -c "import torch; print(torch.cuda.device_count())")',
    ],
)
def test_the_number_of_gpus_is_told_from_other_holes(text):
    [command] = [c for c in commands(f"N={text}\nf $N", name="f", known={}) if c.words]
    assert command.words[1].holes[0].means == GPUS


def test_items_of_a_list_are_counted():
    assert last("G=0,1,3\nf $(echo $G | tr ',' '\\n' | wc -l)") == ["f", "3"]
    assert last("G=0,1\nf $(echo $G | awk -F',' '{print NF}')") == ["f", "2"]


def test_a_branch_that_nobody_can_decide_is_read_on_both_sides():
    text = "if [ -f x ]; then A=1; f a; else A=2; f b; fi\ng $A"
    found = [c for c in commands(text, name="f", known={}) if c.words]
    assert [c.words[0].text for c in found] == ["f", "f", "g"]
    assert found[0].conditions == ("[ -f x ]",)
    assert found[1].conditions == ("not [ -f x ]",)
    assert found[2].words[1].holes[0].choices == ("1", "2")


def test_a_branch_that_hangs_on_an_argument_asks_for_the_argument():
    text = "N=$((24 / $1))\nif [ $N -lt 3 ]; then A=1; else A=$((N / 3)); fi\nf $A"
    [command] = [c for c in commands(text, name="f", known={}) if c.words]
    assert command.words[1].open == "1"
    assert last(text, **{"1": "4"}) == ["f", "2"]


def test_an_item_of_an_unknown_index_asks_for_the_index():
    text = "rates=(1 2 3); at=$TASK; f ${rates[$(( at % ${#rates[@]} ))]}"
    [command] = [c for c in commands(text, name="f", known={}) if c.words]
    assert command.words[1].open == "TASK"
    assert last(text, TASK="4") == ["f", "2"]


def test_arguments_of_the_file_are_a_hole_and_remarks_within_a_line_are_nothing():
    [command] = [c for c in commands('f a `# b` "$@" c', name="f", known={}) if c.words]
    assert [word.text for word in command.words] == ["f", "a", "$@", "c"]
    assert command.words[2].open == "@"
    assert last('f "$@"', **{"@": "1"}) == ["f", "1"]


def test_arguments_of_a_function_are_not_those_of_the_file_and_shift_counts():
    given = {"1": "a", "2": "b", "3": "c"}
    assert last("g() { f $1 $2; }\ng x $3", **given) == ["f", "x", "c"]
    assert last("shift\nf ${1:-z}", **given) == ["f", "b"]
    assert last("shift 2\nf $1", **given) == ["f", "c"]
    [command] = commands("shift 2\nf $1", name="f", known={})
    assert command.words[1].open == "3"


def test_a_missing_argument_that_ends_the_file_is_taken_for_given():
    text = 'if [ -z "$1" ]; then echo usage; exit 1; fi\nf $1'
    assert words(text) == [["f", "$1"]]
    assert words('if [ -z "$1" ]; then N=4; else N=$1; fi\nf $N') == [["f", "4"]]
    assert read_script('[ "$M" = fast ] && A=1 || A=2\nf $A', name="f", known={}).assumed == ("M",)


def test_a_loop_carries_its_rounds_and_a_loop_over_files_says_so():
    text = "for a in 1 2; do for b in x y; do f $a$b; done; done\nfor c in $FILES; do g $c; done"
    found = [c for c in commands(text, name="f", known={}) if c.words]
    assert [c.rounds for c in found[:2]] == [(("a", "1"), ("b", "x")), (("a", "1"), ("b", "y"))]
    assert found[-1].rounds == (("c", ""),)


def test_files_that_a_shell_file_writes_are_its_text():
    text = (
        'N=2\ncat > a.json <<EOF\n{"n": $N, "m": "${M:-3}"}\nEOF\n'
        "cat <<'EOF' > b.json\n{\"n\": $N}\nEOF\necho '{}' > c.json\necho x | tee d.txt\n"
        "jq .a x.json > e.json\necho 1 > f.txt; echo 2 >> f.txt"
    )
    files = read_script(text, name="f", known={}).files
    said = {name: written.text and plain(written.text) for name, written in files.items()}
    assert said["a.json"] == '{"n": 2, "m": "3"}\n'
    assert said["b.json"] == '{"n": $N}\n'
    assert said["c.json"].strip() == "{}"
    assert said["d.txt"].strip() == "x"
    assert (said["e.json"], files["e.json"].by) == (None, "jq")
    assert said["f.txt"].split() == ["1", "2"]


def test_places_are_lines_and_characters():
    [command] = [c for c in commands("\nÄ=1 f 'é' x", name="f", known={}) if c.words]
    assert [str(word.place) for word in command.words] == ["2:5", "2:7", "2:11"]


def test_a_file_that_runs_for_ever_is_refused():
    for text in (
        "for i in $(seq 100); do for j in $(seq 100); do f $i $j; done; done",
        "f() { f; f; }; f",
        'A="eval \\$A; eval \\$A"; eval $A',
    ):
        named = ""
        try:
            words(text)
        except ConfigError as error:
            named = error.sentence
        assert named in ("", "run.sh: it would run more than 5000 commands")


def test_an_open_quotation_mark_has_its_place():
    with pytest.raises(ConfigError, match=r"run.sh:2:3: a quotation mark ' that nothing closes"):
        words("f a\nf 'b")


def test_what_is_missing_is_named_with_the_command_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tree_sitter", None)
    grammar._parser.cache_clear()
    with pytest.raises(ResourceError, match=r"pip install 'torsh-trainer\[shell\]'"):
        words("f")
    grammar._parser.cache_clear()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7),
        ("7 / 2", 3),
        ("-7 / 2", -3),
        ("-7 % 3", -1),
        ("2 ** 10", 1024),
        ("1 << 4", 16),
        ("!0", 1),
        ("08 + 1", 9),
        ("1 / 0", None),
        ("2 ** 999", None),
        ("a", None),
        ("(" * 300, None),
        ("__import__('os')", None),
    ],
)
def test_numbers_are_computed_as_a_shell_does(text, value):
    assert compute(text) == value


PIECES = st.sampled_from(
    [
        *("A=1", "A=$B", "A+=(1 2)", "A=(", ")", "$A", "${A", "${A:-", "}", "$((", "))", "$(", "`"),
        *("'", '"', "\\", "\n", ";", "&&", "||", "|", "&", ">", "<<EOF", "EOF", "#", "{", "for"),
        *(
            "in",
            "do",
            "done",
            "if",
            "then",
            "fi",
            "[",
            "]",
            "[[",
            "]]",
            "case",
            "esac",
            ";;",
            "f()",
        ),
        *("eval", "bash -c", "export", "${!A}", "${A[@]}", "${#A}", "${A%x}", "ü", "\0", "=", "*"),
        *("while", "function", "local", "shift", "set --", "$1", "$@", "-n", "f", "1", "return"),
    ]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(PIECES, max_size=30), st.sampled_from([" ", "", "\n"]))
@example(["A=$A", "eval", "$A"], "\n")
def test_any_text_is_read_or_named(pieces, between):
    named = "run.sh"
    try:
        read_script(between.join(pieces), name="run.sh", known={"B": "2"})
    except ConfigError as error:
        named = error.sentence
    assert "run.sh" in named


SOURCED = """\
A=$1
run() {
    python train.py --lr $1 $A
}
return
A=lost
"""


def test_a_sourced_file_is_read_as_if_it_stood_there():
    asked = []

    def open_text(name, folder):
        asked.append((name, folder))
        return SOURCED if name == "env.sh" else None

    text = "# a line more\n\ncd runs\nsource env.sh 3\n. gone.sh\nrun 0.1\nrun $1\n"
    script = read_script(text, name="run.sh", known={"1": "0.5"}, open_text=open_text)
    assert asked == [("env.sh", "runs"), ("gone.sh", "runs")]
    assert script.sourced == {"env.sh": True, "gone.sh": False}
    runs = [command for command in script.commands if len(command.words) > 1]
    runs = [run for run in runs if run.words[0].text == "python"]
    assert [" ".join(word.text for word in run.words) for run in runs] == [
        "python train.py --lr 0.1 3",
        "python train.py --lr 0.5 3",
    ]
    assert [run.words[0].place.line for run in runs] == [6, 7]


def test_a_file_that_sources_itself_comes_to_an_end():
    script = read_script(
        "source a.sh\npython x.py\n", name="a.sh", known={}, open_text=lambda *_: "source a.sh\n"
    )
    assert [command.words[0].text for command in script.commands] == ["source", "python"]
