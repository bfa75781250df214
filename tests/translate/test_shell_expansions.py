"""Defaults and quotation marks within ``${...}`` as bash itself reads them."""

from __future__ import annotations

import subprocess

import pytest

from torsh_trainer.translate.base import TranslationRequest
from torsh_trainer.translate.launch.translator import LaunchTranslator
from torsh_trainer.translate.shell.script import commands

SETS = 'A=a; E=""; S="a b"; N=2; ARR=(x "y z" w); '
EXPANSIONS = [
    r"""${x:-""}""",
    r"""${x:-''}""",
    r'''"${x:-""}"''',
    r'''"${x:-''}"''',
    r"""${E:-""}""",
    r"""${E-"z"}""",
    r"""${E:-"z q"}""",
    r'''"${E:-"z q"}"''',
    r"""${x:-"a b" c}""",
    r"""${x:-a" b"c}""",
    r"""${x:-'a b'}""",
    r'''"${x:-'a b'}"''',
    r'''"${x:-a 'b' c}"''',
    r"""${x:-"$S"}""",
    r"""${x:-$S}""",
    r'''"${x:-$S}"''',
    r'''"${x:-"$S"}"''',
    r"""${x:-"$S"'q r'}""",
    r"""${x:-a\ b}""",
    r"""${x:-a\$b}""",
    r'''"${x:-a\$b}"''',
    r'''"${x:-\"q\"}"''',
    r"""${x:-"${y:-"d e"}"}""",
    r"""${x:-${y:-"d e"}}""",
    r'''"${x:-${y:-'d e'}}"''',
    r"""${A:+"$A b"}""",
    r"""${A:+--flag "$A b"}""",
    r'''"${A:+--flag $A}"''',
    r"""${A:+--flag $A}""",
    r"""${x:+--flag $x}""",
    r'''"${x:+--flag}"''',
    r"""${E:+--flag}""",
    r"""${E+--flag}""",
    r"""--opt=${x:-""}""",
    r'''--opt="${x:-""}"''',
    r'''--opt "${x:-}"''',
    r"""--opt ${x:-}""",
    r"""--opt "$E" z""",
    r"""--opt $E z""",
    r'''--opt "${E}"''',
    r"""--opt ''""",
    r'''--opt ""''',
    r'''"${ARR[@]:-}"''',
    r'''${x:-"a"}"b"''',
    r'''"${x:-~}"''',
    r'''${x:="k l"} $x "$x"''',
    r"""${S// /_}""",
    r"""${S/"a b"/c}""",
    r"""${S/'a'/c}""",
    r"""${S%" b"}""",
    r"""${S%' b'}""",
    r'''"${S%" b"}"''',
    r'''"${S#"a "}"''',
    r"""${S#"$A"}""",
    r"""${S##"a"*}""",
    r"""${x:-*}""",
    r"""${x:-a}b}""",
    r'''"${x:-$(echo "q r")}"''',
    r"""${x:-$(echo "q r")}""",
    r"""${x:-`echo "q r"`}""",
    r"""${x:-$((N+1))}""",
    r'''"${x:-"$((N+1))"}"''',
    r"""${x:-"}"}""",
    r'''"${x:-"}"}"''',
    r"""${x:-'}'}""",
    r"""${#S} ${#E}""",
    '"${x:-a\nb}"',
    r"""${x:-"--a 1 --b 2"}""",
    r"""${x:---a 1 --b 2}""",
    r"""${x:-"--a=1" "--b=2"}""",
    r"""${x:-$'a\tb'}""",
    r'''"${S:0:1}"''',
    r"""${S:2}""",
    r"""${A:-"u"}""",
    r'''"${A:-"u"}"''',
    r"""pre${x:-" "}post""",
    r"""pre"${x:- }"post""",
    r"""${E:-${A:-"n"}}""",
    r'''"${E:-${ARR[1]}}"''',
    r"""${E:-"${ARR[1]}"}""",
    r'''"${N:+"--n" "$N"}"''',
    r"""${N:+"--n" "$N"}""",
    r"""${N:+"--n=$N"}""",
    r"""${N:+'--n' $N}""",
]
MADE = "f-x() { [ $# = 0 ] || printf '%s\\0' \"$@\"; }\n"


@pytest.mark.parametrize("expansion", EXPANSIONS)
def test_words_are_those_that_bash_makes(expansion, tmp_path):
    text = f"{SETS}f-x {expansion}"
    ran = subprocess.run(
        ["bash", "-c", MADE + text], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    said = ran.stdout.split("\0")[:-1]
    [command] = [one for one in commands(text, name="run.sh", known={}) if one.words]
    assert not any(word.open for word in command.words)
    assert [word.text for word in command.words[1:]] == said


TRAINERS = "--save_strategy no --bf16 --learning_rate 1e-4 --logging_steps 1"


@pytest.mark.parametrize("empty", ['""', "''", '${DS:-""}', "${DS:-''}", '"${DS:-}"'])
def test_a_flag_with_an_empty_word_is_not_on(empty):
    line = f"torchrun --nproc_per_node 2 train.py --deepspeed {empty} {TRAINERS}"
    [plan] = LaunchTranslator().translate_jobs("", TranslationRequest(command=line))
    said = {finding.key: finding for finding in plan.findings}
    assert (said["--deepspeed"].value, said["--deepspeed"].verdict) == ("", "dead")
    assert plan.choices["strategy"] == "ddp"
    on = line.replace(f" {empty}", "")
    [plan] = LaunchTranslator().translate_jobs("", TranslationRequest(command=on))
    said = {finding.key: finding for finding in plan.findings}
    assert (said["--deepspeed"].value, said["--deepspeed"].verdict) == ("true", "exact")
    assert "strategy" not in plan.choices


def test_hosts_that_are_chosen_by_an_empty_word_are_not_chosen():
    line = 'deepspeed --include ${I:-""} --exclude "" train.py'
    [plan] = LaunchTranslator().translate_jobs("", TranslationRequest(command=line))
    said = {finding.key: finding.verdict for finding in plan.findings}
    assert said == {"--include": "dead", "--exclude": "dead"}
    [plan] = LaunchTranslator().translate_jobs(
        "", TranslationRequest(command="accelerate launch --mixed_precision '' train.py")
    )
    assert "no precision is called ''" in [finding.why for finding in plan.findings]
