"""Callbacks: what loggers leave behind, when a run stops early, what a profile holds."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import pickle
import random
import struct
import sys
import textwrap
import time

import cloudpickle
import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import nn

from torsh_trainer.callbacks import logger as logger_module
from torsh_trainer.callbacks.base import Callback, EvaluationReport, RunInfo, StepReport
from torsh_trainer.callbacks.csv import Csv
from torsh_trainer.callbacks.early_stopping import EarlyStopping
from torsh_trainer.callbacks.jsonl import Jsonl
from torsh_trainer.callbacks.mlflow import MLflow
from torsh_trainer.callbacks.places import TAKEN
from torsh_trainer.callbacks.profiler import Profiler
from torsh_trainer.callbacks.summary import summarise
from torsh_trainer.callbacks.tensorboard import TensorBoard, record
from torsh_trainer.callbacks.throughput import Throughput
from torsh_trainer.callbacks.wandb import WandB
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.rundir import RunDir
from torsh_trainer.utils.lookup import import_object


def run_info(run_dir=None, **changes):
    facts = {
        "run_dir": run_dir,
        "world": World(),
        "strategy": "single",
        "backend": "local",
        "precision": "fp32",
        "device": "cpu",
        "batch_size": 8,
        "micro_batch_size": 8,
        "accumulate": 1,
        "max_steps": 4,
        "steps_per_epoch": 4,
        "first_step": 0,
        "parameters": 10,
        "trainable_parameters": 10,
    }
    return RunInfo(**{**facts, **changes})


def logged(step, **metrics):
    numbers = {
        "loss": 1.0 / step,
        "lr": 0.1,
        "grad_norm": 2.0,
        "samples_per_s": 100.0,
        "data_wait_s": 0.001,
        "step_s": 0.01,
        "skipped": 0.0,
    }
    return StepReport(step, 0, 8 * step, {**numbers, **metrics})


def evaluated(step, split="eval", **metrics):
    return EvaluationReport(split, step, 0, 8 * step, metrics or {"accuracy": 0.5}, 0.25)


def drive(callback, info, reports):
    """A whole run as the loop would drive it."""
    callback.on_start(info)
    for report in reports:
        if isinstance(report, EvaluationReport):
            callback.on_evaluate(report)
        else:
            callback.on_step(report)
    callback.on_end({"metrics": {}})


def whole_run():
    reports = []
    for step in range(1, 5):
        reports += [StepReport(step, 0, 8 * step, None)] if step == 2 else [logged(step)]
        reports += [evaluated(step, accuracy=step / 4, loss=1 / step)] if step % 2 == 0 else []
    return [*reports, evaluated(4, split="test", accuracy=0.75)]


def json_rows(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


# -- metrics.jsonl --------------------------------------------------------------------------------


def test_jsonl_holds_one_object_for_every_report_and_none_for_other_steps(tmp_path):
    drive(Jsonl(), run_info(tmp_path), whole_run())
    rows = json_rows(tmp_path / "metrics.jsonl")
    assert [(row["split"], row["step"]) for row in rows] == [
        ("train", 1),
        ("eval", 2),
        ("train", 3),
        ("train", 4),
        ("eval", 4),
        ("test", 4),
    ]
    first = rows[0]
    assert {k: first[k] for k in ("epoch", "samples", "loss", "lr", "grad_norm")} == {
        "epoch": 0,
        "samples": 8,
        "loss": 1.0,
        "lr": 0.1,
        "grad_norm": 2.0,
    }
    assert rows[-1]["accuracy"] == 0.75
    elapsed = [row["elapsed_s"] for row in rows]
    assert elapsed == sorted(elapsed)


def test_jsonl_writes_null_for_a_number_that_is_not_finite(tmp_path):
    drive(Jsonl(), run_info(tmp_path), [logged(1, loss=math.nan, grad_norm=math.inf)])
    (row,) = json_rows(tmp_path / "metrics.jsonl")
    assert row["loss"] is None
    assert row["grad_norm"] is None
    assert row["lr"] == 0.1


def test_jsonl_is_on_disk_after_each_report(tmp_path):
    callback = Jsonl()
    callback.on_start(run_info(tmp_path))
    for step in (1, 2):
        callback.on_step(logged(step))
        assert len(json_rows(tmp_path / "metrics.jsonl")) == step
    callback.on_error(RuntimeError("the run died"))


def test_jsonl_of_a_resumed_run_goes_on_where_a_killed_one_broke_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    earlier = {"split": "train", "step": 1, "elapsed_s": 1000.0}
    path.write_text(json.dumps(earlier) + '\n{"split": "tra')
    drive(Jsonl(), run_info(tmp_path, first_step=1), [logged(2)])
    rows = json_rows(path)
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[1]["elapsed_s"] >= 1000.0


@pytest.mark.parametrize("make", [Jsonl, Csv])
def test_a_resumed_run_drops_what_was_reported_after_its_checkpoint(make, tmp_path):
    before = make()
    before.on_start(run_info(tmp_path))
    for event in (logged(1), evaluated(1), logged(2)):
        before.on_step(event) if isinstance(event, StepReport) else before.on_evaluate(event)
    saved = before.state_dict()  # after step 2, whose evaluation comes later
    before.on_evaluate(evaluated(2))
    before.on_step(logged(3))
    before.on_error(RuntimeError("killed"))
    after = make()
    after.load_state_dict(saved)
    drive(after, run_info(tmp_path, first_step=2), [evaluated(2), logged(3)])
    with (tmp_path / after.filename).open(newline="") as file:
        rows = [json.loads(row) for row in file] if make is Jsonl else list(csv.DictReader(file))
    told = [(row["split"], int(row["step"])) for row in rows]
    assert told == [("train", 1), ("eval", 1), ("train", 2), ("eval", 2), ("train", 3)]


def test_a_run_that_only_evaluates_a_checkpoint_drops_no_report(tmp_path):
    drive(Jsonl(), run_info(tmp_path), whole_run())
    before = json_rows(tmp_path / "metrics.jsonl")
    drive(Jsonl(), run_info(tmp_path, first_step=1, trains=False), [evaluated(1)])
    assert json_rows(tmp_path / "metrics.jsonl")[:-1] == before


def test_a_run_that_begins_anew_in_the_same_directory_sets_the_reports_of_the_last_aside(tmp_path):
    drive(Jsonl(), run_info(tmp_path), [logged(1), logged(2)])
    drive(Jsonl(), run_info(tmp_path), [logged(1)])
    assert len(json_rows(tmp_path / "metrics.jsonl")) == 1
    assert len(json_rows(tmp_path / "metrics.1.jsonl")) == 2


def test_tokens_and_utilisation_follow_from_samples_per_second(tmp_path):
    info = run_info(
        tmp_path, unit="tokens", units_per_sample=32, flops_per_sample=2e6, peak_flops=1e9
    )
    drive(Jsonl(), info, [logged(1)])
    (row,) = json_rows(tmp_path / "metrics.jsonl")
    assert row["tokens_per_s"] == row["samples_per_s"] * 32
    assert row["mfu"] == row["samples_per_s"] * 2e6 / 1e9
    assert row["tflops_per_device"] == row["samples_per_s"] * 2e6 / 1e12


def test_flops_are_those_of_one_device_and_utilisation_waits_for_a_peak(tmp_path):
    info = run_info(tmp_path, world=World(0, 4), flops_per_sample=2e12)
    rates = Throughput.of(info).complete({"samples_per_s": 8.0})
    assert rates == {"samples_per_s": 8.0, "tflops_per_device": 4.0}


def test_a_rate_that_the_task_measured_itself_stays():
    rates = Throughput("tokens", 32).complete({"samples_per_s": 2.0, "tokens_per_s": 50.0})
    assert rates == {"samples_per_s": 2.0, "tokens_per_s": 50.0}


@pytest.mark.parametrize("make", [Jsonl, Csv, TensorBoard])
def test_a_file_that_the_disk_refuses_is_a_resource_error(make, tmp_path):
    in_the_way = tmp_path / "run"
    in_the_way.write_text("a file where a folder should be")
    with pytest.raises(ResourceError, match="cannot write"):
        drive(make(), run_info(in_the_way), [logged(1)])


NAMED = {
    "logger.jsonl.filename": lambda name: Jsonl(filename=name),
    "logger.csv.filename": lambda name: Csv(filename=name),
    "logger.tensorboard.dir": lambda name: TensorBoard(dir=name),
    "callbacks.profiler.dir": lambda name: Profiler(dir=name),
}


@pytest.mark.parametrize("knob", NAMED)
@pytest.mark.parametrize(
    "name", ["", ".", "..", "/dev/null", "a/../../b", "a\x07", "result.json", "checkpoints/x"]
)
def test_a_name_that_is_none_in_the_run_directory_is_refused(name, knob):
    with pytest.raises(ConfigError) as refusal:
        NAMED[knob](name)
    assert f"{knob}=" in str(refusal.value)
    assert str(refusal.value).isprintable()
    NAMED[knob]("deeper/name")


def test_what_the_run_itself_writes_is_what_no_callback_may(tmp_path):
    home = RunDir.create(tmp_path / "run")
    home.write_config({})
    home.start_provenance(command=[]).join()
    home.write_result({})
    with home.logging(World(), "info"):
        pass
    assert {*TAKEN} - {file.name for file in home.path.iterdir()} == {".hydra", "checkpoints"}
    assert {file.name for file in home.path.iterdir()} <= {*TAKEN}


@pytest.mark.parametrize("make", [Jsonl, Csv])
def test_a_folder_in_the_place_of_reports_is_not_moved(make, tmp_path):
    logger = make(filename="mine")
    (tmp_path / "mine").mkdir()
    with pytest.raises(ResourceError, match="it is a folder"):
        logger.on_start(run_info(run_dir=tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("make", [Jsonl, Csv, TensorBoard])
def test_without_a_run_directory_a_file_logger_writes_nothing(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    drive(make(), run_info(None), whole_run())
    assert list(tmp_path.iterdir()) == []


# -- metrics.csv ----------------------------------------------------------------------------------


def test_csv_holds_what_jsonl_holds(tmp_path):
    for callback in (Jsonl(), Csv()):
        drive(callback, run_info(tmp_path), whole_run())
    objects = json_rows(tmp_path / "metrics.jsonl")
    with (tmp_path / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(objects)
    for row, content in zip(table, objects, strict=True):
        filled = {key: value for key, value in row.items() if value != ""}
        assert filled.keys() == content.keys()
        del filled["elapsed_s"], content["elapsed_s"]
        assert filled == {key: str(value) for key, value in content.items()}


def test_csv_of_a_resumed_run_keeps_rows_and_columns(tmp_path):
    drive(Csv(), run_info(tmp_path), [logged(1), evaluated(1)])
    drive(Csv(), run_info(tmp_path, first_step=1), [logged(2), evaluated(2, top5=0.9)])
    with (tmp_path / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["step"] for row in table] == ["1", "1", "2", "2"]
    assert table[1]["accuracy"] == "0.5"
    assert [row["top5"] for row in table] == ["", "", "", "0.9"]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


# -- TensorBoard ----------------------------------------------------------------------------------


def test_tensorboard_reads_back_every_scalar(tmp_path):
    drive(TensorBoard(), run_info(tmp_path), whole_run())
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(1, 1.0), (3, pytest.approx(1 / 3)), (4, 0.25)]
    assert [event.value for event in events.Scalars("eval/accuracy")] == [0.5, 1.0]
    assert [event.value for event in events.Scalars("test/accuracy")] == [0.75]
    assert events.Scalars("train/lr")[0].wall_time == pytest.approx(time.time(), abs=600)


@pytest.mark.parametrize("size", [0, 1, 7, 1000])
def test_records_are_those_that_tensorboard_writes(size):
    data, theirs = random.Random(size).randbytes(size), io.BytesIO()
    RecordWriter(theirs).write(data)
    assert record(data) == theirs.getvalue()


def test_tensorboard_is_readable_while_the_run_goes_on(tmp_path):
    callback = TensorBoard()
    callback.on_start(run_info(tmp_path))
    assert not (tmp_path / "tensorboard").exists()
    callback.on_step(logged(1, loss=math.nan))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Scalars("train/loss")
    assert math.isnan(event.value)
    callback.on_error(RuntimeError("the run died"))


def test_tensorboard_is_imported_when_a_run_starts_and_not_in_a_step(tmp_path, run_command):
    script = """
        import sys
        from pathlib import Path
        from types import SimpleNamespace
        from torsh_trainer.callbacks.tensorboard import TensorBoard
        def imported():
            names = ("tensorboard", "tensorflow", "boto3")
            return [name for name in names if name in sys.modules]
        chosen = TensorBoard()
        print(imported())
        sink = chosen.open(SimpleNamespace(run_dir=Path(), first_step=0, trains=True))
        started = set(sys.modules)
        print(imported())
        sink.write(SimpleNamespace(step=1, prefixed_metrics=lambda: {"loss": 1.0}))
        print(sorted(set(sys.modules) - started))
    """
    result = run_command([sys.executable, "-c", textwrap.dedent(script)], cwd=tmp_path)
    assert result.stdout.splitlines() == ["[]", "['tensorboard']", "[]"], result.stderr


# -- experiment trackers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "library"), [(TensorBoard, "tensorboard"), (WandB, "wandb"), (MLflow, "mlflow")]
)
def test_a_logger_whose_library_is_missing_names_the_extra(make, library, monkeypatch):
    monkeypatch.setattr(logger_module, "find_spec", lambda name: None)
    with pytest.raises(ResourceError, match=f"needs {library}") as caught:
        make()
    assert 'pip install "torsh-trainer[loggers]"' in caught.value.fix
    assert make.requires == library


def test_every_extra_that_an_error_names_exists(project):
    assert {"loggers", "report"} <= project["optional-dependencies"].keys()
    listed = " ".join(project["optional-dependencies"]["loggers"])
    for library in ("tensorboard", "wandb", "mlflow-skinny"):
        assert library in listed


def offline_records(run_dir):
    """What offline runs of Weights & Biases hold, by wandb's own messages."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # its service process closes the files after a run's end
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        for data in leveldb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            yield record


def leveldb_records(content):
    """Records of a LevelDB log after wandb's 7-byte header; none here is split over blocks."""
    at = 7
    while at + 7 <= len(content):
        _, length, kind = struct.unpack_from("<IHB", content, at)
        assert kind == 1, "a record split over blocks"
        yield content[at + 7 : at + 7 + length]
        at += 7 + length


def test_wandb_gets_every_report_and_one_identity_when_the_run_resumes(tmp_path):
    config = {"optimizer": {"lr": 0.1}}
    info = run_info(tmp_path, config=config)
    drive(WandB(mode="offline", project="unit"), info, whole_run())
    again = WandB(mode="offline", project="unit")
    drive(again, run_info(tmp_path, config=config, first_step=4), [logged(5)])
    records = list(offline_records(tmp_path))
    runs = [record.run for record in records if record.HasField("run")]
    assert len({run.run_id for run in runs}) == 1
    assert {run.project for run in runs} == {"unit"}
    rows = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in r.history.item}
        for r in records
        if r.HasField("history")
    ]
    assert [row["train/loss"] for row in rows if "train/loss" in row] == [1.0, 1 / 3, 0.25, 0.2]
    assert [(row["step"], row["eval/accuracy"]) for row in rows if "eval/accuracy" in row] == [
        (2, 0.5),
        (4, 1.0),
    ]


def test_mlflow_gets_every_report_the_configuration_and_the_end(tmp_path, monkeypatch):
    from mlflow.tracking import MlflowClient

    # The plain-file store needs no database, and has to be asked for in recent releases.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "store").as_uri()
    info = run_info(tmp_path / "run", config={"optimizer": {"lr": 0.1}, "seed": 3})
    drive(MLflow(tracking_uri=uri, experiment="unit", tags={"who": "test"}), info, whole_run())
    resumed = MLflow(tracking_uri=uri, experiment="unit")
    resumed.on_start(info)
    resumed.on_step(logged(5))
    resumed.on_error(RuntimeError("the run died"))

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("unit")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "run"
    assert run.info.status == "FAILED"
    assert run.data.params == {"optimizer.lr": "0.1", "seed": "3"}
    assert run.data.tags["who"] == "test"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(m.step, m.value) for m in history] == [(1, 1.0), (3, 1 / 3), (4, 0.25), (5, 0.2)]


def test_mlflow_without_its_server_says_which_knob_to_check(tmp_path):
    callback = MLflow(tracking_uri="nowhere://unit")
    with pytest.raises(ResourceError, match="MLflow refuses the run") as caught:
        callback.on_start(run_info(tmp_path))
    assert "logger.mlflow.tracking_uri" in caught.value.fix


def test_an_unknown_mode_of_wandb_offers_the_nearest():
    with pytest.raises(ConfigError, match="mode=ofline is unknown") as caught:
        WandB(mode="ofline")
    assert "offline" in caught.value.fix


# -- early stopping -------------------------------------------------------------------------------


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
