"""The other direction: recipes as files of other engines, and DeepSpeed's own back as they were."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from torsh_trainer.__main__ import main
from torsh_trainer.errors import ConfigError
from torsh_trainer.translate import report
from torsh_trainer.translate.deepspeed import keys, versions
from torsh_trainer.translate.deepspeed.normalising import normalise
from torsh_trainer.translate.deepspeed.source import Options, Source
from torsh_trainer.translate.deepspeed.translator import translate
from torsh_trainer.translate.nodes import Place
from torsh_trainer.translate.outward import accelerate, deepspeed, torchtitan
from torsh_trainer.translate.outward.native import Native
from torsh_trainer.translate.plan import Finding, Plan
from torsh_trainer.translate.reading import read

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.usefixtures("warm_interpreters")

CONF = Path(__file__).parents[2] / "conf"
CHOSEN = {"task": "classification", "model": "mlp", "data": None}


@cache
def option(group: str, name: str) -> str:
    """An option's file, with what it builds on, as JSON: a fresh copy for everyone."""
    content = yaml.safe_load((CONF / group / f"{name}.yaml").read_text())
    merged: dict[str, Any] = {}
    for part in content.pop("defaults", ["_self_"]):
        if part == "_self_":
            merged |= content
        elif isinstance(part, str):
            merged |= json.loads(option(group, part))
    return json.dumps(merged)


def groups() -> Iterator[tuple[str, str | None]]:
    """Group -> its option where nobody chooses one."""
    for item in yaml.safe_load((CONF / "config.yaml").read_text())["defaults"]:
        if isinstance(item, dict):
            ((group, name),) = item.items()
            if not group.startswith("override"):
                yield group, CHOSEN.get(group, name)


def native_of(plan: Plan, version: versions.Version = versions.NEWEST) -> Native:
    """The recipe of a plan, composed without Hydra; a test holds the two equal."""
    chosen = dict(groups()) | dict(plan.choices)
    config: dict[str, Any] = {
        group: None if name is None else json.loads(option(group, name))
        for group, name in chosen.items()
    }
    for dotted, value in plan.values.items():
        *parents, key = dotted.split(".")
        node = config
        for parent in parents:
            if node.get(parent) is None:
                node[parent] = {}
            node = node[parent]
        node[key] = value
    said = dict.fromkeys([*plan.choices, *plan.values], Place(1, 1))
    return Native("recipe", config, said, dict(plan.choices), version)


def content_of(plan: Plan) -> dict[str, Any]:
    return dict(deepspeed.content_of(plan))


def normalised(config: Mapping[str, Any], options: Options) -> Source:
    return normalise(read(config), options)


def same(source: Source) -> dict[str, Any]:
    """What the engine works with, in one way of saying it: names that mean the same are one."""
    values: dict[str, Any] = {}
    for path, key in keys.schema().items():
        if path[-1] != "*":
            values[key.dotted] = source.get(key.dotted)
    for path, leaf in source.found.items():
        if leaf.key is not None and leaf.key.path[-1] == "*":
            values[".".join(path)] = leaf.value
    from torsh_trainer.translate.deepspeed import job

    values["zero_optimization.stage"] = job.stage(source)
    if job.offloads_optimizer(source) and job.stage(source) == 1:
        values["zero_optimization.stage"] = 2  # FSDP2 offloads all of it, or nothing
    if values["zero_optimization.stage"] in (0, 3):
        values["bf16.check_grad_overflow"] = None  # which these stages do not read
    name = job.optimizer_name(source)
    if name in ("adam", "adamw"):
        decoupled = name == "adamw" or values["optimizer.params.adam_w_mode"]
        name = "adamw" if decoupled else "adam"
    values["optimizer.type"] = name
    if values["optimizer.params.max_grad_norm"] is not None and values["gradient_clipping"] is None:
        values["gradient_clipping"] = values["optimizer.params.max_grad_norm"]
    if values["communication_data_type"] is not None:
        values["communication_data_type"] = values["communication_data_type"].lower()
    return values


ELSEWHERE = {
    "optimizer.params.max_grad_norm": "gradient_clipping says it, and the engine takes that alone",
    "optimizer.params.adam_w_mode": "the type says it",
    "train_batch_size": "any two of the three sizes say it",
    "gradient_accumulation_steps": "any two of the three sizes say it",
    "zero_optimization": "zero_optimization.stage says it",
}
"""Keys that come back by another name."""


def comes_back(finding: Finding) -> bool:
    """An exact key that has become something: a definition alone leaves no trace to come back."""
    return finding.given and finding.verdict == "exact" and bool(finding.becomes)


def held_back(config: Mapping[str, Any], options: Options) -> tuple[Plan, Plan]:
    """There and back again: both plans, after a comparison of every exact key."""
    there = translate(config, options)
    back = deepspeed.to_deepspeed(native_of(there, options.version))
    content = content_of(back)
    content.setdefault("train_micro_batch_size_per_gpu", 1)  # where the loader says it
    again = translate(content, options)
    before, after = same(normalised(config, options)), same(normalised(content, options))
    hysteresis = before["zero_optimization.stage"] == 0  # which stage 0 does not read
    for finding in there.findings:
        path = tuple(finding.key.split("."))
        for length in (2, 1):
            path = (*keys.ALIASES.get(path[:length], path[:length]), *path[length:])
        key = ".".join(path)
        if not comes_back(finding) or key in ELSEWHERE or (hysteresis and "hysteresis" in key):
            continue
        assert after.get(key) == before.get(key), (key, content)
    return there, again


def settings_of(plan: Plan) -> dict[str, Any]:
    """The knobs that exact and emulated keys set."""
    said: set[str] = set()
    for finding in plan.findings:
        if finding.verdict in ("exact", "emulated"):
            said |= set(re.findall(r"(?:^| )([\w.]+)=", finding.becomes))
    known = {**plan.values, **plan.choices}
    return {name: known[name] for name in said & known.keys()}


def unlike(there: Plan, again: Plan) -> dict[str, tuple[Any, Any]]:
    """Settings that the second translation does not make as the first did."""
    second = {**again.values, **again.choices}
    return {
        name: (value, second.get(name))
        for name, value in settings_of(there).items()
        if second.get(name) != value and not _same_sum(name, value, second)
    }


def _same_sum(name: str, value: Any, second: Mapping[str, Any]) -> bool:
    """A size that follows from the two others; a share that came from a division."""
    if name in ("data.batch_size", "trainer.accumulate"):
        return True
    number = second.get(name)
    return (
        isinstance(value, float)
        and isinstance(number, float)
        and number == pytest.approx(value, rel=1e-12)
    )


SENSIBLE: dict[str, list[Any]] = {
    "train_batch_size": [64],
    "gradient_accumulation_steps": [1, 2],
    "gradient_clipping": [0.0, 0.5],
    "zero_optimization.stage": [0, 1, 2, 3],
    "zero_optimization.mics_shard_size": [2],
    "zero_optimization.offload_optimizer.device": ["cpu", "none"],
    "zero_optimization.memory_efficient_linear": [False],
    "zero_optimization.overlap_comm": [True, False],
    "communication_data_type": ["fp32", "BF16", "fp16"],
    "bf16.enabled": [True],
    "fp16.enabled": [True],
    "fp16.loss_scale": [0, 128],
    "fp16.initial_scale_power": [4, 16],
    "fp16.loss_scale_window": [7],
    "fp16.hysteresis": [1, 3],
    "bf16.check_grad_overflow": [True, False],
    "data_types.grad_accum_dtype": ["fp32", "bf16"],
    "optimizer.params.torch_adam": [True, False],
    "optimizer.params.adam_w_mode": [True, False],
    "optimizer.params.lr": [1e-3, 0.1],
    "optimizer.params.betas": [[0.8, 0.9]],
    "optimizer.params.eps": [1e-6],
    "optimizer.params.weight_decay": [0.0, 0.1],
    "optimizer.params.amsgrad": [False, True],
    "scheduler.params.warmup_min_lr": [0.0, 1e-4],
    "scheduler.params.warmup_max_lr": [0.01],
    "scheduler.params.warmup_num_steps": [10],
    "scheduler.params.warmup_type": ["log", "linear"],
    "scheduler.params.total_num_steps": [100],
    "wandb.enabled": [True],
    "wandb.project": ["mine"],
    "steps_per_print": [5],
    "optimizer.params.max_grad_norm": [0.3],
}
TYPES: list[tuple[str, dict[str, Any]]] = [
    ("Adam", {}),
    ("AdamW", {}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("Adagrad", {"lr": 0.1}),
    ("RMSprop", {"alpha": 0.9}),
]
SCHEDULES: list[tuple[str, dict[str, Any]] | None] = [
    None,
    ("WarmupLR", {}),
    ("WarmupDecayLR", {"total_num_steps": 90}),
    ("WarmupCosineLR", {"total_num_steps": 90, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.01}),
    ("StepLR", {"step_size": 4}),
    ("OneCycle", {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 5}),
    ("LRRangeTest", {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 4}),
]
ADAMS = ("torch_adam", "adam_w_mode", "betas", "eps", "amsgrad", "max_grad_norm")


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4}
    kind, params = draw(st.sampled_from(TYPES))
    put(config, "optimizer.type", kind)
    for name, value in params.items():
        put(config, f"optimizer.params.{name}", value)
    chosen = draw(st.sampled_from(SCHEDULES))
    for dotted in draw(st.lists(st.sampled_from(sorted(SENSIBLE)), max_size=12, unique=True)):
        top, _, name = dotted.rpartition(".")
        if top == "scheduler.params" and (chosen is None or not chosen[0].startswith("Warmup")):
            continue
        if name in ADAMS and not kind.startswith("Adam"):
            continue
        put(config, dotted, draw(st.sampled_from(SENSIBLE[dotted])))
    if chosen is not None:
        put(config, "scheduler.type", chosen[0])
        for name, value in chosen[1].items():
            put(config, f"scheduler.params.{name}", value)
    return config


def put(config: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, name = dotted.split(".")
    for parent in parents:
        config = config.setdefault(parent, {})
    config[name] = value


OPTIONS = st.builds(
    Options,
    world_size=st.sampled_from([None, 4]),
    version=st.sampled_from([(0, 19, 6), versions.NEWEST]),
    mode=st.sampled_from(["exact", "clean"]),
)


@settings(
    max_examples=120, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(configurations(), OPTIONS)
def test_what_was_exact_comes_back_from_native_as_it_was(config, options):
    try:
        there = translate(config, options)
    except ConfigError:
        assume(False)
    assume(not there.counts["refused"])
    mics = there.values.get("strategy.shard_size")
    assume(mics is None or options.version < versions.REMOVALS)  # no engine has it any more
    if there.choices["schedule"] == "torch":  # torch gives its schedulers no optimizer of ZeRO's
        assume(there.values.get("strategy.zero1") is False and "precision" not in there.choices)
    there, again = held_back(config, options)
    assert unlike(there, again) == {}


def test_what_is_exact_in_public_files_comes_back(corpus):
    options = Options(
        context="hf-trainer",
        lenient=True,
        world_size=8,
        version=(0, 19, 6),
        settings={"hidden_size": "768", "warmup_steps": "10", "max_steps": "100"},
    )
    held = 0
    for path in corpus:
        try:
            there = translate(path, options)
        except ConfigError:
            continue
        back = deepspeed.to_deepspeed(native_of(there, options.version))
        if not there.counts["refused"]:
            again = translate(content_of(back), options)
            assert unlike(there, again) == {}, path.name
            held += 1
    print(f"{held} files came back")
    assert held > 30


WRITTEN: dict[str, dict[str, Any]] = {
    "nothing": {},
    "stage 3 in bf16": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}},
    "offloaded": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
    "sums in fp32": {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "fp16": {"fp16": {"enabled": True, "hysteresis": 3, "initial_scale_power": 8}},
    "autocast": {"torch_autocast": {"enabled": True}},
    "Adam and a warm-up": {
        "optimizer": {"type": "Adam", "params": {"lr": 0.1, "adam_w_mode": False}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10}},
    },
    "SGD and a scheduler of torch": {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "scheduler": {"type": "StepLR", "params": {"step_size": 3}},
    },
    "logs": {"tensorboard": {"enabled": True}, "wandb": {"enabled": True, "project": "mine"}},
}


def test_the_live_engine_takes_what_is_written(repository, run_command, tmp_path):
    sources: list[Any] = [{"train_micro_batch_size_per_gpu": 4, **c} for c in WRITTEN.values()]
    sources += sorted((repository.parent / "shared" / "corpus" / "deepspeed").glob("*.json"))
    options = Options(
        context="hf-trainer",
        lenient=True,
        world_size=8,
        settings={"hidden_size": "768", "warmup_steps": "10", "max_steps": "100"},
    )
    pairs = []
    for source in sources:
        try:
            plan = translate(source, options)
        except ConfigError:
            continue
        back = deepspeed.to_deepspeed(native_of(plan))
        pairs.append((str(len(pairs)), deepspeed.text_of(back)))
    assert len(pairs) >= len(WRITTEN)
    asked = tmp_path / "pairs.json"
    asked.write_text(json.dumps(pairs))
    program = Path(__file__).with_name("engine.py")
    answer = run_command([sys.executable, program, asked], cwd=tmp_path, timeout_s=960)
    assert answer.returncode == 0, answer.stderr
    texts = dict(pairs)
    verdicts = json.loads(answer.stdout)
    assert {texts[name]: v for name, v in verdicts.items() if v[0] != "takes"} == {}


def test_a_rule_that_is_left_out_is_seen(monkeypatch):
    config = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"eps": 1e-5}}}
    there, again = held_back(config, Options())
    assert unlike(there, again) == {}
    lost = deepspeed.TABLE.rules["strategy.find_unused_parameters"]  # it writes nothing
    monkeypatch.setitem(deepspeed.TABLE.rules, "optimizer.*", lost)
    with pytest.raises(AssertionError, match=re.escape("optimizer.params.eps")):
        held_back(config, Options())


def test_every_knob_of_the_groups_has_a_rule_for_every_engine():
    tables = [module.TABLE for module in (deepspeed, accelerate, torchtitan)]
    theirs = {"ddp": (0, 2), "fsdp": (0, 1, 2), "single": (0,), "auto": (0,), "gloo": (0, 2)}
    for group in ("trainer", "data", "optimizer", "schedule", "strategy", "precision", "logger"):
        for file in (CONF / group).glob("[a-z]*.yaml"):
            native = Native(file.stem, {group: json.loads(option(group, file.stem))}, {})
            which = theirs.get(file.stem, ()) if group == "strategy" else range(3)
            for key, _ in native.knobs():
                rules = [tables[i].find(key) for i in which]
                assert all(rule is not None and "strategy.*" not in rule[0] for rule in rules), key


ODD = st.sampled_from([None, True, False, 0, 1, 2, 0.5, 1e-9, "", "x", [], ["A"], {}, {"a": 1}])
TARGETS = {
    "deepspeed": (deepspeed.to_deepspeed, deepspeed.text_of),
    "accelerate-fsdp": (accelerate.to_accelerate, accelerate.text_of),
    "torchtitan": (torchtitan.to_torchtitan, torchtitan.text_of),
}


@st.composite
def recipes(draw: st.DrawFn) -> Native:
    """Any options of the groups, some knobs at values that their kind allows."""
    config: dict[str, Any] = {}
    chosen = {}
    for group, name in groups():
        files = sorted(file.stem for file in (CONF / group).glob("[a-z]*.yaml"))
        pick = draw(st.sampled_from([name, *files]))
        config[group] = None if pick is None else json.loads(option(group, pick))
        if pick != name:
            chosen[group] = pick
    native = Native("recipe", config, {}, chosen)
    knobs = [(key, value) for key, value in native.knobs() if "." in key]
    said = dict.fromkeys(chosen, Place(1, 1))
    for key, value in draw(st.lists(st.sampled_from(knobs), max_size=8)):
        if isinstance(value, bool):
            put(config, key, draw(st.booleans()))
        elif isinstance(value, int | float):
            put(config, key, draw(st.sampled_from([value, value * 2])))
        elif not key.startswith(SOUND):
            put(config, key, draw(ODD))
        said[key] = Place(2, 1)
    return Native("recipe", config, said, chosen, draw(st.sampled_from([(0, 19, 2), (0, 19, 8)])))


SOUND = ("trainer", "data", "optimizer", "schedule", "strategy", "precision")
"""Groups whose values are sound when a recipe has composed: null, or of their type."""


@settings(
    max_examples=120, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(recipes(), st.sampled_from(sorted(TARGETS)))
def test_whatever_a_recipe_holds_is_written_with_a_verdict_for_each_knob_or_refused(native, to):
    translated, text_of = TARGETS[to]

    def found() -> tuple[str, ...]:
        try:
            plan = translated(native)
        except ConfigError as error:
            return error.sentence, error.fix
        assert {f.key for f in plan.findings if f.given} >= {
            key for key in native.given if not isinstance(native.get(key), dict)
        }
        assert not [f for f in plan.findings if f.rule == "ledger"]
        return report.as_json(plan), report.as_html(plan), text_of(plan)

    first = found()
    assert first == found()
    assert all(first)


# -- the door ------------------------------------------------------------------------------------


def door(capsys: Any, *words: Any) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["translate", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def recipe(tmp_path, monkeypatch, write) -> Path:
    """A recipe as translate writes it."""
    monkeypatch.chdir(tmp_path)
    config = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    }
    path = write(json.dumps(config))
    assert main(["translate", str(path), "--world-size", "2", "--output", "mine.yaml"]) == 0
    return tmp_path / "mine.yaml"


def test_the_door_writes_the_file_and_a_verdict_for_each_knob_of_the_recipe(
    capsys, recipe, tmp_path
):
    code, out, err = door(
        capsys, "mine.yaml", "--to", "deepspeed", "-o", "ds.json", "--report", "r.json"
    )
    assert (code, err) == (0, "")
    assert "ds.json: written for deepspeed 0.19.8" in out
    content = json.loads((tmp_path / "ds.json").read_text())
    assert content["zero_optimization"] == {"stage": 2}
    findings = json.loads((tmp_path / "r.json").read_text())["findings"]
    said = yaml.safe_load(recipe.read_text())
    chosen = {key.removeprefix("override /") for item in said.pop("defaults") for key in item}
    wanted = {f"{group}.{name}" for group, node in said.items() for name in node} | chosen
    assert {f["key"] for f in findings if f["given"]} == wanted
    assert all(f["line"] for f in findings if f["given"])
    # Composed by Hydra, and in this file without it, it is the same.
    plan = translate(tmp_path / "ds.json", Options(world_size=2))
    again = deepspeed.to_deepspeed(native_of(plan))
    assert content_of(again) == content


def test_overrides_and_versions_count(capsys, recipe, tmp_path):
    groups = ("strategy.shard_size=2", "strategy.reshard_after_forward=true")
    words = ("mine.yaml", "--to", "deepspeed", "-o", "ds.json", *groups)
    code, _, _ = door(capsys, *words, "launcher.num_processes=4")
    assert code == 11
    code, out, _ = door(capsys, *words, "--source-version", "0.19.6")
    assert code == 0
    assert (
        json.loads((tmp_path / "ds.json").read_text())["zero_optimization"]["mics_shard_size"] == 2
    )
    assert "for deepspeed 0.19.6" in out


def test_what_the_native_peers_read(capsys, recipe, tmp_path):
    code, _, _ = door(
        capsys, "mine.yaml", "--to", "accelerate-fsdp", "-o", "a.yaml", "--report", "a.html",
        "strategy.wrap_modules=[Block,Head]",
    )  # fmt: skip
    assert code == 11
    content = yaml.safe_load((tmp_path / "a.yaml").read_text())
    assert content["distributed_type"] == "FSDP"
    assert content["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == "Block,Head"
    assert (content["mixed_precision"], content["num_processes"]) == ("bf16", 2)
    page = (tmp_path / "a.html").read_text()
    assert "<h1>mine.yaml: from native to accelerate-fsdp" in page
    assert "in the script: accelerator.clip_grad_norm_(model.parameters(), 1.0)" in page
    code, _, _ = door(
        capsys, "mine.yaml", "--to", "torchtitan", "-o", "t.toml", "trainer.max_steps=9"
    )
    assert code == 11
    toml = tomllib.loads((tmp_path / "t.toml").read_text())
    assert toml["training"] == {
        "global_batch_size": 32,
        "local_batch_size": 4,
        "max_norm": 1.0,
        "steps": 9,
        "enable_cpu_offload": False,
        "dtype": "float32",
        "mixed_precision_param": "bfloat16",
        "mixed_precision_reduce": "float32",
    }
    assert toml["parallelism"]["fsdp_reshard_after_forward"] == "never"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("mine.yaml", "--to", "accelerate-fsdp", "strategy=ddp"), "is not cut by FSDP2"),
        (("mine.yaml", "--to", "torchtitan", "strategy=single"), "has no strategy Single"),
        (("mine.yaml", "--to", "deepspeed", "--report", "x.txt"), "neither .json nor .html"),
        (("nowhere.yaml", "--to", "deepspeed"), "there is no such file"),
        (("mine.yaml", "--to", "deepspeed", "strategy.shard=2"), "shard"),
        (("mine.yaml", "--to", "deepspeed", "-m"), "translate writes a file"),
        (("mine.yaml", "--to", "deepspeed", "--source-version", "9.9"), "is newer than the rules"),
    ],
)
def test_what_cannot_be_written_is_one_error(capsys, recipe, words, said):
    code, out, err = door(capsys, *words)
    assert (code, out) == (2, "")
    assert said in err


def test_a_recipe_of_the_repository_is_translated_by_its_name(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = door(capsys, "digits", "--to", "deepspeed")
    assert code == 11
    assert "DeepSpeed's file has no Cosine" in out
    assert "precision=auto is bf16_mixed on a GPU: autocast" in out
    plain = ("schedule=constant", "schedule.warmup_ratio=null", "strategy=ddp", "precision=fp32")
    code, _, _ = door(capsys, "digits", "--to", "deepspeed", "-o", "ds.json", *plain)
    assert code == 10  # norms and biases
    assert translate(tmp_path / "ds.json").exit_code == 0


def test_a_recipe_of_ones_own_folder_is_found_wherever_the_folder_is_named(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "mine" / "recipes" / "waves"
    home.mkdir(parents=True)
    text = "# @package _global_\ndefaults:\n  - override /strategy: fsdp\ntrainer:\n  seed: 3\n"
    (home / "recipe.yaml").write_text(text)
    to = ("--to", "deepspeed", "--world-size", "4")
    for words in (("--config-dir", "mine", "waves", *to), ("waves", *to, "--config-dir", "mine")):
        code, out, err = door(capsys, *words)
        assert (code, err) == (10, "")
        assert "trainer.seed" in out
        assert "4 processes" in out


def test_the_report_is_what_its_schema_says(recipe, capsys, tmp_path):
    door(capsys, "mine.yaml", "--to", "deepspeed", "--report", "r.json")
    content = json.loads((tmp_path / "r.json").read_text())
    schema = json.loads(report.schema_text())
    assert set(content) == set(schema["required"])
    assert (content["engine"], content["target"]) == ("native", "deepspeed 0.19.8")
