"""Lines that cut a model: Megatron's sizes and accelerate's become axes of the mesh."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from torsh_trainer.errors import ConfigError
from torsh_trainer.mesh import axes
from torsh_trainer.translate.base import TranslationRequest
from torsh_trainer.translate.engines import work_of
from torsh_trainer.translate.launch import meshes
from torsh_trainer.translate.plan import Plan

MEGATRON = (
    "torchrun --nproc_per_node 4 pretrain_gpt.py --num-layers 8 --train-iters 9 --hidden-size 64 "
    "--seq-length 32 "
)
ACCELERATE = "accelerate launch --num_processes 4 "
SHARDED = "--use_fsdp --fsdp_version 2 --use_parallelism_config "


def plan_of(command: str) -> Plan:
    [plan] = work_of("", TranslationRequest(command=command)).translate_jobs()
    return plan


def verdict(plan: Plan, key: str) -> str:
    [found] = [finding for finding in plan.findings if finding.key == key]
    return found.verdict


def test_an_axis_waits_here_as_long_as_the_mesh_refuses_it():
    assert meshes.NOT_YET == axes.NOT_YET


def test_sizes_of_megatron_are_axes_of_the_mesh():
    line = f"{MEGATRON}--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"
    plan = plan_of(f"{line} --sequence-parallel")
    assert plan.choices["strategy"] == "parallel"
    sizes = {key: value for key, value in plan.values.items() if key.startswith("mesh.")}
    assert sizes == {"mesh.pp": 2, "mesh.tp": 2, "mesh.dp_shard": 1}
    assert verdict(plan, "--sequence-parallel") == "performance-only"
    plan = plan_of(f"{MEGATRON}--tensor-model-parallel-size 2 --sequence-parallel")
    assert plan.values["strategy.sequence_parallel"] is True
    assert "strategy.zero1" not in plan.values
    assert plan_of(f"{MEGATRON}--tensor-model-parallel-size 1").choices.get("strategy") is None


@pytest.mark.parametrize(
    ("flag", "sharded"),
    [
        ("--use-distributed-optimizer", None),
        ("--zero-stage 1", None),
        ("--zero-stage 2", False),
        ("--zero-stage 3", True),
    ],
)
def test_what_shards_beside_a_cut_model_is_the_mesh(flag, sharded):
    plan = plan_of(f"{MEGATRON}--tensor-model-parallel-size 2 {flag}")
    assert plan.choices["strategy"] == "parallel"
    assert plan.values.get("strategy.reshard_after_forward") == sharded


@pytest.mark.parametrize(
    ("flags", "chunks"),
    [
        ("--num-layers-per-virtual-pipeline-stage 2", 2),
        ("--virtual-pipeline-model-parallel-size 4", 4),
        ("--num-layers-per-virtual-pipeline-stage 4", None),
        ("--num-layers-per-virtual-pipeline-stage 2 --tensor-model-parallel-size 2", None),
    ],
)
def test_chunks_of_a_stage_are_interleaved(flags, chunks):
    plan = plan_of(f"{MEGATRON}--pipeline-model-parallel-size 2 {flags}")
    assert plan.values.get("strategy.stages_per_rank") == chunks
    schedule = plan.values.get("strategy.schedule")
    assert schedule == (None if chunks is None else "interleaved_1f1b")


@pytest.mark.parametrize(
    ("flag", "exchange"),
    [("--context-parallel-size 2", None), ("--ds-sequence-parallel-size 2", "alltoall")],
)
def test_sequences_in_parts_are_an_axis_too(flag, exchange):
    plan = plan_of(f"{MEGATRON}{flag}")
    assert (plan.choices["strategy"], plan.values["mesh.cp"]) == ("parallel", 2)
    assert plan.values.get("strategy.context_exchange") == exchange
    beside = plan_of(f"{MEGATRON}{flag} --pipeline-model-parallel-size 2")
    assert verdict(beside, flag.split()[0]) == "refused"


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ("--tensor-model-parallel-size 3", "--tensor-model-parallel-size"),
        ("--expert-model-parallel-size 2", "--expert-model-parallel-size"),
        ("--num-experts 8", "--num-experts"),
    ],
)
def test_what_cannot_be_cut_is_refused(flags, key):
    assert verdict(plan_of(f"{MEGATRON}{flags}"), key) == "refused"


def test_the_batch_of_deepspeeds_file_counts_processes_with_other_samples(tmp_path):
    """Four processes that cut one model in two are two of them, as Megatron tells DeepSpeed."""
    (tmp_path / "ds.json").write_text(
        json.dumps({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2})
    )
    (tmp_path / "run.sh").write_text(
        "deepspeed --num_gpus 4 pretrain.py --num-layers 8 --train-iters 9 --micro-batch-size 2 "
        "--tensor-model-parallel-size 2 --deepspeed --deepspeed_config ds.json\n"
    )
    [plan] = work_of(tmp_path / "run.sh", TranslationRequest()).translate_jobs()
    assert plan.choices["strategy"] == "parallel"
    assert (plan.values["data.batch_size"], plan.values["data.micro_batch_size"]) == (16, 2)
    assert plan.values["launcher.num_processes"] == 4
    [stage] = [f for f in plan.findings if f.key == "zero_optimization.stage"]
    assert "strategy=parallel" in stage.becomes
    assert "zero1" not in stage.becomes + " ".join(plan.values)


def test_a_batch_that_counts_all_processes_contradicts_a_cut_model(tmp_path):
    sizes = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
    (tmp_path / "ds.json").write_text(json.dumps({**sizes, "gradient_accumulation_steps": 1}))
    line = "deepspeed --num_gpus 4 pretrain.py --num-layers 8 --train-iters 9 --micro-batch-size 2 "
    script = tmp_path / "run.sh"
    script.write_text(f"{line} --deepspeed_config ds.json --hidden-size 8\n")
    work_of(script, TranslationRequest()).translate_jobs()
    script.write_text(f"{line} --deepspeed_config ds.json --tensor-model-parallel-size 2\n")
    with pytest.raises(ConfigError, match="8 is not 2 x 1 x 2 processes"):
        work_of(script, TranslationRequest()).translate_jobs()


def test_parameters_in_host_memory_are_refused_beside_a_cut_model():
    flags = f"{SHARDED}--fsdp_offload_params true "
    plan = plan_of(f"{ACCELERATE}{flags}--parallelism_config_tp_size 2 train.py")
    assert verdict(plan, "--fsdp_offload_params") == "refused"
    assert "strategy.cpu_offload" not in plan.values
    assert plan_of(f"{ACCELERATE}{flags}train.py").values["strategy.cpu_offload"] is True


def test_the_mesh_of_accelerate_is_ours():
    sizes = "--parallelism_config_dp_shard_size 2 --parallelism_config_tp_size 2 "
    plan = plan_of(f"{ACCELERATE}{SHARDED}{sizes} train.py")
    assert plan.choices["strategy"] == "parallel"
    assert (plan.values["mesh.dp_shard"], plan.values["mesh.tp"]) == (2, 2)
    sizes = "--parallelism_config_dp_replicate_size 2 --parallelism_config_dp_shard_size 2 "
    plan = plan_of(f"{ACCELERATE}{SHARDED}{sizes} train.py")
    assert plan.choices["strategy"] == "fsdp"
    assert (plan.values["mesh.dp_replicate"], plan.values["mesh.dp_shard"]) == (2, 2)


def test_a_mesh_that_accelerate_does_not_read_is_dead():
    plan = plan_of(f"{ACCELERATE}--multi_gpu --parallelism_config_tp_size 2 train.py")
    assert verdict(plan, "--parallelism_config_tp_size") == "dead"
    assert plan.choices["strategy"] == "ddp"
    plan = plan_of(f"{ACCELERATE}--use_parallelism_config train.py")
    assert verdict(plan, "--use_parallelism_config") == "refused"


def test_a_file_of_accelerate_says_a_mesh(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_version: 2}\n"
        "parallelism_config: {parallelism_config_tp_size: 4, parallelism_config_cp_size: 1}\n"
    )
    plan = plan_of(f"accelerate launch --config_file {tmp_path}/a.yaml train.py")
    assert (plan.choices["strategy"], plan.values["mesh.tp"]) == ("parallel", 4)


def test_megatron_through_accelerate_is_cut_as_it_stands():
    flags = "--megatron_lm_tp_degree 2 --megatron_lm_pp_degree 2 --megatron_lm_num_micro_batches 8 "
    own = "--megatron_lm_eod_mask_loss true "
    plan = plan_of(f"{ACCELERATE}--use_megatron_lm {flags}{own}train.py")
    assert verdict(plan, "--use_megatron_lm") == "approximate"
    assert plan.choices["strategy"] == "parallel"
    values = {"mesh.tp": 2, "mesh.pp": 2, "trainer.accumulate": 8}
    assert {key: plan.values[key] for key in values} == values
    assert verdict(plan, "--megatron_lm_eod_mask_loss") == "refused"
    alone = plan_of(f"{ACCELERATE}{flags}train.py")
    assert verdict(alone, "--megatron_lm_tp_degree") == "dead"


@pytest.mark.exhaustive
@pytest.mark.usefixtures("warm_interpreters")
def test_a_line_that_cuts_a_model_trains_to_what_one_process_does(tmp_path):
    """What is written for it runs, and its losses are those without its mesh."""
    line = (
        "torchrun --nproc_per_node 2 pretrain_gpt.py --tensor-model-parallel-size 2 --lr 0.001 "
        "--lr-decay-iters 9 --micro-batch-size 4 --global-batch-size 8 --train-iters 3"
    )
    plan = plan_of(line)
    words = [f"{key}={value}" for key, value in {**plan.choices, **plan.values}.items()]
    mesh = {"mesh.tp", "mesh.dp_shard", "strategy", "launcher.num_processes"}
    alone = [word for word in words if word.partition("=")[0] not in mesh]
    losses = [train(tmp_path / name, said) for name, said in (("cut", words), ("one", alone))]
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def train(folder: Path, words: list[str]) -> list[float]:
    subprocess.run(
        [sys.executable, "-m", "torsh_trainer", *SMALL, *words, f"hydra.run.dir={folder}"],
        check=True,
        capture_output=True,
        timeout=600,
    )
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row and "lr" in row]


SMALL = (
    *("+recipe=stdlib_lm", "trainer.log_every=1", "precision=fp32", "trainer.stages=[fit]"),
    "schedule.warmup_steps=0",
)
