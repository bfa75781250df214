"""Models by configuration and from folders, and what is wrong with them in one sentence."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import TensorDataset

from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.tasks.base import DataSource
from torsh_trainer.tasks.huggingface import library
from torsh_trainer.tasks.huggingface.checks import positions_of
from torsh_trainer.tasks.huggingface.heads import CausalLM, SequenceClassification
from torsh_trainer.tasks.huggingface.models import HuggingFaceModel
from torsh_trainer.tasks.huggingface.text import Documents, LabelledTexts
from torsh_trainer.tasks.language_model import LanguageModel

pytestmark = pytest.mark.usefixtures("warm_interpreters")

GPT2 = {"vocab_size": 120, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
BERT = {
    "vocab_size": 120,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
CAUSAL, LABELS = "AutoModelForCausalLM", "AutoModelForSequenceClassification"


class Bytes(DataSource):
    """A source that says what its tokens are."""

    def __init__(self, *, vocab_size: int = 64, context: int = 16) -> None:
        self.vocab_size, self.context, self.fixed_length = vocab_size, context, True
        self.train = TensorDataset(torch.zeros(4, context + 1, dtype=torch.int64))


def saved(folder: Path, kind: str = "bert", head: str = "AutoModel", **knobs: Any) -> Path:
    sizes = {"bert": BERT, "gpt2": GPT2}[kind]
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **knobs})
    torch.manual_seed(5)
    getattr(transformers, head).from_config(config).save_pretrained(folder, max_shard_size="20KB")
    return folder


def test_a_model_type_and_its_overrides_make_what_transformers_makes():
    torch.manual_seed(0)
    made = HuggingFaceModel(config="gpt2", overrides=GPT2).build(CAUSAL)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("gpt2", **GPT2)
    right = transformers.AutoModelForCausalLM.from_config(config)
    assert type(made) is type(right)
    for name, tensor in right.state_dict().items():
        assert torch.equal(made.state_dict()[name], tensor), name


def test_names_that_every_configuration_shares_override_too():
    made = HuggingFaceModel(config="gpt2", overrides={**GPT2, "num_hidden_layers": 1}).build(CAUSAL)
    assert len(made.transformer.h) == 1


def test_a_folder_gives_weights_of_several_shards_in_float32(tmp_path, no_network):
    folder = saved(tmp_path / "m", "gpt2", CAUSAL, dtype="bfloat16")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    right = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    made = HuggingFaceModel(pretrained=str(folder)).build(CAUSAL)
    assert made.dtype == torch.float32
    for name, tensor in right.state_dict().items():
        assert torch.equal(made.state_dict()[name], tensor), name
    for path in (folder, folder / "config.json"):
        fresh = HuggingFaceModel(config=str(path)).build(CAUSAL)
        assert fresh.config.n_embd == 32
        assert not torch.equal(fresh.state_dict()["lm_head.weight"], tensor)


def test_what_a_folder_lacks_starts_anew_and_is_told(tmp_path, caplog):
    folder = saved(tmp_path / "m")
    HuggingFaceModel(pretrained=str(folder)).build(LABELS)
    assert "starts with random weights: classifier.bias, classifier.weight" in caplog.text


def test_the_meta_device_reads_no_weights(tmp_path):
    folder = saved(tmp_path / "m")
    with torch.device("meta"):
        made = HuggingFaceModel(pretrained=str(folder)).build(LABELS)
    assert all(parameter.is_meta for parameter in made.parameters())


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({}, "takes either model.pretrained or model.config; give"),
        ({"pretrained": "a", "config": "b"}, "and both are given"),
        ({"pretrained": "gpt2"}, "no such folder, and nothing is downloaded; give a local folder"),
        ({"pretrained": "."}, "cannot read config.json"),
        ({"config": "gpt-2"}, "neither a folder nor a model type .* did you mean 'gpt2'"),
        ({"config": "zzz/own"}, "neither a folder nor a model type .* such as gpt2"),
        ({"config": "gpt2", "overrides": {"n_layers": 2}}, "gpt2 has no 'n_layers'; did you mean"),
        (
            {"config": "gpt2", "overrides": {"n_layer": "x"}},
            "gpt2 refuses its configuration: .*int",
        ),
        ({"config": "gpt2", "overrides": {**GPT2, "n_head": 5}}, "cannot make the model of gpt2"),
        ({"config": "vit"}, "the model type vit has no CausalLM head"),
        ({"config": "gpt2", "trust_remote_code": True}, "model.trust_remote_code=true is refused"),
        ({"config": "gpt2", "overrides": {"trust_remote_code": True}}, "is refused"),
        ({"config": "gpt2", "attn_implementation": "fast"}, "cannot make the model of gpt2"),
    ],
)
def test_a_wrong_model_is_told_in_a_sentence(tmp_path, monkeypatch, no_network, knobs, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words):
        HuggingFaceModel(**knobs).build(CAUSAL)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "names no model_type"),
        ('{"model_type": "bret"}', "model type 'bret', .* did you mean 'bert'"),
        ('{"model_type": "own", "auto_map": {}}', "auto_map.*trust_remote_code is refused"),
    ],
)
def test_a_wrong_config_json_is_told_in_a_sentence(tmp_path, no_network, content, words):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=words):
        HuggingFaceModel(pretrained=str(tmp_path)).build(CAUSAL)


def test_weights_of_another_shape_are_refused_or_start_anew(tmp_path):
    folder = saved(tmp_path / "m", head=LABELS, num_labels=5)
    knobs = {"pretrained": str(folder), "overrides": {"num_labels": 3}}
    with pytest.raises(ConfigError, match=r"classifier.bias.*has another shape"):
        HuggingFaceModel(**knobs).build(LABELS)
    made = HuggingFaceModel(**knobs, ignore_mismatched_sizes=True).build(LABELS)
    assert made.classifier.weight.shape == (3, 32)


def test_damaged_weights_are_told_in_a_sentence(tmp_path):
    folder = saved(tmp_path / "m")
    for path in folder.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigError, match="cannot make the model of"):
        HuggingFaceModel(pretrained=str(folder)).build(LABELS)


def test_a_library_that_is_not_installed_is_named_with_the_command(monkeypatch):
    library.transformers.cache_clear()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ResourceError, match=r'pip install "torsh-trainer\[hf\]"'):
        HuggingFaceModel(config="gpt2").build(CAUSAL)


def test_the_library_is_loaded_when_a_model_is_made_and_not_before(run_command, tmp_path):
    script = """
import sys
from torsh_trainer.checkpoint.cli import export
from torsh_trainer.tasks.huggingface import checks, heads, models, records, text, tokenizer
made = models.HuggingFaceModel(config="gpt2")
heads.CausalLM(lambda: made, text.Documents(path="x", tokenizer="."))
print(*{"transformers", "tokenizers", "safetensors"} & {*sys.modules})
"""
    done = run_command([sys.executable, "-c", script], cwd=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"vocab_size": 256}, "token numbers up to 255, .* vocabulary is 120; set ..model"),
        ({"context": 65}, "65 tokens, and the model 64 positions; set data.context=64"),
    ],
)
def test_data_that_a_model_cannot_take_is_refused_before_the_first_step(data, words):
    task = CausalLM(partial(HuggingFaceModel, config="gpt2", overrides=GPT2), Bytes(**data))
    with pytest.raises(ConfigError, match=words):
        task.build_model()


def test_texts_that_a_model_cannot_take_are_refused_before_the_first_step(tokenizer, files):
    data = Documents(path=str(files["txt"]), tokenizer=str(tokenizer))
    for knobs, words in [
        ({"vocab_size": 50}, "vocabulary is 50"),
        ({"n_positions": 8}, "the model 8 positions; set data.max_length=8"),
    ]:
        model = partial(HuggingFaceModel, config="gpt2", overrides={**GPT2, **knobs})
        with pytest.raises(ConfigError, match=words):
            CausalLM(model, data).build_model()


def test_roberta_has_fewer_positions_than_its_table():
    config = transformers.AutoConfig.for_model("roberta", **BERT)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    assert positions_of(model) == 64 - config.pad_token_id - 1
    model(torch.ones(1, 62, dtype=torch.int64) * 5)
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.ones(1, 63, dtype=torch.int64) * 5)


def classifying(folder: Path, files: Any, tokenizer: Path, **knobs: Any) -> SequenceClassification:
    classes = knobs.pop("classes", None)
    data = LabelledTexts(path=str(files["csv"]), tokenizer=str(tokenizer), classes=classes)
    return SequenceClassification(partial(HuggingFaceModel, pretrained=str(folder), **knobs), data)


def test_the_classes_of_the_data_become_those_of_the_model(tmp_path, files, tokenizer):
    model = classifying(saved(tmp_path / "m"), files, tokenizer).build_model()
    assert model.config.id2label == {0: "neg", 1: "pos"}
    assert model.config.label2id == {"neg": 0, "pos": 1}


def test_a_label_that_the_model_does_not_have_is_named(tmp_path, files, tokenizer):
    task = classifying(saved(tmp_path / "m"), files, tokenizer, overrides={"num_labels": 1})
    with pytest.raises(ConfigError, match=r"label 'pos' is number 1 .* the model has 1 labels"):
        task.build_model()


def test_a_folder_that_numbers_the_labels_otherwise_is_refused(tmp_path, files, tokenizer):
    folder = saved(
        tmp_path / "m", head=LABELS, id2label={0: "pos", 1: "neg"}, label2id={"pos": 0, "neg": 1}
    )
    with pytest.raises(ConfigError, match=r"numbers its labels pos, neg, .*classes=\[pos,neg\]"):
        classifying(folder, files, tokenizer).build_model()
    task = classifying(folder, files, tokenizer, classes=["pos", "neg"])
    assert task.build_model().config.id2label == {0: "pos", 1: "neg"}


def test_a_model_of_ours_is_refused_and_one_of_transformers_is_taken(tmp_path):
    config = transformers.AutoConfig.for_model("gpt2", **GPT2)
    right = transformers.AutoModelForCausalLM.from_config(config)
    assert CausalLM(lambda: right, Bytes()).build_model() is right
    with pytest.raises(ConfigError, match="takes a model of transformers, not a Linear"):
        CausalLM(lambda: torch.nn.Linear(1, 1), Bytes()).build_model()


def test_a_model_that_looks_ahead_is_refused_as_a_language_model():
    task = CausalLM(partial(HuggingFaceModel, config="bert", overrides=BERT), Bytes())
    with pytest.raises(ConfigError, match="bert predicts a token that it has seen"):
        task.build_model()
    knobs = {**BERT, "is_decoder": True}
    CausalLM(partial(HuggingFaceModel, config="bert", overrides=knobs), Bytes()).build_model()


def test_a_task_that_takes_no_model_of_transformers_says_so():
    task = LanguageModel(partial(HuggingFaceModel, config="gpt2"), Bytes())
    with pytest.raises(ConfigError, match=r"HuggingFaceModel, which is no torch.nn.Module"):
        task.build_model()


@pytest.mark.parametrize("batch", [(torch.zeros(2, 3),), {"input_ids": torch.zeros(2, 3)}])
def test_a_batch_of_other_data_is_refused(batch):
    model = partial(HuggingFaceModel, config="gpt2")
    with pytest.raises(ConfigError, match="has no labels; choose data=hf_labelled_text"):
        SequenceClassification(model, Bytes()).weight(batch)
    with pytest.raises(ConfigError, match="has no"):
        CausalLM(model, Bytes()).weight(batch)


def test_what_is_kept_for_a_folder_names_the_architecture_and_no_dtype():
    task = CausalLM(partial(HuggingFaceModel, config="gpt2", overrides=GPT2), Bytes())
    assert task.state_dict() == {}
    task.build_model()
    kept = task.state_dict()["export"]
    values = json.loads(kept["files"]["config.json"])
    assert (values["architectures"], values["use_cache"]) == (["GPT2LMHeadModel"], True)
    assert "dtype" not in values
    assert kept["tied"] == ["lm_head.weight"]
