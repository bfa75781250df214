"""Knobs, files and recipes: what DeepSpeed is told, and what is an error instead."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch.optim import AdamW
from torsh_trainer_deepspeed import (
    DeepSpeed,
    DeepSpeedConfig,
    DeepSpeedIntegration,
    library,
    operators,
)
from torsh_trainer_deepspeed.config import KNOWN_KEYS
from torsh_trainer_deepspeed.recipe import ConfigPlan, FileSchedule, check_optimizer, plan_config

from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.data.loading import Loading
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, ResourceError, Unsupported
from torsh_trainer.optim.precision import LossScaling, Precision
from torsh_trainer.optim.schedule import Cosine, TorchSchedule
from torsh_trainer.strategies.base import BatchPlan, Clip, Job, Strategy
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.testing.resuming import SentenceTask
from torsh_trainer.testing.tiny import TinyTask
from torsh_trainer.training.job import complete
from torsh_trainer.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("warm_interpreters")

CONF = Path(library.__file__).with_name("conf") / "strategy" / "deepspeed.yaml"


def job(**asked: Any) -> Job:
    """12 samples a step on two ranks."""
    task = TinyTask()
    return Job(task=task, build_model=task.build_model, batch=BatchPlan(12, 3, 2, 2), **asked)


@pytest.fixture
def write(tmp_path):
    """``write({...})`` or ``write("text")``: the path of a ds_config.json with that content."""

    def written(content: Any) -> str:
        file = tmp_path / "ds_config.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content, indent=1))
        return str(file)

    return written


def plan(
    strategy: DeepSpeed, asked: Job | None = None, *, device: str = "cpu", **model: Any
) -> ConfigPlan:
    made = TinyTask().build_model()
    if model:
        made.config = SimpleNamespace(**model)
    return plan_config(strategy.settings(), asked or job(), made, device=device)


def test_the_yaml_has_every_knob_with_its_default_and_a_comment():
    said = yaml.safe_load(CONF.read_text())
    assert said.pop("_target_") == "torsh_trainer_deepspeed.strategy.DeepSpeed"
    knobs = {
        knob.name: {} if knob.name == "extra" else knob.default
        for knob in dataclasses.fields(DeepSpeed)
    }
    assert said == knobs
    assert all(" # " in line for line in CONF.read_text().splitlines()[2:])


def test_knobs_stand_where_deepspeed_looks_for_them():
    values = plan(DeepSpeed(stage=3, offload_param="cpu", extra={"steps_per_print": 7})).values
    assert values["zero_optimization"]["stage"] == 3
    assert values["zero_optimization"]["offload_param"] == {"device": "cpu"}
    assert values["steps_per_print"] == 7
    assert values["train_batch_size"] == 12
    assert values["train_micro_batch_size_per_gpu"] == 3
    assert values["gradient_accumulation_steps"] == 2


def test_a_file_is_taken_as_it_is_and_completed_by_the_recipe(write):
    file = write('{ # comments and trailing commas\n zero_optimization: {stage: "3"},\n}')
    made = plan(DeepSpeed(config=file), job(clip=Clip(norm=0.5)))
    assert made.stage == 3
    assert made.values["zero_optimization"] == {"stage": 3}
    assert made.values["train_batch_size"] == 12
    assert made.max_norm is None  # the run has one


def test_what_is_called_auto_comes_from_the_recipe_as_hugging_face_defines_it(write):
    file = write(
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "fp16": {"enabled": "auto", "initial_scale_power": "auto"},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
            },
        }
    )
    precision = Precision(params="bf16", compute="bf16")
    made = plan(DeepSpeed(config=file), job(precision=precision), hidden_size=64)
    zero = made.values["zero_optimization"]
    assert zero["reduce_bucket_size"] == 64 * 64
    assert zero["stage3_prefetch_bucket_size"] == int(0.9 * 64 * 64)
    assert zero["stage3_param_persistence_threshold"] == 640
    assert made.values["bf16"] == {"enabled": True}
    assert made.half
    with pytest.raises(ConfigError, match=r"line \d+: .*reduce_bucket_size.*hidden_size"):
        plan(DeepSpeed(config=file), job(precision=precision))


def test_an_auto_that_nobody_can_fill_is_an_error(write):
    file = write({"zero_optimization": {"stage": 2, "allgather_bucket_size": "auto"}})
    with pytest.raises(ConfigError, match=r'line 4: .*allgather_bucket_size is "auto"'):
        plan(DeepSpeed(config=file))


def test_words_for_loss_scaling_become_ours(write):
    fp16 = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 5, "hysteresis": 3}
    made = plan(DeepSpeed(config=write({"zero_optimization": True, "fp16": fp16})))
    assert made.stage == 1
    assert made.precision.loss_scaling == LossScaling(
        initial_scale=1024.0, growth_interval=5, hysteresis=3, min_scale=1.0
    )


CONTRADICTIONS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "a stage": (
        {"zero_optimization": {"stage": 3}},
        {"stage": 1},
        {},
        r"line 3: zero_optimization.stage is 3, and strategy.stage=1; set strategy.stage=3",
    ),
    "accumulation": (
        {"gradient_accumulation_steps": 4},
        {},
        {},
        r"line 2: gradient_accumulation_steps is 4, and trainer.accumulate=2",
    ),
    "a micro-batch": (
        {"train_micro_batch_size_per_gpu": 6},
        {},
        {},
        r"is 6, and data.micro_batch_size=3",
    ),
    "clipping": (
        {"gradient_clipping": 1.0},
        {},
        {"clip": Clip(norm=0.5)},
        r"gradient_clipping is 1, and trainer.max_grad_norm=0.5",
    ),
    "precision": (
        {"fp16": {"enabled": True}},
        {},
        {"precision": Precision(compute="bf16")},
        r"fp16.enabled is true, and precision.compute=bf16",
    ),
    "batch arithmetic": (
        {
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
        },
        {},
        {},
        r"line 2: train_batch_size is 64, which is not .*_gpu=4 x .*_steps=2 x 2 processes",
    ),
    "no number": ({"train_batch_size": "many"}, {}, {}, r"is 'many', not a positive number"),
    "both": (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        {},
        {},
        r"exclude each other",
    ),
    "extra": ({"steps_per_print": 5}, {"extra": {"steps_per_print": 6}}, {}, r"is 5, and strat"),
}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_file_and_a_recipe_that_say_two_things_are_an_error_that_shows_both(what, write):
    content, knobs, asked, words = CONTRADICTIONS[what]
    with pytest.raises(ConfigError, match=words):
        plan(DeepSpeed(config=write(content), **knobs), job(**asked))


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"lr": 0.5}, r"optimizer.params.lr is 0.5, and optimizer.lr=0.01"),
        ({"betas": [0.8, 0.9]}, r"betas is \[0.8, 0.9\], and optimizer.betas=\(0.9, 0.999\)"),
        ({"max_grad_norm": 1.0}, r"it is trainer.max_grad_norm"),
        ({"adam_w_mode": False}, r"Adam, and the recipe's optimizer is AdamW"),
    ],
)
def test_the_optimizer_of_a_file_is_held_against_the_recipes(params, words, write):
    optimizer = AdamW([torch.nn.Parameter(torch.zeros(2))], lr=0.01)
    agrees = write({"optimizer": {"type": "Adam", "params": {"lr": 1e-2, "eps": 1e-8}}})
    check_optimizer(DeepSpeedConfig.from_file(agrees), optimizer)
    differs = write({"optimizer": {"type": "Adam", "params": params}})
    with pytest.raises(ConfigError, match=words):
        check_optimizer(DeepSpeedConfig.from_file(differs), optimizer)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op; a gradient is a mean"),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme"}}},
            "device is nvme at stage 0, and DeepSpeed keeps files at stage 3",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "device is nvme, where .* parameters are fp32; set precision=bf16_true",
        ),
        ({"aio": {"use_gds": True}}, "use_gds; leave it out"),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, "needs a GPU"),
    ],
)
def test_what_would_give_another_result_or_cannot_run_is_refused_by_name(content, words, write):
    with pytest.raises(Unsupported, match=words):
        plan(DeepSpeed(config=write(content)))


def test_what_a_file_says_of_the_run_holds_where_the_recipe_is_silent(write):
    file = write({"train_batch_size": 24, "gradient_accumulation_steps": 4, "scheduler": WARMUP})
    trainer = Trainer(task=TinyTask(), max_steps=1)
    filled = complete(trainer, DeepSpeed(config=file), dp_size=2)
    assert (filled.loading.batch_size, filled.accumulate) == (24, 4)
    assert filled.schedule == FileSchedule(
        scheduler="deepspeed.runtime.lr_schedules.WarmupLR", options={"warmup_num_steps": 5}
    )
    said = replace(trainer, loading=Loading(batch_size=8), accumulate=2)
    kept = complete(said, DeepSpeed(config=file), dp_size=2)
    assert (kept.loading.batch_size, kept.accumulate) == (
        8,
        2,
    )  # which ``plan_config`` then refuses
    cosine = replace(trainer, schedule=Cosine())
    with pytest.raises(ConfigError, match=r"line 5: scheduler.type is WarmupLR, and schedule=cos"):
        complete(cosine, DeepSpeed(config=file), dp_size=2)


def test_sizes_of_a_file_and_of_a_recipe_that_do_not_divide_say_where_they_come_from(write):
    trainer = Trainer(task=TinyTask(), max_steps=1, loading=Loading(batch_size=64))
    file = write({"gradient_accumulation_steps": 5})
    with pytest.raises(
        ConfigError, match=r"deepspeed brings accumulate=5 .*batch_size=64 does not"
    ):
        complete(trainer, DeepSpeed(config=file), dp_size=2)


WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": "auto"}}


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"type": "WarmUpLR"}, r"is WarmUpLR, which is no scheduler; did you mean 'WarmupLR'"),
        (
            {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto"}},
            r'params.warmup_num_steps is "auto"',
        ),
        ({"type": "OneCycle", "params": {"cycle_max_lr": "auto"}}, r'cycle_max_lr is "auto"'),
    ],
)
def test_a_scheduler_that_cannot_be_made_is_an_error(block, words, write):
    with pytest.raises(ConfigError, match=words):
        DeepSpeed(config=write({"scheduler": block})).brings(schedule=None)


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ({}, "fp32"),
        ({"bf16": {"enabled": False}}, "fp32"),
        ({"bfloat16": {"enabled": True}}, "bf16-true"),
        ({"fp16": {"enabled": True, "initial_scale_power": 8}}, "fp16-mixed"),
        ({"bf16": {"enabled": "auto"}}, "auto"),
    ],
)
def test_a_file_says_what_auto_computes_in(write, content: dict[str, Any], name: str) -> None:
    strategy = DeepSpeed(config=write(content))
    asked = Precision(compute="auto", reduce="bf16")
    trainer = Trainer(task=TinyTask(), strategy=strategy, precision=asked)
    found = complete(trainer, strategy, dp_size=1).precision
    assert (found.name, found.reduce) == (name, "bf16")
    if name == "fp16-mixed":
        assert found.loss_scaling.initial_scale == 2.0**8
    if name != "auto":  # what the run asks for and the file says is one thing
        model = TinyTask().build_model()
        plan = plan_config(strategy.settings(), job(precision=found), model, device="cpu")
        assert plan.precision.compute == found.compute


def test_without_a_file_the_device_says_what_auto_computes_in() -> None:
    trainer = Trainer(task=TinyTask(), strategy=DeepSpeed(stage=1))
    assert complete(trainer, DeepSpeed(stage=1), dp_size=1).precision.is_auto


def test_auto_in_a_scheduler_is_the_optimizers_rate_and_the_updates_of_the_run(write):
    params = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "total_num_steps": "auto"}
    block = {"type": "WarmupDecayLR", "params": {**params, "warmup_num_steps": 2}}
    schedule = DeepSpeed(config=write({"scheduler": block})).brings(schedule=None)["schedule"]
    written = {"warmup_max_lr": 0.25, "total_num_steps": 9, "warmup_num_steps": 2}
    plain = TorchSchedule(scheduler=schedule.scheduler, options=written)
    optimizers = [AdamW([torch.nn.Parameter(torch.zeros(2))], lr=0.25) for _ in "ab"]
    running = [
        made.start({"main": optimizer}, total=9)
        for made, optimizer in zip((schedule, plain), optimizers, strict=True)
    ]
    rates = set()
    for _ in range(9):
        first, second = (optimizer.param_groups[0]["lr"] for optimizer in optimizers)
        assert first == second
        rates.add(first)
        for one in running:
            one.on_update()
    assert max(rates) == 0.25
    with pytest.raises(ConfigError, match=r'total_num_steps .* is "auto", and nobody knows'):
        schedule.start({"main": optimizers[0]}, total=None)


@pytest.mark.parametrize("kind", ["Lamb", "Lion", "OneBitAdam", "Muon"])
def test_an_optimizer_that_only_deepspeed_has_is_refused_by_name_with_the_reason(kind, write):
    optimizer = AdamW([torch.nn.Parameter(torch.zeros(2))])
    config = DeepSpeedConfig.from_file(write({"optimizer": {"type": kind}}))
    with pytest.raises(Unsupported, match=rf"line 3: optimizer.type: {kind} (has|is|takes|looks)"):
        check_optimizer(config, optimizer)


def test_quantised_zero_is_passed_through_on_a_gpu(write):
    file = write({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}})
    zero = plan(DeepSpeed(config=file), device="cuda").values["zero_optimization"]
    assert zero["zero_quantized_weights"] is True


def test_a_key_that_deepspeed_would_ignore_is_an_error_with_its_line_and_the_nearest(write, caplog):
    file = write('{\n "fp16": {"enabled": false},\n "zero_optimisation": {"stage": 3}\n}')
    words = rf"{re.escape(file)}, line 3: zero_optimisation is no key .*'zero_optimization'"
    with pytest.raises(ConfigError, match=words):
        DeepSpeed(config=file).settings()
    assert plan(DeepSpeed(config=file, unknown_keys="warn")).stage == 0
    assert "zero_optimisation" in caplog.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"fp16": {},\n "fp16": {}}', "'fp16' stands twice"),
        ('{"fp16": [}', r"line 1: "),
        ("[1, 2]", "holds list"),
    ],
)
def test_a_file_that_does_not_parse_is_told_as_such(text, words, write):
    with pytest.raises(ConfigError, match=words):
        DeepSpeedConfig.from_file(write(text))


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"nowhere\.json cannot be read: No such file"):
        DeepSpeed(config="nowhere.json").settings()


def test_a_kernel_for_an_optimizer_that_torch_has_not_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match=r"optimizer=cpu_lion .* Lion has no twin in torch"):
        DeepSpeed(optimizer="cpu_lion")


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"offload_optimizer": "nvme"}, r"device is nvme, and nothing says .*\(strategy.nvme_path"),
        ({"offload_optimizer": "cpu", "nvme_path": "/x"}, "nothing is offloaded to nvme; set"),
    ],
)
def test_files_and_their_place_go_together(knobs, words):
    with pytest.raises(ConfigError, match=words):
        plan(DeepSpeed(stage=3, **knobs))


@pytest.mark.parametrize("knobs", [{"stage": 4}, {"offload_param": "disk"}, {"optimizer": "adam"}])
def test_a_knob_that_is_no_choice_is_an_error(knobs):
    with pytest.raises(ConfigError, match=r"is not one of"):
        DeepSpeed(**knobs)


class Recording(dict):
    """Notes what is looked up in it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return Looked(self)

    def __copy__(self) -> Recording:
        return self


class Looked:
    def __init__(self, of: Recording) -> None:
        self.of = of

    def __contains__(self, key: object) -> bool:
        return key in self.of

    def __iter__(self) -> Any:
        return dict.__iter__(self.of)


def test_every_key_that_deepspeed_reads_is_known():
    library.load(LocalCommunicator(torch.device("cpu")))
    from deepspeed.runtime.config import DeepSpeedConfig as Theirs

    values = Recording({"train_batch_size": 1})
    Theirs(values)
    assert values.seen - KNOWN_KEYS == set()
    # The rest is read by DeepSpeed elsewhere, or is there in older releases.
    assert len(KNOWN_KEYS - values.seen) < 10, KNOWN_KEYS - values.seen


def test_without_the_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ResourceError, match="pip install torsh-trainer-deepspeed"):
        library.load(LocalCommunicator(torch.device("cpu")))


def test_a_device_that_deepspeed_does_not_drive_here_is_named():
    library.load(LocalCommunicator(torch.device("cpu")))
    with pytest.raises(ConfigError, match=r"drives cpu .* run is on cuda; set DS_ACCELERATOR=cuda"):
        library.load(
            SimpleNamespace(device=torch.device("cuda"), world=SimpleNamespace(local_rank=0))
        )


def test_what_is_compiled_stays_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert operators.extensions_dir().is_relative_to(tmp_path / "torsh-trainer")


def test_a_compilation_that_fails_says_what_it_needs_and_waits_for_no_dead_one(tmp_path):
    folder = tmp_path / "torsh-trainer" / "torch_extensions" / operators.extensions_dir().name
    mark = folder / "deepspeed_shm_comm" / "lock"
    mark.parent.mkdir(parents=True)
    mark.touch()
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "CXX": "no-compiler"}
    env.pop("TORCH_EXTENSIONS_DIR", None)
    command = [sys.executable, "-m", "torsh_trainer_deepspeed.build"]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=480, check=False)
    assert run.returncode == 1
    assert "DeepSpeed compiles deepspeed_shm_comm and cpu_adam, once" in run.stderr
    assert "error: DeepSpeed could not compile deepspeed_shm_comm: " in run.stderr
    assert "no-compiler: not found; it takes a C++ compiler (apt-get install g++)" in run.stderr
    assert not mark.exists()


def test_offloading_more_than_the_machine_has_is_an_error_beforehand():
    world = World(rank=0, size=4, local_rank=0, local_size=2, source="test")
    library.check_memory(2**30, world, 8 * 2**30)
    library.check_memory(2**30, world, None)
    with pytest.raises(ResourceError, match=r"takes 8.0 GiB .* and 7.0 GiB are available"):
        library.check_memory(2**30, world, 7 * 2**30)
    assert (library.available_bytes() or 1) > 0


def test_an_integration_holds_a_file_and_checks_the_process(write):
    file = write({"zero_optimization": {"stage": 3}, "fp16": {"enabled": False}})
    integration = DeepSpeedIntegration(DeepSpeedConfig.from_file(file))
    assert integration.config.stage == 3
    assert not dist.is_initialized()
    integration.initialize(0, 1)
    assert integration.is_initialized
    with pytest.raises(ConfigError, match=r"rank 0 of 1, not 1 of 2"):
        integration.initialize(1, 2)


def test_runs_of_one_process_know_nothing_of_each_other(tmp_path, monkeypatch):
    """Neither of DeepSpeed's functions nor of a process group that is gone."""
    monkeypatch.chdir(tmp_path)

    def loss(strategy: Strategy) -> float:
        trainer = Trainer(
            task=SentenceTask(),
            strategy=strategy,
            loading=Loading(batch_size=8),
            precision=Precision(compute="bf16"),
            max_steps=2,
            device="cpu",
            log_level="error",
        )
        return trainer.fit().content["train_loss"]

    native, zero = loss(FSDP()), loss(DeepSpeed(stage=3))
    assert loss(FSDP()) == native
    assert loss(DeepSpeed(stage=3)) == zero != native


def test_the_command_line_trains(tmp_path, write):
    file = write({"zero_optimization": {"stage": 3}})
    command = [
        *(sys.executable, "-m", "torsh_trainer", "+recipe=digits", "strategy=deepspeed"),
        *(f"strategy.config={file}", "launcher.num_processes=2", "trainer.max_steps=3"),
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=os.environ, timeout=480
    )
    assert done.returncode == 0, done.stderr
    (result,) = tmp_path.glob("runs/digits/*/result.json")
    assert json.loads(result.read_text())["strategy"] == "deepspeed"
    assert json.loads(result.read_text())["steps"] == 3
