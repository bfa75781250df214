"""``python -m benchmarks.picture``: digits under every engine, as the picture of the README."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from textwrap import wrap

from torsh_trainer.report.charts import PALETTE, Chart, charts_of
from torsh_trainer.report.runs import Run, read_run
from torsh_trainer.report.svg import HEIGHT, WIDTH, color_class, svg_of
from torsh_trainer.report.together import caption, coincident

OUTPUT = Path(__file__).parent.parent / "docs" / "pictures" / "coincide.svg"
RECIPE = (
    "+recipe=digits",
    "trainer.stages=[fit]",
    "trainer.max_steps=200",
    "trainer.log_every=4",
    "checkpoint.at_end=false",
    "logger.tensorboard.enabled=false",
)
TWO = "launcher.num_processes=2"
RUNS = {
    "single": ("strategy=single",),
    "ddp x 2": ("strategy=ddp", TWO),
    "fsdp x 2": ("strategy=fsdp", TWO),
    "gloo x 2": ("strategy=gloo", TWO),
    "mpi x 2": ("strategy=mpi", TWO),
    "DeepSpeed ZeRO 2 x 2": ("strategy=deepspeed", "strategy.stage=2", TWO),
    "Horovod x 2": ("strategy=horovod", TWO),
    "single with lr=0.001": ("strategy=single", "optimizer.lr=1e-3"),
}
"""Name in the picture -> overrides; the last is there to show what a difference looks like."""

_LETTER, _ENTRY, _ROW = 6.3, 34, 22
"""Widths and heights of the legend, in the picture's units."""
_CAPTION_LETTERS = 96


def main(argv: Sequence[str] | None = None) -> None:
    """Trains (a few minutes), writes the picture, and says where."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.picture", description=__doc__)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="default: %(default)s")
    output = parser.parse_args(argv).output
    with tempfile.TemporaryDirectory() as folder:
        runs = [_train(name, overrides, Path(folder)) for name, overrides in RUNS.items()]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(picture_of(runs), encoding="utf-8")
    print(output)


def picture_of(runs: Sequence[Run]) -> str:
    """The training loss of ``runs`` as an SVG file that needs no other, dark or light."""
    (chart,) = (chart for chart in charts_of(runs) if chart.key == "loss")
    entries, top = _legend([run.name for run in runs])
    told = caption(chart.curves, coincident(chart.curves, "step"), [run.name for run in runs])
    below = [
        f'<text x="14" y="{top + HEIGHT + 20 + 17 * i}">{escape(line)}</text>'
        for i, line in enumerate(wrap(told, _CAPTION_LETTERS))
    ]
    height = top + HEIGHT + 12 + 17 * len(below)
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            "<title>Training loss of the recipe digits under every strategy</title>",
            f"<style>{_style()}</style>",
            f'<rect class="card" x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="10"/>',
            '<text class="title" x="14" y="26">Training loss over steps, recipe digits</text>',
            *entries,
            f'<svg y="{top}" width="{WIDTH}" height="{HEIGHT}" {_drawn(chart, runs)}',
            *below,
            "</svg>\n",
        )
    )


def _train(name: str, overrides: Sequence[str], folder: Path) -> Run:
    place = folder / re.sub(r"\W+", "-", name)
    words = (*RECIPE, *overrides, f"hydra.run.dir={place}")
    print(name, flush=True)
    subprocess.run(
        [sys.executable, "-m", "torsh_trainer", *words],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return read_run(place, name=name)


def _drawn(chart: Chart, runs: Sequence[Run]) -> str:
    """The report's own chart, from its attributes on, without what answers to the mouse."""
    text = svg_of(chart, "step", [run.name for run in runs])
    svg = text[text.index("<svg ") + len("<svg ") : text.index("</svg>") + len("</svg>")]
    return re.sub(r'<(line|rect) class="(cross|field)"[^>]*/>| data-\w+="[^"]*"', "", svg)


def _legend(names: Sequence[str]) -> tuple[list[str], int]:
    """Entries in rows, and where the rows end."""
    x, y = 14.0, 50
    entries = []
    for i, name in enumerate(names):
        width = _ENTRY + _LETTER * len(name)
        if x + width > WIDTH:
            x, y = 14.0, y + _ROW
        entries.append(
            f'<g class="curve {color_class(i)}"><path d="M{x:.0f} {y - 4}h16"/></g>'
            f'<text x="{x + 22:.0f}" y="{y}">{escape(name)}</text>'
        )
        x += width
    return entries, y + 8


def _style() -> str:
    """Of the page's style, the colours and the rules for what stands in a chart."""
    css = re.sub(
        r"/\*.*?\*/", "", (files("torsh_trainer.report") / "page.css").read_text(), flags=re.S
    )
    rules = re.findall(r"^(?:\.grid|\.base|\.curve|svg text)[^{]*\{[^}]*\}", css, re.MULTILINE)
    light, dark = re.findall(r":root \{([^}]*)\}", css)
    palette = [
        "".join(f".c{i}{{--c:{pair[way]}}}" for i, pair in enumerate(PALETTE)) for way in (0, 1)
    ]
    own = (
        "text{font-family:system-ui,sans-serif;fill:var(--soft);font-size:12px}"
        "text.title{fill:var(--ink);font-size:14px;font-weight:600}"
        ".card{fill:var(--card);stroke:var(--line)}"
    )
    return (
        f":root{{{' '.join(light.split())}}}{palette[0]}"
        f"@media(prefers-color-scheme:dark){{:root{{{' '.join(dark.split())}}}{palette[1]}}}"
        f"{' '.join(' '.join(rule.split()) for rule in rules)}{own}"
    )


if __name__ == "__main__":
    main()
