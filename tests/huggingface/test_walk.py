"""From a folder to a fine-tuned folder, by the command line; and back into it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file

from torsh_trainer.__main__ import main
from torsh_trainer.tasks.huggingface.text import Documents, LabelledTexts

pytestmark = pytest.mark.usefixtures("warm_interpreters")

BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
FAST = ["optimizer.lr=1e-2", "data.batch_size=8", "trainer.device=cpu"]


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Path) -> Path:
    """A pretrained encoder and its tokenizer, as somebody downloads them."""
    fast = transformers.AutoTokenizer.from_pretrained(tokenizer)
    fast.save_pretrained(tmp_path / "base")
    config = transformers.AutoConfig.for_model("bert", vocab_size=len(fast), **BERT)
    torch.manual_seed(5)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def run_of(tmp_path: Path, number: int = 0) -> Path:
    found = sorted((path.parent for path in tmp_path.glob("runs/**/result.json")), key=str)
    return found[number]


def metrics_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "result.json").read_text())["metrics"]


def test_a_folder_is_fine_tuned_and_opens_in_transformers_with_the_same_logits(
    tmp_path, warm_door, folder, files
):
    args = ["task=hf_classification", "model=hf", "data=hf_labelled_text", "data.path=data.csv"]
    done = warm_door(
        [
            *(*args, *FAST, "model.pretrained=base", "strategy=fsdp", "trainer.max_epochs=4"),
            "trainer.stages=[fit,predict]",
        ],
        processes=2,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run, out = run_of(tmp_path), tmp_path / "out"
    assert main(["checkpoint", "export", str(run), "--format", "hf", "--output", str(out)]) == 0
    auto = transformers.AutoModelForSequenceClassification
    model, told = auto.from_pretrained(out, output_loading_info=True)
    assert not any(told.values())
    fast = transformers.AutoTokenizer.from_pretrained(out)

    data = LabelledTexts(path=str(files["csv"]), tokenizer=str(folder))

    def logits_of(rows):
        texts = [fast.decode(sample["input_ids"]) for sample in rows]
        return model(**fast(texts, padding=True, return_tensors="pt")).logits

    labels = data.eval.singles["labels"]
    right = F.cross_entropy(logits_of(data.eval), labels)
    assert metrics_of(run)["loss"] == pytest.approx(right.item(), rel=1e-5)
    names = [model.config.id2label[int(i)] for i in logits_of(data.test).argmax(-1)]
    assert torch.load(run / "predictions.pt") == names

    again = warm_door(
        [*args, *FAST, "model.pretrained=out", "trainer.stages=[evaluate]"], processes=1
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert metrics_of(run_of(tmp_path, 1))["loss"] == pytest.approx(right.item(), rel=1e-5)


def test_a_language_model_with_tied_weights_trains_sharded_and_opens_in_transformers(
    tmp_path, warm_door, tokenizer, files
):
    sizes = "{n_embd: 32, n_layer: 2, n_head: 4, n_positions: 64, vocab_size: 120}"
    done = warm_door(
        [
            *("task=hf_lm", "model=hf", "model.config=gpt2", f"model.overrides={sizes}"),
            *("data=hf_text", "data.path=data.txt", f"data.tokenizer={tokenizer}"),
            *("data.packing=true", "data.max_length=40", "model.gradient_checkpointing=true"),
            *(*FAST, "data.batch_size=4", "strategy=fsdp", "trainer.max_epochs=3"),
        ],
        processes=2,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run, out = run_of(tmp_path), tmp_path / "out"
    assert main(["checkpoint", "export", str(run), "--format", "hf", "--output", str(out)]) == 0
    assert "lm_head.weight" not in load_file(out / "model.safetensors")
    model, told = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(told.values())
    fast = transformers.AutoTokenizer.from_pretrained(out)
    assert (model.config.bos_token_id, model.config.eos_token_id) == (None, fast.eos_token_id)
    data = Documents(path=str(files["txt"]), tokenizer=str(out))
    losses = [
        F.cross_entropy(
            model(input_ids=sample["tokens"].unsqueeze(0)).logits[0],
            sample["targets"],
            reduction="none",
        )
        for sample in data.eval
    ]
    right = torch.cat(losses).mean().item()
    assert metrics_of(run)["loss"] == pytest.approx(right, rel=1e-5)
