"""Launch files and lines: what is started, by whom, with a verdict for every flag."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torsh_trainer.__main__ import main
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.translate import report
from torsh_trainer.translate.base import TranslationRequest
from torsh_trainer.translate.engines import work_of
from torsh_trainer.translate.launch import (
    accelerate_flags,
    deepspeed_flags,
    script_arguments,
    torch_flags,
    trainer_arguments,
)
from torsh_trainer.translate.launch.translator import LaunchTranslator
from torsh_trainer.translate.plan import Finding, Plan
from torsh_trainer.translate.recipe import recipe_of

FILES = Path(__file__).parent / "launch_files"


def plans_of(source: Path | str, command: str | None = None, **options) -> tuple[Plan, ...]:
    return work_of(source, TranslationRequest(command=command, **options)).translate_jobs()


def plan_of(command: str, **options) -> Plan:
    [plan] = plans_of("", command, **options)
    return plan


def verdicts(plan: Plan) -> dict[str, str]:
    return {finding.key: finding.verdict for finding in plan.findings}


def finding(plan: Plan, key: str) -> Finding:
    [found] = [finding for finding in plan.findings if finding.key == key]
    return found


# -- tables and the parsers that they stand for ----------------------------------------------------


def flags_of(parser: argparse.ArgumentParser) -> dict[str, int]:
    """Every flag of a parser, with ``_``, and how many words follow it."""
    found = {}
    for action in parser._actions:
        for flag in action.option_strings:
            if flag not in ("-h", "--help"):
                takes = 0 if action.nargs == 0 else 1
                found["--" + flag[2:].replace("-", "_") if flag[:2] == "--" else flag] = takes
    return found


def takes_of(table) -> dict[str, int]:
    return {flag: row.takes for flag, row in table.items()}


def test_every_flag_of_torchrun_has_a_row():
    from torch.distributed import run

    wanted = flags_of(run.get_args_parser())
    mine = takes_of(torch_flags.TABLE)
    assert {flag: mine.get(flag) for flag in wanted} == wanted
    assert set(mine) - set(wanted) == {"--use_env"}, "torch.distributed.launch alone has it"


def test_every_flag_of_accelerate_launch_has_a_row():
    from accelerate.commands import launch

    wanted = flags_of(launch.launch_command_parser())
    mine = takes_of(accelerate_flags.TABLE)
    assert {flag: mine.get(flag) for flag in wanted} == wanted


def test_every_flag_of_deepspeed_has_a_row(monkeypatch):
    from deepspeed.launcher import runner

    seen: list[argparse.ArgumentParser] = []
    monkeypatch.setattr(
        argparse.ArgumentParser, "parse_args", lambda self, args=None: seen.append(self)
    )
    runner.parse_args(["train.py"])
    [parser] = seen
    wanted = flags_of(parser)
    mine = takes_of(deepspeed_flags.TABLE)
    assert mine == wanted


def test_every_argument_of_the_trainer_has_a_row():
    import transformers

    names = {f"--{field.name}" for field in dataclasses.fields(transformers.TrainingArguments)}
    assert names <= set(trainer_arguments.TABLE)
    for name, outcome in trainer_arguments.DEFAULTS.items():
        [field] = [f for f in dataclasses.fields(transformers.TrainingArguments) if f.name == name]
        for value in outcome.values.values():
            assert value == field.default, name


def test_arguments_that_deepspeed_gives_to_any_script_have_a_row():
    import deepspeed

    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    known = script_arguments.table_of_family("")
    assert {flag for flag in flags_of(parser) if "deepscale" not in flag} <= set(known)


# -- whole files -----------------------------------------------------------------------------------


def test_a_shell_file_with_its_configuration_is_one_job():
    [plan] = plans_of(FILES / "finetune.sh")
    assert plan.taken_for == (
        "a shell file, read and not executed: deepspeed starts train.py, with arguments of "
        "Hugging Face's Trainer, configured by ds.json (DeepSpeed 0.19.8)"
    )
    assert plan.facts == ()
    assert plan.world_size == 4
    assert plan.values["launcher.num_processes"] == 4
    assert plan.values["data.micro_batch_size"] == 4
    assert plan.values["trainer.accumulate"] == 4
    assert plan.values["optimizer.lr"] == 2e-5
    assert plan.values["schedule.warmup_steps"] == 100
    assert plan.choices["schedule"] == "cosine"
    assert plan.choices["strategy"] == "fsdp"
    assert plan.choices["precision"] == "bf16_true"
    assert finding(plan, "bf16.enabled").why.endswith('"auto", filled from --bf16')
    assert finding(plan, "--model_name_or_path").verdict == "yours"
    assert finding(plan, "WANDB_API_KEY").value == "***"
    assert plan.command.startswith("python -m torsh_trainer +recipe=RECIPE.yaml")


def test_what_is_set_counts_before_what_the_file_says():
    [plan] = plans_of(FILES / "finetune.sh", settings={"1": "8"})
    assert plan.values["launcher.num_processes"] == 8
    assert plan.values["trainer.accumulate"] == 2
    with pytest.raises(ConfigError, match="--set nothing: nothing of this job hangs on it"):
        plans_of(FILES / "finetune.sh", settings={"nothing": "1"})


def test_a_slurm_file_keeps_srun_and_knows_its_directives():
    [plan] = plans_of(FILES / "job.sbatch")
    assert plan.taken_for.startswith("a Slurm file, read and not executed: torchrun in srun")
    assert plan.world_size == 8
    assert plan.values["data.batch_size"] == 64
    assert plan.values["schedule.final"] == pytest.approx(0.1)
    assert "launcher.num_processes" not in plan.values
    assert plan.command.startswith("srun torchrun --nnodes 2 --nproc_per_node 4 --rdzv_id")
    assert finding(plan, "--tensor-model-parallel-size").verdict == "dead"
    assert finding(plan, "#SBATCH --nodes").verdict == "exact"


def test_a_loop_over_values_is_a_sweep():
    [plan] = plans_of(FILES / "sweep.sh")
    assert dict(plan.sweep) == {"trainer.seed": (1, 2, 3), "optimizer.lr": (1e-4, 3e-4)} or dict(
        plan.sweep
    ) == {"optimizer.lr": (1e-4, 3e-4), "trainer.seed": (1, 2, 3)}
    assert " -m " in plan.command
    assert "optimizer.lr=0.0001,0.0003" in plan.command


def test_a_loop_that_no_sweep_holds_is_a_job_each():
    text = "for n in 2 4; do torchrun --nproc_per_node $n a.py --lr 0.$n; done"
    [plan] = plans_of("", text)
    assert dict(plan.sweep) == {"launcher.num_processes": (2, 4)}
    text = "for n in 1 2; do deepspeed --num_gpus $n train.py --task $n; done"
    assert "sweep" in plans_of("", text)[0].notes[-1]
    text = "for t in a b; do torchrun --nproc_per_node 2 train.py --task $t; done"
    [plan] = plans_of("", text)
    assert "keep the loop around the command" in plan.notes[-1]


def test_several_launches_are_several_jobs_and_nothing_is_run(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("something was run"))
    plans = plans_of(FILES / "stages.sh")
    assert [plan.values["launcher.num_processes"] for plan in plans] == [4, 2]
    assert [plan.source.rpartition(":")[2] for plan in plans] == ["11", "11"]
    left = plans[0].notes[-1]
    assert "wget (6)" in left
    assert "rm (7)" in left
    assert "python prepare.py (8)" in left
    assert any("[ -f work/done ]" in note for note in plans[1].notes)
    with pytest.raises(ConfigError, match="starts 2 jobs"):
        LaunchTranslator().translate(FILES / "stages.sh", TranslationRequest())


@pytest.mark.parametrize("name", sorted(path.name for path in FILES.iterdir()))
def test_a_recipe_of_each_file_composes_and_its_report_keeps_the_schema(
    name, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["translate", str(FILES / name), "-o", "job.yaml", "--report", "r.json"]) < 20
    recipe = next(iter(sorted(tmp_path.glob("job*.yaml"))))
    said = json.loads(next(iter(sorted(tmp_path.glob("r*.json")))).read_text())
    schema = json.loads(report.schema_text())
    assert set(said) == set(schema["required"]) == set(schema["properties"])
    assert said["engine"] in schema["properties"]["engine"]["enum"]
    assert "start it with: " in capsys.readouterr().out
    parts = ["task=classification", "model=mlp", "data=digits", "trainer.max_steps=2"]
    assert main([f"+recipe={recipe}", *parts, "--cfg", "job"]) == 0
    composed = yaml.safe_load(capsys.readouterr().out)
    for dotted, value in said["values"].items():
        found = composed
        for key in dotted.split("."):
            found = found[key]
        assert dotted == "trainer.max_steps" or found == value, dotted


# -- lines -----------------------------------------------------------------------------------------

LINES = {
    "deepspeed --num_gpus 4 a.py": (
        {"launcher.num_processes": 4},
        "python -m torsh_trainer +recipe=RECIPE.yaml task=TASK data=DATA",
    ),
    "deepspeed a.py": ({"launcher.num_processes": "auto"}, "python -m torsh_trainer"),
    "deepspeed --include localhost:1,3 a.py": (
        {"launcher.num_processes": 2},
        "CUDA_VISIBLE_DEVICES=1,3 python -m torsh_trainer",
    ),
    "deepspeed --num_nodes 2 --num_gpus 8 --hostfile h a.py": (
        {},
        "torchrun --nnodes=2 --nproc-per-node=8 --node-rank=NODE_RANK --master-addr=FIRST_MACHINE",
    ),
    "accelerate launch --num-processes 2 --mixed-precision fp16 --multi-gpu a.py": (
        {"launcher.num_processes": 2},
        "python -m torsh_trainer",
    ),
    "accelerate launch --use_fsdp --fsdp_offload_params true --num_processes 4 a.py": (
        {"strategy.cpu_offload": True, "launcher.num_processes": 4},
        "python -m torsh_trainer",
    ),
    "accelerate launch --use_fsdp --fsdp_sharding_strategy 2 --num_processes 4 a.py": (
        {"strategy.reshard_after_forward": False, "launcher.num_processes": 4},
        "python -m torsh_trainer",
    ),
    "accelerate launch --gpu_ids 2,3 --num_processes 2 --module pkg.train": (
        {"launcher.num_processes": 2},
        "CUDA_VISIBLE_DEVICES=2,3 python -m torsh_trainer",
    ),
    "accelerate launch --num_machines 2 --machine_rank $R --num_processes 16 a.py": (
        {},
        "torchrun --nnodes=2 --nproc-per-node=8 --node-rank=$R",
    ),
    "torchrun --nproc-per-node=gpu a.py": (
        {"launcher.num_processes": "auto"},
        "python -m torsh_trainer",
    ),
    "torchrun --nnode 2 --node_rank 1 --nproc_per_node 2 a.py": (
        {},
        "torchrun --nnode 2 --node_rank NODE_RANK --nproc_per_node 2 -m torsh_trainer",
    ),
    "python3.11 -u -m torch.distributed.launch --use_env --nproc_per_node 2 a.py": (
        {"launcher.num_processes": 2},
        "python -m torsh_trainer",
    ),
    "A=1 srun -n 4 --gres=gpu:4 python -u a.py": (
        {},
        "A=1 srun -n 4 --gres=gpu:4 python -m torsh_trainer",
    ),
    "mpirun -np 2 -x PATH -mca pml ob1 uv run a.py": (
        {},
        "mpirun -np 2 -x PATH -mca pml ob1 uv run python -m torsh_trainer",
    ),
    "nohup poetry run deepspeed --num_gpus=2 a.py > log &": (
        {"launcher.num_processes": 2},
        "python -m torsh_trainer",
    ),
    "python a.py --lr 1": ({}, "python -m torsh_trainer"),
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_becomes_knobs_and_a_command(line):
    values, command = LINES[line]
    plan = plan_of(line)
    assert dict(plan.values) == values
    assert plan.command.startswith(command)
    assert plan.facts == ()


def test_flags_of_accelerate_are_a_configuration_of_deepspeed():
    plan = plan_of(
        "accelerate launch --use_deepspeed --zero_stage 3 --offload_optimizer_device cpu "
        "--mixed_precision bf16 --gradient_clipping 0.5 --num_processes 2 a.py"
    )
    assert plan.choices["strategy"] == "fsdp"
    assert plan.values["trainer.max_grad_norm"] == 0.5
    assert plan.values["strategy.cpu_offload"] is True
    assert "configured by its flags" in plan.taken_for


def test_the_yaml_of_accelerate_is_read_with_the_line(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\nfsdp_config:\n"
        "  fsdp_sharding_strategy: SHARD_GRAD_OP\n  fsdp_transformer_layer_cls_to_wrap: Block\n"
        "rdzv_backend: static\nunheard_of: 1\n"
    )
    script = tmp_path / "run.sh"
    script.write_text("accelerate launch --config_file a.yaml --num_processes 4 train.py\n")
    [plan] = plans_of(script)
    assert plan.choices["strategy"] == "fsdp"
    assert plan.values["strategy.reshard_after_forward"] is False
    assert plan.values["strategy.wrap_modules"] == ["Block"]
    assert plan.values["launcher.num_processes"] == 4
    assert finding(plan, "num_processes").verdict == "dead"
    assert finding(plan, "fsdp_config.fsdp_sharding_strategy").where == "a.yaml:5"
    assert finding(plan, "unheard_of").verdict == "dead"
    (tmp_path / "a.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 2\nmixed_precision: bf16\n"
        "deepspeed_config: {zero_stage: 2, gradient_accumulation_steps: 2}\n"
    )
    [plan] = plans_of(script)
    assert plan.values["trainer.accumulate"] == 2
    assert plan.choices["precision"] == "bf16_true"


def test_arguments_of_the_trainer_stand_in_a_file_as_well(tmp_path):
    (tmp_path / "sft.yaml").write_text(
        "model: x\nlearning_rate: 1.0e-5\nper_device_train_batch_size: 2\nbf16: true\n"
        "gradient_accumulation_steps: 8\nlr_scheduler_type: constant\nnum_train_epochs: 1\n"
    )
    script = tmp_path / "run.sh"
    script.write_text("torchrun --nproc_per_node 2 sft.py sft.yaml\n")
    [plan] = plans_of(script)
    assert plan.values["optimizer.lr"] == 1e-5
    assert plan.values["data.micro_batch_size"] == 2
    assert finding(plan, "learning_rate").where == "sft.yaml:2"


HF = "--output_dir o --per_device_train_batch_size 2 --save_strategy no"
TRAINER = {
    "--learning_rate 1e-4": {"optimizer.lr": 1e-4},
    "--num_train_epoch 2": {"trainer.max_epochs": 2},
    "--max_steps 10 --num_train_epochs 2": {"trainer.max_steps": 10},
    "--adam_beta2 0.95": {"optimizer.betas": [0.9, 0.95]},
    "--warmup_ratio 0.1": {"schedule.warmup_ratio": 0.1},
    "--warmup_ratio 0.1 --warmup_steps 5": {"schedule.warmup_steps": 5},
    "--max_grad_norm 0": {"trainer.max_grad_norm": None},
    "--eval_strategy steps --eval_steps 20": {"trainer.eval_every": 20},
    "--save_strategy epoch": {"checkpoint.every_epochs": 1},
    "--tf32 True": {"precision.matmul": "high"},
    "--fsdp 'full_shard auto_wrap offload'": {
        "strategy.reshard_after_forward": True,
        "strategy.cpu_offload": True,
    },
    "--ddp_find_unused_parameters True": {"strategy.find_unused_parameters": True},
    "--report_to wandb tensorboard": {
        "logger.wandb.enabled": True,
        "logger.tensorboard.enabled": True,
    },
}


@pytest.mark.parametrize("arguments", TRAINER)
def test_arguments_of_the_trainer_become_knobs(arguments):
    plan = plan_of(f"torchrun --nproc_per_node 2 a.py {HF} {arguments}")
    assert {key: plan.values.get(key) for key in TRAINER[arguments]} == TRAINER[arguments]


def test_a_constant_rate_has_no_warm_up():
    plan = plan_of(f"torchrun a.py {HF} --lr_scheduler_type constant --warmup_ratio 0.1")
    assert finding(plan, "--warmup_ratio").verdict == "dead"
    assert "schedule.warmup_ratio" not in plan.values


def test_nothing_is_silent_and_nobodys_arguments_are_the_scripts_own():
    plan = plan_of("torchrun --nproc_per_node 2 a.py pos --lr 1 --flag -x=3 --path 'a b'")
    assert verdicts(plan) == {
        "--nproc_per_node": "exact",
        "pos": "yours",
        "--lr": "yours",
        "--flag": "yours",
        "-x": "yours",
        "--path": "yours",
    }


def test_a_row_that_another_overrides_does_not_count():
    plan = plan_of("deepspeed --num_gpus 2 --num_gpus 4 a.py")
    assert [f.verdict for f in plan.findings if f.key == "--num_gpus"] == ["dead", "exact"]


# -- what is missing -------------------------------------------------------------------------------


def test_what_is_missing_is_asked_once(capsys):
    line = "torchrun --nproc_per_node $N a.py --deepspeed $DS --learning_rate $LR " + HF
    plan = plan_of(line)
    assert [fact.name for fact in plan.facts] == ["deepspeed", "N", "LR"]
    assert plan.exit_code == 13
    assert main(["translate", "--command", line, "-o", "never.yaml"]) == 13
    said = capsys.readouterr().out
    assert "missing, and only you know it:" in said
    assert "--set deepspeed=FILE --set N=VALUE --set LR=VALUE" in said
    assert not Path("never.yaml").exists()


def test_facts_that_are_stated_are_no_longer_missing(tmp_path):
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"stage": 1}, "bf16": {"enabled": '
        '"auto"}, "train_micro_batch_size_per_gpu": "auto"}'
    )
    line = "torchrun --nproc_per_node $N a.py --deepspeed $DS --bf16 " + HF
    given = {"N": "2", "deepspeed": str(tmp_path / "ds.json")}
    plan = plan_of(line, settings=given)
    assert plan.facts == ()
    assert plan.values["launcher.num_processes"] == 2
    assert plan.choices["precision"] == "bf16_true"


def test_a_configuration_that_is_not_there_leaves_what_it_may_decide_open():
    plan = plan_of(f"torchrun a.py {HF} --deepspeed nowhere.json --bf16 --learning_rate 1e-4")
    assert {finding(plan, key).verdict for key in ("--deepspeed", "--bf16", "--learning_rate")} == {
        "refused"
    }
    assert "precision" not in plan.choices
    assert "optimizer.lr" not in plan.values


def test_auto_that_no_line_fills_is_asked_for(tmp_path):
    (tmp_path / "ds.json").write_text(
        '{"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}'
    )
    script = tmp_path / "run.sh"
    script.write_text("deepspeed --num_gpus 2 a.py --deepspeed ds.json --config my.py\n")
    [plan] = plans_of(script)
    assert {fact.name for fact in plan.facts} == {"bf16", "per_device_train_batch_size"}
    assert finding(plan, "bf16.enabled").verdict == "refused"
    [plan] = plans_of(script, settings={"bf16": "true", "per_device_train_batch_size": "4"})
    assert plan.values["data.micro_batch_size"] == 4


def test_a_configuration_is_found_beside_the_file_and_above_it(tmp_path):
    (tmp_path / "conf").mkdir()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "conf" / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 3}')
    script = tmp_path / "scripts" / "run.sh"
    for named in ("conf/ds.json", "$ROOT/conf/ds.json", "$(dirname $0)/../conf/ds.json"):
        script.write_text(f"deepspeed a.py --deepspeed_config {named}\n")
        assert plans_of(script)[0].values["data.micro_batch_size"] == 3
    script.write_text("deepspeed a.py --deepspeed_config conf/other.json\n")
    [fact] = plans_of(script)[0].facts
    assert fact.name == "deepspeed_config"
    assert "there is no conf/other.json here, beside the file or in the 5 folders" in fact.look
    script.write_text("jq .a x > conf/ds.json\ndeepspeed a.py --deepspeed_config conf/ds.json\n")
    [fact] = plans_of(script)[0].facts
    assert "jq writes it in line 1, which is read and not run" in fact.look


# -- bad input -------------------------------------------------------------------------------------

WRONG = {
    "deepspeed --num_gpus four a.py": ("--num_gpus should be a number, not 'four'", "correct"),
    "deepspeed --num_gpus 0 a.py": ("should be a whole number, 1 or more", "correct"),
    "deepspeed --nmu_gpus 2 a.py": ("deepspeed has no option --nmu_gpus", "'--num_gpus'"),
    "torchrun --nproc_per_node": ("--nproc_per_node wants a value", "add it"),
    "echo a; rm -rf b": ("starts no training: it runs echo, rm", "deepspeed, accelerate"),
    "bash train.sh 8 'a b'": ("line 1 runs train.sh", "translate train.sh --set 1=8 --set 2='a b'"),
    "deepspeed a.py 'x": ("a quotation mark ' that nothing closes", "close it"),
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_line_is_one_sentence_and_the_next_move(line):
    words, fix = WRONG[line]
    with pytest.raises(ConfigError) as caught:
        plan_of(line)
    assert words in caught.value.sentence
    assert fix in caught.value.fix


def test_configurations_that_contradict_one_another_are_refused(tmp_path):
    (tmp_path / "a.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    (tmp_path / "b c.json").write_text('{"train_micro_batch_size_per_gpu": 2}')
    script = tmp_path / "run it.sh"
    script.write_text("deepspeed t.py --deepspeed_config a.json --ds_config 'b c.json'\n")
    with pytest.raises(ConfigError, match="are two configurations of DeepSpeed that contradict"):
        plans_of(script)
    script.write_text(f"deepspeed t.py --deepspeed a.json {HF} --logging_steps 1\n")
    with pytest.raises(
        ConfigError, match=r"--per_device_train_batch_size 2 contradicts train_micro"
    ):
        plans_of(script)


def test_content_decides_what_a_file_is(tmp_path):
    launch = tmp_path / "notes.txt"
    launch.write_text("deepspeed --num_gpus 2 a.py\n")
    assert work_of(launch, TranslationRequest()).translator.name == "launch"
    for name, text in {
        "a.sh": '{"train_batch_size": 8}',
        "b.py": "import torch\n# torchrun --nproc_per_node 2 b.py\n",
        "c.yaml": "command: torchrun a.py\n",
        "d.sh": "HOROVOD_CYCLE_TIME=1\n",
        "e.sh": "horovodrun -np 2 python a.py\n",
    }.items():
        path = tmp_path / name
        path.write_text(text)
        assert not LaunchTranslator().recognises(path, None), name
    binary = tmp_path / "f.sh"
    binary.write_bytes(b"\x7fELF\xff\0\1")
    with pytest.raises((ConfigError, ResourceError), match=r"f\.sh"):
        plans_of(binary)


def test_several_lines_of_horovodrun_are_a_job_each(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("N=2\nhorovodrun -np $N python a.py\nhorovodrun -np 4 python a.py\n")
    plans = plans_of(script)
    assert [plan.engine for plan in plans] == ["horovod", "horovod"]
    assert [plan.values["launcher.num_processes"] for plan in plans] == [2, 4]
    assert {f.line for f in plans[1].findings if f.given} == {3}


def test_a_job_that_a_file_writes_and_submits_is_read(tmp_path):
    script = tmp_path / "submit.sh"
    job = "#SBATCH --nodes=1\ntorchrun --nproc_per_node 4 a.py\n"
    script.write_text(f"cat > job.sh <<'EOF'\n{job}EOF\nsbatch job.sh\n")
    [plan] = plans_of(script)
    assert plan.values["launcher.num_processes"] == 4
    assert "the job stands in job.sh, which line 1 writes" in plan.notes[-1]


# -- any text --------------------------------------------------------------------------------------

TEXTS = [path.read_text() for path in sorted(FILES.iterdir())]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_files_that_are_cut_shuffled_and_changed_are_read_or_named(data):
    text = data.draw(st.sampled_from(TEXTS))
    how = data.draw(st.sampled_from(["cut", "lines", "words", "characters", "joined"]))
    if how == "cut":
        first = data.draw(st.integers(0, len(text)))
        text = text[first : data.draw(st.integers(first, len(text)))]
    elif how == "lines":
        text = "\n".join(data.draw(st.permutations(text.split("\n"))))
    elif how == "words":
        words = text.split(" ")
        for _ in range(data.draw(st.integers(1, 5))):
            a, b = (data.draw(st.integers(0, len(words) - 1)) for _ in range(2))
            words[a], words[b] = words[b], words[a]
        text = " ".join(words)
    elif how == "characters":
        for _ in range(data.draw(st.integers(1, 8))):
            at = data.draw(st.integers(0, len(text)))
            text = text[:at] + data.draw(st.sampled_from("'\"$\\`(){}[];|&\n\0é -=#*")) + text[at:]
    else:
        text += data.draw(st.sampled_from(TEXTS))
    named = None
    try:
        for plan in plans_of("", text):
            assert recipe_of(plan)
            assert plan.exit_code in (0, 10, 11, 13)
    except (ConfigError, ResourceError) as error:
        named = error
    assert named is None or (named.sentence and named.fix)


@pytest.mark.parametrize(
    ("accumulate", "family"), [('"auto"', "hugging-face"), ("2", "the script's own")]
)
def test_few_arguments_are_the_trainers_where_the_file_it_is_handed_says_auto(
    tmp_path, accumulate, family
):
    file = tmp_path / "run.sh"
    file.write_text("deepspeed train.py --deepspeed ds.json --gradient_accumulation_steps 8\n")
    (tmp_path / "ds.json").write_text(
        f'{{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": {accumulate}}}'
    )
    [plan] = plans_of(file)
    if family == "hugging-face":
        assert plan.values["trainer.accumulate"] == 8
        assert "Hugging Face's Trainer" in plan.taken_for
    else:
        assert plan.values["trainer.accumulate"] == 2
        assert "Hugging Face's Trainer" not in plan.taken_for


def test_a_file_that_is_taken_in_sets_variables_and_one_that_is_not_here_is_named(tmp_path):
    (tmp_path / "env.sh").write_text("GPUS=4\n")
    (tmp_path / "run.sh").write_text(
        '#!/bin/bash\nsource "$(dirname "$0")/env.sh"\nsource gone.sh\nsource activate\n'
        "torchrun --nproc_per_node $GPUS train.py\n"
    )
    [plan] = plans_of(tmp_path / "run.sh")
    assert plan.values["launcher.num_processes"] == 4
    said = "; ".join(plan.notes)
    assert "taken in, as source does:" in said
    assert "not read, since it is not here: gone.sh; what it sets counts as unset" in said
    assert "activate;" not in said


HOROVOD_SCRIPT = """
import argparse
import horovod.torch as hvd
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--momentum", type=float, required=True)


def main():
    args = parser.parse_args()
    hvd.init()
    model = torch.nn.Linear(8, 3)
    loader = torch.utils.data.DataLoader(make_data(), batch_size=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("start", "size"),
    [("mpirun -np 4 -bind-to none", 4), ("srun -N 2 --ntasks-per-node=4", 8), ("srun", None)],
)
def test_a_horovod_script_is_read_whatever_starts_it(tmp_path, monkeypatch, start, size):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(HOROVOD_SCRIPT)
    plan = plan_of(f"{start} python train.py --lr 0.1 --momentum 0.9")
    assert plan.taken_for.startswith("a launch line, read and not executed: python in ")
    assert "a script for Horovod" in plan.taken_for
    assert plan.command.startswith(f"{start} python -m torsh_trainer +recipe=")
    assert plan.values["optimizer.momentum"] == 0.9
    assert plan.values["strategy.zero_unused"] is True
    assert "launcher.num_processes" not in plan.values
    assert not plan.facts
    assert plan.values["optimizer.lr"] == pytest.approx(0.1 * (size or 1))
    assert plan.values.get("optimizer.lr_scaling") == (None if size else "linear")


def test_what_a_script_asks_for_can_be_stated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(HOROVOD_SCRIPT)
    line = "mpirun -np 2 python train.py"
    (fact,) = plan_of(line).facts
    assert plan_of(line, settings={fact.name: "0.5"}).values["optimizer.momentum"] == 0.5
    with pytest.raises(ConfigError, match="nothing of this job hangs on it"):
        plan_of(line, settings={fact.name: "0.5", "nope": "1"})


def test_a_configuration_that_a_script_knows_by_a_word_is_asked_for(tmp_path):
    line = "deepspeed --num_gpus 2 train.py --deepspeed zero3 --output_dir out --learning_rate 1e-4"
    [plan] = plans_of("", f"{line} --per_device_train_batch_size 2")
    [fact] = plan.facts
    assert (fact.name, fact.value) == ("deepspeed", "FILE")
    assert "zero3 is no file" in fact.look
    path = tmp_path / "theirs.json"
    path.write_text('{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2}')
    stated = {"deepspeed": str(path)}
    [plan] = plans_of("", f"{line} --per_device_train_batch_size 2", settings=stated)
    assert plan.choices["strategy"] == "fsdp"


@pytest.mark.parametrize(
    ("variable", "verdict"),
    [
        ("ACCELERATE_USE_DEEPSPEED=true", "refused"),
        ("ACCELERATE_USE_DEEPSPEED=false", "exact"),
        ("ACCELERATE_MIXED_PRECISION=bf16", "refused"),
        ("PL_DEEPSPEED_CONFIG_PATH=ds.json", "refused"),
        ("ACCELERATE_LOG_LEVEL=info", "exact"),
    ],
)
def test_a_variable_that_decides_the_engine_is_not_passed_over(tmp_path, variable, verdict):
    path = tmp_path / "run.sh"
    arguments = "--output_dir out --learning_rate 1e-4 --per_device_train_batch_size 2"
    path.write_text(f"export {variable}\ntorchrun --nproc_per_node 2 train.py {arguments}\n")
    [plan] = plans_of(path)
    name = variable.partition("=")[0]
    [finding] = [finding for finding in plan.findings if finding.key == name]
    assert finding.verdict == verdict
    assert ("strategy" in plan.choices) is (verdict == "exact")
    path.write_text(
        f"export {variable}\naccelerate launch --num_processes 2 train.py {arguments}\n"
    )
    [plan] = plans_of(path)
    assert [f.verdict for f in plan.findings if f.key == name] == ["exact"] or "PL" in name


def test_two_jobs_that_name_two_files_ask_for_them_by_their_paths(tmp_path):
    path = tmp_path / "run.sh"
    line = "deepspeed --num_gpus 2 train.py --deepspeed {}\n"
    path.write_text(line.format("conf/one.json") + line.format("conf/two.json"))
    names = [fact.name for plan in plans_of(path) for fact in plan.facts]
    assert names == ["conf/one.json", "conf/two.json"]
    for name, size in (("a.json", 2), ("b.json", 7)):
        (tmp_path / name).write_text(f'{{"train_micro_batch_size_per_gpu": {size}}}')
    stated = {"conf/one.json": str(tmp_path / "a.json"), "conf/two.json": str(tmp_path / "b.json")}
    sizes = [plan.values["data.micro_batch_size"] for plan in plans_of(path, settings=stated)]
    assert sizes == [2, 7]
    path.write_text(line.format("conf/one.json") * 2)
    assert {fact.name for plan in plans_of(path) for fact in plan.facts} == {"deepspeed"}


def test_a_file_that_starts_what_it_is_given_asks_for_that(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text("GPUS=$1\ntorchrun --nproc_per_node=$GPUS ${@:2}\n")
    [plan] = plans_of(path)
    assert {fact.name for fact in plan.facts} == {"1", "@"}
    stated = {"1": "4", "@": "4 train.py --lr 3"}
    [plan] = plans_of(path, settings=stated)
    assert not plan.facts
    assert plan.taken_for.endswith("torchrun starts train.py")
    assert plan.values["launcher.num_processes"] == 4
    assert verdicts(plan)["--lr"] == "yours"


def test_arguments_that_are_handed_on_are_no_value_of_the_flag_before(tmp_path):
    path = tmp_path / "run.sh"
    line = 'main() { deepspeed --num_gpus 2 train.py --stage ${1:-3} --epochs 5 "$@"; }\n'
    path.write_text(line + '[ $# -gt 4 ] && shift\nmain "$@"\n')
    [plan] = plans_of(path)
    assert (finding(plan, "--epochs").value, finding(plan, "--stage").value) == ("5", "3")
    assert any("hands its own arguments on ($@)" in note for note in plan.notes)
    [plan] = plans_of(path, settings={"@": "2 --lr '1e-3'"})
    assert (finding(plan, "--epochs").value, finding(plan, "--stage").value) == ("5 2", "2")
    assert finding(plan, "--lr").value == "1e-3"


def test_a_directive_behind_a_command_is_none(tmp_path):
    path = tmp_path / "job.sbatch"
    text = "#!/bin/bash\n{}#SBATCH --nodes=2\n#SBATCH --gpus-per-task=a100:4\n"
    text += "accelerate launch --num_machines $SLURM_NNODES --machine_rank $SLURM_PROCID "
    text += "--num_processes $((SLURM_NNODES * SLURM_GPUS_PER_TASK)) train.py\n"
    path.write_text(text.format("# first\n\n"))
    [plan] = plans_of(path)
    assert finding(plan, "#SBATCH --nodes").verdict == "exact"
    assert "--nnodes=2 --nproc-per-node=4" in plan.command
    path.write_text(text.format("set -e\n"))
    [plan] = plans_of(path)
    assert finding(plan, "#SBATCH --nodes").verdict == "dead"
    assert "--nnodes=$SLURM_NNODES --nproc-per-node=gpu" in plan.command


def test_what_the_launcher_sets_stands_before_no_command():
    plan = plan_of("MASTER_PORT=1234 OMP_NUM_THREADS=2 torchrun --nproc_per_node 2 train.py")
    assert verdicts(plan)["MASTER_PORT"] == "dead"
    assert plan.command.startswith("OMP_NUM_THREADS=2 python -m torsh_trainer")


@pytest.mark.parametrize("count", [1, 2])
def test_variables_around_horovodrun_have_a_row(tmp_path, count):
    path = tmp_path / "run.sh"
    line = 'X=1 horovodrun -np 2 python train.py --lr 0.1 "$@"\n'
    path.write_text("export HOROVOD_CYCLE_TIME=2\nexport OMP_NUM_THREADS=4\n" + line * count)
    plans = plans_of(path)
    assert len(plans) == count
    for plan in plans:
        assert {"X", "OMP_NUM_THREADS", "HOROVOD_CYCLE_TIME"} <= set(verdicts(plan))


def test_what_is_to_be_filled_in_is_asked_for_by_its_name(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(
        "torchrun --nproc_per_node 2 train.py --output_dir o --learning_rate <your-rate>\n"
    )
    [plan] = plans_of(path)
    assert finding(plan, "--learning_rate").value == "${your_rate}"
    [plan] = plans_of(path, settings={"your_rate": "0.1"})
    assert finding(plan, "--learning_rate").value == "0.1"


def test_the_folder_of_a_file_that_bash_names_is_its_own(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(
        'cd "$(dirname "${BASH_SOURCE[0]}")"\ntorchrun --nproc_per_node 2 train.py --lr 0.1\n'
    )
    [plan] = plans_of(path)
    assert plan.facts == ()


def test_an_export_of_its_own_value_says_what_it_is(tmp_path):
    path = tmp_path / "run.sh"
    line = "torchrun --nproc_per_node 2 train.py --lr 0.1\n"
    path.write_text("export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}\n" + line)
    [plan] = plans_of(path)
    assert verdicts(plan)["OMP_NUM_THREADS"] == "performance-only"


def test_what_hangs_on_nothing_is_told_with_a_short_offer():
    with pytest.raises(ConfigError) as refusal:
        plan_of("torchrun --nproc_per_node $N train.py", settings={"bogus": "1"})
    assert len(str(refusal.value)) < 200


def test_every_key_of_fsdp_config_has_a_verdict(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = (
        "torchrun --nproc_per_node 4 train.py --output_dir out --learning_rate 1e-4 "
        "--per_device_train_batch_size 2 --fsdp 'full_shard auto_wrap' --fsdp_config "
    )
    Path("fsdp.json").write_text(
        '{"fsdp_transformer_layer_cls_to_wrap": ["Block"], "min_num_params": 0, "xla": true,\n'
        ' "activation_checkpointing": true, "reshard_after_forward": false, "bogus": 1}'
    )
    plan = plan_of(f"{line} fsdp.json")
    found = {f.key.removeprefix("fsdp_config."): f.verdict for f in plan.findings}
    assert found["xla"] == "refused"
    assert found["bogus"] == "dead"
    assert found["fsdp_transformer_layer_cls_to_wrap"] == found["min_num_params"] == "exact"
    assert plan.values["strategy.wrap_modules"] == ["Block"]
    assert plan.values["trainer.activation_checkpointing"] is True
    assert plan.values["strategy.reshard_after_forward"] is False
    inline = plan_of(f"""{line} '{{"min_num_params": 1000}}'""")
    assert inline.values["strategy.wrap_min_parameters"] == 1000
    [fact] = plan_of(f"{line} gone.json").facts
    assert fact.name == "fsdp_config"


def test_a_configuration_within_a_file_of_arguments_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = '"output_dir": "o", "learning_rate": 1e-4, "per_device_train_batch_size": 2'
    Path("args.json").write_text(
        f'{{{arguments}, "deepspeed": {{"zero_optimization": {{"stage": 3}},\n'
        '"train_micro_batch_size_per_gpu": 2}}'
    )
    plan = plan_of("torchrun --nproc_per_node 2 train.py args.json")
    assert plan.choices["strategy"] == "fsdp"
    assert verdicts(plan)["zero_optimization.stage"] in ("exact", "emulated", "approximate")
    Path("args.json").write_text(
        f'{{{arguments}, "fsdp": "full_shard", "fsdp_config": {{"min_num_params": 1000}}}}'
    )
    plan = plan_of("torchrun --nproc_per_node 2 train.py args.json")
    assert plan.values["strategy.wrap_min_parameters"] == 1000
