"""Loggers: what they leave behind, and what they say where they cannot."""

from __future__ import annotations

import csv
import io
import json
import math
import random
import struct
import sys
import textwrap
import time

import pytest
from callback_runs import drive, evaluated, json_rows, logged, run_info, whole_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from torsh_trainer.callbacks import logger as logger_module
from torsh_trainer.callbacks.base import StepReport
from torsh_trainer.callbacks.csv import Csv
from torsh_trainer.callbacks.jsonl import Jsonl
from torsh_trainer.callbacks.mlflow import MLflow
from torsh_trainer.callbacks.places import TAKEN
from torsh_trainer.callbacks.profiler import Profiler
from torsh_trainer.callbacks.tensorboard import TensorBoard, record
from torsh_trainer.callbacks.throughput import Throughput
from torsh_trainer.callbacks.wandb import WandB
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.rundir import RunDir

pytestmark = pytest.mark.usefixtures("warm_interpreters")


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
