"""Callbacks: when a run stops early, what a profile and a summary hold, what all have in common."""

from __future__ import annotations

import gzip
import json
import math
import pickle

import cloudpickle
import pytest
import torch
import yaml
from callback_runs import evaluated, logged, run_info
from torch import nn

from torsh_trainer.callbacks.base import Callback, StepReport
from torsh_trainer.callbacks.early_stopping import EarlyStopping
from torsh_trainer.callbacks.profiler import Profiler
from torsh_trainer.callbacks.summary import summarise
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError
from torsh_trainer.utils.lookup import import_object


def stops_at(callback, values, *, metric="loss", split="eval"):
    """The 1-based report at which the callback asks to stop, or None."""
    for i, value in enumerate(values, start=1):
        if callback.on_evaluate(evaluated(i, split=split, **{metric: value})):
            return i
    return None


def test_it_stops_after_patience_reports_without_an_improvement():
    assert stops_at(EarlyStopping(patience=2), [1.0, 0.9, 0.95, 0.9, 0.1]) == 4
    assert stops_at(EarlyStopping(patience=2), [1.0, 0.9, 0.95, 0.8, 0.9, 0.7]) is None


def test_mode_max_looks_for_higher_values():
    callback = EarlyStopping(monitor="accuracy", mode="max", patience=1)
    assert stops_at(callback, [0.1, 0.5, 0.4], metric="accuracy") == 3
    assert callback.best == 0.5


def test_a_change_within_min_delta_is_no_improvement():
    assert stops_at(EarlyStopping(patience=2, min_delta=0.1), [1.0, 0.95, 0.91]) == 3


@pytest.mark.parametrize(
    ("mode", "values", "step"), [("max", [0.5, 0.97], 2), ("min", [0.5, 0.31, 0.3], 3)]
)
def test_reaching_the_threshold_stops_at_once(mode, values, step):
    threshold = {"max": 0.97, "min": 0.3}[mode]
    callback = EarlyStopping(mode=mode, patience=None, threshold=threshold)
    assert stops_at(callback, values) == step


def test_a_value_that_is_not_finite_is_no_improvement():
    assert stops_at(EarlyStopping(patience=2), [math.nan, math.nan]) == 2
    assert stops_at(EarlyStopping(patience=2), [1.0, -math.inf, math.nan]) == 3


def test_other_splits_do_not_count():
    callback = EarlyStopping(patience=1)
    assert stops_at(callback, [1.0, 2.0, 3.0], split="test") is None
    assert callback.on_step(logged(1)) is None


def test_it_can_watch_the_training_loss():
    callback = EarlyStopping(split="train", patience=1)
    assert not callback.on_step(logged(1, loss=1.0))
    assert not callback.on_step(StepReport(2, 0, 16, None))
    assert callback.on_step(logged(3, loss=1.5))


def test_a_metric_that_no_report_has_offers_the_nearest():
    callback = EarlyStopping(monitor="acuracy", mode="max")
    with pytest.raises(ConfigError, match="acuracy is no metric of eval") as caught:
        callback.on_evaluate(evaluated(1, accuracy=0.5, loss=1.0))
    assert "'accuracy'" in caught.value.fix


def test_a_restored_state_goes_on_counting():
    before = EarlyStopping(patience=3)
    stops_at(before, [1.0, 1.1, 1.2])
    after = EarlyStopping(patience=3)
    after.load_state_dict(before.state_dict())
    assert stops_at(after, [1.3]) == 1


def test_the_state_of_another_metric_is_not_taken_over():
    before = EarlyStopping(patience=2)
    stops_at(before, [0.1, 0.2])
    after = EarlyStopping(monitor="accuracy", mode="max", patience=2)
    after.load_state_dict(before.state_dict())
    assert stops_at(after, [0.05, 0.05], metric="accuracy") is None


def test_why_it_stopped_is_said_on_one_rank(capsys):
    for rank in (0, 1):
        callback = EarlyStopping(patience=1)
        callback.on_start(run_info(world=World(rank=rank, size=2)))
        stops_at(callback, [1.0, 2.0])
        stops_at(callback, [3.0])  # the loop evaluates once more in the end
    told = capsys.readouterr().out.splitlines()
    assert told == ["stopping early at step 2: eval loss was no better than 1 in 1 reports"]


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"mode": "maximum"}, "mode=maximum is unknown"),
        ({"split": "dev"}, "split=dev is unknown"),
        ({"patience": 0}, "patience=0 is not a positive number"),
        ({"min_delta": -1.0}, "min_delta=-1.0 is negative"),
        ({"patience": None}, "neither patience nor threshold"),
    ],
)
def test_knobs_of_early_stopping_out_of_range_are_refused(knobs, words):
    with pytest.raises(ConfigError, match=words):
        EarlyStopping(**knobs)


# -- profiler -------------------------------------------------------------------------------------


def train(callback, info, *, steps, log_every=2):
    model = nn.Linear(8, 8)
    callback.on_start(info)
    for step in range(info.first_step + 1, steps + 1):
        model(torch.randn(4, 8)).sum().backward()
        callback.on_step(logged(step) if step % log_every == 0 else StepReport(step, 0, 0, None))


def traced_calls(path, name):
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    return sum(event.get("name") == name and event.get("cat") == "cpu_op" for event in events)


@pytest.mark.parametrize("first_step", [1, 3])
def test_a_trace_holds_exactly_the_chosen_steps(first_step, tmp_path, capsys):
    callback = Profiler(first_step=first_step, steps=2)
    train(callback, run_info(tmp_path), steps=6)
    callback.on_end({})
    assert traced_calls(tmp_path / "profile/rank-0.json.gz", "aten::addmm") == 2
    assert "aten::addmm" in (tmp_path / "profile/rank-0.txt").read_text()
    told = capsys.readouterr().out
    assert "profile of 2 steps" in told
    assert "10.00 ms, of which 1.00 ms (10.0%) waiting for data" in told


def test_the_split_of_a_step_is_told_of_steps_that_no_tracing_slowed_down(tmp_path, capsys):
    callback = Profiler(first_step=3, steps=2)
    callback.on_start(run_info(tmp_path))
    for step in range(1, 13):
        slow = 0.5 if step == 6 else 0.01  # the report after the trace pays for its saving
        callback.on_step(
            logged(step, step_s=slow) if step % 2 == 0 else StepReport(step, 0, 0, None)
        )
    callback.on_end({})
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("a step up to")]
    assert line.startswith("a step up to 8: 10.00 ms")


def test_a_profiler_says_nothing_on_standard_error(tmp_path, capfd):
    train(Profiler(first_step=1, steps=1), run_info(tmp_path), steps=2)
    assert capfd.readouterr().err == ""


def test_every_rank_leaves_a_trace_of_its_own_and_one_speaks(tmp_path, capsys):
    callback = Profiler(first_step=2, steps=1)
    train(callback, run_info(tmp_path, world=World(rank=1, size=2)), steps=3)
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == [
        "rank-1.json.gz",
        "rank-1.txt",
    ]
    assert capsys.readouterr().out == ""


def test_a_run_that_ends_within_the_chosen_steps_still_leaves_its_trace(tmp_path, capsys):
    callback = Profiler(first_step=2, steps=100)
    train(callback, run_info(tmp_path), steps=4)
    callback.on_error(RuntimeError("the run died"))
    assert traced_calls(tmp_path / "profile/rank-0.json.gz", "aten::addmm") == 3
    assert "profile of 3 steps" in capsys.readouterr().out


def test_a_resumed_run_that_is_past_the_chosen_steps_says_so(tmp_path, caplog):
    callback = Profiler(first_step=2, steps=1)
    train(callback, run_info(tmp_path, first_step=3), steps=6)
    callback.on_end({})
    assert not (tmp_path / "profile").exists()
    assert "nothing is traced: this run goes on after step 3" in caplog.text


@pytest.mark.parametrize("knob", ["first_step", "steps", "rows"])
def test_a_profile_of_nothing_is_refused(knob):
    with pytest.raises(ConfigError, match=f"callbacks.profiler.{knob}=0"):
        Profiler(**{knob: 0})


# -- model summary --------------------------------------------------------------------------------


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.drop = nn.Dropout()


def test_a_summary_counts_what_the_model_has_and_a_shared_parameter_once():
    model = Blocks()
    model.blocks.bfloat16()
    model.embed.weight.requires_grad_(False)
    total = sum(p.numel() for p in model.parameters())
    blocks = sum(p.numel() for p in model.blocks.parameters())
    lines = summarise(model).splitlines()
    assert lines[0].split() == ["module", "type", "parameters", "trainable", "dtype"]
    cells = {line.split()[0]: line for line in lines[1:-1]}
    assert f"{total}" in cells["Blocks"]
    assert f"{blocks / total:.1%}" in cells["Blocks"]
    assert "bfloat16, float32" in cells["Blocks"]
    assert cells["embed"].split() == ["embed", "Embedding", "40", "none", "float32"]
    assert cells["0..2"].split() == ["0..2", "3", "x", "Linear", f"{blocks}", "all", "bfloat16"]
    assert cells["drop"].split() == ["drop", "Dropout", "-", "-", "-"]
    assert lines[-1].startswith(f"{total} parameters, {blocks} of them trainable")


def test_depth_bounds_a_summary_and_a_lazy_module_has_no_size_yet():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.LazyLinear(3))
    assert "Linear" not in summarise(model, depth=0).split("\n", 1)[1].replace("LazyLinear", "")
    shallow, deep = summarise(model, depth=1), summarise(model, depth=2)
    assert len(deep.splitlines()) == len(shallow.splitlines()) + 1
    (lazy,) = [line for line in deep.splitlines() if "LazyLinear" in line]
    assert "not known yet" in lazy
    assert deep.isascii()


# -- all of them ----------------------------------------------------------------------------------


def nodes(repository):
    for group in ("callbacks", "logger"):
        content = yaml.safe_load((repository / "conf" / group / "default.yaml").read_text())
        yield from ((f"{group}.{name}", node) for name, node in content.items())


def test_every_node_of_the_configuration_builds_its_callback_with_those_knobs(repository):
    for name, node in nodes(repository):
        knobs = {key: v for key, v in node.items() if key not in ("_target_", "enabled")}
        callback = import_object(node["_target_"], option="_target_")(**knobs)
        assert isinstance(callback, Callback), name
        for knob, value in knobs.items():
            kept = getattr(callback, knob)
            assert (list(kept) if isinstance(kept, tuple) else kept) == value, f"{name}.{knob}"


def test_every_callback_travels_to_a_worker_before_its_run_starts(repository):
    for _, node in nodes(repository):
        callback = import_object(node["_target_"], option="_target_")()
        copy = pickle.loads(cloudpickle.dumps(callback))
        assert copy.state_dict() == callback.state_dict()
