"""Which charts a set of runs calls for, and the curves in them; no drawing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torsh_trainer.report.runs import Point, Run

Axis = Literal["step", "samples", "time"]

PALETTE = (  # (light, dark), in the order of runs
    ("#2563eb", "#6ea8fe"),
    ("#e8590c", "#ff922b"),
    ("#2f9e44", "#69db7c"),
    ("#c2255c", "#f783ac"),
    ("#7048e8", "#b197fc"),
    ("#0c8599", "#3bc9db"),
    ("#b08900", "#ffd43b"),
    ("#8d5524", "#d0a17a"),
    ("#5f6b7a", "#adb5bd"),
    ("#f06595", "#ffc9de"),
    ("#74a30f", "#c0eb75"),
    ("#0bb4c9", "#99e9f2"),
)

_OVERLAY_RUNS = 3  # up to so many runs, training and evaluation loss share a chart
_RAW_RUNS = 4  # up to so many runs, the unsmoothed curve stands behind the smoothed one
_SMOOTH_FROM = 60  # reports
_LOG_FROM = 100.0  # max / min
_POINTS = 240  # of which each may keep its lowest and its highest


@dataclass(frozen=True)
class Curve:
    """One line. ``dashed`` sets evaluation apart from training; ``faint`` is the raw behind it."""

    run: int
    split: str
    points: tuple[Point, ...]
    dashed: bool = False
    faint: bool = False


@dataclass(frozen=True)
class Chart:
    """One pair of axes. ``zero`` starts the y axis at 0, ``percent`` shows values times 100."""

    key: str
    title: str
    curves: tuple[Curve, ...]
    note: str = ""
    log: bool = False
    zero: bool = False
    percent: bool = False

    def values(self) -> list[float]:
        """All finite values of all curves."""
        return [p.value for c in self.curves for p in c.points if p.value is not None]


def charts_of(runs: Sequence[Run]) -> list[Chart]:
    """Loss, evaluation metrics, learning rate, throughput, and whatever else was logged."""
    overlay = len(runs) <= _OVERLAY_RUNS
    charts = [_loss(runs, overlay=overlay)]
    for split in ("eval", "test"):
        shown = {"wall_s"} | ({"loss"} if overlay and split == "eval" else set())
        metrics = [metric for metric in _names(runs, split) if metric not in shown]
        charts += [_of_split(runs, split, metric) for metric in metrics]
    train = [m for m in _names(runs, "train") if m not in ("loss", "step_s", "skipped")]
    speeds = _speeds(runs, train)
    first = ["lr", *speeds, "grad_norm", "data_wait_s", "tflops_per_device", "mfu"]
    rest = [m for m in train if m not in first and not m.endswith("_per_s")]
    charts += [_of_train(runs, metric) for metric in (*first, *rest) if metric in train]
    # A single number each (a test at the end) is the table's business.
    return [chart for chart in charts if any(len(curve.points) > 1 for curve in chart.curves)]


def thin_out(points: Sequence[Point], *, buckets: int = _POINTS) -> list[Point]:
    """So few points that the line looks the same: each bucket keeps its lowest and highest."""
    if len(points) <= 2 * buckets:
        return list(points)
    kept = {0, len(points) - 1}
    for i in range(buckets):
        bucket = range(i * len(points) // buckets, (i + 1) * len(points) // buckets)
        finite = [j for j in bucket if points[j].value is not None]
        if len(finite) < len(bucket):
            kept.add(next(j for j in bucket if points[j].value is None))
        if finite:
            kept.add(min(finite, key=lambda j: points[j].value or 0.0))
            kept.add(max(finite, key=lambda j: points[j].value or 0.0))
    return [points[j] for j in sorted(kept)]


def smooth(points: Sequence[Point], *, half_width: int) -> list[Point]:
    """Each value as the mean over ``half_width`` neighbours on both sides; gaps stay gaps."""
    sums, counts = [0.0], [0]
    for point in points:
        sums.append(sums[-1] + (point.value or 0.0))
        counts.append(counts[-1] + (point.value is not None))
    result = []
    for i, point in enumerate(points):
        # At the start, where curves are steep, the window shrinks on both sides alike: a lopsided
        # one would begin too low. At the end, where they are flat, it only ends.
        reach = min(half_width, i)
        low, high = i - reach, min(i + reach + 1, len(points))
        count = counts[high] - counts[low]
        mean = (sums[high] - sums[low]) / count if count and point.value is not None else None
        result.append(replace(point, value=mean))
    return result


def position(point: Point, axis: Axis) -> float:
    """Where a point lies along the x axis."""
    return {"step": point.step, "samples": point.samples, "time": point.elapsed_s}[axis]


def axes_of(runs: Sequence[Run]) -> list[Axis]:
    """The x axes worth offering: samples only where runs differ in samples a step."""
    a_step = [
        last["samples"] / last["step"]
        for run in runs
        for last in [row for row in run.rows if row.get("samples") and row["step"]][-1:]
    ]
    timed = any(row.get("elapsed_s") for run in runs for row in run.rows)
    axes: list[Axis] = ["step"]
    if a_step and max(a_step) > 1.05 * min(a_step):  # a ragged last batch makes no difference
        axes.append("samples")
    return [*axes, "time"] if timed else axes


def _loss(runs: Sequence[Run], *, overlay: bool) -> Chart:
    chart = _of_train(runs, "loss")
    evaluated = _curves(runs, "eval", "loss") if overlay else []
    if not evaluated:
        return chart
    curves = (*chart.curves, *(replace(curve, dashed=True) for curve in evaluated))
    note = "; ".join(filter(None, ["dashed: evaluation", chart.note]))
    both = replace(chart, title="Loss", curves=curves, note=note)
    return replace(both, log=_spans_decades(both))


def _of_train(runs: Sequence[Run], metric: str) -> Chart:
    curves = _curves(runs, "train", metric)
    title, percent, zero = metric.replace("_", " ").capitalize(), False, False
    if metric == "loss":
        title = "Training loss"
    elif metric == "lr":
        title = "Learning rate"
    elif metric == "tflops_per_device":
        title, zero = "TFLOP/s of a device", True
    elif metric == "mfu":
        title, percent, zero = "Model FLOPs utilisation", True, True
    elif metric == "grad_norm":
        title = "Gradient norm"
    elif metric.endswith("_per_s"):
        title, zero = (
            f"{metric.removesuffix('_per_s').replace('_', ' ').capitalize()} per second",
            True,
        )
    elif metric == "data_wait_s":
        title, percent, zero = "Share of a step spent waiting for data", True, True
        curves = _shares(runs)
    chart = Chart(metric, title, tuple(curves), zero=zero, percent=percent)
    chart = replace(chart, log=metric != "lr" and not zero and _spans_decades(chart))
    return chart if metric == "lr" else _smooth(chart, raw=len(runs) <= _RAW_RUNS)


def _of_split(runs: Sequence[Run], split: str, metric: str) -> Chart:
    word = {"eval": "Evaluation", "test": "Test"}[split]
    title = f"{word} {metric.replace('_', ' ')}"
    chart = Chart(f"{split}-{metric}", title, tuple(_curves(runs, split, metric)))
    return replace(chart, log=_spans_decades(chart))


def _smooth(chart: Chart, *, raw: bool) -> Chart:
    longest = max((len(curve.points) for curve in chart.curves), default=0)
    if longest < _SMOOTH_FROM:
        return chart
    half_width = max(2, longest // 80)
    means = [
        replace(curve, points=tuple(smooth(curve.points, half_width=half_width)))
        for curve in chart.curves
    ]
    behind = [replace(curve, faint=True) for curve in chart.curves] if raw else []
    note = f"smoothed over {2 * half_width + 1} reports" + (", faint: as logged" if raw else "")
    return replace(chart, curves=(*behind, *means), note=note)


def _curves(runs: Sequence[Run], split: str, metric: str) -> list[Curve]:
    return list(_each(runs, split, lambda run: run.curve(split, metric)))


def _shares(runs: Sequence[Run]) -> list[Curve]:
    def share(run: Run) -> list[Point]:
        steps = {p.step: p.value for p in run.curve("train", "step_s")}
        waits = run.curve("train", "data_wait_s")
        return [
            replace(p, value=None if p.value is None or not steps.get(p.step) else p.value / whole)
            for p in waits
            for whole in [steps.get(p.step) or 1.0]
        ]

    return list(_each(runs, "train", share))


def _each(runs: Sequence[Run], split: str, points: Callable[[Run], list[Point]]) -> Iterator[Curve]:
    for i, run in enumerate(runs):
        if found := points(run):
            yield Curve(i, split, tuple(found))


def _names(runs: Sequence[Run], split: str) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.metrics(split)))


def _speeds(runs: Sequence[Run], train: Sequence[str]) -> list[str]:
    """Rates to draw; samples a second only where a run has no rate of its own (tokens)."""
    own = [m for m in train if m.endswith("_per_s") and m != "samples_per_s"]
    covered = all(set(own) & set(run.metrics("train")) for run in runs if run.rows)
    return own if own and covered else ["samples_per_s", *own]


def _spans_decades(chart: Chart) -> bool:
    values = chart.values()
    return bool(values) and min(values) > 0 and max(values) / min(values) >= _LOG_FROM
