"""What a user may name: files of several dialects, dicts, base64; and what is refused, where."""

from __future__ import annotations

import base64
import difflib
import json
import math

import pytest

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.deepspeed.source import Options
from torsh_trainer.translate.deepspeed.translator import translate
from torsh_trainer.translate.reading import read

CONFIG = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}

ACCELERATE = """\
compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 2
  gradient_clipping: 0.5
  zero3_init_flag: false
  zero_stage: 3
  offload_optimizer_device: none
mixed_precision: bf16
num_processes: 4
"""

NEOX = """\
# GPT-NeoX
"num-layers": 12
"hidden-size": 768
"pipe-parallel-size": {pipe}
"train_micro_batch_size_per_gpu": 4
"zero_optimization": {{"stage": 1}}
"""


def test_a_file_a_dict_and_base64_of_the_same_give_the_same_plan(write):
    path = write(json.dumps(CONFIG))
    packed = base64.urlsafe_b64encode(json.dumps(CONFIG).encode()).decode()
    plans = [translate(source) for source in (path, str(path), CONFIG, packed)]
    assert all(plan.values == plans[0].values for plan in plans)
    assert all(plan.choices == {**plans[0].choices, "strategy": "fsdp"} for plan in plans)


def test_the_block_in_an_accelerate_file_is_read_at_its_own_lines(write, finding_of):
    plan = translate(write(ACCELERATE, "accelerate.yaml"))
    assert (plan.context, plan.world_size) == ("accelerate", 4)
    assert finding_of(plan, "zero_optimization.stage").line == 6
    assert finding_of(plan, "bf16.enabled").line == 8
    assert finding_of(plan, "zero3_init_flag").verdict == "dead"
    assert plan.choices["precision"] == "bf16_true"
    assert plan.values["trainer.max_grad_norm"] == 0.5


def test_an_accelerate_file_that_names_another_says_which_to_translate(write):
    path = write("deepspeed_config:\n  deepspeed_config_file: zero3.json\n", "a.yaml")
    with pytest.raises(ConfigError, match=r"a\.yaml:2:3: this file names another, 'zero3\.json'"):
        translate(path)


@pytest.mark.parametrize(("pipe", "verdict"), [(1, "dead"), (4, "refused")])
def test_a_gpt_neox_file_is_known_by_its_arguments(write, finding_of, pipe, verdict):
    plan = translate(write(NEOX.format(pipe=pipe), "neox.yml"))
    assert read(write(NEOX.format(pipe=pipe), "neox.yml")).dialect == "gpt-neox"
    assert finding_of(plan, "hidden-size").verdict == "dead"
    assert finding_of(plan, "pipe-parallel-size").verdict == verdict
    assert plan.choices["strategy"] == "ddp"


BAD = {
    "not JSON": ('{"a" 1}', "ds.json:1:6: a colon should follow"),
    "a template": (
        '{\n"train_batch_size": {{ size }}\n}',
        "ds.json:2: '{{ size }}': this is a Jinja",
    ),
    "a block of a template": ('{% if x %}{"a": 1}{% endif %}', "this is a Jinja template"),
    "a placeholder": (
        "{\ntrain_batch_size: GBSIZE\n}",
        "ds.json:2:19: .*a placeholder of a template",
    ),
    "a key twice": ('{"a": 1,\n"a": 2}', "ds.json:2:1: the key 'a' stands twice, first in line 1"),
    "a list": ("[1, 2]", "holds no object"),
    "NaN": ('{"train_batch_size": NaN\n}', "should be a whole number"),
    "a number as text": ('{"train_batch_size": "16"}', 'should be a whole number, not "16"'),
    "a text for an object": ('{"optimizer": "Adam"}', "'optimizer' wants an object"),
    "null for an object": ('{"fp16": null}', "'fp16' wants an object"),
    "no batch size": ('{"bf16": {"enabled": true}}', "neither train_batch_size nor"),
    "a batch size of 0": ('{"train_batch_size": 0}', "should be more than 0"),
    "a stage of 4": ('{"zero_optimization": {"stage": 4}}', "should be between 0 and 3"),
    "two modes": ('{"bf16": {"enabled": true}, "fp16": {"enabled": true}}', "are both on"),
    "an object for a number": ('{"zero_optimization": {"stage": {"a": 1}}}', "knows no key"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_error_with_a_place_and_a_next_move(write, what):
    text, words = BAD[what]
    with pytest.raises(ConfigError, match=words) as caught:
        translate(write(text))
    assert caught.value.fix


def test_a_folder_a_missing_file_and_bytes_are_refused_in_words(tmp_path, write):
    with pytest.raises(ConfigError, match="is a folder"):
        translate(tmp_path)
    with pytest.raises(ConfigError, match="neither a file nor a configuration in base64"):
        translate(tmp_path / "none.json")
    (tmp_path / "weights.bin").write_bytes(bytes(range(128, 256)))
    with pytest.raises(ConfigError, match="is not text in UTF-8"):
        translate(tmp_path / "weights.bin")


def test_fifty_megabytes_are_refused_unread(tmp_path):
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(50_000_000)
    with pytest.raises(ConfigError, match="has 50 MB: that is no configuration"):
        translate(tmp_path / "large.json")


@pytest.mark.parametrize("name", ["deep.json", "deep.yaml"])
def test_deep_nesting_is_refused(write, name):
    with pytest.raises(ConfigError, match="nested"):
        translate(write('{"a": ' + "[" * 3000 + "]" * 3000 + "}", name))


def test_yaml_that_grows_by_its_aliases_is_refused(write):
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(ConfigError, match="grows too large by its aliases"):
        translate(write("\n".join(lines), "laughs.yaml"))


@pytest.mark.parametrize("text", ["a: [1", "a: 1\na: 2", "- 1", "a: 1\n---\nb: 2", "? [a]\n: 1"])
def test_broken_yaml_is_refused_with_its_place(write, text):
    with pytest.raises(ConfigError, match=r"x\.yaml:\d+:\d+: "):
        translate(write(text, "x.yaml"))


def test_a_dict_that_holds_itself_or_no_number_is_refused():
    loop: dict = {}
    loop["zero_optimization"] = loop
    with pytest.raises(ConfigError, match="holds itself"):
        translate(loop)
    with pytest.raises(ConfigError, match="should be a finite number"):
        translate({"fp16": {"loss_scale": math.nan}, "train_batch_size": 1})


UNKNOWN = {
    "misspelt": ('{"zero_optimisation": {"stage": 1}}', "did you mean 'zero_optimization'"),
    "misspelt below": ('{"fp16": {"enable": true}}', "did you mean 'enabled'"),
    "misplaced": ('{"offload_optimizer": {"device": "cpu"}}', "it belongs into zero_optimization"),
    "a block misplaced": ('{"optimizer": {"zero_optimization": {"stage": 2}}}', "outermost level"),
    "not its own": ('{"bp16": {"enabled": true}}', "did you mean 'fp16' or 'bf16'"),
    "an old name": ('{"aio": {"thread_count": 2}}', "DeepSpeed knows no key 'aio.thread_count'"),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_a_key_that_nobody_knows_is_an_error_with_the_nearest_key(write, what):
    text, advice = UNKNOWN[what]
    with pytest.raises(ConfigError) as caught:
        translate(write(text.replace("{", '{"train_batch_size": 8, ', 1)))
    assert "DeepSpeed knows no key" in str(caught.value)
    assert advice in str(caught.value)
    assert str(caught.value).split("ds.json:")[1].startswith("1:")


def test_thousands_of_unknown_keys_are_told_and_the_nearest_is_looked_up_for_the_first(
    write, monkeypatch
):
    """To look one up takes a millisecond or two, and nobody reads on."""
    looked_up, own = [], difflib.get_close_matches

    def count(word, *args, **kwargs):
        looked_up.append(word)
        return own(word, *args, **kwargs)

    monkeypatch.setattr(difflib, "get_close_matches", count)
    keys = [f"gradient_clippin{number:04}" for number in range(8000)]
    with pytest.raises(ConfigError, match="did you mean 'gradient_clipping'") as caught:
        translate(write(json.dumps({"train_batch_size": 8, **dict.fromkeys(keys, 1)})))
    assert len(caught.value.facts["problems"]) == 8000
    assert looked_up == keys[:100]


def test_lenient_only_warns_of_what_deepspeed_passes_over(write, finding_of):
    path = write('{"train_batch_size": 8, "zero_optimisation": {"stage": 1}}')
    plan = translate(path, Options(lenient=True))
    assert "did you mean 'zero_optimization'" in plan.warnings[0]
    assert finding_of(plan, "zero_optimisation.stage").verdict == "dead"
    strict = write('{"train_batch_size": 8, "fp16": {"enable": true}}')
    with pytest.raises(ConfigError, match=r"knows no key 'fp16\.enable'"):
        translate(strict, Options(lenient=True))


def test_all_that_is_wrong_is_told_at_once(write):
    path = write('{\n"a_key": 1,\n"train_batch_size": "8",\n"other": 2}')
    with pytest.raises(ConfigError) as caught:
        translate(path)
    assert [line for line, _, _ in caught.value.facts["problems"]] == [2, 3, 4]
