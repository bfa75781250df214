"""Runs that a report is made of, and its page taken apart."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser

import yaml

from torsh_trainer.callbacks.base import EvaluationReport, RunInfo, StepReport
from torsh_trainer.callbacks.jsonl import Jsonl
from torsh_trainer.environments.world import World
from torsh_trainer.report import main


def make_run(
    folder, *, steps=40, lr=0.01, strategy="ddp", scale=1.0, batch_size=8, config=None, **result
):
    """A run directory as a run leaves it: reports by the real logger, every tenth evaluated."""
    info = RunInfo(
        run_dir=folder,
        world=World(),
        strategy=strategy,
        backend="gloo",
        precision="fp32",
        device="cpu",
        batch_size=batch_size,
        micro_batch_size=batch_size,
        accumulate=1,
        max_steps=steps,
        steps_per_epoch=None,
        first_step=0,
        parameters=1,
        trainable_parameters=1,
    )
    logger = Jsonl()
    logger.on_start(info)
    for step in range(1, steps + 1):
        metrics = {
            "loss": scale * (0.1 + math.exp(-step / 10)),
            "lr": lr,
            "grad_norm": 1.0 / step,
            "samples_per_s": 100.0 + step,
            "data_wait_s": 0.001,
            "step_s": 0.01,
            "skipped": 0.0,
        }
        logger.on_step(StepReport(step, 0, batch_size * step, metrics))
        if step % 10 == 0:
            numbers = {"accuracy": 1 - scale / step, "loss": scale / step}
            logger.on_evaluate(
                EvaluationReport("eval", step, 0, batch_size * step, numbers, wall_s=0.1)
            )
    logger.on_end({})
    spread_over_time(folder / "metrics.jsonl")
    content = {
        "strategy": strategy,
        "world_size": 2,
        "steps": steps,
        "train_loss": 0.1 * scale,
        "wall_s": 75.0,
        "samples_per_s": 120.0,
        "peak_memory_bytes": 2**30,
        **result,
    }
    (folder / "result.json").write_text(json.dumps(content))
    tree = {"optimizer": {"lr": lr}, "strategy": {"_target_": f"package.{strategy}.{strategy}"}}
    (folder / "config.yaml").write_text(yaml.safe_dump({**tree, "seed": 0, **(config or {})}))
    (folder / "provenance.json").write_text(
        json.dumps({"command": ["python", "-m", "torsh_trainer", f"strategy={strategy}"]})
    )
    return folder


def spread_over_time(path):
    """Half a second between reports, which this test has no time to wait for."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [json.dumps({**row, "elapsed_s": 0.5 * i}) for i, row in enumerate(rows, start=1)]
    path.write_text("\n".join(lines) + "\n")


class Page(HTMLParser):
    """A page taken apart; every element must be closed where it should be."""

    VOID = frozenset({"meta", "input", "br", "line", "path", "rect", "circle"})

    def __init__(self, text):
        super().__init__()
        self.tables, self.attributes, self.scripts, self.open = {}, [], [], []
        self.text = ""
        self._table = None
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.attributes.append((tag, attrs))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table" and "id" in attrs:
            self._table = self.tables.setdefault(attrs["id"], [])
        if tag == "tr" and self._table is not None:
            self._table.append((attrs, []))
        if tag in ("td", "th") and self._table is not None:
            self._table[-1][1].append("")
        if tag == "script":
            self.scripts.append((attrs, ""))

    def handle_startendtag(self, tag, attrs):
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag
        if tag == "table":
            self._table = None

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            attrs, text = self.scripts[-1]
            self.scripts[-1] = (attrs, text + data)
            return
        self.text += data
        if self._table and self._table[-1][1]:
            self._table[-1][1][-1] += data

    @property
    def plots(self):
        """The numbers behind every chart, by its title and x axis."""
        labels = [attrs["aria-label"] for tag, attrs in self.attributes if tag == "svg"]
        data = [
            json.loads(text)
            for attrs, text in self.scripts
            if attrs.get("type") == "application/json" and attrs.get("id") != "runs"
        ]
        return dict(zip(labels, data, strict=True))


def report(*argv):
    assert main([str(argument) for argument in argv]) == 0


def page_at(path):
    return Page(path.read_text(encoding="utf-8"))
