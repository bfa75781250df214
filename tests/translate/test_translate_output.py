"""The verb translate: recipe, report, table and exit codes, as a user meets them."""

from __future__ import annotations

import json
import re
import sys
import time
from html.parser import HTMLParser
from typing import Any

import pytest
import yaml

from torsh_trainer.__main__ import main
from torsh_trainer.translate import report

EXACT = """\
{ # fp32, stage 1
  train_batch_size: 64
  optimizer: {type: "AdamW", params: {lr: 1e-5, torch_adam: true, weight_decay: 0.1}}
  scheduler: {type: "WarmupLR", params: {warmup_num_steps: 10, warmup_max_lr: 1e-5}}
  zero_optimization: {stage: 1}
}
"""
APPROXIMATE = EXACT.replace("zero_opt", "torch_autocast: {enabled: true}\n  zero_opt")
REFUSED = EXACT.replace("AdamW", "Lion")
ODD = {
    "SGD and a scheduler of torch": {
        "train_batch_size": 32,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "nesterov": True, "momentum": 0.9}},
        "scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 10}},
    },
    "fp16, offload and loggers": {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "fp16": {"enabled": True, "initial_scale_power": 12, "min_loss_scale": 2},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "tensorboard": {"enabled": True},
        "wandb": {"enabled": True, "team": "a", "project": "b"},
        "steps_per_print": 10,
        "dataloader_drop_last": True,
        "log_level": "debug",
    },
    "1-bit Adam": {
        "train_batch_size": 8,
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 4}},
    },
    "MiCS and DeepCompile": {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 3, "mics_shard_size": 2},
        "compile": {"deepcompile": True},
    },
    "a cosine": {
        "train_batch_size": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 9}},
    },
}


def translated(capsys, *args: Any) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["translate", *map(str, args)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(("text", "code"), [(EXACT, 0), (APPROXIMATE, 10), (REFUSED, 11)])
def test_the_exit_code_says_how_near_the_translation_is(write, capsys, text, code):
    found, out, err = translated(capsys, write(text))
    assert (found, err) == (code, "")
    assert "optimizer.params.weight_decay" in out


def test_invalid_input_and_options_exit_with_2_and_a_sentence(write, capsys, tmp_path):
    path = write(EXACT)
    for args, words in (
        ((write('{"a" 1}', "b.json"),), "b.json:1:6: a colon"),
        ((path, "--report", "x.txt"), "neither .json nor .html"),
        ((path, "--world-size", "0"), "no number of processes"),
        ((path, "--set", "lr"), "is not NAME=VALUE"),
        ((path, "--source-version", "1.0"), "is newer than the rules"),
        ((path, "--source-version", "old"), "is no version"),
    ):
        code, out, err = translated(capsys, *args)
        assert (code, out) == (2, "")
        assert words in err
    code, _, err = translated(capsys, path, "--output", path / "recipe.yaml")
    assert code == 1
    assert "cannot write" in err


@pytest.mark.parametrize("what", ["plain", *ODD])
def test_the_recipe_composes_to_what_the_plan_says(write, capsys, tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    path = write(EXACT if what == "plain" else json.dumps(ODD[what]))
    recipe = tmp_path / "made" / "recipe.yaml"
    translated(capsys, path, "--output", recipe, "--report", "r.json", "--world-size", "2")
    plan = json.loads((tmp_path / "r.json").read_text())
    parts = ["task=classification", "model=mlp", "data=digits", "trainer.max_steps=2"]
    assert main([f"+recipe={recipe}", *parts, "--cfg", "job"]) == 0
    composed = yaml.safe_load(capsys.readouterr().out)
    for dotted, value in plan["values"].items():
        found = composed
        for key in dotted.split("."):
            found = found[key]
        assert found == value, dotted
    chosen = {"adamw": "AdamW", "sgd": "SGD"}.get(plan["choices"].get("optimizer", ""), "")
    assert composed["optimizer"]["_target_"].endswith(chosen)


def test_the_recipe_trains(write, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    translated(capsys, write(EXACT), "--output", "recipe.yaml")
    parts = ["task=classification", "model=mlp", "data=digits", "trainer.max_steps=2"]
    quiet = ["callbacks.console.enabled=false", "logger.tensorboard.enabled=false"]
    here = [
        "launcher=inline",
        "strategy=single",
        "~strategy.zero1",
        "~strategy.find_unused_parameters",
        "~strategy.zero_unused",
    ]
    code = main(["+recipe=recipe.yaml", *parts, *quiet, *here, "hydra.run.dir=run"])
    assert code == 0, capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 2


def problems(value: Any, schema: dict[str, Any], where: str = "report") -> list[str]:
    """Where ``value`` breaks the part of JSON Schema that ours uses."""
    kinds = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "null": type(None),
    }
    found = []
    wanted = schema.get("type", [])
    wanted = [wanted] if isinstance(wanted, str) else wanted
    if wanted and not any(isinstance(value, kinds[name]) for name in wanted):
        found.append(f"{where} is no {wanted}")
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{where} is none of {schema['enum']}")
    if "const" in schema and value != schema["const"]:
        found.append(f"{where} is not {schema['const']}")
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        extra = schema.get("additionalProperties", True)
        found += [f"{where} lacks {key}" for key in schema.get("required", []) if key not in value]
        for key, item in value.items():
            part = properties.get(key, extra)
            if part is False:
                found.append(f"{where}.{key} is not in the schema")
            elif isinstance(part, dict):
                found += problems(item, part, f"{where}.{key}")
    if isinstance(value, list):
        for i, item in enumerate(value):
            found += problems(item, schema.get("items", {}), f"{where}[{i}]")
    return found


def test_the_json_report_is_as_its_schema_says(write, capsys, tmp_path):
    schema = json.loads(report.schema_text())
    for text in (EXACT, APPROXIMATE, REFUSED):
        translated(capsys, write(text), "--report", tmp_path / "r.json", "--world-size", "4")
        content = json.loads((tmp_path / "r.json").read_text())
        assert problems(content, schema) == []
        assert content["memory"] is not None or "Lion" in text
        assert [row["what"] for row in content["dtypes"]][:2] == ["parameters", "compute"]
    del content["findings"][0]["rule"]
    content["counts"]["fine"] = 1
    assert problems(content, schema) == [
        "report.counts.fine is not in the schema",
        "report.findings[0] lacks rule",
    ]


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_needs_no_other_file_and_runs_nothing_of_the_source(write, capsys, tmp_path):
    text = EXACT.replace("AdamW", "<script>alert(1)</script>")
    translated(capsys, write(text), "--report", tmp_path / "r.html")
    page = Page()
    content = (tmp_path / "r.html").read_text()
    page.feed(content)
    assert page.links == []
    assert "script" not in page.tags
    assert content.count("<tr") > 10
    assert "url(" not in content


def test_nothing_of_the_source_leaves_a_comment_of_the_recipe(write, capsys, tmp_path):
    name = "Lion\nhydra: {run: {dir: elsewhere}}"
    text = json.dumps({"train_batch_size": 8, "optimizer": {"type": name}})
    translated(capsys, write(text), "--output", tmp_path / "recipe.yaml")
    assert "hydra" not in yaml.safe_load((tmp_path / "recipe.yaml").read_text())


def test_a_table_keeps_to_the_terminal(write, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "180")
    _, out, _ = translated(capsys, write(APPROXIMATE))
    assert max(len(line) for line in out.splitlines()[1:]) <= 180
    assert re.search(r"\d+ exact, \d+ emulated, \d+ approximate", out)


def test_it_needs_neither_torch_nor_hydra_and_little_time(write, run_command, tmp_path):
    script = (
        "import sys; from torsh_trainer.__main__ import main; "
        f"main(['translate', {str(write(EXACT))!r}]); "
        "print(sorted({'torch', 'hydra', 'omegaconf', 'numpy'} & set(sys.modules)))"
    )
    began = time.perf_counter()
    answer = run_command([sys.executable, "-c", script], cwd=tmp_path)
    print(f"{time.perf_counter() - began:.2f} s")
    assert answer.stdout.splitlines()[-1] == "[]", answer.stderr
