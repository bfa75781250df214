"""A trace of chosen steps, and where their time went."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import profiler

from torsh_trainer.callbacks.base import Callback, RunInfo, StepReport
from torsh_trainer.callbacks.formatting import nearby
from torsh_trainer.callbacks.places import in_run_directory
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.utils.files import disk_error

log = logging.getLogger(__name__)
_NEVER = -1


class Profiler(Callback):
    """Traces ``steps`` steps from ``first_step`` on, with torch.profiler, on every rank.

    Each rank leaves in ``dir`` of the run directory ``rank-N.json.gz`` (a Chrome trace: open it in
    https://ui.perfetto.dev) and ``rank-N.txt`` (torch's table of operations). Rank 0 also prints
    the ``rows`` most expensive operations and, with a later report, how a step divides into
    waiting for data and computing. Tracing slows the traced steps down, ``with_stack`` above all.

    Raises:
        ConfigError: a number is out of range, or ``dir`` is no name in the run directory.
        ResourceError: the trace cannot be written.
    """

    def __init__(
        self,
        *,
        first_step: int = 10,
        steps: int = 5,
        dir: str = "profile",
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        rows: int = 10,
    ) -> None:
        for name, value in (("first_step", first_step), ("steps", steps), ("rows", rows)):
            if value < 1:
                raise ConfigError(
                    f"callbacks.profiler.{name}={value} is not a positive number",
                    fix="give 1 or more",
                )
        self.first_step = first_step
        self.steps = steps
        self.dir = in_run_directory(dir, knob="callbacks.profiler.dir")
        self.record_shapes = record_shapes
        self.profile_memory = profile_memory
        self.with_stack = with_stack
        self.rows = rows
        self._edge = _NEVER  # the step after which tracing starts or stops
        self._folder = Path(dir)
        self._rank = 0
        self._done = 0
        self._trace: _Trace | None = None
        self._latest: StepReport | None = None
        self._reports_to_split = 0  # after so many, the split of a step is told; 0 is never

    def on_start(self, info: RunInfo) -> None:
        self._rank = info.world.rank
        self._folder = (info.run_dir or Path()) / self.dir
        self._edge = self.first_step - 1
        self._done = info.first_step
        if self._edge == self._done:
            self._begin()
        elif self._edge < self._done and info.world.is_rank_zero:
            log.warning(
                "nothing is traced: this run goes on after step %d, and "
                "callbacks.profiler.first_step is %d",
                info.first_step,
                self.first_step,
            )

    def on_step(self, report: StepReport) -> bool | None:
        self._done = report.step
        if report.metrics is not None:
            self._hear(report)
        if report.step == self._edge:
            if self._trace is None:
                self._begin()
            else:
                self._finish()
        return None

    def on_error(self, error: BaseException) -> None:
        try:
            self._cut_short()
        except ResourceError as refusal:  # must not hide the error that ended the run
            log.warning("%s", refusal)

    def on_end(self, result: Mapping[str, Any]) -> None:
        self._cut_short()
        if self._reports_to_split:
            self._tell_split(spoiled=self._reports_to_split == 1)

    def _begin(self) -> None:
        self._edge = self.first_step + self.steps - 1
        self._trace = _Trace(
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
        )

    def _finish(self) -> None:
        steps = self._done - self.first_step + 1
        trace, self._trace, self._edge = self._trace, None, _NEVER
        assert trace is not None
        wall_s = trace.stop()
        stem = self._folder / f"rank-{self._rank}"
        trace.save(stem)
        if self._rank == 0:
            print(trace.table(stem, steps=steps, wall_s=wall_s, rows=self.rows), flush=True)
            # The next report's steps include the tracing and its saving: the one after is told.
            self._reports_to_split = 2

    def _hear(self, report: StepReport) -> None:
        self._latest = report
        if self._reports_to_split:
            self._reports_to_split -= 1
            if self._reports_to_split == 0:
                self._tell_split(spoiled=False)

    def _tell_split(self, *, spoiled: bool) -> None:
        self._reports_to_split = 0
        if self._latest is not None and self._latest.metrics is not None:
            words = split_of_a_step(self._latest.metrics, self._latest.step)
            print(words + (" (tracing included)" if spoiled else ""), flush=True)

    def _cut_short(self) -> None:
        if self._trace is not None and self._done >= self.first_step:
            self._finish()


class _Trace:
    """torch.profiler, running from birth until ``stop``."""

    def __init__(self, *, record_shapes: bool, profile_memory: bool, with_stack: bool) -> None:
        self._profile = profiler.profile(
            activities=profiler.supported_activities(),
            record_shapes=record_shapes,
            profile_memory=profile_memory,
            with_stack=with_stack,
        )
        _synchronize()
        with _without_chatter():
            self._profile.start()
        self._began_s = time.perf_counter()

    def stop(self) -> float:
        """Ends the trace; returns the seconds that it covers."""
        _synchronize()
        wall_s = time.perf_counter() - self._began_s
        with _without_chatter():
            self._profile.stop()
        self._operations = self._profile.key_averages()
        return wall_s

    def save(self, stem: Path) -> None:
        """Writes ``stem``.json.gz and ``stem``.txt."""
        try:
            stem.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(f"{stem}.json.gz")
            table = self._operations.table(
                sort_by="self_device_time_total" if self._on_device else "self_cpu_time_total",
                row_limit=200,
                max_name_column_width=80,
            )
            Path(f"{stem}.txt").write_text(table, encoding="utf-8")
        except OSError as error:
            raise disk_error(error, "write", stem.parent) from error

    @property
    def _on_device(self) -> bool:
        return any(op.self_device_time_total > 0 for op in self._operations)

    def table(self, stem: Path, *, steps: int, wall_s: float, rows: int) -> str:
        """The most expensive operations, by their own time on the device (else on the CPU)."""
        device = self._on_device
        trace = nearby(f"{stem}.json.gz")
        times = {
            op.key: (op.self_device_time_total if device else op.self_cpu_time_total, op.count)
            for op in self._operations
        }
        total_us = sum(time_us for time_us, _ in times.values()) or 1.0
        dearest = sorted(times.items(), key=lambda item: -item[1][0])[:rows]
        where = "device" if device else "CPU"
        lines = [
            f"profile of {steps} steps: {1e3 * wall_s / steps:.2f} ms a step; trace {trace}",
            f"  {'operation':<52}{where + ' ms a step':>16}{'share':>8}{'calls a step':>14}",
        ]
        for name, (time_us, count) in dearest:
            short = name if len(name) <= 50 else name[:47] + "..."
            lines.append(
                f"  {short:<52}{time_us / 1e3 / steps:>16.3f}{time_us / total_us:>8.1%}"
                f"{count / steps:>14.1f}"
            )
        return "\n".join(lines)


def split_of_a_step(metrics: Mapping[str, float], step: int) -> str:
    """One line: how the steps of the report at ``step`` divide into waiting and computing."""
    step_s, wait_s = metrics["step_s"], metrics["data_wait_s"]
    return (
        f"a step up to {step}: {1e3 * step_s:.2f} ms, of which {1e3 * wait_s:.2f} ms "
        f"({wait_s / step_s if step_s else 0.0:.1%}) waiting for data and "
        f"{1e3 * (step_s - wait_s):.2f} ms computing and communicating"
    )


@contextlib.contextmanager
def _without_chatter() -> Iterator[None]:
    """Keeps torch's profiler from telling, past Python and through a progress bar, that it starts.

    Its lines (``USDT: ...``) go straight to file descriptor 2; all others are passed on afterwards.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            caught.seek(0)
            for line in caught.read().splitlines(keepends=True):
                if not line.startswith(b"USDT:"):
                    os.write(2, line)


def _synchronize() -> None:
    """Waits for the device, so that a trace holds whole steps."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
