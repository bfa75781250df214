"""What a script on DeepSpeed alone has saved is read without it, and a native run goes on."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from torsh_trainer_deepspeed import library

from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.checkpoint.cli import zero
from torsh_trainer.checkpoint.cli.importing import Import, import_file
from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.errors import ConfigError
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.testing import cases
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.reference import Scenario
from torsh_trainer.testing.tiny import TinyData, TinyModelOptions

BEFORE, AFTER = 3, 3
SCENARIO = Scenario(
    optimizer="adamw",
    model=TinyModelOptions(tied=True),
    data=TinyData(steps=BEFORE + AFTER),
)
KINDS = {
    "stage-0": {"zero_optimization": {"stage": 0}},
    "stage-1": {"zero_optimization": {"stage": 1}},
    "stage-2": {"zero_optimization": {"stage": 2, "reduce_bucket_size": 200}},
    "stage-3": {"zero_optimization": {"stage": 3}},
    "stage-3-in-sub-groups": {"zero_optimization": {"stage": 3, "sub_group_size": 50}},
    "stage-1-bf16": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    "stage-3-bf16": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
}


def original(comm, folder, config, scenario=SCENARIO):
    """A script on DeepSpeed: saves amid training; its losses afterwards, and both ends' masters."""
    with library.putting_back():
        return script(comm, folder, config, scenario)


def script(comm, folder, config, scenario):
    deepspeed = library.load(comm)
    task = scenario.task
    model = task.build_model()
    optimizer = task.build_optimizers(list(model.named_parameters()))["main"]
    config = {
        "train_micro_batch_size_per_gpu": scenario.data.samples,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        **config,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )

    def step(number):
        (micro,) = scenario.data.step(number, comm.world.size)[comm.world.rank]
        loss = task.loss(task.forward(engine, micro.batch).float(), micro.batch)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    for number in range(BEFORE):
        step(number)
    engine.save_checkpoint(str(folder), client_state={"epoch": 1})
    saved = masters(model, deepspeed)
    losses = [step(number) for number in range(BEFORE, BEFORE + AFTER)]
    ended = masters(model, deepspeed)
    engine.destroy()
    return saved, losses, ended


def masters(model, deepspeed):
    """fp32 parameters by name, as DeepSpeed itself tells them; collective."""
    told = {
        name: deepspeed.utils.safe_get_full_fp32_param(p) for name, p in model.named_parameters()
    }
    return {
        name: (dict(model.named_parameters())[name] if value is None else value).detach().clone()
        for name, value in told.items()
    }


def imported(folder, output, **options):
    path, notes = import_file(Import(file=folder, output=output, **options))
    return path, notes


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """``saved(kind, ranks=2)``: the folder, and what each rank of the script then told."""
    made = {}

    def make(kind, ranks=2):
        if (kind, ranks) not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind, ranks] = folder, shared_pool(ranks).run(original, folder, KINDS[kind])
        return made[kind, ranks]

    return make


def order_file(tmp_path):
    task = SCENARIO.task
    model = task.build_model()
    names = {id(p): name for name, p in model.named_parameters()}
    groups = task.build_optimizers(list(model.named_parameters()))["main"].param_groups
    path = tmp_path / "order.txt"
    path.write_text("\n".join(names[id(p)] for group in groups for p in group["params"]))
    return path


@pytest.mark.proves("checkpoint.masters")
@pytest.mark.parametrize("kind", KINDS)
def test_the_masters_are_read_bit_for_bit(kind, saved, tmp_path):
    folder, told = saved(kind)
    options = {"parameters": order_file(tmp_path)} if kind == "stage-0" else {}
    path, notes = imported(folder, tmp_path / "out", **options)
    assert path.name == f"step-{BEFORE:08d}"
    assert notes[0].startswith("deepspeed (")
    model = SCENARIO.task.build_model()
    checkpointer = DcpCheckpointer(path.parent, LocalCommunicator(), CheckpointOptions())
    state = {"engine": {"model": dict(model.state_dict())}, "position": {}}
    loaded = checkpointer.load(state, path=path, leave=[("engine", "optimizer")])
    masters_then = told[0][0]
    for name, tensor in loaded["engine"]["model"].items():
        expected = masters_then.get(name, masters_then["embedding.weight"])
        assert torch.equal(tensor, expected), name
    assert loaded["position"]["samples"] == BEFORE * 2 * SCENARIO.data.samples
    assert loaded["position"]["epoch"] == 1


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "bf16" not in kind])
@pytest.mark.parametrize("strategy", [DDP(), FSDP()], ids=["ddp", "fsdp"])
def test_a_native_run_goes_on_as_the_original_does(kind, strategy, saved, tmp_path):
    folder, told = saved(kind)
    options = {"parameters": order_file(tmp_path)} if kind == "stage-0" else {}
    path, _ = imported(folder, tmp_path / "out", **options)
    outcomes = shared_pool(2).run(cases.go_on, strategy, SCENARIO, path, BEFORE)
    for rank, (outcome, (_, losses, ended)) in enumerate(zip(outcomes, told, strict=True)):
        mine = [step[rank][0] for step in outcome.losses]
        assert mine == pytest.approx(losses, rel=1e-6)
        for name, expected in ended.items():
            torch.testing.assert_close(outcome.parameters[name], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("kind", ["stage-2", "stage-3", "stage-3-in-sub-groups"])
def test_the_universal_format_holds_the_same(kind, saved, tmp_path):
    folder, _ = saved(kind)
    steps = f"global_step{BEFORE}"
    convert(folder / steps, tmp_path / "universal" / steps)
    ours = zero.read(zero.folder_of(folder))
    universal = zero.read(zero.folder_of(tmp_path / "universal"))
    assert universal.kind == "universal"
    assert universal.counts == ours.counts
    assert universal.weights.keys() == ours.weights.keys()
    for name, tensor in ours.weights.items():
        assert torch.equal(universal.weights[name], tensor), name
    assert universal.optimizer["groups"] == ours.optimizer["groups"]
    for name, slots in ours.optimizer["state"].items():
        assert universal.optimizer["state"][name].keys() == slots.keys()
        for slot, value in slots.items():
            assert torch.equal(universal.optimizer["state"][name][slot], value), (name, slot)


def convert(folder, output):
    """DeepSpeed's own program, which leaves the file ``latest_universal`` beside its output."""
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", str(folder), "--output_folder", str(output)]
    env = {**os.environ, "DS_ACCELERATOR": "cpu"}
    subprocess.run([*command, "--inject_missing_state"], check=True, env=env, capture_output=True)


# -- what cannot be read, and says so -------------------------------------------------------------


def damaged(saved, tmp_path, kind="stage-1"):
    """A copy to spoil: the folder, and that of its step."""
    folder = tmp_path / "copy"
    shutil.copytree(saved(kind)[0], folder)
    return folder, folder / f"global_step{BEFORE}"


def test_the_file_of_a_rank_that_is_missing_is_named(saved, tmp_path):
    folder, step = damaged(saved, tmp_path)
    (step / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(ConfigError, match=r"has the optimizer of 1 ranks, and 2 saved theirs"):
        imported(folder, tmp_path / "out")
    (step / "zero_pp_rank_0_mp_rank_00_optim_states.pt").rename(
        step / "zero_pp_rank_2_mp_rank_00_optim_states.pt"
    )
    with pytest.raises(ConfigError, match=r"optim_states.pt of rank 0"):
        imported(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_file_is_named(saved, tmp_path):
    folder, step = damaged(saved, tmp_path)
    path = step / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"zero_pp_rank_1_mp_rank_00_optim_states.pt cannot be"):
        imported(folder, tmp_path / "out")


def test_ranks_of_different_checkpoints_are_found_out(saved, tmp_path):
    folder, step = damaged(saved, tmp_path)
    path = step / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = torch.load(path, weights_only=False)
    partitions = content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    partitions[0] = partitions[0][:3]
    torch.save(content, path)
    with pytest.raises(ConfigError, match="belong to different checkpoints, or are damaged"):
        imported(folder, tmp_path / "out")


def test_a_model_that_was_itself_divided_is_refused(saved, tmp_path):
    folder, step = damaged(saved, tmp_path)
    shutil.copy(step / "mp_rank_00_model_states.pt", step / "mp_rank_01_model_states.pt")
    with pytest.raises(ConfigError, match=r"mp_rank_01_model_states.pt is of a model that was"):
        imported(folder, tmp_path / "out")


def test_latest_that_names_nothing_says_what_to_name(saved, tmp_path):
    folder, step = damaged(saved, tmp_path)
    shutil.rmtree(step)
    with pytest.raises(ConfigError, match=rf"latest names 'global_step{BEFORE}', and no model"):
        imported(folder, tmp_path / "out")


def test_an_optimizer_in_groups_without_names_asks_for_them(saved, tmp_path):
    with pytest.raises(ConfigError, match="knows its parameters by number") as caught:
        imported(saved("stage-0")[0], tmp_path / "out")
    assert "--parameters FILE" in caught.value.fix


def test_another_format_than_asked_for_is_an_error(saved, tmp_path):
    with pytest.raises(ConfigError, match=r"--from hf: .* is not of that kind, but deepspeed"):
        imported(saved("stage-1")[0], tmp_path / "out", format="hf")
    with pytest.raises(ConfigError, match="--from deepsped is unknown") as caught:
        imported(saved("stage-1")[0], tmp_path / "out", format="deepsped")
    assert "deepspeed" in caught.value.fix


@pytest.mark.parametrize("blocked", [False, True], ids=["unknown", "blocked"])
def test_no_code_in_a_file_is_run(blocked, saved, tmp_path):
    class Runs:
        def __reduce__(self):
            if blocked:  # torch keeps some modules away whoever allows them
                return (os.mkdir, (str(tmp_path / "ran"),))
            return (shutil.copyfile, (__file__, str(tmp_path / "ran")))

    folder, step = damaged(saved, tmp_path)
    path = step / "mp_rank_00_model_states.pt"
    content = torch.load(path, weights_only=False)
    torch.save({**content, "args": Runs()}, path)
    if blocked:
        with pytest.raises(ConfigError, match=r"would run \w+.mkdir when it is read"):
            imported(folder, tmp_path / "out")
    else:
        imported(folder, tmp_path / "out")
    assert not (tmp_path / "ran").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "ran").exists(), "the file would have"
