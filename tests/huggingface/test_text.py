"""Texts through a tokenizer: what a sample is, what counts, and what a packed one may see."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers

from torsh_trainer.errors import ConfigError
from torsh_trainer.tasks.huggingface.checks import check_packing
from torsh_trainer.tasks.huggingface.heads import CausalLM
from torsh_trainer.tasks.huggingface.models import HuggingFaceModel
from torsh_trainer.tasks.huggingface.text import Documents, LabelledTexts
from torsh_trainer.tasks.language_model import IGNORED

WHOLE = {"eval_fraction": 0.0, "test_fraction": 0.0}
SMALL = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 120},
    "llama": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 120,
    },
}


def expected_of(tokenizer: Path, text: str) -> list[int]:
    fast = transformers.AutoTokenizer.from_pretrained(tokenizer)
    return [*fast(text)["input_ids"], fast.eos_token_id]


def whole_batch(data):
    return data.collate(data.train.__getitems__(range(len(data.train))))


@pytest.mark.parametrize("suffix", ["txt", "csv", "jsonl"])
def test_lines_tables_and_objects_are_the_same_texts(tokenizer, files, suffix, texts):
    data = Documents(path=str(files[suffix]), tokenizer=str(tokenizer), **WHOLE)
    assert len(data.train) == 60
    for sample, (text, _) in zip(data.train, texts, strict=True):
        tokens = expected_of(tokenizer, text)
        assert sample["tokens"].tolist() == tokens[:-1]
        assert sample["targets"].tolist() == tokens[1:]


def test_the_tokens_of_a_prompt_do_not_count(tokenizer, files, texts):
    data = Documents(path=str(files["jsonl"]), tokenizer=str(tokenizer), prompt="prompt", **WHOLE)
    fast = transformers.AutoTokenizer.from_pretrained(tokenizer)
    for sample, (text, _) in zip(data.train, texts, strict=True):
        given, own = fast("it was")["input_ids"], expected_of(tokenizer, text)
        assert sample["tokens"].tolist() == [*given, *own][:-1]
        assert sample["targets"].tolist() == [IGNORED] * (len(given) - 1) + own


def test_a_long_text_is_cut_and_every_token_but_the_first_is_predicted_once(
    tokenizer, files, texts
):
    data = Documents(path=str(files["txt"]), tokenizer=str(tokenizer), max_length=5, **WHOLE)
    assert data.longest == 5
    wanted = [t for text, _ in texts for t in expected_of(tokenizer, text)[1:]]
    assert [t for sample in data.train for t in sample["targets"].tolist()] == wanted


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_packed_batch_has_the_loss_of_its_texts_one_by_one(tokenizer, files, kind, attention):
    knobs = {"path": str(files["txt"]), "tokenizer": str(tokenizer), **WHOLE}
    packed = Documents(**knobs, packing=True, max_length=40)
    single = Documents(**knobs)
    assert len(packed.train) < len(single.train) / 2

    def make():
        return HuggingFaceModel(config=kind, overrides=SMALL[kind], attn_implementation=attention)

    torch.manual_seed(0)
    task = CausalLM(make, packed)
    model = task.build_model().eval()
    batch = whole_batch(packed)
    losses = []
    for sample in single.train:
        logits = model(input_ids=sample["tokens"].unsqueeze(0)).logits[0]
        losses.append(F.cross_entropy(logits, sample["targets"], reduction="none"))
    right = torch.cat(losses)
    assert task.weight(batch) == len(right)
    torch.testing.assert_close(task.loss(task.forward(model, batch), batch), right.mean())
    padded = whole_batch(single)
    torch.testing.assert_close(task.loss(task.forward(model, padded), padded), right.mean())


@pytest.mark.parametrize(
    ("kind", "knobs", "words"),
    [
        ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}, "takes no position_ids"),
        ("mamba", {"hidden_size": 32, "num_hidden_layers": 2}, "refused for the model type mamba"),
    ],
)
def test_packing_is_refused_where_a_model_cannot_keep_texts_apart(kind, knobs, words):
    config = transformers.AutoConfig.for_model(kind, vocab_size=64, **knobs)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=words):
        check_packing(model)


def test_packing_is_refused_where_one_text_sees_another():
    config = transformers.AutoConfig.for_model("gpt2", **SMALL["gpt2"])
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    with pytest.raises(ConfigError, match="gpt2: texts attend to those before them"):
        check_packing(model)  # a cache of keys makes it forget
    model.config.use_cache = False
    check_packing(model)
    assert model.training
    forward = model.forward

    def crossing(input_ids, position_ids):
        everything = torch.ones(1, 1, 5, 5).tril().bool()  # a mask given turns theirs off
        return forward(input_ids, position_ids=position_ids, attention_mask=everything)

    model.forward = crossing
    with pytest.raises(ConfigError, match="gpt2: texts attend to those before them"):
        check_packing(model)


def test_labels_are_numbered_and_a_batch_is_padded_with_the_tokenizers_token(
    tokenizer, files, texts
):
    data = LabelledTexts(path=str(files["csv"]), tokenizer=str(tokenizer), **WHOLE)
    assert data.class_names == ["neg", "pos"]
    batch = whole_batch(data)
    fast = transformers.AutoTokenizer.from_pretrained(tokenizer)
    right = fast([text for text, _ in texts], padding=True, return_tensors="pt")
    assert torch.equal(batch["input_ids"], right["input_ids"])
    assert torch.equal(batch["attention_mask"], right["attention_mask"])
    assert batch["labels"].tolist() == [label == "pos" for _, label in texts]


def test_pairs_of_texts_are_encoded_together_and_cut_to_a_length(tokenizer, tmp_path):
    (tmp_path / "pairs.tsv").write_text("text\ttext_pair\tlabel\na film\tgood day\t0\n" * 4)
    data = LabelledTexts(
        path=str(tmp_path / "pairs.tsv"),
        tokenizer=str(tokenizer),
        text_pair="text_pair",
        max_length=3,
        **WHOLE,
    )
    fast = transformers.AutoTokenizer.from_pretrained(tokenizer)
    right = fast("a film", "good day", truncation=True, max_length=3)["input_ids"]
    assert data.train[0]["input_ids"].tolist() == right


def test_the_tokenizer_that_is_kept_is_the_one_of_the_folder(tokenizer, files):
    data = LabelledTexts(path=str(files["csv"]), tokenizer=str(tokenizer), max_length=3)
    assert data.longest == 3
    kept = data.tokenizer_files()
    assert json.loads(kept["tokenizer.json"]) == json.loads(
        (tokenizer / "tokenizer.json").read_text()
    )
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    saved = json.loads(kept["tokenizer_config.json"])
    assert saved["model_max_length"] == settings["model_max_length"]


def test_truncated_texts_are_counted(tmp_path, tokenizer, caplog):
    file = tmp_path / "films.csv"
    file.write_text("text,label\na film,0\na good film of a good day,1\na good day,1\n")
    for most, told in ((None, ""), (2, "2 of 3"), (3, "1 of 3"), (40, "")):
        caplog.clear()
        data = LabelledTexts(path=str(file), tokenizer=str(tokenizer), max_length=most, **WHOLE)
        assert len(data.train)
        assert told in caplog.text, most
        assert bool(told) == ("truncated to data.max_length" in caplog.text)


def test_whole_numbers_are_classes_by_themselves(tokenizer, tmp_path):
    lines = [json.dumps({"text": "a film", "label": label}) for label in (0, 2, 10, 2)]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    data = LabelledTexts(path=str(tmp_path / "d.jsonl"), tokenizer=str(tokenizer), **WHOLE)
    assert [int(sample["labels"]) for sample in data.train] == [0, 2, 10, 2]
    assert len(data.class_names) == 11


def test_classes_are_held_out_in_equal_shares(tokenizer, files):
    data = LabelledTexts(path=str(files["csv"]), tokenizer=str(tokenizer))
    for rows, count in ((data.train, 48), (data.eval, 6), (data.test, 6)):
        assert len(rows) == count
        assert rows.singles["labels"].sum() == count / 2


@pytest.mark.parametrize(
    ("kind", "knobs", "content", "words"),
    [
        (Documents, {"text": "body"}, '{"text": "a"}', "line 1 has no column 'body'"),
        (Documents, {}, '{"text": 3', "line 1 is not JSON"),
        (Documents, {}, "[1]", "line 1 is no object"),
        (Documents, {}, '{"text": null}', "line 1, column 'text' is no text"),
        (Documents, {}, "\n \n", "has no text"),
        (Documents, {"packing": True}, "", "give data.max_length"),
        (Documents, {"max_length": 0}, "", "data.max_length=0 is not a positive"),
        (Documents, {"tokenizer": None}, "", "data.tokenizer has no value"),
        (Documents, {"tokenizer": "gpt2"}, "", "no such folder, and nothing is downloaded"),
        (LabelledTexts, {}, '{"text": "a"}', "line 1 has no column 'label'"),
        (
            LabelledTexts,
            {"classes": ["x", "y"]},
            '{"text": "a", "label": "z"}',
            "row 1 has the label 'z', which is none of the classes x, y",
        ),
    ],
)
def test_what_cannot_be_read_is_told_in_a_sentence(
    tokenizer, tmp_path, no_network, kind, knobs, content, words
):
    path = tmp_path / "d.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        _ = kind(**{"path": str(path), "tokenizer": str(tokenizer), **WHOLE, **knobs}).train


def test_a_folder_without_a_tokenizer_is_named(tmp_path, files, no_network):
    transformers.AutoConfig.for_model("gpt2").save_pretrained(tmp_path / "model")
    data = Documents(path=str(files["txt"]), tokenizer=str(tmp_path / "model"))
    with pytest.raises(ConfigError, match="model: the folder has no tokenizer"):
        _ = data.train


def test_a_table_without_the_column_of_text_is_named(tokenizer, tmp_path):
    (tmp_path / "d.csv").write_text("body,label\na,b\n")
    data = LabelledTexts(path=str(tmp_path / "d.csv"), tokenizer=str(tokenizer))
    with pytest.raises(ConfigError, match="has no column 'text'"):
        _ = data.train
