"""How far apart two runs are, which rule that points at, and what it adds up to."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from torsh_trainer.assemble import verifying
from torsh_trainer.assemble.verifying import where_all_fit
from torsh_trainer.checkpoint.shards import FlatShard
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.errors import ConfigError
from torsh_trainer.mesh import Groups, Mesh
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.verify import running
from torsh_trainer.verify.compare import Bounds, Comparison, compare, of_arrays, of_numbers
from torsh_trainer.verify.options import Entry, VerifyOptions
from torsh_trainer.verify.record import FACTS, ROWS, Record, parameters_file
from torsh_trainer.verify.suspects import suspect_of
from torsh_trainer.verify.witness import WatchedStrategy, parameters_of

BOUNDS = Bounds(1e-6, 1e-6)
FACTS_OF_TWO = {"world_size": 2, "accumulate": 4, "gradient_scale": 1.0}
ALONE = {"world_size": 1, "accumulate": 8, "gradient_scale": 1.0}
STEPS = 4


def row(step: int, **changed: Any) -> dict[str, Any]:
    values = {"loss": 2.0 / step, "grad_norm": 1.0 / step, "lr": 0.1} if step else {}
    return {"step": step, **values, "samples": 64 * step, "replicas_agree": True, **changed}


def record(folder: Path, *, rows: dict[int, Any] | None = None, weights: Any = None) -> Record:
    """A run of four steps, with ``rows`` changed and ``weights(step)`` as its only parameter."""
    folder.mkdir()
    lines = [row(step, **(rows or {}).get(step, {})) for step in range(STEPS + 1)]
    (folder / ROWS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / FACTS).write_text(json.dumps(FACTS_OF_TWO))
    for step in range(STEPS + 1):
        array = numpy.ones(3) * (step + 1) if weights is None else weights(step)
        arrays = {"names": numpy.array(["weight"]), "0": array}
        with parameters_file(folder, step).open("wb") as file:
            numpy.savez(file, **arrays)
    return Record(folder)


def compared(tmp_path: Path, bounds: Bounds = BOUNDS, **changes: Any) -> Comparison:
    return compare(record(tmp_path / "mine", **changes), record(tmp_path / "other"), bounds)


# -- differences ------------------------------------------------------------------------------


def test_equal_runs_are_nowhere_apart(tmp_path: Path) -> None:
    found = compared(tmp_path)
    assert found.first is None
    assert suspect_of(found, FACTS_OF_TWO, ALONE) is None
    assert [moment.step for moment in found.moments] == [0, 1, 2, 3, 4]


def test_a_number_is_measured_by_the_references() -> None:
    found = of_numbers(3.0, 4.0)
    assert (found.absolute, found.relative) == (1.0, 0.25)


@pytest.mark.parametrize("value", [math.inf, math.nan, None])
def test_what_is_equally_not_finite_is_equal_and_else_infinitely_far(value: float | None) -> None:
    assert of_numbers(value, value).relative == 0
    assert of_numbers(value, 1.0).relative == math.inf
    assert of_numbers(1.0, value).relative == math.inf


def test_a_parameter_is_measured_by_its_tensor_unless_that_is_next_to_nothing() -> None:
    big, small = numpy.array([4.0, -8.0]), numpy.array([1e-9, 0.0])
    found = of_arrays({"big": big + 2.0, "small": small}, {"big": big, "small": small})
    assert (found.absolute, found.relative, found.worst) == (2.0, 0.25, "big")
    noise = of_arrays({"big": big, "small": -small}, {"big": big, "small": small})
    assert noise.relative == pytest.approx(2e-9 / (0.01 * 8.0)), "by a hundredth of the largest"


def test_a_parameter_that_the_other_has_not_or_that_is_not_a_number_is_infinitely_far() -> None:
    one = {"weight": numpy.ones(2)}
    for other in ({}, {"bias": numpy.ones(2)}, {"weight": numpy.ones(3)}):
        assert of_arrays(other, one).relative == math.inf
    assert of_arrays({"weight": numpy.array([1.0, math.nan])}, one).relative == math.inf


def test_every_step_may_add_a_rounding_and_the_learning_rate_none() -> None:
    assert BOUNDS.limit_after("loss", 0) == BOUNDS.limit_after("loss", 1) == 1e-6
    assert BOUNDS.limit_after("parameters", 10) == pytest.approx(1e-5)
    assert BOUNDS.limit_after("lr", 10) < 1e-8
    assert Bounds(1e-6, None).limit_after("parameters", 10) == math.inf


# -- suspects ---------------------------------------------------------------------------------


def scaled(name: str, factor: float, *, since: int = 1) -> dict[int, Any]:
    return {step: {name: row(step)[name] * factor} for step in range(since, STEPS + 1)}


@pytest.mark.parametrize(
    ("rows", "step", "quantity", "rule", "words"),
    [
        (scaled("loss", 1.1), 1, "loss", "data", "the same weights give another loss"),
        (
            {1: {"loss": 9.0, "changing_buffers": ["norm.seen"]}},
            1,
            "loss",
            "buffers",
            "training forwards change norm.seen",
        ),
        ({3: {"samples": 190, "loss": 1.0}}, 3, "loss", "data", "190 samples were consumed"),
        (scaled("grad_norm", 2.0), 1, "grad_norm", "averaging", "summed over the 2 ranks"),
        (scaled("grad_norm", 0.5), 1, "grad_norm", "averaging", "by the 2 ranks once too often"),
        (scaled("grad_norm", 4.0), 1, "grad_norm", "averaging", "not divided by the 4 accumulated"),
        (scaled("grad_norm", 0.25), 1, "grad_norm", "averaging", "4 accumulated micro-batches"),
        (scaled("grad_norm", 1.37), 1, "grad_norm", "averaging", "it is 1.37 times"),
        ({2: {"grad_norm": math.nan}}, 2, "grad_norm", "averaging", "does not"),
        (scaled("lr", 3.0, since=3), 3, "lr", "schedule", "it is 3 times the reference's"),
        ({2: {"replicas_agree": False}}, 2, "parameters", "replicas", "different parameters"),
    ],
)
def test_the_quantity_that_parts_first_names_the_rule(
    rows: Any, step: int, quantity: str, rule: str, words: str, tmp_path: Path
) -> None:
    suspect = suspect_of(compared(tmp_path, rows=rows), FACTS_OF_TWO, ALONE)
    assert suspect is not None
    assert (suspect.step, suspect.quantity, suspect.rule) == (step, quantity, rule)
    assert words in suspect.because


def test_a_sum_that_the_strategy_declares_is_called_so(tmp_path: Path) -> None:
    found = compared(tmp_path, rows=scaled("grad_norm", 2.0))
    suspect = suspect_of(found, {**FACTS_OF_TWO, "gradient_scale": 2.0}, ALONE)
    assert suspect is not None
    assert "2 times the reference's: that is what its knobs say" in suspect.because


def test_parameters_that_part_before_the_first_step_were_initialised_otherwise(tmp_path) -> None:
    suspect = suspect_of(
        compared(tmp_path, weights=lambda step: numpy.ones(3) * (step + 1.01)), FACTS_OF_TWO, ALONE
    )
    assert suspect is not None
    assert (suspect.step, suspect.rule) == (0, "initialisation")
    assert "weight most" in suspect.because


def test_parameters_that_part_alone_point_at_the_optimizer(tmp_path: Path) -> None:
    def weights(step: int) -> Any:
        return numpy.ones(3) * (step + 1 + (0.1 if step >= 2 else 0.0))

    found = compared(tmp_path, weights=weights)
    suspect = suspect_of(found, FACTS_OF_TWO, ALONE)
    assert suspect is not None
    assert (suspect.step, suspect.quantity, suspect.rule) == (2, "parameters", "optimizer")


def test_rounding_that_grows_step_by_step_is_called_what_it_is(tmp_path: Path) -> None:
    rows = {step: {"loss": row(step)["loss"] * (1 + 0.3e-6 * step**2)} for step in (1, 2, 3, 4)}
    suspect = suspect_of(compared(tmp_path, rows=rows), FACTS_OF_TWO, ALONE)
    assert suspect is not None
    assert (suspect.step, suspect.rule) == (4, "rounding")


# -- bounds, rungs, exit codes ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "bound"),
    [
        ({}, 1e-6),
        ({"params": "fp32", "compute": "fp32", "reduce": "fp32"}, 1e-6),
        ({"params": "fp32", "compute": "fp16"}, 2.0**-10),
        ({"params": "fp32", "compute": "bf16"}, 2.0**-7),
        ({"reduce": "bf16"}, 2.0**-7),
    ],
)
def test_the_bound_follows_the_lowest_precision(precision: Any, bound: float) -> None:
    options = VerifyOptions(("single", "ddp"))
    assert running.bounds_of(options, precision, "sgd") == Bounds(bound, bound)
    recipe = running.bounds_of(options, precision, "recipe")
    assert recipe.parameters is None
    assert bound <= recipe.values <= 100 * bound


def test_a_bound_of_ones_own_replaces_it() -> None:
    options = VerifyOptions(("single", "ddp"), bound=1e-4)
    assert running.bounds_of(options, {}, "sgd").values == 1e-4
    assert running.bounds_of(options, {}, "recipe").values == pytest.approx(1e-2)


def test_the_rung_sgd_takes_away_what_hides_a_factor_and_leaves_the_configuration_alone() -> None:
    config = {
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-3},
        "schedule": {"_target_": "torsh_trainer.optim.schedule.Cosine"},
        "trainer": {"max_grad_norm": 1.0, "max_grad_value": None, "ema_decay": 0.9, "seed": 3},
        "precision": {"compute": "bf16"},
    }
    before = json.dumps(config)
    options = VerifyOptions(("single", "ddp"), sgd_lr=0.2)
    plain = running.on_rung(config, "sgd", options)
    assert plain["optimizer"] == {"_target_": "torch.optim.SGD", "lr": 0.2}
    assert plain["schedule"] is None
    assert plain["trainer"]["max_grad_norm"] is plain["trainer"]["ema_decay"] is None
    assert plain["trainer"]["seed"] == 3
    assert plain["precision"] == {"compute": "bf16"}
    assert running.on_rung(config, "recipe", options) == config
    assert json.dumps(config) == before


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (("reference", "agrees"), 0),
        (("reference", "refused"), 11),
        (("reference", "refused", "missing"), 1),
        (("reference", "missing", "failed"), 3),
        (("reference", "failed", "apart", "refused"), 12),
    ],
)
def test_the_gravest_outcome_decides_the_exit_code(statuses: Any, code: int) -> None:
    outcomes = tuple(
        running.RungOutcome("sgd", Entry(f"s{i}"), status, Path(), 1)
        for i, status in enumerate(statuses)
    )
    options = VerifyOptions(("single", "ddp"))
    verdict = running.Verdict("digits", options, {}, {}, outcomes)
    assert verdict.exit_code == code


# -- entries ----------------------------------------------------------------------------------


def test_single_is_the_reference_wherever_it_stands_else_the_first() -> None:
    assert VerifyOptions(("ddp", "single")).reference.label == "single"
    assert VerifyOptions(("ddp", "fsdp")).reference.label == "ddp"


def test_knobs_tell_two_entries_of_a_strategy_apart() -> None:
    options = VerifyOptions(("ddp", {"ddp": {"zero1": True, "launcher.num_processes": 4}}))
    assert [entry.label for entry in options.entries] == [
        "ddp",
        "ddp zero1=true launcher.num_processes=4",
    ]
    assert len({entry.folder for entry in options.entries}) == 2
    with pytest.raises(ConfigError, match="stands there twice"):
        VerifyOptions(({"ddp": {"zero1": True}}, {"ddp": {"zero1": True}}))


# -- the witness ------------------------------------------------------------------------------


class Sharded:
    """As much of an engine as shows parameters: a flat piece of one, a whole one, a buffer."""

    def __init__(self, tensor: torch.Tensor, offset: int) -> None:
        self.model = nn.BatchNorm1d(2)
        shard = FlatShard("flat", (2, 3), offset, tensor)
        names = {"weight": torch.ones(2, dtype=torch.bfloat16), "running_mean": torch.zeros(2)}
        self.state = {"model": {"flat": shard, **names}}

    def state_dict(self) -> dict[str, Any]:
        return self.state


def test_a_watched_strategy_passes_everything_on() -> None:
    public = {name for name in vars(Strategy) if not name.startswith("_")} - {"refuse"}
    assert public <= {*vars(WatchedStrategy)}


def test_a_hole_between_the_pieces_of_a_parameter_is_no_parameter() -> None:
    whole: Any = Sharded(torch.arange(6.0), 0)
    alone = Groups(Mesh(), LocalCommunicator(torch.device("cpu")))
    found = parameters_of(whole, alone)
    assert list(found) == ["flat", "weight"], "buffers are left out"
    assert found["flat"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert found["weight"].dtype == numpy.float32
    part: Any = Sharded(torch.arange(2.0), 4)
    torn = parameters_of(part, alone)["flat"]
    assert numpy.isnan(torn).sum() == 4
    assert of_arrays({"flat": torn}, {"flat": torn}).relative == math.inf


CONFIGS: dict[str, dict[str, Any]] = {
    "single": {"trainer": {"device": "auto", "seed": 1}},
    "ddp": {"trainer": {"seed": 1}, "launcher": {"num_processes": "auto"}},
}


@pytest.mark.parametrize(("gpus", "words"), [(1, "1 GPU for 2 processes"), (3, "3 GPUs for 4")])
def test_where_gpus_are_fewer_than_processes_all_strategies_are_trained_on_the_cpu(
    gpus: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verifying, "accelerators", lambda env: gpus)
    found = where_all_fit(CONFIGS, gpus + 1, {})
    assert [config["trainer"] for config in found.values()] == [{"device": "cpu", "seed": 1}] * 2
    assert found["ddp"]["launcher"] == CONFIGS["ddp"]["launcher"]
    said = capsys.readouterr().err
    assert words in said
    assert "all strategies are trained on the CPU" in said


@pytest.mark.parametrize(("gpus", "most"), [(0, 2), (2, 2), (8, 2), (1, 1)])
def test_where_every_process_has_a_gpu_or_there_is_none_nothing_changes(
    gpus: int, most: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verifying, "accelerators", lambda env: gpus)
    assert where_all_fit(CONFIGS, most, {}) == CONFIGS
    assert not capsys.readouterr().err


def test_gpus_that_are_asked_for_and_too_few_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "accelerators", lambda env: 1)
    asked = {**CONFIGS, "single": {"trainer": {"device": "cuda"}}}
    with pytest.raises(ConfigError, match="this host has 1 GPU for 2 processes") as caught:
        where_all_fit(asked, 2, {})
    assert "launcher.num_processes=1" in str(caught.value)


def test_a_verification_on_the_cpu_looks_for_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "accelerators", lambda env: pytest.fail("it has looked"))
    on_cpu = {"single": {"trainer": {"device": "cpu"}}}
    assert where_all_fit(on_cpu, 2, {}) == on_cpu
