"""What a run says while it runs: a banner, a progress bar or plain lines, a final table."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal

from rich.console import Console as Terminal
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from torsh_trainer import __version__
from torsh_trainer.callbacks.base import (
    EvaluationReport,
    RankZeroOnly,
    RunInfo,
    SaveReport,
    StepReport,
)
from torsh_trainer.callbacks.formatting import banner, duration, nearby, number, size
from torsh_trainer.callbacks.throughput import Throughput
from torsh_trainer.errors import ConfigError, nearest

_STYLES = ("auto", "bar", "lines")
_NOT_SHOWN = frozenset({"samples_per_s", "data_wait_s", "step_s", "skipped"})
_SLOW_DATA = 0.1  # the share of a step spent waiting for data from which on it is shown
_DRAWING_SHARE = 0.0025  # of the time, at most: a redraw also takes caches from the step
_LINES_WIDTH = 100
_WORDS = 15
"""Columns for the words of a table, at least."""

_LONG_STRIDE = 64


class Console(RankZeroOnly):
    """Shows a run's progress to the person who started it; on rank 0.

    ``style`` bar is a progress bar, redrawn at most ``refresh_per_second`` times a second (and for
    at most a quarter of a percent of the time); lines is one plain line a report; auto takes the
    bar on a terminal and lines elsewhere. ``show_model`` prints the model summary before the first
    step.

    Raises:
        ConfigError: a knob is out of range.
    """

    def __init__(
        self,
        *,
        style: Literal["auto", "bar", "lines"] = "auto",
        refresh_per_second: float = 5.0,
        show_model: bool = True,
    ) -> None:
        where = "callbacks.console"
        if style not in _STYLES:
            raise ConfigError(f"{where}.style={style} is unknown", fix=nearest(style, _STYLES))
        if refresh_per_second <= 0:
            raise ConfigError(
                f"{where}.refresh_per_second={refresh_per_second} is not a positive number",
                fix=f"give a positive number, or {where}.style=lines for no bar",
            )
        self.style = style
        self.refresh_per_second = refresh_per_second
        self.show_model = show_model
        self._display = _Display()
        self._left = 0  # steps until the display wants to look at the clock again

    def terminal(self) -> Terminal:
        """Where to write: standard output, plain and at a sane width when it is no terminal.

        In a notebook, too: its kernel asks for colours (FORCE_COLOR), which rich takes for a
        terminal, and moves of the cursor come out as characters there.
        """
        plain = Terminal(
            highlight=False,
            markup=False,
            width=_LINES_WIDTH,
            force_terminal=False,
            force_jupyter=False,
        )
        return Terminal(highlight=False, markup=False) if sys.stdout.isatty() else plain

    def on_start(self, info: RunInfo) -> None:
        terminal = self.terminal()
        moves = terminal.is_terminal and not terminal.is_dumb_terminal
        bar = self.style == "bar" or (self.style == "auto" and moves)
        _introduce(terminal, info, show_model=self.show_model)
        self._left = 0
        self._display = (
            _Bar(terminal, info, 1 / self.refresh_per_second) if bar else _Lines(terminal, info)
        )

    def on_step(self, report: StepReport) -> bool | None:
        if report.metrics is not None:
            self._display.report(report)
        self._left -= 1
        if self._left < 0:
            self._left = self._display.look(report.step)
        return None

    def on_evaluate(self, report: EvaluationReport) -> bool | None:
        self._display.evaluation(report)
        return None

    def on_save(self, report: SaveReport) -> None:
        self._display.save(report)

    def on_error(self, error: BaseException) -> None:
        self._close(failed=True)

    def on_end(self, result: Mapping[str, Any]) -> None:
        display = self._close(failed=False)
        display.conclude(result)

    def _close(self, *, failed: bool) -> _Display:
        display, self._display = self._display, _Display()
        display.close(failed=failed)
        return display


class _Display:
    """How reports are shown; this one shows nothing."""

    def report(self, report: StepReport) -> None:
        """A logged step."""

    def look(self, step: int) -> int:
        """Called now and then while steps go by; returns how many may pass until the next call."""
        return _LONG_STRIDE

    def evaluation(self, report: EvaluationReport) -> None:
        """Metrics of an evaluation."""

    def save(self, report: SaveReport) -> None:
        """A checkpoint."""

    def close(self, *, failed: bool) -> None:
        """The run is over: leaves the terminal as it was."""

    def conclude(self, result: Mapping[str, Any]) -> None:
        """The final table."""


class _Shown(_Display):
    """What bar and lines share: words for a report, the time left, the final table."""

    def __init__(self, terminal: Terminal, info: RunInfo) -> None:
        self._terminal = terminal
        self._info = info
        self._throughput = Throughput.of(info)
        self._clock = _Clock(info)

    def _speed(self, metrics: Mapping[str, float]) -> str:
        rates = self._throughput.complete(metrics)
        if self._throughput.name not in rates:
            return ""
        speed = f"{number(_round_rate(rates[self._throughput.name]))} {self._throughput.unit}/s"
        if "tflops_per_device" in rates:
            each = " a device" if self._throughput.devices > 1 else ""
            speed += f"  {number(rates['tflops_per_device'])} TFLOP/s{each}"
        return f"{speed}  mfu {rates['mfu']:.1%}" if "mfu" in rates else speed

    def _numbers(self, metrics: Mapping[str, float]) -> str:
        words = [f"{k} {number(v)}" for k, v in metrics.items() if k not in _NOT_SHOWN]
        words.append(self._speed(metrics))
        step_s = metrics.get("step_s", 0.0)
        if step_s and metrics.get("data_wait_s", 0.0) / step_s >= _SLOW_DATA:
            words.append(f"waiting for data {metrics['data_wait_s'] / step_s:.0%}")
        if metrics.get("skipped"):
            words.append(f"{number(metrics['skipped'])} skipped")
        return "  ".join(word for word in words if word)

    def conclude(self, result: Mapping[str, Any]) -> None:
        self._terminal.print(Text("\nDone", style="bold green"))
        pairs = _conclusion(result, self._info, self._throughput)
        width = max(_WORDS, *(len(word) + 1 for word, _ in pairs))
        for word, value in pairs:
            _print_pair(self._terminal, word, value, width=width)


class _Lines(_Shown):
    """One plain line a report, for files and pipes."""

    def report(self, report: StepReport) -> None:
        assert report.metrics is not None
        self._clock.see(report.step)
        total = f"/{self._clock.total:,}" if self._clock.total else ""
        left = self._clock.time_left()
        self._say(
            f"step {report.step:,}{total}  epoch {report.epoch}  "
            f"{self._numbers(report.metrics)}{f'  {left} left' if left else ''}"
        )

    def evaluation(self, report: EvaluationReport) -> None:
        self._say(evaluation_line(report))

    def save(self, report: SaveReport) -> None:
        self._say(f"saved {nearby(report.path)} ({report.wall_s:.1f} s)")

    def _say(self, line: str) -> None:
        # Not Terminal.print: it would wrap, and costs ten times as much.
        self._terminal.file.write(line + "\n")
        self._terminal.file.flush()


class _Bar(_Shown):
    """A progress bar at the bottom of a terminal; evaluations stay above it as lines."""

    def __init__(self, terminal: Terminal, info: RunInfo, interval_s: float) -> None:
        super().__init__(terminal, info)
        self._interval_s = interval_s
        self._due_s = 0.0
        self._looked_s = time.monotonic()
        self._stride = 1
        self._step = info.first_step
        self._words = "waiting for the first step"
        self._epoch = 0
        self._evaluated = ""
        # No refresh thread: a loader's workers may be forked at any moment, and would inherit
        # whatever lock that thread holds.
        self._live = Live(
            console=terminal,
            auto_refresh=False,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),
            get_renderable=self._render,
        )
        self._logs = _LogsAbove(self._live)
        self._live.refresh()

    def report(self, report: StepReport) -> None:
        assert report.metrics is not None
        self._epoch = report.epoch
        self._words = self._numbers(report.metrics)

    def look(self, step: int) -> int:
        now_s = time.monotonic()
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        # Aims at two looks an interval, so that the clock is read on few of many short steps.
        if passed_s < self._interval_s / 4:
            self._stride = min(2 * self._stride, _LONG_STRIDE)
        elif passed_s > self._interval_s / 2:
            self._stride = max(1, self._stride // 2)
        self._step = step
        if now_s >= self._due_s:
            self._clock.see(step)
            self._live.refresh()
            drawn_s = time.monotonic()
            pause_s = max(self._interval_s, (drawn_s - now_s) / _DRAWING_SHARE)
            self._due_s = drawn_s + pause_s
            self._looked_s = drawn_s
        return self._stride - 1

    def evaluation(self, report: EvaluationReport) -> None:
        self._terminal.print(Text(evaluation_line(report)), soft_wrap=True)
        name, value = next(iter(report.metrics.items()), ("", math.nan))
        self._evaluated = f"  | {report.split} {name} {number(value)}" if name else ""
        self._live.refresh()

    def close(self, *, failed: bool) -> None:
        self._live.transient = not failed
        self._live.refresh()
        self._live.stop()
        self._logs.restore()

    def _render(self) -> Group:
        total, left = self._clock.total, self._clock.time_left()
        steps = f"{self._step:,}" + (f"/{total:,}" if total else "")
        share = self._clock.share(self._step)
        bar = ProgressBar(
            total=None if share is None else 1.0,
            completed=share or 0.0,
            width=max(10, min(40, self._terminal.width - 50)),
        )
        grid = Table.grid(padding=(0, 1))
        grid.add_row(
            Text("step", style="bold"),
            Text(steps),
            bar,
            Text("" if share is None else f"{share:4.0%}", style="cyan"),
            Text(f"epoch {self._epoch}", style="dim"),
            Text(f"{left} left" if left else f"{duration(self._clock.elapsed_s)} so far"),
        )
        words = f"  {self._words}{self._evaluated}"
        return Group(grid, Text(words, no_wrap=True, overflow="ellipsis"))


class _LogsAbove:
    """Log lines print above the bar instead of through it, until ``restore``."""

    def __init__(self, live: Live) -> None:
        streams = {id(sys.stdout): "stdout", id(sys.stderr): "stderr"}
        live.start()
        self._moved: list[tuple[logging.StreamHandler[Any], Any]] = []
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and id(handler.stream) in streams:
                self._moved.append((handler, handler.stream))
                handler.setStream(getattr(sys, streams[id(handler.stream)]))

    def restore(self) -> None:
        for handler, stream in self._moved:
            handler.setStream(stream)


class _Clock:
    """How much of a run is done and how long the rest will take, at the pace so far."""

    def __init__(self, info: RunInfo) -> None:
        self.total = info.total_steps or info.max_steps
        self._max_time_s = info.max_time_s
        self._began_s = time.monotonic()
        self._first: tuple[int, float] | None = None
        self._last = (info.first_step, self._began_s)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def see(self, step: int) -> None:
        """Notes that ``step`` is done; the pace counts from the first one noted."""
        self._last = (step, time.monotonic())
        if self._first is None:
            self._first = self._last

    def time_left(self) -> str:
        """Time left, in words; empty while nobody can tell."""
        bounds_s = []
        if self._max_time_s is not None:
            bounds_s.append(max(0.0, self._max_time_s - self.elapsed_s))
        step, at_s = self._last
        if self.total and self._first and step > self._first[0]:
            a_step_s = (at_s - self._first[1]) / (step - self._first[0])
            bounds_s.append(max(0, self.total - step) * a_step_s)
        return duration(min(bounds_s)) if bounds_s else ""

    def share(self, step: int) -> float | None:
        """How much is done, between 0 and 1; None while nobody can tell."""
        shares = [step / self.total] if self.total else []
        if self._max_time_s:
            shares.append(self.elapsed_s / self._max_time_s)
        return min(1.0, max(shares)) if shares else None


def evaluation_line(report: EvaluationReport) -> str:
    """``eval at step 200: accuracy 0.9712  loss 0.0912  (1.2 s)``."""
    words = "  ".join(f"{name} {number(value)}" for name, value in report.metrics.items())
    return f"{report.split} at step {report.step:,}: {words}  ({report.wall_s:.1f} s)"


def _introduce(terminal: Terminal, info: RunInfo, *, show_model: bool) -> None:
    terminal.print(Text(f"ToRSh Trainer {__version__}", style="bold"))
    for word, facts in banner(info):
        _print_pair(terminal, word, facts)
    if show_model and info.model_summary:
        terminal.print()
        terminal.print(Text(info.model_summary), soft_wrap=True)
    terminal.print()


def _print_pair(terminal: Terminal, word: str, facts: str, *, width: int = _WORDS) -> None:
    line = Text(f"  {word:<{width}}", style="bold cyan").append(facts, style="not bold default")
    terminal.print(line, soft_wrap=True)


def _conclusion(
    result: Mapping[str, Any], info: RunInfo, throughput: Throughput
) -> list[tuple[str, str]]:
    """(word, value) rows of the final table; what ``result`` lacks is left out."""
    rows = [(word, number(result[word])) for word in ("steps", "samples") if word in result]
    if result.get("train_loss") is not None:
        rows.append(("train loss", number(result["train_loss"])))
    for name, value in (result.get("metrics") or {}).items():
        split, _, rest = name.partition("_")
        rows.append((f"test {rest}" if split == "test" else f"eval {name}", number(value)))
    if result.get("wall_s") is not None:
        rows.append(("wall time", duration(result["wall_s"])))
    if result.get("samples_per_s"):
        rate = throughput.complete({"samples_per_s": result["samples_per_s"]})[throughput.name]
        rows.append(("throughput", f"{number(_round_rate(rate))} {throughput.unit}/s"))
    if result.get("peak_memory_bytes"):
        rows.append(("peak memory", f"{size(result['peak_memory_bytes'])} per process"))
    if result.get("changing_buffers"):
        names = ", ".join(result["changing_buffers"])
        rows.append(("buffers", f"{names}: rank 0's, see docs/strategies.md"))
    if result.get("checkpoint"):
        rows.append(("checkpoint", nearby(result["checkpoint"])))
    if info.run_dir is not None:
        rows.append(("run", nearby(info.run_dir)))
    return rows


def _round_rate(rate: float) -> float:
    return round(rate) if rate >= 100 else rate
