"""What a run says: on a terminal, in a pipe, and when it fails."""

from __future__ import annotations

import io
import logging
import math
import re
import sys
import time

import pytest
from rich.console import Console as Terminal

from torsh_trainer.callbacks.base import EvaluationReport, RunInfo, SaveReport, StepReport
from torsh_trainer.callbacks.console import Console
from torsh_trainer.callbacks.formatting import banner, batch_arithmetic, duration, number, size
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError

RESULT = {
    "steps": 200,
    "samples": 12800,
    "train_loss": 0.081234,
    "metrics": {"accuracy": 0.9731, "loss": 0.09, "test_accuracy": 0.97},
    "wall_s": 75.0,
    "samples_per_s": 171.0,
    "peak_memory_bytes": 431 * 2**20,
    "checkpoint": "runs/7/checkpoints/step-00000200",
}


def run_info(**changes):
    facts = {
        "run_dir": "runs/7",
        "world": World(rank=0, size=2, local_size=2),
        "strategy": "ddp",
        "backend": "gloo",
        "precision": "bf16-mixed",
        "device": "cpu",
        "batch_size": 64,
        "micro_batch_size": 16,
        "accumulate": 2,
        "max_steps": 200,
        "steps_per_epoch": 22,
        "first_step": 0,
        "parameters": 315776,
        "trainable_parameters": 299392,
        "model_summary": "module  parameters\nNet        315,776",
        "threads": 1,
    }
    return RunInfo(**{**facts, **changes})


def logged(step, **metrics):
    numbers = {
        "loss": 0.33123,
        "lr": 0.003,
        "grad_norm": 0.8121,
        "samples_per_s": 4812.3,
        "data_wait_s": 0.0001,
        "step_s": 0.01,
        "skipped": 0.0,
    }
    return StepReport(step, 3, 64 * step, {**numbers, **metrics})


class Shown(Console):
    """A console that writes into a string, as to a terminal or as to a pipe."""

    def __init__(self, *, tty, width=100, **knobs):
        super().__init__(**knobs)
        self.file = io.StringIO()
        self.tty, self.width = tty, width

    def terminal(self):
        return Terminal(
            file=self.file,
            force_terminal=self.tty,
            width=self.width,
            color_system="truecolor" if self.tty else None,
            highlight=False,
            markup=False,
            _environ={"TERM": "xterm-256color"},
        )

    @property
    def raw(self):
        return self.file.getvalue()

    @property
    def text(self):
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.raw)


def run(console, info=None, *, steps=200):
    console.on_start(info or run_info())
    for step in range(1, steps + 1):
        console.on_step(
            logged(step) if step % 50 == 0 or step == 1 else StepReport(step, 3, 64 * step, None)
        )
        if step % 100 == 0:
            metrics = {"accuracy": 0.9712, "loss": 0.0912}
            console.on_evaluate(EvaluationReport("eval", step, 3, 64 * step, metrics, 1.23))
            console.on_save(SaveReport(step, f"runs/7/checkpoints/step-{step:08}", 0.1))
    console.on_end(RESULT)
    return console


# -- lines ----------------------------------------------------------------------------------------


def test_a_pipe_gets_one_plain_line_for_every_report():
    console = run(Shown(tty=False))
    assert "\x1b" not in console.raw
    assert "\r" not in console.raw
    assert console.raw.isascii()
    lines = console.raw.splitlines()
    steps = [line.split()[1] for line in lines if line.startswith("step ")]
    assert steps == ["1/200", "50/200", "100/200", "150/200", "200/200"]
    assert lines.count("eval at step 100: accuracy 0.9712  loss 0.0912  (1.2 s)") == 1
    assert lines.count("saved runs/7/checkpoints/step-00000100 (0.1 s)") == 1


def test_a_line_holds_loss_learning_rate_speed_and_time_left():
    (line,) = [x for x in run(Shown(tty=False)).raw.splitlines() if x.startswith("step 50/200")]
    assert line.startswith(
        "step 50/200  epoch 3  loss 0.3312  lr 0.003  grad_norm 0.8121  4,812 samples/s"
    )
    assert re.search(r"  \d+:\d\d:\d\d left$", line)


def test_the_banner_says_what_batch_normalisation_sees_where_that_is_not_the_batch():
    seen = [dict(banner(run_info(normalised=n))).get("batch norm") for n in (0, 16, 64)]
    assert seen == [None, "normalises 16 samples at a time, not all 64", None]
    assert "batch norm" not in dict(banner(run_info(normalised=16, trains=False)))


def test_the_banner_says_what_the_run_is_made_of():
    text = run(Shown(tty=False)).raw
    banner = re.sub(r" +", " ", text.split("step 1/200")[0])
    for words in (
        "strategy ddp, 2 processes over gloo",
        "device cpu, 1 thread per process",
        "precision bf16-mixed",
        "batch 64 = 16 micro x 2 accumulate x 2 processes",
        "length 200 steps, 22 steps an epoch",
        "model 315,776 parameters, 299,392 of them trainable",
        "run runs/7",
        "Net 315,776",
    ):
        assert words in banner


def test_a_run_that_only_evaluates_says_no_length():
    text = run(Shown(tty=False), run_info(trains=False, max_steps=None)).text
    assert "length" not in text
    assert "no bound" not in text


def test_the_final_table_holds_metrics_time_memory_and_where_the_run_lies():
    text = re.sub(r" +", " ", run(Shown(tty=False)).raw.split("Done")[1])
    for words in (
        "steps 200",
        "train loss 0.08123",
        "eval accuracy 0.9731",
        "eval loss 0.09",
        "test accuracy 0.97",
        "wall time 0:01:15",
        "throughput 171 samples/s",
        "peak memory 431 MiB per process",
        "checkpoint runs/7/checkpoints/step-00000200",
        "run runs/7",
    ):
        assert words in text


def test_tokens_and_utilisation_take_the_place_of_samples():
    info = run_info(unit="tokens", units_per_sample=256, flops_per_sample=1e8, peak_flops=1e12)
    text = run(Shown(tty=False), info).raw
    rates = f"{4812.3 * 256:,.0f} tokens/s  0.2406 TFLOP/s a device  mfu {4812.3 * 1e8 / 1e12:.1%}"
    assert rates in text
    assert "samples/s" not in text


def test_without_a_peak_the_rate_of_operations_stands_alone_and_is_that_of_a_device():
    info = run_info(unit="tokens", flops_per_sample=1e8, world=World(0, 2))
    text = run(Shown(tty=False), info).raw
    assert "0.2406 TFLOP/s a device" in text
    assert "mfu" not in text


def test_waiting_for_data_and_skipped_steps_are_shown_once_they_matter():
    console = Shown(tty=False)
    console.on_start(run_info())
    console.on_step(logged(1))
    console.on_step(logged(2, data_wait_s=0.005, skipped=3.0, loss=math.nan))
    quiet, loud = console.raw.splitlines()[-2:]
    assert "waiting" not in quiet
    assert "skipped" not in quiet
    assert "loss nan" in loud
    assert "waiting for data 50%" in loud
    assert "3 skipped" in loud


def test_the_model_summary_can_be_left_out():
    assert "Net " not in run(Shown(tty=False, show_model=False)).raw


def test_a_run_without_bound_or_with_a_clock_has_no_total():
    console = Shown(tty=False)
    console.on_start(run_info(max_steps=None, steps_per_epoch=None, max_time_s=90.0))
    console.on_step(logged(1))
    console.on_step(logged(2))
    assert "length         at most 0:01:30" in console.raw
    assert re.search(r"^step 2  epoch 3 .*0:01:\d\d left$", console.raw, re.MULTILINE)


def test_a_run_that_did_nothing_but_evaluate_still_has_its_table():
    console = Shown(tty=False)
    console.on_start(run_info())
    console.on_end({"steps": 0, "train_loss": None, "metrics": {"test_loss": 0.5}, "wall_s": 1.0})
    assert re.search(r"test loss +0.5", console.raw)
    assert "train loss" not in console.raw


def test_output_that_is_no_terminal_chooses_lines_by_itself(capsys):
    run(Console())
    told = capsys.readouterr().out
    assert "\x1b" not in told
    assert "step 200/200" in told


# -- the bar --------------------------------------------------------------------------------------


def test_a_terminal_gets_a_bar_that_is_gone_in_the_end():
    console = Shown(tty=True)
    console.on_start(run_info())
    assert "waiting for the first step" in console.text
    console.on_step(logged(50))
    assert re.search(r"step 50/200 ━+\S* +25% epoch 3", console.text)
    assert "loss 0.3312  lr 0.003  grad_norm 0.8121  4,812 samples/s" in console.text
    assert "\x1b[?25l" in console.raw, "the cursor hides while the bar moves"
    console.on_end(RESULT)
    assert console.raw.rindex("\x1b[?25h") > console.raw.rindex("\x1b[?25l")
    assert "train loss" in console.text


def test_an_evaluation_stays_as_a_line_above_the_bar_and_within_it():
    text = run(Shown(tty=True, width=140)).text
    assert text.count("eval at step 100: accuracy 0.9712  loss 0.0912  (1.2 s)\n") == 1
    assert "| eval accuracy 0.9712" in text


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test moves: ``clock[0]`` is the time in seconds."""
    now_s = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    return now_s


def test_the_bar_is_drawn_about_as_often_as_asked(clock):
    console = Shown(tty=True)
    console.on_start(run_info(max_steps=10**6))
    before = console.text.count("epoch")
    for step in range(1, 20001):
        clock[0] += 0.001
        console.on_step(StepReport(step, 0, step, None))
    drawn = console.text.count("epoch") - before
    seconds, times_a_second = 20, Console().refresh_per_second
    assert 0.7 * seconds * times_a_second <= drawn <= seconds * times_a_second + 1


def test_short_steps_rarely_look_at_the_clock_and_long_ones_always(clock, monkeypatch):
    console = Shown(tty=True)
    console.on_start(run_info(max_steps=10**6))
    looks = []
    look = console._display.look
    monkeypatch.setattr(console._display, "look", lambda step: looks.append(step) or look(step))
    for step in range(1, 5001):
        clock[0] += 1e-5
        console.on_step(StepReport(step, 0, step, None))
    assert len(looks) < 5000 / 50
    for step in range(5001, 5201):
        clock[0] += 5.0
        console.on_step(StepReport(step, 0, step, None))
    assert looks[-50:] == list(range(5151, 5201))


def test_drawing_takes_one_percent_of_the_time_at_most(clock):
    console = Shown(tty=True)
    console.on_start(run_info(max_steps=10**6))
    live, spent_s = console._display._live, []
    refresh = live.refresh

    def slow_refresh():
        clock[0] += 0.05
        spent_s.append(0.05)
        refresh()

    live.refresh = slow_refresh
    began_s = clock[0]
    for step in range(1, 30001):
        clock[0] += 0.01
        console.on_step(StepReport(step, 0, step, None))
    assert len(spent_s) > 10
    assert sum(spent_s) <= 0.011 * (clock[0] - began_s)


def test_a_failed_run_gives_the_terminal_back_and_leaves_the_bar_where_it_was():
    console = Shown(tty=True)
    stdout = sys.stdout
    console.on_start(run_info())
    console.on_step(logged(50))
    console.on_error(RuntimeError("the run died"))
    assert sys.stdout is stdout
    assert console.raw.rindex("\x1b[?25h") > console.raw.rindex("\x1b[?25l")
    assert "Done" not in console.text
    console.on_step(logged(51))  # nothing listens any more


def test_prints_and_log_lines_appear_above_the_bar(monkeypatch):
    console = Shown(tty=True)
    handler = logging.StreamHandler(sys.stdout)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        stream = handler.stream
        console.on_start(run_info())
        console.on_step(logged(50))
        print("a print of the user's")
        root.warning("a warning of the user's")
        console.on_end(RESULT)
        assert handler.stream is stream
    finally:
        root.removeHandler(handler)
    for words in ("a print of the user's\n", "a warning of the user's\n"):
        assert console.text.count(words) == 1


def test_a_narrow_terminal_cuts_the_numbers_and_keeps_the_bar():
    console = Shown(tty=True, width=50)
    console.on_start(run_info())
    bar = console.text.split("\n\n")[-1]
    console.on_step(logged(50))
    assert all(len(line) <= 50 for line in bar.splitlines())
    assert "…" in console.text


def test_style_lines_holds_on_a_terminal_too():
    assert "\x1b[?25l" not in run(Shown(tty=True, style="lines")).raw


@pytest.mark.parametrize(
    ("knobs", "words"),
    [({"style": "barr"}, "style=barr is unknown"), ({"refresh_per_second": 0}, "=0 is not a pos")],
)
def test_knobs_of_the_console_out_of_range_are_refused(knobs, words):
    with pytest.raises(ConfigError, match=words):
        Console(**knobs)


# -- words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "accumulate", "words"),
    [
        (1, 1, "16 = 16 micro x 1 accumulate x 1 process"),
        (4, 2, "128 = 16 micro x 2 accumulate x 4 processes"),
    ],
)
def test_batch_arithmetic_multiplies_out(world, accumulate, words):
    info = run_info(
        world=World(size=world, local_size=world),
        batch_size=16 * accumulate * world,
        accumulate=accumulate,
    )
    assert batch_arithmetic(info) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0831234, "0.08312"),
        (3e-5, "3e-05"),
        (4812.3, "4,812"),
        (1.0, "1"),
        (math.inf, "inf"),
        (None, "None"),
    ],
)
def test_numbers_have_four_significant_digits(value, words):
    assert number(value) == words


def test_durations_and_sizes_have_units():
    assert [duration(s) for s in (0.2, 41, 3671, 90061)] == [
        "0:00:00",
        "0:00:41",
        "1:01:11",
        "1 d 01:01:01",
    ]
    assert [size(n) for n in (12, 2048, 431 * 2**20, 5 * 2**40)] == [
        "12 bytes",
        "2 KiB",
        "431 MiB",
        "5 TiB",
    ]
