"""The engine beside a script that calls deepspeed.initialize by itself: the same bits."""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional as F
from torsh_trainer_deepspeed import DeepSpeed, library

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.testing.cases import Driver
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.reference import Scenario, TrainingOutcome
from torsh_trainer.testing.state import whole_state
from torsh_trainer.testing.tiny import PADDING, TinyData, TinyTask

STEPS = 4

# The file of the guides that DeepSpeed users come from: stage 3, offloaded, no micro-batch size.
GUIDE = """{
  "zero_optimization": {
    "stage": 3,
    "allgather_bucket_size": 200000000,
    "reduce_bucket_size": 200000000,
    "overlap_comm": true,
    "contiguous_gradients": true,
    "stage3_max_live_parameters": 1000000000,
    "stage3_max_reuse_distance": 1000,
    "stage3_prefetch_bucket_size": 500000000,
    "offload_optimizer": {
      "device": "cpu"
    },
    "offload_param": {
      "device": "cpu"
    }
  },
  "gradient_clipping": 1.0,
  "gradient_accumulation_steps": 4,
  "fp16": {
    "enabled": true,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1
  }
}
"""


class Curve(NamedTuple):
    losses: list[list[float]]  # by step and micro-batch, of one rank
    norms: list[float]


class RoundTask(TinyTask):
    """Starts from values that fp16 and bf16 hold exactly: DeepSpeed's masters are rounded ones."""

    def build_model(self) -> Any:
        model = super().build_model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_((parameter * 64).round() / 64)
        return model


@contextlib.contextmanager
def fp16_supported(supported: bool) -> Iterator[None]:
    """DeepSpeed's answer for a CPU, which is that of the processor: most have no fp16."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    kind = type(accelerator)
    before = kind.is_fp16_supported
    kind.is_fp16_supported = lambda self: supported
    try:
        yield
    finally:
        kind.is_fp16_supported = before


def raw(comm: Communicator, config: dict[str, Any], scenario: Scenario, factor: float) -> Curve:
    """What a user's own script does; ``factor`` on the loss is the negative control."""
    with library.putting_back():
        return _raw(comm, config, scenario, factor)


def _raw(comm: Communicator, config: dict[str, Any], scenario: Scenario, factor: float) -> Curve:
    deepspeed = library.load(comm)
    task = RoundTask(scenario.model, scenario.optimizer)
    model = task.build_model()
    (optimizer,) = task.build_optimizers(model.named_parameters()).values()
    if "offload_optimizer" in config["zero_optimization"] and scenario.optimizer == "adamw":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        keys = ("params", "lr", "betas", "eps", "weight_decay")
        optimizer = DeepSpeedCPUAdam([{k: g[k] for k in keys} for g in optimizer.param_groups])
    with fp16_supported(True):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        curve = Curve([], [])
        for number in range(scenario.data.steps):
            losses = []
            for micro in scenario.data.step(number, comm.world.size)[comm.world.rank]:
                logits = engine(micro.batch["tokens"]).float().flatten(0, 1)
                targets = micro.batch["targets"].flatten()
                loss = F.cross_entropy(logits, targets, ignore_index=PADDING)
                engine.backward(loss * factor)
                engine.step()
                losses.append(float(loss.detach()))
            curve.losses.append(losses)
            norm = engine.get_global_grad_norm() or 0.0
            curve.norms.append(float(torch.as_tensor(norm).float()))
        engine.destroy()
    return curve


def ours(comm: Communicator, strategy: Strategy, scenario: Scenario) -> Curve:
    """The same samples under the engine, driven as the loop does."""
    library.load(comm)
    with fp16_supported(True):
        task = RoundTask(scenario.model, scenario.optimizer)
        driver = Driver(comm, strategy, scenario, task=task)
        outcome, mine = TrainingOutcome(), driver.mesh.dp_rank
        schedule = strategy.brings(schedule=None).get("schedule")
        running = schedule and schedule.start(driver.engine.optimizers)
        for number in range(scenario.data.steps):
            driver.step(number, outcome)
            if running:
                running.on_update()
        driver.engine.close()
    return Curve([[float(x or 0) for x in step[mine]] for step in outcome.losses], outcome.norms)


def config_of(stage: int, precision: str, **more: Any) -> dict[str, Any]:
    config = {
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 200,
            "allgather_bucket_size": 200,
            **more,
        },
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if precision == "fp16":
        config["fp16"]["initial_scale_power"] = 8
    return config


def both(
    config: dict[str, Any], file: Path, scenario: Scenario, factor: float = 1.0
) -> tuple[list[Curve], list[Curve]]:
    file.write_text(json.dumps(config))
    pool = shared_pool(2)
    theirs = pool.run(raw, copy.deepcopy(config), scenario, factor)
    return pool.run(ours, DeepSpeed(config=str(file)), scenario), theirs


SCENARIO = Scenario(data=TinyData(steps=STEPS, accumulate=2))


@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        *[(stage, "fp32") for stage in range(4)],
        *[(stage, "bf16") for stage in (2, 3)],
        *[(stage, "fp16") for stage in (1, 3)],
    ],
)
def test_every_loss_and_norm_is_that_of_a_script_of_ones_own(stage, precision, tmp_path):
    ours, theirs = both(config_of(stage, precision), tmp_path / "ds.json", SCENARIO)
    for mine, plain in zip(ours, theirs, strict=True):
        assert mine.losses == plain.losses
        if stage:  # DeepSpeed itself does not report a norm at stage 0 in fp32
            assert mine.norms == plain.norms


def test_the_scheduler_of_a_file_is_deepspeeds_own(tmp_path):
    params = {"warmup_num_steps": 3, "warmup_max_lr": 0.2, "warmup_type": "linear"}
    plain = config_of(2, "fp32")
    config = {**plain, "scheduler": {"type": "WarmupLR", "params": params}}
    ours, theirs = both(config, tmp_path / "ds.json", SCENARIO)
    without = shared_pool(2).run(raw, plain, SCENARIO, 1.0)
    assert [curve.losses for curve in ours] == [curve.losses for curve in theirs]
    assert ours[0].losses != without[0].losses


def test_a_division_that_nobody_asked_for_would_be_seen(tmp_path):
    ours, theirs = both(config_of(2, "fp32"), tmp_path / "ds.json", SCENARIO, factor=0.5)
    assert ours[0].losses[0] == theirs[0].losses[0]
    assert ours[0].losses[1] != theirs[0].losses[1]
    assert ours[0].norms[0] == pytest.approx(2 * theirs[0].norms[0])


def test_the_file_of_the_guides_trains_as_deepspeed_does_with_a_micro_batch_size(tmp_path):
    """Its batch sizes come from the recipe; the seventeen bits of scale are too many at first."""
    file = tmp_path / "ds_config.json"
    file.write_text(GUIDE)
    scenario = Scenario(optimizer="adamw", data=TinyData(steps=6, accumulate=4))
    pool = shared_pool(2)
    config = {**json.loads(GUIDE), "train_micro_batch_size_per_gpu": 3}
    theirs = pool.run(raw, config, scenario, 1.0)
    mine = pool.run(ours, DeepSpeed(config=str(file)), scenario)
    for one, other in zip(mine, theirs, strict=True):
        assert one.losses == other.losses
        assert one.losses[0] != one.losses[-1]


def functions_around(comm: Communicator) -> dict[str, bool]:
    """Whether ``linear`` is torch's own, after a script and before, amid and after engines."""
    own = F.linear
    with library.putting_back() as theirs:
        _raw(comm, config_of(3, "bf16"), SCENARIO, 1.0)
    own_is = {"a script replaces it": "linear" in theirs, "after the script": F.linear is own}
    first, second = (Driver(comm, DeepSpeed(stage=3), SCENARIO) for _ in range(2))
    for driver in (first, second):
        driver.step(0, TrainingOutcome())
    own_is["between two in use"] = F.linear is own
    first.engine.close()  # and the second never is
    own_is["after closing"] = F.linear is own
    return own_is


class OwnTask(RoundTask):
    """Adagrad or AdamW, with settings that are not the defaults."""

    def build_optimizers(self, named_parameters: Any) -> Any:
        parameters = [p for _, p in named_parameters]
        if self.optimizer_name == "adagrad":
            return {"main": torch.optim.Adagrad(parameters, lr=0.05, eps=1e-4, weight_decay=0.1)}
        return {"main": torch.optim.AdamW(parameters, lr=0.02, eps=1e-4, weight_decay=0.1)}


def by_own_kernel(comm: Communicator, strategy: DeepSpeed, kind: str) -> tuple[Any, Any, Any]:
    """Losses under the engine, those of a script with the optimizer by its own name, and slots."""
    deepspeed = library.load(comm)
    # Imported here: they choose an accelerator.
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import FusedAdam

    scenario, outcome = SCENARIO, TrainingOutcome()
    driver = Driver(comm, strategy, scenario, task=OwnTask(scenario.model, kind))
    for number in range(STEPS):
        driver.step(number, outcome)
    state = whole_state(driver.engine.state_dict()["optimizer"]["main"]["state"], comm)
    driver.engine.close()
    ours = [[float(x or 0) for x in step[driver.mesh.dp_rank]] for step in outcome.losses]

    task = OwnTask(scenario.model, kind)
    model = task.build_model()
    made = DeepSpeedCPUAdagrad if kind == "adagrad" else FusedAdam
    keys = ("params", "lr", "betas", "eps", "weight_decay")
    (plain,) = task.build_optimizers(model.named_parameters()).values()
    optimizer = made([{k: g[k] for k in keys if k in g} for g in plain.param_groups])
    zero = {"stage": strategy.stage, "reduce_bucket_size": 200, "allgather_bucket_size": 200}
    if strategy.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {**config_of(strategy.stage, "fp32"), "zero_optimization": zero}
    with library.putting_back():
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        theirs = []
        for number in range(STEPS):
            theirs.append([])
            for micro in scenario.data.step(number, comm.world.size)[comm.world.rank]:
                loss = task.loss(engine(micro.batch["tokens"]).float(), micro.batch)
                engine.backward(loss)
                engine.step()
                theirs[-1].append(float(loss.detach()))
        engine.destroy()
    return ours, theirs, state


OWN = {
    "fused_adam": ("adamw", None, {"step", "exp_avg", "exp_avg_sq"}),
    "cpu_adagrad": ("adagrad", "cpu", {"step", "sum"}),
}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("own", OWN)
def test_an_optimizer_of_deepspeeds_own_steps_as_in_a_script_and_is_saved_in_torchs_words(
    own, stage
):
    kind, offload, slots = OWN[own]
    sizes = {"reduce_bucket_size": 200, "allgather_bucket_size": 200}
    strategy = DeepSpeed(stage=stage, optimizer=own, offload_optimizer=offload, **sizes)
    for ours, theirs, state in shared_pool(2).run(by_own_kernel, strategy, kind):
        assert ours == theirs
        assert ours[0] != ours[-1]
        assert all(set(found) == slots for found in state.values())


def test_another_model_in_the_process_computes_with_torchs_own_functions():
    for own_is in shared_pool(2).run(functions_around):
        assert all(own_is.values()), own_is


class AdafactorTask(TinyTask):
    """An optimizer that looks at rows and columns."""

    def build_optimizers(self, named_parameters: Any) -> Any:
        return {"main": torch.optim.Adafactor([p for _, p in named_parameters])}


def refused(
    comm: Communicator, strategy: Strategy, scenario: Scenario, task: TinyTask | None = None
) -> str:
    library.load(comm)
    with fp16_supported(False):
        try:
            Driver(comm, strategy, scenario, task=task)
        except ConfigError as error:
            return str(error)
    return ""


REFUSED = {
    "elasticity": ({"elasticity": {"enabled": True}}, "Elastic training has been removed"),
    "stage3_prefetch": ({"zero_optimization": {"stage3_prefetch": 1}}, "Extra inputs"),
    "stage": ({"zero_optimization": {"stage": 7}}, "Input should be"),
}


def test_what_deepspeed_refuses_is_told_with_its_words_file_line_and_key(tmp_path):
    file = tmp_path / "ds_config.json"
    file.write_text(GUIDE)
    scenario = Scenario(optimizer="adamw", data=TinyData(accumulate=4))
    for words in shared_pool(2).run(refused, DeepSpeed(config=str(file)), scenario):
        assert "fp16 is not supported on your device" in words
        assert f"{file}, line 20: fp16" in words


def refused_at_once(comm: Communicator, strategy: Any, folder: Path) -> tuple[str, list[str]]:
    """The refusal, and what was compiled, or tried to be, before it came."""
    before = os.environ.get("TORCH_EXTENSIONS_DIR")
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    try:
        scenario = Scenario(optimizer="adamw", data=TinyData(accumulate=4))
        words = refused(comm, strategy, scenario)
    finally:
        os.environ.pop("TORCH_EXTENSIONS_DIR")
        os.environ.update({} if before is None else {"TORCH_EXTENSIONS_DIR": before})
    return words, [path.name for path in folder.iterdir()]


def test_fp16_on_a_cpu_is_refused_before_anything_is_compiled(tmp_path):
    file, folder = tmp_path / "ds_config.json", tmp_path / "extensions"
    file.write_text(GUIDE)
    folder.mkdir()
    [(words, made)] = shared_pool(1).run(refused_at_once, DeepSpeed(config=str(file)), folder)
    assert "fp16 is not supported on your device, cpu; run on a GPU, or set bf16" in words
    assert made == []


@pytest.mark.parametrize("key", REFUSED)
def test_so_is_a_key_that_it_has_removed_or_does_not_know(key, tmp_path):
    content, said = REFUSED[key]
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(content, indent=1))
    for words in shared_pool(2).run(refused, DeepSpeed(config=str(file)), Scenario()):
        assert words.startswith(f"DeepSpeed refuses the configuration: {file}, line ")
        assert f"{key}: " in words
        assert said in words


def test_an_optimizer_that_looks_at_more_than_single_elements_is_refused_where_zero_cuts():
    pool = shared_pool(2)
    for words in pool.run(refused, DeepSpeed(stage=1), Scenario(), AdafactorTask()):
        assert "cannot honour the optimizer Adafactor from stage 1 on" in words
    assert pool.run(refused, DeepSpeed(stage=0), Scenario(), AdafactorTask()) == ["", ""]
