"""What is written for Accelerate and torchtitan, held against those who read it.

Accelerate's own launcher reads each file, and what a script then finds in its environment becomes
the plugin that cuts the model. torchtitan cannot be imported without a GPU's compiler, so its files
are held to the fields of its ``JobConfig``, names and types, copied from the release.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from torsh_trainer.__main__ import main

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FSDP = ("strategy=fsdp", "launcher.num_processes=4")


def written(to: str, name: str, *words: str) -> Path:
    assert main(["translate", "digits", "--to", to, "-o", name, *words]) in (0, 10, 11)
    return Path(name)


# -- Accelerate ------------------------------------------------------------------------------------


def launched(file: Path) -> tuple[Any, dict[str, str]]:
    """The arguments of ``accelerate launch`` with the file's, and the processes' environment."""
    words = ["--config_file", str(file), "--main_process_port", "0", "script.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    return args, prepare_multi_gpu_env(args)


class Read(NamedTuple):
    """The launcher's arguments, a process's environment, and what a script makes of that."""

    args: Any
    env: dict[str, str]
    plugin: Any
    mesh: tuple[int, int, int]  # replicas, shards, parts of a layer


@pytest.fixture
def read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def by_accelerate(*words: str) -> Read:
        args, env = launched(written("accelerate-fsdp", "a.yaml", *FSDP, *words))
        with monkeypatch.context() as patched:
            for name in env.keys() - os.environ.keys():
                patched.setenv(name, env[name])
            mesh = ParallelismConfig()
            plugin = FullyShardedDataParallelPlugin()
        sizes = (mesh.dp_replicate_size, mesh.dp_shard_size, mesh.tp_size)
        return Read(args, env, plugin, sizes)

    return by_accelerate


def test_accelerate_takes_the_file_and_cuts_as_the_recipe_does(read):
    args, env, plugin, mesh = read()
    assert (args.num_processes, args.num_machines, args.use_cpu) == (4, 1, False)
    assert (args.use_fsdp, plugin.fsdp_version) == (True, 2)
    assert (plugin.reshard_after_forward, plugin.activation_checkpointing) == (True, False)
    assert plugin.auto_wrap_policy is transformer_auto_wrap_policy
    assert plugin.transformer_cls_names_to_wrap is None
    assert not isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    assert mesh == (1, 1, 1)
    assert env["ACCELERATE_MIXED_PRECISION"] == "bf16"  # what auto is on a GPU
    assert env["ACCELERATE_DYNAMO_BACKEND"] == "NO"
    assert "ACCELERATE_USE_PARALLELISM_CONFIG" not in env


KNOBS: dict[str, Callable[[Read], Any]] = {
    "strategy.reshard_after_forward=false": lambda r: r.plugin.reshard_after_forward is False,
    "strategy.cpu_offload=true": lambda r: isinstance(r.plugin.cpu_offload, CPUOffloadPolicy),
    "strategy.wrap_modules=[Block,Head]": lambda r: (
        r.plugin.transformer_cls_names_to_wrap == ["Block", "Head"]
    ),
    "strategy.wrap_min_parameters=1000": lambda r: (
        r.plugin.auto_wrap_policy is size_based_auto_wrap_policy and r.plugin.min_num_params == 1000
    ),
    "strategy.shard_size=2": lambda r: r.mesh == (2, 2, 1),
    "mesh.dp_replicate=2": lambda r: r.mesh == (2, 2, 1),
    "mesh.tp=2": lambda r: r.mesh == (1, 2, 2),
    "mesh.tp=4": lambda r: r.mesh == (1, 1, 4),
    "trainer.activation_checkpointing=true": lambda r: r.plugin.activation_checkpointing,
    "trainer.compile=true": lambda r: r.env["ACCELERATE_DYNAMO_BACKEND"] == "INDUCTOR",
    "precision=bf16_mixed": lambda r: r.env["ACCELERATE_MIXED_PRECISION"] == "bf16",
    "precision=fp16_mixed": lambda r: r.env["ACCELERATE_MIXED_PRECISION"] == "fp16",
}


@pytest.mark.parametrize("knob", KNOBS)
def test_every_knob_that_is_written_is_one_that_accelerate_heeds(read, knob):
    assert KNOBS[knob](read(knob))
    assert not KNOBS[knob](read("precision=fp32"))


def test_accelerate_refuses_what_it_does_not_know_and_a_file_that_counts_no_processes(read):
    read()
    content = yaml.safe_load(Path("a.yaml").read_text())
    Path("a.yaml").write_text(yaml.safe_dump({**content, "fsdp": {}}))
    with pytest.raises(ValueError, match="unknown keys"):
        launched(Path("a.yaml"))
    with pytest.raises(ValueError, match="num_processes"):
        launched(written("accelerate-fsdp", "b.yaml", "strategy=fsdp"))


def test_a_recipe_that_counts_no_processes_is_told_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")
    written("accelerate-fsdp", "b.yaml", "strategy=fsdp")
    assert "give accelerate launch --num_processes" in capsys.readouterr().out


# -- torchtitan ------------------------------------------------------------------------------------

Kind = Any
JOB_CONFIG: dict[str, dict[str, Kind]] = {
    "parallelism": {
        "data_parallel_replicate_degree": int,
        "data_parallel_shard_degree": int,
        "fsdp_reshard_after_forward": ("default", "always", "never"),
        "tensor_parallel_degree": int,
        "pipeline_parallel_degree": int,
        "pipeline_parallel_schedule": ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"),
        "pipeline_parallel_microbatch_size": int,
        "context_parallel_degree": int,
        "context_parallel_rotate_method": ("allgather", "alltoall"),
    },
    "training": {
        "local_batch_size": int,
        "global_batch_size": int,
        "max_norm": float,
        "steps": int,
        "enable_cpu_offload": bool,
        "dtype": ("bfloat16", "float32"),
        "mixed_precision_param": ("bfloat16", "float32"),
        "mixed_precision_reduce": ("float32",),
    },
    "optimizer": {
        "name": ("Adam", "AdamW"),
        "lr": float,
        "beta1": float,
        "beta2": float,
        "eps": float,
        "weight_decay": float,
        "implementation": ("for-loop", "foreach", "fused"),
    },
    "lr_scheduler": {
        "warmup_steps": int,
        "total_steps": int,
        "decay_ratio": float,
        "decay_type": ("linear", "sqrt", "cosine"),
        "min_lr_factor": float,
    },
    "activation_checkpoint": {"mode": ("selective", "full", "memory_budget", "none")},
    "compile": {"enable": bool},
    "debug": {"seed": int, "deterministic": bool},
    "metrics": {"log_freq": int},
}
"""Of torchtitan 0.2.2, ``torchtitan/config/job_config.py``: the fields that are written."""


def strange(content: dict[str, dict[str, Any]]) -> list[str]:
    """What ``JobConfig`` would not take: fields that it has not, values of another type."""
    found = []
    for section, fields in content.items():
        for name, value in fields.items():
            kind = JOB_CONFIG.get(section, {}).get(name)
            if isinstance(kind, tuple):
                fits = value in kind
            elif kind is float:
                fits = isinstance(value, float | int) and not isinstance(value, bool)
            else:
                fits = type(value) is kind
            found += [] if fits else [f"{section}.{name}={value!r}"]
    return found


RECIPES: dict[str, tuple[str, ...]] = {
    "as it is": FSDP,
    "replicas of shards": (*FSDP, "strategy.shard_size=2", "strategy.reshard_after_forward=false"),
    "layers in parts": (*FSDP, "strategy=parallel", "mesh.tp=2"),
    "sequences in parts": (*FSDP, "strategy=parallel", "mesh.cp=2"),
    "stages": (
        *(*FSDP, "strategy=parallel", "mesh.pp=2", "strategy.schedule=gpipe"),
        *("data.micro_batch_size=4", "trainer.accumulate=2", "data.batch_size=null"),
    ),
    "whole in every process": ("strategy=ddp", "launcher.num_processes=4"),
    "bf16, offloaded": (*FSDP, "precision=bf16_true", "strategy.cpu_offload=true"),
    "autocast": (*FSDP, "precision=bf16_mixed"),
    "clipped": (*FSDP, "trainer.max_grad_norm=1"),
    "accumulated": (*FSDP, "data.batch_size=64", "data.micro_batch_size=8"),
    "a plain rate": (*FSDP, "schedule=constant", "schedule.warmup_ratio=null"),
    "a falling rate": (
        *FSDP,
        "schedule=linear",
        "schedule.warmup_ratio=null",
        "schedule.warmup_steps=5",
    ),
    "a rate that stays and falls": (
        *FSDP,
        "schedule=warmup_stable_decay",
        "schedule.warmup_ratio=null",
        "schedule.warmup_steps=5",
    ),
    "Adam, fused": (*FSDP, "optimizer=adam", "optimizer.fused=true", "optimizer.lr=1"),
    "all of speed": (*FSDP, "trainer.compile=true", "trainer.activation_checkpointing=true"),
    "a run": (*FSDP, "trainer.max_steps=9", "trainer.seed=3", "trainer.deterministic=true"),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_written_for_torchtitan_are_fields_of_its_job_config(tmp_path, monkeypatch, recipe):
    monkeypatch.chdir(tmp_path)
    content = tomllib.loads(written("torchtitan", "t.toml", *RECIPES[recipe]).read_text())
    assert content.keys() >= {"parallelism", "training"}
    assert strange(content) == []


def test_a_mesh_of_torchtitan_has_the_sizes_and_batches_of_the_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = tomllib.loads(written("torchtitan", "t.toml", *RECIPES["stages"]).read_text())
    found = content["parallelism"]
    assert found["pipeline_parallel_degree"] == 2
    assert found["pipeline_parallel_schedule"] == "GPipe"
    # a rank's samples of a step go through the stages in micro-batches
    assert found["pipeline_parallel_microbatch_size"] == 4
    assert content["training"]["local_batch_size"] == 8
    assert content["training"]["global_batch_size"] == 4 * 2 * 2


def test_a_field_that_torchtitan_has_not_would_be_seen():
    wrong = {
        "parallelism": {"data_parallel_shard_degree": "-1", "shard": 2},
        "training": {"dtype": "float16", "steps": True},
        "train": {"steps": 9},
    }
    assert strange(wrong) == [
        "parallelism.data_parallel_shard_degree='-1'",
        "parallelism.shard=2",
        "training.dtype='float16'",
        "training.steps=True",
        "train.steps=9",
    ]
