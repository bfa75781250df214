"""``python -m benchmarks``: measures, prints, and writes the tables of docs/benchmarks.md."""

from __future__ import annotations

import argparse
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks import checkpoint_ranks, checkpoint_save, ddp_step, first_step, step_cost

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
MARK = "<!-- measured: everything below this line is written by make bench -->"
ALL = "abce"
PEERS = ("torch", "lightning", "accelerate", "transformers", "hydra-core")


def main() -> None:
    """Runs what is asked for; a partial or quick run prints and leaves the page alone."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only",
        default=ALL,
        help="a step cost, b DDP step, c start and memory, e saving checkpoints",
    )
    parser.add_argument("--quick", action="store_true", help="few blocks: to see that it runs")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; (b) is CPU only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    if "a" in options.only:
        print("(a) cost of a step over the bare loop")
        found["a"] = step_cost.measure(blocks=10 if options.quick else 60, device=options.device)
    if "b" in options.only:
        print("(b) DDP step on two processes")
        found["b"] = ddp_step.measure(blocks=10 if options.quick else 800)
    if "c" in options.only:
        print("(c) from the shell to the first step, (d) peak memory")
        found["c"] = first_step.measure(repeats=2 if options.quick else 7, steps=100)
    if "e" in options.only:
        print("(e) saving checkpoints")
        small = {"size": "3M", "saves": 3} if options.quick else {}
        found["e"] = checkpoint_save.measure(**small)
        found["e ranks"] = checkpoint_ranks.measure(**small)
    text = page(found, options.device)
    print("\n" + text)
    if not options.quick and options.only == ALL and options.device == "cpu":
        kept = PAGE.read_text(encoding="utf-8").split(MARK)[0]
        PAGE.write_text(f"{kept}{MARK}\n\n{text}", encoding="utf-8")
        print(f"written to {PAGE.name}")
    print(json.dumps(found))


def page(found: dict[str, list[dict[str, Any]]], device: str) -> str:
    """The measured part of the page, in Markdown."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else _cpu()
    versions = ", ".join(f"{peer} {_version(peer)}" for peer in PEERS)
    parts = [f"Device: {name}. Python {platform.python_version()}, {versions}."]
    if "a" in found:
        parts.append(
            "### (a) Cost of a step over the bare loop, one process\n\n"
            + _table(
                (
                    "model",
                    "loop",
                    "microseconds over bare",
                    "95% interval",
                    "bare step (us)",
                    "blocks",
                ),
                [
                    (
                        r["model"],
                        r["contender"],
                        f"{r['extra_us']['value']:+.1f}",
                        f"{r['extra_us']['low']:+.1f} to {r['extra_us']['high']:+.1f}",
                        f"{r['bare_us']:.0f}",
                        r["blocks"],
                    )
                    for r in found["a"]
                ],
            )
        )
    if "b" in found:
        parts.append(
            "### (b) DDP step, two processes, beside bare DDP\n\n"
            + _table(
                ("loop", "ratio to bare DDP", "95% interval", "bare step (us)", "blocks"),
                [
                    (
                        r["contender"],
                        f"{r['ratio']['value']:.3f}",
                        f"{r['ratio']['low']:.3f} to {r['ratio']['high']:.3f}",
                        f"{r['bare_us']:.0f}",
                        r["blocks"],
                    )
                    for r in found["b"]
                ],
            )
        )
    if "c" in found:
        parts.append(
            "### (c) From the shell to the first step, and (d) peak memory\n\n"
            + _table(
                ("program", "first step (s)", "ratio", "peak memory (MiB)", "ratio", "runs"),
                [
                    (
                        r["contender"],
                        f"{r['first_step_s']:.2f}",
                        f"{r['first_step_ratio']:.2f}",
                        f"{r['peak_mib']:.0f}",
                        f"{r['peak_ratio']:.2f}",
                        r["runs"],
                    )
                    for r in found["c"]
                ],
            )
        )
    if "e" in found:
        rows = found["e"]
        table = _table(checkpoint_save.HEAD, [checkpoint_save.cells(row) for row in rows])
        note = checkpoint_save.note(rows)
        parts.append(f"### (e) Saving and loading checkpoints\n\n{table}\n\n{note}")
        rows = found["e ranks"]
        table = _table(checkpoint_ranks.HEAD, [checkpoint_ranks.cells(row) for row in rows])
        parts.append(f"{table}\n\n{checkpoint_ranks.note(rows)}")
    return "\n\n".join(parts) + "\n"


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = {line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")}
    return f"{', '.join(sorted(names)) or platform.machine()}, {torch.get_num_threads()} thread"


if __name__ == "__main__":
    main()
